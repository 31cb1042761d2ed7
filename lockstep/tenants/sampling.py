"""Answers of the base model and of its adapters, all in one running batch."""

from __future__ import annotations

import gc
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.inference.continuous_engine import ContinuousEngine, SampleCall
from lockstep.inference.engine import LocalEngine
from lockstep.inference.sequence import SequenceOptions, TokenSequence
from lockstep.model.adapters import load_adapter
from lockstep.rundir import MANIFEST
from lockstep.tenants.base_model import BaseModel, load_adapted
from lockstep.types import SamplingParams

MAX_ADAPTERS = 8  # kept for whoever asks next; each widens a product of every step
MAX_OWN_ENGINES = 2  # of adapters that cannot be switched from row to row: each has a cache of its own


@dataclass(frozen=True)
class AnswerRequest:
    """`adapter`: a folder, or empty for the base model. `num_top`, `num_prompt_top`: of the likeliest tokens."""

    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: str = ""
    ignores_end: bool = False
    prompt_logprobs: bool = False
    num_top: int = 0
    num_prompt_top: int = 0

    @property
    def scores(self) -> bool:
        """Whether tokens are scored by the model at temperature 1, beside being sampled."""
        scales = self.params.temperature not in (0.0, 1.0)
        return scales or self.prompt_logprobs or self.num_top > 0 or self.num_prompt_top > 0

    def options(self, adapter: str | None) -> SequenceOptions:
        """`adapter`: its name in the bank."""
        return SequenceOptions(
            adapter=adapter,
            num_top=max(self.num_top, self.num_prompt_top) if self.scores else None,
            prompt_scores=self.prompt_logprobs or self.num_prompt_top > 0,
            ignores_end=self.ignores_end,
        )


@dataclass(frozen=True)
class SampledAnswer:
    """`top`: of each token, (id, log-prob) of the likeliest there."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class SampleResult:
    """`prompt_logprobs`: of each prompt token, nan of the first; None unless asked for."""

    answers: tuple[SampledAnswer, ...]
    prompt_logprobs: np.ndarray | None = None
    prompt_top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class _Running:
    engine: ContinuousEngine
    request: AnswerRequest
    adapter: str  # its name, empty for the base model
    future: Future[SampleResult]


class SharedSampler:
    """Rows of the base model and of its adapters are decoded in one batch. An adapter that cannot be switched from row
    to row, such as one on experts, has an engine of its own.

    `report` is told, once, of each fast way that cannot be taken.
    """

    def __init__(self, base: BaseModel, batch_size: int | None, report: Callable[[str], None]) -> None:
        self._base, self._batch_size, self._report = base, batch_size, report
        engine = LocalEngine(base.copy(), base.tokenizer, batch_size, report=report)
        self._bank = engine.hold_adapters()
        self._shared = ContinuousEngine(engine, min_slots=min(engine.batch_size, 4))
        self._own: dict[str, ContinuousEngine] = {}  # by the name of the adapter that it alone has
        self._running: dict[SampleCall, _Running] = {}
        self._names: dict[str, SampleCall] = {}
        self._adapters: OrderedDict[str, str] = OrderedDict()  # by name, the folder of each
        self._said: set[str] = set()

    @property
    def adapters(self) -> list[str]:
        """Folders of those that are loaded, the one that was asked for last at the end."""
        return list(self._adapters.values())

    @property
    def has_work(self) -> bool:
        return any(engine.has_work for engine in self._engines)

    @property
    def _engines(self) -> list[ContinuousEngine]:
        return [self._shared, *self._own.values()]

    def submit(self, name: str, request: AnswerRequest) -> Future[SampleResult]:
        """`name`: to cancel it by."""
        self._check(request)
        adapter = self._hold(request.adapter) if request.adapter else ""
        engine = self._own.get(adapter, self._shared)
        options = request.options(adapter if adapter and engine is self._shared else None)
        future: Future[SampleResult] = Future()
        call = engine.submit([request.prompt], request.params, name=name, options=options)
        if call.finished:
            _settle(call, request, future)
        else:
            self._running[call], self._names[name] = _Running(engine, request, adapter, future), call
        return future

    def advance(self) -> None:
        for engine in self._engines:
            if engine.has_work:
                self._advance(engine)

    def _advance(self, engine: ContinuousEngine) -> None:
        try:
            ended = engine.advance()
        except Exception as error:  # every answer in progress is lost, and later ones start afresh
            ended = engine.reset(error)
        for call in ended:
            self._names.pop(call.name, None)
            done = self._running.pop(call)
            _settle(call, done.request, done.future)

    def cancel(self, name: str) -> None:
        call = self._names.pop(name, None)
        if call is not None:
            cancelled = self._running.pop(call)
            cancelled.engine.cancel(call)
            cancelled.future.set_exception(ValueError("it was cancelled"))

    def close_adapter(self, folder: str) -> None:
        for name, of_folder in list(self._adapters.items()):
            if of_folder == folder and name not in self._in_use():
                self._drop(name)

    def _check(self, request: AnswerRequest) -> None:
        if not request.prompt:
            raise ValueError("the prompt is empty: nothing predicts its first token")
        known = self._base.num_tokens
        unknown = [t for t in request.prompt if t < 0 or (known is not None and t >= known)]
        if unknown:
            raise ValueError(f"the prompt has token {unknown[0]}, and the model knows 0 to {(known or 0) - 1}")

    def _hold(self, folder: str) -> str:
        """Its name: another one where other weights were saved to the same folder. Adapters of calls that are being
        answered stay; of the others the ones that were asked for last."""
        manifest = Path(folder) / MANIFEST
        stat = manifest.stat() if manifest.exists() else None
        name = folder if stat is None else f"{folder}#{stat.st_ino}.{stat.st_mtime_ns}"
        if name not in self._adapters:
            self._load(name, Path(folder))
        self._adapters[name] = folder
        self._adapters.move_to_end(name)
        self._make_room(name, list(self._adapters), MAX_ADAPTERS)
        self._make_room(name, [held for held in self._adapters if held in self._own], MAX_OWN_ENGINES)
        return name

    def _load(self, name: str, folder: Path) -> None:
        try:
            self._bank.add(name, load_adapter(folder))
        except ValueError as error:
            if not (folder / MANIFEST).exists():
                raise
            engine = LocalEngine(load_adapted(self._base, folder), self._base.tokenizer, self._batch_size)
            self._own[name] = ContinuousEngine(engine)
            reason = str(error).removeprefix(f"the adapter {folder} cannot be used: ")
            self._report_once(
                f"adapters of this kind are decoded apart from all others, each in a batch of its own: {reason}"
            )
        else:
            self._shared.check_adapters()

    def _report_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._report(message)

    def _make_room(self, name: str, held: list[str], most: int) -> None:
        idle = [each for each in held if each not in {name, *self._in_use()}]
        for each in idle[: max(len(held) - most, 0)]:
            self._drop(each)

    def _in_use(self) -> set[str]:
        return {running.adapter for running in self._running.values()}

    def _drop(self, name: str) -> None:
        if name in self._own:
            del self._own[name]
            gc.collect()  # its modules refer to each other, and hold a cache
        else:
            self._bank.remove(name)
            self._shared.check_adapters()
        del self._adapters[name]


def _settle(call: SampleCall, request: AnswerRequest, future: Future[SampleResult]) -> None:
    if call.error is not None:
        future.set_exception(call.error)
    else:
        future.set_result(_read(call, request))


def _read(call: SampleCall, request: AnswerRequest) -> SampleResult:
    first = call.sequences[0]
    prompt_logprobs = None
    if request.prompt_logprobs:
        prompt_logprobs = np.array([math.nan, *(score.logprob for score in first.prompt_scores)], dtype=np.float32)
    top: Any = ()
    if request.num_prompt_top:
        top = ((), *(score.first(request.num_prompt_top).top for score in first.prompt_scores))
    return SampleResult(tuple(_answer(sequence, request) for sequence in call.sequences), prompt_logprobs, top)


def _answer(sequence: TokenSequence, request: AnswerRequest) -> SampledAnswer:
    completion = sequence.completion()
    scores = sequence.scores if request.scores else []
    logprobs = tuple(score.logprob for score in scores) if request.scores else tuple(sequence.logprobs)
    top = tuple(score.first(request.num_top).top for score in scores) if request.num_top else ()
    return SampledAnswer(completion.tokens, logprobs, completion.finish_reason, top)


def draw_seed() -> int:
    """Not from torch's generator, which a loaded checkpoint sets back."""
    return secrets.randbits(62)
