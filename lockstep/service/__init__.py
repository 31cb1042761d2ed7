"""The job service: a queue of runs over HTTP, with a store, an API and a page. Never imports torch."""
