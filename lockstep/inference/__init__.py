"""Sampling: text from a model. The protocol is light; an engine imports torch when it is made."""

from lockstep.inference.sampler import PartialCompletion, Prompt, Sampler, SamplingParams, TextCompletion

__all__ = ["PartialCompletion", "Prompt", "Sampler", "SamplingParams", "TextCompletion"]
