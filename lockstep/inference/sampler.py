"""What every sampler offers: completions of token prompts, and newer weights.

Must not know torch, nor which engine answers. Prompts are tokens, so that what was sampled is what is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Prompt = Sequence[int]
Weights = str | Path | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 takes the likeliest token. Otherwise only the `top_k` likeliest tokens are drawn from (0: all),
    of these the fewest that hold `top_p` of the probability, of these those not below `min_p` times the likeliest.

    `stop` texts end a completion and are not part of its text; `stop_tokens` end it like the model's own end of turn.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    num_samples: int = 1
    logprobs: bool = False
    top_k: int = 0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1 (given: {self.max_tokens})")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative (given: {self.temperature})")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (given: {self.top_p})")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative; 0 keeps every token (given: {self.top_k})")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 and 1 (given: {self.min_p})")
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which every answer begins with: leave it out")
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1 (given: {self.num_samples})")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError("several samples of one prompt need a temperature above 0: they would all be the same")


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """`tokens` is what was sampled, up to and with the token that ended the turn or completed a stop text; `text` has
    neither. `finish_reason` length: the answer was cut.

    `logprobs`, where asked for: the model's log-prob of each token at the temperature it was sampled with (at 1 for
    temperature 0), before top_k, top_p and min_p. `version` is that of the weights, the newest of them; `versions`
    has one for each token, and is empty where all are the same.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: tuple[float, ...] | None = None
    version: int = 0
    versions: tuple[int, ...] = ()

    @property
    def oldest_version(self) -> int:
        return min(self.versions, default=self.version)


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """What an answer has so far: of each token its log-prob, and the version of the weights that it came from."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"an answer was begun with {len(self.tokens)} tokens, {len(self.logprobs)} log-probs and "
                f"{len(self.versions)} versions: each token needs one of both"
            )


# For each prompt and each of its samples what there is of it already; None: nothing.
PartialCompletions = Sequence[Sequence[PartialCompletion | None]]


class Sampler(Protocol):
    def load_weights(self, source: Weights, version: int) -> None:
        """Answer with other weights from now on; `version` says which. From disk, or tensors by their names."""
        ...

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int] | None = None,
        begun: PartialCompletions | None = None,
    ) -> list[list[TextCompletion]]:
        """`num_samples` completions of each prompt, in the order of the prompts.

        With a seed, a sample is decided by the seed, the prompt, its key and its number among the samples of the
        prompt, never by the company it is computed in. `keys`: one integer per prompt, its place by default.
        Answers that were `begun` go on from there; what is returned has them from their beginning.
        """
        ...
