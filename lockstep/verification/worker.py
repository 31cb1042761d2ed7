"""The entry of every rank that verifies: `python -m lockstep.verification.worker FOLDER`.

Takes batches as training does, makes a step on each through TorchBackend, and writes what came out. All ranks alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.parallel.group import Group
from lockstep.types import Datum, LossSpec
from lockstep.verification.job import Job, own_rank, record_failure, tensor_name, write_found, write_tensors
from lockstep.verification.reduced import build_reduced
from lockstep.verification.sample import Taken, compile_rows, renumber, take_batches, total_weight


def main(arguments: list[str] | None = None) -> int:
    (name,) = sys.argv[1:] if arguments is None else arguments
    folder = Path(name)
    try:
        compute(Job.read(folder), folder)
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            record_failure(folder, own_rank(), _sentence(error), refused=_is_refusal(error))
        sys.stderr.flush()
        os._exit(1)  # without waiting for collectives: the others must learn at once that this rank is gone
    return 0


def compute(job: Job, folder: Path) -> None:
    torch.set_num_threads(1)  # the model is tiny, and sums must not depend on threads
    taken = take_batches(compile_rows(job.config), job.config)
    group = join_group("cpu", job.layout.parallel, job.timeout_s)
    backend = make_backend(job, group)
    facts: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for number, part in enumerate(taken):
        facts.append(_step(backend, job, part, number, tensors))
    disagreements = _write_shared(tensors, facts, group, folder)
    group.barrier()
    if group.rank == 0:
        found = {"disagreements": disagreements, "warnings": backend.warnings, "packs": backend.policy.packs}
        write_found(folder, {"steps": facts, **found})
    group.leave()


def make_backend(job: Job, group: Group) -> TorchBackend:
    return TorchBackend(
        build_reduced(job.config, job.reduction),
        micro_batch_tokens=job.micro_batch_tokens,
        precision="fp64",
        parallel=job.layout.parallel,
        activation_checkpointing=job.config.model.activation_checkpointing,
        activation_offload=job.config.model.activation_offload,
        compile=False,
        seed=job.config.seed,
        group=group,
    )


def _step(backend: TorchBackend, job: Job, taken: Taken, number: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """One step; its gradients and weights go into `tensors`, whole."""
    batch = renumber(taken.data, job.tokens)
    logprobs = _supervised(backend.forward(batch), batch)
    loss = backend.forward_backward(batch, LossSpec("cross_entropy", scale=1.0 / total_weight(batch))).loss
    for name, parameter in backend.parameters().items():
        tensors[tensor_name(number, "gradients", name)] = _gradient(parameter)
    norm = backend.optim_step(job.step).grad_norm
    for name, parameter in backend.parameters().items():
        tensors[tensor_name(number, "weights", name)] = _whole(parameter.detach())
    return {"names": taken.names, "cursor": taken.cursor, "loss": loss, "norm": norm, "logprobs": logprobs}


def _supervised(logprobs: Any, batch: list[Datum]) -> list[float]:
    return [
        value
        for datum, row in zip(batch, logprobs, strict=True)
        for completion, values in zip(datum.completions, row, strict=True)
        for weight, value in zip(completion.weights, values, strict=True)
        if weight
    ]


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    return _whole(parameter.grad)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _write_shared(tensors: dict[str, Tensor], facts: list[dict[str, Any]], group: Group, folder: Path) -> list[str]:
    """Each tensor is written by the first rank that has it. Sentences about what ranks have differently. All ranks."""
    mine = {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in tensors.items()}
    disagreements = []
    owners: dict[str, tuple[int, str]] = {}
    for rank, (digests, their_facts) in enumerate(group.gather_objects((mine, facts))):
        for name, digest in digests.items():
            owner, first = owners.setdefault(name, (rank, digest))
            if first != digest:
                step, kind, parameter = name.split(".", 2)
                what = {"gradients": "gradient", "weights": "weights"}[kind]
                disagreements.append(
                    f"ranks {owner} and {rank} disagree about the {what} of {parameter} (batch {int(step) + 1})"
                )
        for number, (own, theirs) in enumerate(zip(facts, their_facts, strict=True), start=1):
            different = [key for key in own if own[key] != theirs[key]]
            disagreements += [f"ranks disagree about the {key} of batch {number}" for key in different]
    write_tensors(folder, group.rank, {name: t for name, t in tensors.items() if owners[name][0] == group.rank})
    return disagreements


def _is_refusal(error: BaseException) -> bool:
    """Whether this model cannot be laid out like this, as it is said where parallelism is applied.

    The probe's errors are of the same kind, and may be a fault that it found.
    """
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, ValueError) and "lockstep.backend.build" in modules


def _sentence(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    sys.exit(main())
