"""The engine behind OpenAI's HTTP API, with several adapters of one base model in one batch."""
