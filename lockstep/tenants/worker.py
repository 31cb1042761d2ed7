"""The process of one base model: whatever its callers train or sample, one thing after another, answers in slices.

Bodies are JSON and raw arrays. A caller's mistake is an answer; anything else is an error.
"""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from torch import Tensor

from lockstep.config import ModelConfig
from lockstep.model.load import keep_freed_memory
from lockstep.processes.child import Method, Result, telling_mistakes
from lockstep.processes.worker import Body, Reply
from lockstep.tenants.base_model import AdapterSpec, BaseModel
from lockstep.tenants.sampling import AnswerRequest, SampleResult, SharedSampler, draw_seed
from lockstep.tenants.shared_prefixes import TrainingRow
from lockstep.tenants.training import TrainedModel
from lockstep.types import OptimStep, SamplingParams

_TOKENS, _TARGETS, _VALUES = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")
_MAX_TOKENS = 4096  # of an answer to somebody who names no limit, where the model has none


def start(settings: Body) -> ModelProcess:
    return ModelProcess(settings)


class ModelProcess:
    def __init__(self, settings: Body) -> None:
        keep_freed_memory()
        config = ModelConfig.model_validate(settings["model"])
        self._slow: list[str] = []
        self._base = BaseModel(config, settings["device"])
        self._sampling = SharedSampler(self._base, settings["batch_size"], self._report)
        self._micro_batch_tokens, self._compile = settings["micro_batch_tokens"], config.compile
        self._models: dict[str, TrainedModel] = {}
        self._cancelled: list[str] = []  # by the reading thread, for the serving one
        training: list[Method] = [self.create_model, self.forward_backward, self.optim_step]
        training += [self.save_weights, self.load_weights, self.unload_model]
        others: list[Method] = [self.describe, self.sample, self.close_adapter]
        self.methods = {method.__name__: telling_mistakes(self._then_sample(method)) for method in training}
        self.methods |= {method.__name__: telling_mistakes(method) for method in others}
        self.immediate: dict[str, Method] = {"ping": self.ping, "cancel": self.cancel}

    def has_work(self) -> bool:
        return self._sampling.has_work or bool(self._cancelled)

    def work(self) -> None:
        while self._cancelled:
            self._sampling.cancel(self._cancelled.pop(0))
        if self._sampling.has_work:
            self._sampling.advance()

    def close(self) -> None:
        for model in self._models.values():
            model.close()

    def _report(self, message: str) -> None:
        warnings.warn(message, stacklevel=2)  # to this process's log
        self._slow.append(message)

    def _then_sample(self, method: Method) -> Method:
        """A slice of decoding after each call that trains: those who sample get on, however many train."""

        @functools.wraps(method)
        def call(body: Body, tensors: dict[str, Tensor]) -> Result | Future[Reply]:
            try:
                return method(body, tensors)
            finally:
                if self.has_work():
                    self.work()

        return call

    # --- answered at any time ---------------------------------------------------------------------------------------

    def ping(self, body: Body, tensors: dict[str, Tensor]) -> Body:
        return {"busy": self._sampling.has_work, "models": len(self._models), "slow": list(self._slow)}

    def cancel(self, body: Body, tensors: dict[str, Tensor]) -> None:
        self._cancelled.append(body["call"])

    # --- training ---------------------------------------------------------------------------------------------------

    def describe(self, body: Body, tensors: dict[str, Tensor]) -> Body:
        base = self._base
        about = {"device": str(base.device), "precision": base.precision, "slow": list(self._slow)}
        return {"max_context_length": base.num_positions, **about}

    def create_model(self, body: Body, tensors: dict[str, Tensor]) -> Body:
        names = ("rank", "seed", "train_attn", "train_mlp", "train_unembed")
        model = TrainedModel(
            self._base,
            AdapterSpec(**{name: body[name] for name in names}),
            micro_batch_tokens=self._micro_batch_tokens,
            compile=self._compile,
        )
        self._models[body["model_id"]] = model
        for message in model.slow:
            if message not in self._slow:
                self._report(message)
        return {"num_trained": model.num_trained}

    def forward_backward(self, body: Body, tensors: dict[str, Tensor]) -> Body:
        result = self._find(body).forward_backward(
            read_rows(body), body["loss_fn"], body["loss_fn_config"], forward_only=body["forward_only"]
        )
        logprobs = np.concatenate(result.logprobs).astype(_VALUES).tobytes()
        return {"logprobs": logprobs, "metrics": {"loss:sum": result.loss}}

    def optim_step(self, body: Body, tensors: dict[str, Tensor]) -> Body:
        names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm")
        norm = self._find(body).optim_step(OptimStep(**{name: body[name] for name in names}))
        return {"metrics": {"grad_norm": norm}}

    def save_weights(self, body: Body, tensors: dict[str, Tensor]) -> Body:
        folder = Path(body["folder"])
        return {"size_bytes": self._find(body).save(folder, with_optimizer=body["with_optimizer"])}

    def load_weights(self, body: Body, tensors: dict[str, Tensor]) -> None:
        self._find(body).load(Path(body["folder"]), with_optimizer=body["with_optimizer"])

    def unload_model(self, body: Body, tensors: dict[str, Tensor]) -> None:
        self._find(body).close()
        del self._models[body["model_id"]]
        gc.collect()  # modules refer to each other: their memory would stay until Python looks for such

    def _find(self, body: Body) -> TrainedModel:
        if body["model_id"] not in self._models:
            raise ValueError(f"the model {body['model_id']} is not loaded")
        return self._models[body["model_id"]]

    # --- sampling ---------------------------------------------------------------------------------------------------

    def sample(self, body: Body, tensors: dict[str, Tensor]) -> Future[Reply]:
        request = self._read_request(body)
        sampled = self._sampling.submit(body["call"], request)
        copies = body["num_samples"] if request.params.temperature == 0 else 1  # they would all be the same
        answer: Future[Reply] = Future()

        def settle(done: Future[SampleResult]) -> None:
            try:
                answer.set_result(_encode(done.result(), copies))
            except ValueError as error:
                answer.set_result(Reply({"mistake": str(error)}))
            except Exception as error:
                answer.set_exception(error)

        sampled.add_done_callback(settle)
        return answer

    def close_adapter(self, body: Body, tensors: dict[str, Tensor]) -> None:
        self._sampling.close_adapter(body["adapter"])

    def _read_request(self, body: Body) -> AnswerRequest:
        prompt = tuple(np.frombuffer(body["prompt"], _TOKENS).tolist())
        room = None if self._base.num_positions is None else self._base.num_positions - len(prompt)
        most = _MAX_TOKENS if room is None else max(room, 1)
        params = SamplingParams(
            max_tokens=most if body["max_tokens"] is None else body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=max(body["top_k"], 0),
            seed=draw_seed() if body["seed"] is None else body["seed"],
            stop=tuple(body["stop"]),
            stop_tokens=tuple(body["stop_tokens"]),
            num_samples=1 if body["temperature"] == 0 else body["num_samples"],
            logprobs=True,
        )
        return AnswerRequest(
            prompt,
            params,
            adapter=body["adapter"],
            ignores_end=body["ignore_eos"],
            prompt_logprobs=body["prompt_logprobs"],
            num_top=body["topk_sample_logprobs"],
            num_prompt_top=body["topk_prompt_logprobs"],
        )


def read_rows(body: Body) -> list[TrainingRow]:
    """Of arrays that hold all data, one after another."""
    lengths, shapes = body["lengths"], [tuple(shape) for shape in body["shapes"]]
    tokens = _cut(np.frombuffer(body["tokens"], _TOKENS).astype(np.int64), [(length,) for length in lengths])
    columns = {}
    for name in body["inputs"]:
        kind = _TARGETS if name == "target_tokens" else _VALUES
        columns[name] = _cut(np.frombuffer(body[f"input.{name}"], kind), shapes)
    return [
        TrainingRow(text, {name: column[number] for name, column in columns.items()})
        for number, text in enumerate(tokens)
    ]


def _cut(values: np.ndarray, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    ends = list(itertools.accumulate(int(np.prod(shape)) for shape in shapes))
    if len(values) != (ends[-1] if ends else 0):
        raise ValueError(f"{len(values)} numbers came for data of {ends[-1] if ends else 0}")
    return [part.reshape(shape) for part, shape in zip(np.split(values, ends[:-1]), shapes, strict=True)]


def _encode(result: SampleResult, copies: int) -> Reply:
    sequences: list[Body] = []
    for answer in result.answers:
        about: Body = {"stop_reason": answer.stop_reason, "tokens": answer.tokens, "logprobs": answer.logprobs}
        sequences.append({**about, "topk": answer.top} if answer.top else about)
    body: Body = {"sequences": sequences * copies}
    if result.prompt_logprobs is not None:
        body["prompt_logprobs"] = result.prompt_logprobs.astype(_VALUES).tobytes()
    if result.prompt_top:
        body["topk_prompt"] = result.prompt_top
    return Reply(body)
