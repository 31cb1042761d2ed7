"""Engines without processes: they sample as FakePolicy does, token by token, with what was published last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loops.grpo_run import draw_completion

from lockstep.types import PartialCompletion, Prompt, SamplingParams, TextCompletion


@dataclass
class FakeEngines:
    """`pause_s(key)`: time per token of a prompt. `hold(key, place)`: whether it waits there for `released`.

    `gap(version)`: by how much its log-probs are off. `late`: by how many optimizer steps the first completions of a
    key are stale. `failures` are raised for their keys, or by "publish".
    """

    pause_s: Callable[[int], float] = lambda key: 0.0
    hold: Callable[[int, int], bool] = lambda key, place: False
    gap: Callable[[int], float] = lambda version: 0.0
    late: dict[int, int] = field(default_factory=dict)
    failures: Mapping[int | str, Exception] = field(default_factory=dict)
    published: dict[int, float] = field(default_factory=dict)
    continued: dict[int, int] = field(default_factory=dict)
    """For each key the number of tokens that it was first continued from."""
    requests: list[tuple[list[int], tuple[int, int]]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    num_serving: int = 2
    is_closed: bool = False

    @property
    def version(self) -> int:
        return max(self.published)

    def publish(self, version: int, tensors: Mapping[str, Any]) -> None:
        if "publish" in self.failures:
            raise self.failures["publish"]
        self.published[version] = tensors["weight"]

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int],
        *,
        versions: tuple[int, int],
        partial: Any = None,
        on_progress: Any = None,
    ) -> list[list[TextCompletion]]:
        self.requests.append((list(keys), versions))
        assert versions[0] <= self.version <= versions[1], f"{versions} requested, at {self.version}"
        known = partial or [[None] * params.num_samples for _ in prompts]
        grown: list[list[PartialCompletion | None]] = [list(own) for own in known]
        for place, key in enumerate(keys):
            self.continued.setdefault(key, sum(len(own.tokens) for own in known[place] if own))
            if key in self.failures:
                raise self.failures[key]
            for number in range(params.num_samples):
                while self._grow(grown, place, key, number, params):
                    if on_progress is not None:
                        on_progress([list(own) for own in grown])
            age = self.late.pop(key, 0)
            grown[place] = [replace(own, versions=tuple(v - age for v in own.versions)) for own in grown[place] if own]
        return [
            [self._finish(grown[p][n], key, n, params) for n in range(params.num_samples)] for p, key in enumerate(keys)
        ]

    def close(self) -> None:
        self.is_closed = True
        self.released.set()

    def _grow(self, grown: Any, place: int, key: int, number: int, params: SamplingParams) -> bool:
        old = grown[place][number] or PartialCompletion((), (), ())
        tokens = draw_completion(params, key, number)
        if len(old.tokens) == len(tokens):
            return False
        if self.hold(key, len(old.tokens)):
            self.released.wait(20)
        time.sleep(self.pause_s(key))
        version, token = self.version, tokens[len(old.tokens)]
        logprob = -((self.published[version] - token) ** 2) / 2 + self.gap(version)
        grown[place][number] = PartialCompletion(
            (*old.tokens, token), (*old.logprobs, logprob), (*old.versions, version)
        )
        return True

    def _finish(self, grown: PartialCompletion, key: int, number: int, params: SamplingParams) -> TextCompletion:
        reason = "length" if len(grown.tokens) == params.max_tokens else "stop"
        text = " ".join(map(str, grown.tokens))
        return TextCompletion(grown.tokens, text, reason, grown.logprobs, max(grown.versions), grown.versions)
