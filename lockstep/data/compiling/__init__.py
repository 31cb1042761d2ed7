"""The rows of one part through all the steps, in several processes."""
