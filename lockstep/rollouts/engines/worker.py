"""The process of an engine: receives weights and verifies them, samples many calls together; and its messages.

Before the first commit of weights it samples nothing; afterwards only for calls that accept the version it has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lockstep.config import LoraConfig, ModelConfig, RunConfig
from lockstep.inference.continuous_engine import ContinuousEngine, SampleCall
from lockstep.inference.engine import LocalEngine, load_engine
from lockstep.processes.worker import Body, Reply
from lockstep.rollouts.engines import device_memory
from lockstep.rollouts.engines.publishing import Manifest, WeightReceiver
from lockstep.rollouts.episode import as_bytes, as_text
from lockstep.types import PartialCompletion, PartialCompletions, Prompt, SamplingParams, TextCompletion

ENTRY = "lockstep.rollouts.engines.worker:start"
Tensors = dict[str, Tensor]
Method = Callable[[Body, Tensors], Any]


class VersionRefused(ValueError):
    """The engine's weights are not among the versions that the call accepts."""


def engine_settings(
    config: RunConfig, *, precision: str, device: str = "cpu", batch_size: int | None = None
) -> dict[str, object]:
    """What an engine for this run is started with. `precision` is the one that training agreed on."""
    return {
        "model": config.model.model_dump(mode="json"),
        "lora": None if config.lora is None else config.lora.model_dump(mode="json"),
        "precision": precision,
        "device": device,
        "batch_size": batch_size,
        "compiles": config.model.compile is not False,
        "chat_template": config.data.chat_template,
        "records_routing": config.router_replay,
    }


def start(settings: Mapping[str, Any]) -> EngineHandler:
    """The entry of the process."""
    model, lora = ModelConfig(**settings["model"]), settings["lora"]
    others = {name: value for name, value in settings.items() if name not in ("model", "lora")}
    slow: list[str] = []
    compiled: list[float] = []

    def report(message: str) -> None:
        warnings.warn(message, stacklevel=2)  # to this process's log
        slow.append(message)

    engine = load_engine(
        model, None if lora is None else LoraConfig(**lora), report=report, on_compiled=compiled.append, **others
    )
    return EngineHandler(engine, slow, compiled)


class EngineHandler:
    """`slow`: fast ways that could not be taken so far. `compiled`: seconds of what was compiled. Pings ask."""

    def __init__(self, engine: LocalEngine, slow: Sequence[str] = (), compiled: Sequence[float] = ()) -> None:
        self._engine, self._slow, self._compiled = ContinuousEngine(engine), slow, compiled
        self._device = engine.model.device
        self._receiver = WeightReceiver(self._engine.load_weights)
        self._futures: dict[SampleCall, Future[Reply]] = {}
        self._num_messages = 0
        self.methods: dict[str, Method] = {
            "begin_weights": self._begin_weights,
            "bucket": self._receive_bucket,
            "shared_buckets": self._open_shared_buckets,
            "commit_weights": self._commit_weights,
            "sample": self._sample,
        }
        self.immediate: dict[str, Method] = {"ping": self._ping}

    def has_work(self) -> bool:
        return self._engine.has_work

    def work(self) -> None:
        for call in self._engine.advance():
            self.reply(call)

    def close(self) -> None:
        for future in self._futures.values():
            future.cancel()

    def _begin_weights(self, body: Body, tensors: Tensors) -> None:
        self._num_messages += 1
        self._receiver.begin(Manifest.from_json(body))

    def _receive_bucket(self, body: Body, tensors: Tensors) -> None:
        self._num_messages += 1
        self._receiver.receive(body["version"], body["number"], tensors["content"])

    def _open_shared_buckets(self, body: Body, tensors: Tensors) -> None:
        self._num_messages += 1
        for number, address in enumerate(body["addresses"]):
            self._receiver.receive(body["version"], number, device_memory.open_shared(address, self._device))

    def _commit_weights(self, body: Body, tensors: Tensors) -> Body:
        self._num_messages += 1
        self._receiver.commit(body["version"])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what was shared may be written again as soon as we answer
        return {"version": self._receiver.version}

    def _sample(self, body: Body, tensors: Tensors) -> Future[Reply]:
        lowest, highest = body["versions"]
        version = self._receiver.version
        if version is None or not lowest <= version <= highest:
            has = "no weights yet" if version is None else f"version {version}"
            raise VersionRefused(f"this engine has {has}, and versions {lowest} to {highest} are accepted")
        call = self._engine.submit(*unpack_request(body), name=body["call"])
        future: Future[Reply] = Future()
        self._futures[call] = future
        if call.finished:
            self.reply(call)
        return future

    def reply(self, call: SampleCall) -> None:
        future = self._futures.pop(call)
        if call.error is not None:
            future.set_exception(call.error)
        else:
            future.set_result(Reply(*pack_completions(call.completions())))

    def _ping(self, body: Body, tensors: Tensors) -> Body:
        """On another thread than everything else. `partial`: new tokens by call, where they are asked for."""
        partial: dict[str, object] = {}
        if body.get("partial"):
            for call in self._engine.active_calls:
                if call in self._futures:  # otherwise its reply is on the way
                    new = [[place, sample, pack_partial(tokens)] for place, sample, tokens in call.take_progress()]
                    partial |= {call.name: new} if new else {}
        return {
            "version": self._receiver.version,
            "progress": self._engine.progress + self._num_messages,
            "busy": self._engine.has_work,
            "partial": partial,
            "slow": list(self._slow),
            "compiled": list(self._compiled),
            "device_id": device_memory.device_id(self._device),
        }


# --- messages: plain JSON, and large arrays as tensors --------------------------------------------------------------


def pack_request(
    prompts: Sequence[Prompt], params: SamplingParams, keys: Sequence[int], partial: PartialCompletions | None
) -> Body:
    return {
        "prompts": [[int(token) for token in prompt] for prompt in prompts],
        "params": asdict(params),
        "keys": [int(key) for key in keys],
        "partial": None
        if partial is None
        else [[entry and pack_partial(entry) for entry in group] for group in partial],
    }


def unpack_request(
    body: Mapping[str, Any],
) -> tuple[list[list[int]], SamplingParams, list[int], PartialCompletions | None]:
    params, partial = body["params"], body["partial"]
    if partial is not None:
        partial = [[entry and unpack_partial(entry) for entry in group] for group in partial]
    params = SamplingParams(**{**params, "stop": tuple(params["stop"]), "stop_tokens": tuple(params["stop_tokens"])})
    return body["prompts"], params, body["keys"], partial


def pack_partial(partial: PartialCompletion) -> list[object]:
    return [list(partial.tokens), list(partial.logprobs), list(partial.versions), as_text(partial.routing)]


def unpack_partial(values: Sequence[Any]) -> PartialCompletion:
    tokens, logprobs, versions, routing = values
    return PartialCompletion(tuple(tokens), tuple(logprobs), tuple(versions), as_bytes(routing))


def pack_completions(groups: Sequence[Sequence[TextCompletion]]) -> tuple[Body, Tensors]:
    every = [completion for group in groups for completion in group]
    body = {
        "groups": [len(group) for group in groups],
        "lengths": [len(completion.tokens) for completion in every],
        "texts": [completion.text for completion in every],
        "finish_reasons": [completion.finish_reason for completion in every],
        "versions": [completion.version for completion in every],
        "mixed": [bool(completion.versions) for completion in every],
        "has_logprobs": all(completion.logprobs is not None for completion in every),
        "routing_bytes": [len(completion.routing) for completion in every],
    }
    tensors = {
        "tokens": torch.tensor([token for completion in every for token in completion.tokens], dtype=torch.int64),
        "logprobs": torch.tensor([x for completion in every for x in completion.logprobs or ()], dtype=torch.float64),
        "versions": torch.tensor([x for completion in every for x in completion.versions], dtype=torch.int64),
    }
    if routing := bytearray(b"".join(completion.routing for completion in every)):
        tensors["routing"] = torch.frombuffer(routing, dtype=torch.uint8)
    return body, tensors


def unpack_completions(body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[list[TextCompletion]]:
    lengths = body["lengths"]
    tokens = _split(tensors["tokens"], lengths)
    logprobs = _split(tensors["logprobs"], lengths) if body["has_logprobs"] else [None] * len(lengths)
    mixed = [length if is_mixed else 0 for length, is_mixed in zip(lengths, body["mixed"], strict=True)]
    versions = _split(tensors["versions"], mixed)
    routing = [b""] * len(lengths)
    if "routing" in tensors:
        routing = [part.numpy().tobytes() for part in tensors["routing"].split(body["routing_bytes"])]
    rows = zip(
        tokens, body["texts"], body["finish_reasons"], logprobs, body["versions"], versions, routing, strict=True
    )
    every = iter([TextCompletion(*row) for row in rows])
    return [[next(every) for _ in range(count)] for count in body["groups"]]


def _split(numbers: Tensor, lengths: Sequence[int]) -> list[Any]:
    return [tuple(part.tolist()) for part in numbers.split(list(lengths))] if lengths else []
