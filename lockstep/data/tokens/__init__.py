"""Text with spans as tokens with weights, cut to length. Knows nothing of files and formats."""
