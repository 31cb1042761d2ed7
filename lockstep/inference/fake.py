"""A sampler without a model, for tests of its callers: the completion is the prompt, reversed."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.types import PartialCompletions, Prompt, SamplingParams, TextCompletion, Weights


class FakeSampler:
    def __init__(self) -> None:
        self.version = 0

    def load_weights(self, source: Weights, version: int) -> None:
        self.version = version

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int] | None = None,
        partial: PartialCompletions | None = None,
    ) -> list[list[TextCompletion]]:
        return [[self._answer(prompt, params)] * params.num_samples for prompt in prompts]

    def _answer(self, prompt: Prompt, params: SamplingParams) -> TextCompletion:
        tokens = tuple(reversed(prompt))[: params.max_tokens]
        whole = len(tokens) == len(prompt)
        logprobs = (0.0,) * len(tokens) if params.logprobs else None
        text = " ".join(map(str, tokens))
        return TextCompletion(tokens, text, "stop" if whole else "length", logprobs, self.version)
