"""Compiled rows on disk: columns, the cache of them, and who may prepare it. Knows nothing of what rows mean."""
