"""Rows from files, folders and Hub data sets, each with its origin."""
