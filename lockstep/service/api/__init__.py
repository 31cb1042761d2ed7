"""The service's own API, one module for each kind of thing."""
