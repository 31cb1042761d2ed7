"""Text from a model: the engine and its parts. What every sampler offers is in lockstep.types."""
