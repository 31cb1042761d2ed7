"""Sampling: text from a model. The protocol is light; an engine imports torch when it is made."""

from lockstep.sampling.sampler import Begun, Prompt, Sampler, SamplingParams, TextCompletion

__all__ = ["Begun", "Prompt", "Sampler", "SamplingParams", "TextCompletion"]
