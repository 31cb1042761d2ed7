"""One adapter and its optimizer, as one caller trains it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.algorithms.losses import LOSSES, LossInputs
from lockstep.backend.torch_backend import TorchBackend
from lockstep.model.adapters import apply_adapter
from lockstep.rundir import MANIFEST, commit_folder, damage, read_json_object
from lockstep.tenants.base_model import AdapterSpec, BaseModel
from lockstep.tenants.shared_prefixes import SharedBatch, TrainingRow
from lockstep.types import LossSpec, OptimStep

STATE = "state"  # in a saved folder: adapter and optimizer as the backend writes them, beside the adapter as PEFT does
# Of each loss the inputs that it must have, and those that it may have besides.
_POLICY = ("target_tokens", "logprobs", "advantages")
_CLIPPED = ("clip_low_threshold", "clip_high_threshold")
LOSS_INPUTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cross_entropy": (("target_tokens",), ("weights",)),
    "importance_sampling": (_POLICY, ()),
    "ppo": (_POLICY, _CLIPPED),
    "cispo": (_POLICY, _CLIPPED),
    "gspo": ((*_POLICY, "sequence_ratio_mask"), _CLIPPED),
    "dro": (_POLICY, ()),
}
LOSS_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "ppo": _CLIPPED,
    "cispo": _CLIPPED,
    "gspo": _CLIPPED,
    "dro": ("beta",),
}


@dataclass(frozen=True)
class PassResult:
    """`logprobs`: of each row, of each target."""

    logprobs: list[np.ndarray]
    loss: float


def check_loss(rows: Sequence[TrainingRow], loss: LossSpec) -> None:
    """Raises ValueError for what cannot be computed, with the datum it is about."""
    if loss.kind not in LOSS_INPUTS:
        raise ValueError(f"there is no loss {loss.kind!r} here: there is {', '.join(LOSS_INPUTS)}")
    if not rows:
        raise ValueError("there are no data to learn from")
    for name, value in loss.options.items():
        known = LOSS_OPTIONS.get(loss.kind, ())
        if name not in known:
            raise ValueError(f"{loss.kind} has no option {name!r}: it has {', '.join(known) or 'none'}")
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} of {loss.kind} must be a finite number, and is {value!r}")
    for number, row in enumerate(rows):
        _check_row(row, loss.kind, f"datum {number}")


def _check_row(row: TrainingRow, kind: str, where: str) -> None:
    needed, others = LOSS_INPUTS[kind]
    if missing := [name for name in needed if name not in row.inputs]:
        raise ValueError(f"{where} has no {missing[0]}, which {kind} needs")
    if unknown := sorted(row.inputs.keys() - {*needed, *others}):
        raise ValueError(
            f"{where} has {unknown[0]}, which {kind} does not use: it uses {', '.join((*needed, *others))}"
        )
    shape = row.inputs["target_tokens"].shape
    if not len(row.tokens):
        raise ValueError(f"{where} has no tokens")
    if shape[0] != len(row.tokens) or (len(shape) > 1 and kind != "cross_entropy"):
        several = " or [tokens, several]" if kind == "cross_entropy" else ""
        raise ValueError(
            f"{where} has {len(row.tokens)} tokens and target_tokens of the shape {list(shape)}: {kind} takes "
            f"[tokens]{several}, one target for each token"
        )
    for name, values in row.inputs.items():
        if values.shape != shape:
            raise ValueError(f"{where} has target_tokens of the shape {list(shape)} and {name} of {list(values.shape)}")
        if not np.isfinite(values).all():
            raise ValueError(f"{where} has {name} that are not finite numbers")


def evaluate(rows: Sequence[TrainingRow], logprobs: Sequence[np.ndarray], loss: LossSpec) -> float:
    """The loss of these log-probs, without a gradient."""
    lengths = [len(found) for found in logprobs]

    def join(parts: Iterable[Any]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.ravel(part) for part in parts]).astype(np.float64))

    inputs = LossInputs(
        join(row.weights for row in rows),
        values={name: join(row.values[name] for row in rows) for name in rows[0].values},
        options=loss.options,
        completions=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths)),
        num_completions=len(rows),
    )
    return float(LOSSES[loss.kind].fn(join(logprobs), inputs)[0])


class TrainedModel:
    def __init__(self, base: BaseModel, spec: AdapterSpec, *, micro_batch_tokens: int, compile: bool | str) -> None:
        self.spec = spec
        self.backend = TorchBackend(
            base.with_adapter(spec),
            precision=base.precision,
            device=base.device.type,
            micro_batch_tokens=micro_batch_tokens,
            on_out_of_memory="shrink",
            compile=compile,
        )
        self.slow = list(self.backend.slow)
        self._lost = ""  # why gradients since the last step are incomplete, and were dropped

    @property
    def num_trained(self) -> int:
        return sum(parameter.numel() for parameter in self.backend.parameters().values())

    def forward_backward(
        self, rows: Sequence[TrainingRow], loss_fn: str, options: Mapping[str, Any], *, forward_only: bool
    ) -> PassResult:
        if forward_only:
            return self._forward(rows, LossSpec(loss_fn, options=dict(options)))
        try:
            return self._forward_backward(rows, LossSpec(loss_fn, options=dict(options)))
        except Exception as error:
            # A batch comes in several requests, and its step may be on its way: it must not apply a part of it.
            self._lost = self._lost or str(error)
            self._drop_gradients()
            raise

    def _forward(self, rows: Sequence[TrainingRow], loss: LossSpec) -> PassResult:
        check_loss(rows, loss)
        shared = SharedBatch(rows, loss.kind)
        logprobs = shared.rows_of(self.backend.forward(shared.data))
        return PassResult(logprobs, evaluate(rows, logprobs, loss))

    def _forward_backward(self, rows: Sequence[TrainingRow], loss: LossSpec) -> PassResult:
        check_loss(rows, loss)
        shared = SharedBatch(rows, loss.kind)
        result = self.backend.forward_backward(shared.data, loss)
        logprobs = shared.rows_of(result.logprobs())
        if result.nonfinite_origins:
            raise ValueError(f"the log-probs of {', '.join(result.nonfinite_origins)} are not finite")
        return PassResult(logprobs, result.loss)

    def optim_step(self, step: OptimStep) -> float:
        """Returns the norm of the gradient before clipping; a step whose norm is not finite is not applied."""
        if self._lost:
            reason, self._lost = self._lost, ""
            self._drop_gradients()
            raise ValueError(
                f"a forward_backward since the last step failed ({reason}): nothing is applied, and all gradients "
                "since then are dropped; send the batch again"
            )
        if not any(parameter.grad is not None for parameter in self.backend.parameters().values()):
            raise ValueError("there is no gradient to apply: call forward_backward first")
        return self.backend.optim_step(step).grad_norm

    def _drop_gradients(self) -> None:
        for parameter in self.backend.parameters().values():
            parameter.grad = None

    def save(self, folder: Path, *, with_optimizer: bool) -> int:
        """The adapter as PEFT loads it, and with the optimizer what training needs to go on. Returns its bytes."""
        writing = folder.with_name(f"writing-{folder.name}")
        shutil.rmtree(writing, ignore_errors=True)  # of a process that was killed
        writing.mkdir(parents=True)
        try:
            new = writing / "new"
            self.backend.export_weights(new)
            if with_optimizer:
                self.backend.save_state(new / STATE).result()
            commit_folder(new, folder, {"extra": asdict(self.spec)})
        finally:
            shutil.rmtree(writing, ignore_errors=True)  # a disk that is full gets its room back
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    def load(self, folder: Path, *, with_optimizer: bool) -> None:
        problem = damage(folder)
        if problem is not None:
            raise ValueError(f"the checkpoint is damaged: {problem}")
        saved = read_json_object(folder / MANIFEST)["extra"]
        for name, own in asdict(self.spec).items():
            if name != "seed" and saved.get(name) != own:
                raise ValueError(
                    f"the checkpoint is of an adapter with {name} {saved.get(name)}, and this one has {own}"
                )
        has_state = (folder / STATE).is_dir()
        if with_optimizer and not has_state:
            raise ValueError("these weights were saved for sampling, without an optimizer: load them without one")
        self._drop_gradients()
        if has_state:
            self.backend.load_state(folder / STATE, with_optimizer=with_optimizer)
        else:
            apply_adapter(self.backend.policy.model, folder)

    def close(self) -> None:
        self.backend.close()
