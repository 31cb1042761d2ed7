"""What a row says: a conversation, a passage, or a pair of answers."""
