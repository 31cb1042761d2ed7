"""What every sampler offers: completions of token prompts, and newer weights.

Must not know torch, nor which engine answers. Prompts are tokens, so that what was sampled is what is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Prompt = Sequence[int]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 takes the likeliest token. `stop` texts end a completion and are not part of it."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    num_samples: int = 1
    logprobs: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1 (given: {self.max_tokens})")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative (given: {self.temperature})")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (given: {self.top_p})")
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1 (given: {self.num_samples})")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError("several samples of one prompt need a temperature above 0: they would all be the same")


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """`tokens` includes the token that ended the turn, `text` does not. `finish_reason` length: the answer was cut.

    `logprobs`, where asked for: the model's log-prob of each token at temperature 1, before top_p.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: tuple[float, ...] | None = None


class Sampler(Protocol):
    def load_weights(self, source: str | Path, version: int) -> None:
        """Answer with other weights from now on; `version` says which."""
        ...

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[TextCompletion]]:
        """`num_samples` completions of each prompt, in the order of the prompts."""
        ...
