"""Many adapters of one base model in one process, trained and sampled by different callers.

A room of its own because it needs both the backend, which trains, and the engine, which samples: neither knows the
other, and whoever serves requests (`service`) never imports torch and starts this process by name.
"""
