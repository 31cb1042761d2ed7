"""A sampler over a model in training: borrows it for each call, and shares the prompts out to the copies of it.

Every rank calls it alike and gets all answers. Must not know backends: it is given what it needs as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lockstep.inference.engine import LocalEngine
from lockstep.types import PartialCompletions, Prompt, SamplingParams, TextCompletion


class ColocatedEngine:
    """`version`: of the model's weights, set by whoever steps them; answers carry it."""

    def __init__(
        self,
        borrow: Callable[[], AbstractContextManager[Any]],
        tokenizer: Any,
        gather: Callable[[Any], list[Any]],
        *,
        rank: int = 0,
        replicas: int = 1,
        shards: int = 1,
        batch_size: int | None = None,
        max_kept_bytes: int = 0,
        compiles: bool = False,
    ) -> None:
        """The ranks of one replica stand side by side: `rank // shards` is the replica.

        `max_kept_bytes`: a cache of at most this size stays between calls. Training then has less memory, and a GPU's
        graphs need no second capture. `compiles`: see LocalEngine.
        """
        self._borrow, self._tokenizer, self._gather = borrow, tokenizer, gather
        self._replica, self._replicas, self._shards = rank // shards, replicas, shards
        self._batch_size, self._max_kept_bytes, self._compiles = batch_size, max_kept_bytes, compiles
        self._engine: LocalEngine | None = None
        self.version = 0

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int] | None = None,
        partial: PartialCompletions | None = None,
    ) -> list[list[TextCompletion]]:
        mine = slice(self._replica, None, self._replicas)
        keys = range(len(prompts)) if keys is None else keys
        with self._borrow() as model:
            engine = self._engine_of(model)
            try:
                answers = engine.sample(prompts[mine], params, keys[mine], None if partial is None else partial[mine])
            finally:
                if engine.cache_bytes > self._max_kept_bytes:
                    engine.release_cache()
        found: list[list[TextCompletion]] = [[] for _ in prompts]
        for replica, part in enumerate(self._gather(answers)[:: self._shards]):
            found[replica :: self._replicas] = part
        return found

    def _engine_of(self, model: Any) -> LocalEngine:
        """Kept from call to call: what it found out about the model stays true."""
        if self._engine is None or self._engine.model is not model:
            self._engine = LocalEngine(
                model, self._tokenizer, self._batch_size, sharded=self._shards > 1, compiles=self._compiles
            )
        self._engine.version = self.version
        return self._engine
