"""Conversations as text, and where in it the answers lie, read from the chat template itself. Knows no token ids."""
