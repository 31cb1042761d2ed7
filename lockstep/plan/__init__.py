"""What a configuration will need and move, worked out before it runs. Must not know process groups."""
