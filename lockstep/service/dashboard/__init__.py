"""The page at /: plain ES modules that talk to the API as any other client does."""
