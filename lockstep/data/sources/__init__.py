"""Rows from files, folders and Hub data sets, each with the place it came from. Knows nothing of what a row means."""
