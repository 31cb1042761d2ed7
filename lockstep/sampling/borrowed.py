"""A sampler over a model in training: borrows it for each call, and shares the prompts out to the copies of it.

Every rank calls it alike and gets all answers. Must not know backends: it is given what it needs as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lockstep.sampling.local import LocalEngine
from lockstep.sampling.sampler import Prompt, SamplingParams, TextCompletion


class BorrowedEngine:
    def __init__(
        self,
        borrow: Callable[[], AbstractContextManager[Any]],
        tokenizer: Any,
        gather: Callable[[Any], list[Any]],
        *,
        rank: int = 0,
        replicas: int = 1,
        shards: int = 1,
        batch_size: int = 8,
    ) -> None:
        """The ranks of one replica stand side by side: `rank // shards` is the replica."""
        self._borrow, self._tokenizer, self._gather = borrow, tokenizer, gather
        self._replica, self._replicas, self._shards = rank // shards, replicas, shards
        self._batch_size = batch_size

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[TextCompletion]]:
        mine = prompts[self._replica :: self._replicas]
        with self._borrow() as model:
            engine = LocalEngine(model, self._tokenizer, self._batch_size, sharded=self._shards > 1)
            answers = engine.sample(mine, params) if len(mine) else []
        found: list[list[TextCompletion]] = [[] for _ in prompts]
        for replica, part in enumerate(self._gather(answers)[:: self._shards]):
            found[replica :: self._replicas] = part
        return found
