"""What runs in the process of an engine: weights come and are verified, answers of many calls grow together.

Until the first commit it answers nothing; afterwards only requests that accept the version it has.
Must not know other engines, nor how messages travel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config import LoraConfig, ModelConfig, RunConfig
from lockstep.inference.engine import ContinuousEngine, LocalEngine, SampleCall
from lockstep.model.load import DTYPES, build_model, keep_freed_memory, load_tokenizer
from lockstep.model.lora import speed_up_eager
from lockstep.processes.worker import Reply
from lockstep.rollouts.engines.publishing import Manifest, WeightReceiver
from lockstep.rollouts.engines.wire import pack_answers, pack_begun, unpack_request

ENTRY = "lockstep.rollouts.engines.worker:start"
Method = Callable[[dict[str, Any], dict[str, Tensor]], Any]


class VersionRefused(ValueError):
    """The engine's weights are none of those that the request accepts."""


def settings_of(
    config: RunConfig, *, precision: str, device: str = "cpu", batch_size: int | None = None
) -> dict[str, Any]:
    """What an engine for this run is started with. `precision` is the one that training agreed on."""
    return {
        "model": config.model.model_dump(mode="json"),
        "lora": None if config.lora is None else config.lora.model_dump(mode="json"),
        "precision": precision,
        "device": device,
        "batch_size": batch_size,
        "compiles": config.model.compile is not False,
        "tokenizer": {"chat_template": config.data.chat_template},
    }


def start(settings: Mapping[str, Any]) -> EngineHandler:
    keep_freed_memory()
    config = ModelConfig(**settings["model"])
    lora = None if settings["lora"] is None else LoraConfig(**settings["lora"])
    model = build_engine_model(config, lora, settings["precision"], settings["device"])
    tokenizer = load_tokenizer(config)
    template = settings["tokenizer"]["chat_template"]
    if template not in ("auto", "none"):
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    engine = LocalEngine(model, tokenizer, settings["batch_size"], compiles=settings.get("compiles", False))
    return EngineHandler(engine)


def build_engine_model(config: ModelConfig, lora: LoraConfig | None, precision: str, device: str) -> Any:
    """As the trainer lends its own for sampling: every parameter in the dtype that is computed in."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # With its weights, though others will replace them: with them come the model's own ends of a text.
    model = build_model(config, lora, precision, with_weights=True)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(DTYPES[precision])
    if lora is not None and device == "cpu":
        speed_up_eager(model)  # as in training: the same numbers to the last bit
    return model.to(device).eval()


class EngineHandler:
    def __init__(self, engine: LocalEngine) -> None:
        self._engine = ContinuousEngine(engine)
        self._receiver = WeightReceiver(self._engine.load_weights)
        self._futures: dict[SampleCall, Future[Reply]] = {}
        self._num_messages = 0
        self.methods: dict[str, Method] = {
            "begin_weights": self._begin_weights,
            "bucket": self._take_bucket,
            "commit_weights": self._commit_weights,
            "sample": self._sample,
        }
        self.immediate: dict[str, Method] = {"ping": self._ping}

    def has_work(self) -> bool:
        return self._engine.has_work

    def work(self) -> None:
        for call in self._engine.advance():
            self._answer(call)

    def close(self) -> None:
        for future in self._futures.values():
            future.cancel()

    def _begin_weights(self, body: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._num_messages += 1
        self._receiver.begin(Manifest.from_json(body))

    def _take_bucket(self, body: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._num_messages += 1
        self._receiver.take(body["version"], body["number"], tensors["content"])

    def _commit_weights(self, body: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        self._num_messages += 1
        self._receiver.commit(body["version"])
        return {"version": self._receiver.version}

    def _sample(self, body: dict[str, Any], tensors: dict[str, Tensor]) -> Future[Reply]:
        lowest, highest = body["versions"]
        version = self._receiver.version
        if version is None or not lowest <= version <= highest:
            has = "no weights yet" if version is None else f"version {version}"
            raise VersionRefused(f"this engine has {has}, and versions {lowest} to {highest} are accepted")
        call = self._engine.submit(*unpack_request(body), name=body["call"])
        future: Future[Reply] = Future()
        self._futures[call] = future
        if call.finished:
            self._answer(call)
        return future

    def _answer(self, call: SampleCall) -> None:
        future = self._futures.pop(call)
        if call.error is not None:
            future.set_exception(call.error)
        else:
            future.set_result(Reply(*pack_answers(call.completions())))

    def _ping(self, body: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """On another thread than everything else."""
        news: dict[str, Any] = {}
        if body.get("news"):
            for call in self._engine.active_calls:
                if call in self._futures:  # otherwise it is being answered
                    parts = [[place, sample, pack_begun(part)] for place, sample, part in call.take_progress()]
                    news |= {call.name: parts} if parts else {}
        return {
            "version": self._receiver.version,
            "progress": self._engine.progress + self._num_messages,
            "busy": self._engine.has_work,
            "news": news,
        }
