"""The entry of every rank that verifies: `python -m lockstep.verification.worker FOLDER`.

Reads batches as training does, makes a step on each with TorchBackend, and writes the values. The same on all ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.algorithms.losses import LOSSES, lacks_reference
from lockstep.backend.optimizers import OptimizerSettings
from lockstep.backend.router_balance import RouterLosses
from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import DpoConfig, GrpoConfig, KtoConfig, SftConfig
from lockstep.config.parallel import AXES
from lockstep.parallel.group import ProcessGroup
from lockstep.parallel.tensor import local
from lockstep.train.dpo import prepare
from lockstep.types import Datum, LossSpec
from lockstep.verification.checking import tensor_errors
from lockstep.verification.job import LayoutJob, own_rank, record_failure, tensor_name, write_result, write_tensors
from lockstep.verification.plain_optimizers import step_number
from lockstep.verification.plain_policy import (
    RecordingBackend,
    give_routing,
    learn_groups,
    supervised_logprobs,
    update_name,
)
from lockstep.verification.reduced import (
    build_reduced,
    drops_out,
    forget_weights,
    leave_reference,
    reference_config,
)
from lockstep.verification.sample import REFERENCE, add_reference, compile_rows, renumber, take_batches, total_weight

_RECOMPUTED = 1e-4  # models that compute a part in float32 round there; another dropout makes a difference of tenths


def main(arguments: list[str] | None = None) -> int:
    (name,) = sys.argv[1:] if arguments is None else arguments
    folder = Path(name)
    try:
        compute(LayoutJob.read(folder), folder)
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            record_failure(folder, own_rank(), _sentence(error), refused=is_refusal(error))
        sys.stderr.flush()
        os._exit(1)  # without waiting for collectives: the other ranks must fail at once, not after their timeout
    return 0


def compute(job: LayoutJob, folder: Path) -> None:
    torch.set_num_threads(1)  # the model is tiny, and sums must not depend on threads
    algorithm = job.config.algorithm
    sampled = take_batches(compile_rows(job.config), job.config)
    group = join_group("cpu", job.layout.parallel, job.timeout_s)
    batches = [renumber(batch.data, job.tokens) for batch in sampled]
    if getattr(algorithm, "router_replay", False):
        whole = build_reduced(job.config, job.reduction)  # ranks may have some of its layers
        batches = [give_routing(job.config, whole, batch) for batch in batches]
    backend, kind, batches = _build(job, group, batches)
    facts: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for number, (part, rows) in enumerate(zip(sampled, batches, strict=True)):
        backend.micro_batch_tokens = job.micro_batch_tokens[number]
        known = {"names": part.names, "cursor": part.cursor}
        if isinstance(algorithm, GrpoConfig):
            facts += [{**known, **update} for update in _updates(backend, job, rows, number, len(facts), tensors)]
        else:
            facts.append({**known, **_step(backend, job, rows, number, tensors)})
        if number == 0 and not isinstance(algorithm, SftConfig) and algorithm.reference_sync_steps is not None:
            backend.mix_reference(algorithm.reference_mix)
        if number == 0 and facts:  # before its first step a run has no checkpoint
            backend = resume(job, backend, kind, folder / "checkpoint")
    disagreements = _write_shared(tensors, facts, group, folder)
    if drops_out(job.config):
        disagreements += check_dropout(job, group, batches[0], folder)
    group.barrier()
    if group.rank == 0:
        said = [*backend.warnings, *backend.slow]
        shared = {"disagreements": disagreements, "warnings": said, "packs": backend.policy.packs}
        write_result(folder, {"steps": facts, **shared})
    group.leave()


def _build(
    job: LayoutJob, group: ProcessGroup, batches: list[list[Datum]]
) -> tuple[TorchBackend, str, list[list[Datum]]]:
    """As a run does: the backend, its reference, and the rows, with log-probs that are made ahead. All ranks.

    Then the policy leaves its reference.
    """
    has_adapter = job.config.lora is not None and job.config.lora.init != "pissa"  # which begins as the base
    kind = "none"
    if job.reference != "precomputed":
        kind = job.reference
        backend = make_backend(job, group, kind)
    elif job.other is not None:
        other = make_backend(replace(job, config=reference_config(job.config), reduction=job.other), group, "none")
        batches = [add_reference(batch, other.forward(batch)) for batch in batches]
        other.policy.stop_packing()
        backend = make_backend(job, group, kind)
    else:
        kind = "adapter_off" if has_adapter else "none"
        backend = make_backend(job, group, kind)
        batches = [add_reference(batch, backend.forward(batch, reference=has_adapter)) for batch in batches]
    if job.reference != "none":
        leave_reference(local(p.detach()) for p in backend.parameters().values())
    return backend, kind, batches


def resume(job: LayoutJob, backend: TorchBackend, kind: str, path: Path) -> TorchBackend:
    """A new backend that has read the old one's checkpoint, with all that must survive. All ranks."""
    backend.save_state(path).result(timeout=job.timeout_s)
    backend.group.barrier()  # on rank 0 alone the future waits for every rank's part
    resumed = make_backend(job, backend.group, kind)
    resumed.load_state(path)
    return resumed


def make_backend(
    job: LayoutJob, group: ProcessGroup, reference: str, *, checkpointing: str | None = None, dropout: bool = False
) -> TorchBackend:
    """As configured, but for the given. Only rank 0 has weights before."""
    model = build_reduced(job.config, job.reduction, dropout=dropout)
    if group.rank > 0:
        forget_weights(model)
    samples, losses = isinstance(job.config.algorithm, GrpoConfig), RouterLosses.of(job.config.model)
    return TorchBackend(
        model,
        micro_batch_tokens=max(job.micro_batch_tokens),
        precision="fp64",
        parallel=job.layout.parallel,
        activation_checkpointing=checkpointing or job.config.model.activation_checkpointing,
        activation_offload=job.config.model.activation_offload,
        compile=False,
        optimizer=replace(OptimizerSettings.of(job.config), stochastic_rounding=False),
        reference=reference,
        router_losses=RouterLosses(bias_rate=losses.bias_rate) if samples else losses,
        router_replay=getattr(job.config.algorithm, "router_replay", False),
        temperature=getattr(job.config.algorithm, "temperature", 1.0),
        seed=job.config.seed,
        group=group,
    )


def _step(
    backend: TorchBackend, job: LayoutJob, rows: Sequence[Datum], number: int, tensors: dict[str, Tensor]
) -> dict[str, object]:
    """One step; its gradients and weights go into `tensors`, whole."""
    batch, loss = _prepare(job, backend, rows)
    logprobs = supervised_logprobs(backend.forward(batch), batch)
    reference = _reference_logprobs(backend, batch, loss)
    result = backend.forward_backward(batch, loss)
    metrics = {name: result.metrics[name] for name in LOSSES[loss.kind].metrics(loss.options)}
    _keep(tensors, number, "gradients", _snapshot(backend, "gradients"))
    norm = backend.optim_step(step_number(job.step, number + 1)).grad_norm
    _keep(tensors, number, "weights", _snapshot(backend, "weights"))
    facts = {"loss": result.loss, "norm": norm, "logprobs": logprobs}
    return {**facts, "reference_logprobs": reference, "metrics": metrics}


def _updates(
    backend: TorchBackend, job: LayoutJob, rows: Sequence[Datum], batch: int, first: int, tensors: dict[str, Tensor]
) -> list[dict[str, object]]:
    """Every update of the loop on sampled answers. Their tensors are numbered from `first` on."""
    recorder = RecordingBackend(backend, lambda kind: _snapshot(backend, kind), job.step, num_before=first)
    updates = []
    for place, update in enumerate(learn_groups(job.config, recorder, rows)):
        facts = {**vars(update), "where": update_name(batch + 1, place + 1)}
        for kind in ("gradients", "weights"):
            _keep(tensors, first + place, kind, facts.pop(kind))
        updates.append(facts)
    return updates


def _snapshot(backend: TorchBackend, kind: str) -> dict[str, Tensor]:
    """Whole "gradients" or "weights", by name; with these the biases of routers, if they move. All ranks."""
    if kind == "gradients":
        return {name: _gradient(parameter) for name, parameter in backend.parameters().items()}
    moved = {**backend.parameters(), **backend.balance.state()}
    return {name: _whole(tensor.detach()) for name, tensor in moved.items()}


def _keep(tensors: dict[str, Tensor], number: int, kind: str, values: dict[str, Tensor]) -> None:
    tensors.update({tensor_name(number, kind, name): tensor for name, tensor in values.items()})


def _prepare(job: LayoutJob, backend: TorchBackend, rows: Sequence[Datum]) -> tuple[Sequence[Datum], LossSpec]:
    """What the loop of this algorithm makes of the rows."""
    algorithm = job.config.algorithm
    if isinstance(algorithm, SftConfig):
        return rows, LossSpec("cross_entropy", scale=1.0 / total_weight(rows))
    assert isinstance(algorithm, (DpoConfig, KtoConfig))
    return prepare(job.config, backend, rows)


def _reference_logprobs(backend: TorchBackend, batch: Sequence[Datum], loss: LossSpec) -> list[float]:
    """Those that the loss uses: the backend's, or the rows' own."""
    if lacks_reference(loss, batch):
        return supervised_logprobs(backend.forward(batch, reference=True), batch)
    if any(REFERENCE in c.values for datum in batch for c in datum.completions):
        return supervised_logprobs([[c.values[REFERENCE] for c in datum.completions] for datum in batch], batch)
    return []


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    return _whole(parameter.grad)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _write_shared(
    tensors: dict[str, Tensor], facts: list[dict[str, Any]], group: ProcessGroup, folder: Path
) -> list[str]:
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
                where = _name_step(facts, int(step))
                disagreements.append(f"ranks {owner} and {rank} disagree about the {what} of {parameter} ({where})")
        for number, (own, theirs) in enumerate(zip(facts, their_facts, strict=True)):
            different = [key for key in own if own[key] != theirs[key]]
            disagreements += [f"ranks disagree about the {key} of {_name_step(facts, number)}" for key in different]
    write_tensors(folder, group.rank, {name: t for name, t in tensors.items() if owners[name][0] == group.rank})
    return disagreements


def check_dropout(job: LayoutJob, group: ProcessGroup, rows: Sequence[Datum], folder: Path) -> list[str]:
    """Sentences about what is wrong with it, whatever is dropped: in training alone, by each rank its own numbers, the
    same where a pass is computed twice, and going on after a resume. All ranks."""
    loss = LossSpec("cross_entropy", scale=1.0 / total_weight(rows))
    backend = make_backend(job, group, "none", dropout=True)
    streams = group.gather_objects((_place(group), torch.rand(8).tolist()))
    problems = [_stream_problem(streams)]
    if backend.forward(rows) != backend.forward(rows):
        problems.append("two evaluations of the same rows differ")
    losses = [backend.forward_backward(rows, loss).loss for _ in range(2)]
    if losses[0] == losses[1] and job.config.lora is not None and job.config.lora.dropout:
        problems.append("nothing is dropped in training")
    backend.optim_step(job.step)
    backend.save_state(folder / "dropout").result(timeout=job.timeout_s)
    group.barrier()
    expected = torch.rand(8)
    make_backend(job, group, "none", dropout=True).load_state(folder / "dropout")
    if not torch.equal(torch.rand(8), expected):
        problems.append("a rank does not go on with its own numbers after a resume")
    problems.append(_recomputation_problem(job, group, rows, loss))
    found = [own for everybody in group.gather_objects(problems) for own in everybody if own]
    return [f"dropout: {problem}" for problem in dict.fromkeys(found)]


def _place(group: ProcessGroup) -> tuple[int, ...]:
    """Ranks with the same one compute the same tokens with the same layers."""
    return tuple(group.place(axis) for axis in AXES if axis != "tensor")


def _stream_problem(streams: Sequence[tuple[tuple[int, ...], list[float]]]) -> str:
    """`streams`: of each rank, its place and what it draws."""
    for (i, (place, own)), (j, (other_place, others)) in itertools.combinations(enumerate(streams), 2):
        if place == other_place and own != others:
            return f"ranks {i} and {j} have parts of the same layers and draw different numbers"
        if place != other_place and own == others:
            return f"ranks {i} and {j} have other tokens or layers and draw the same numbers"
    return ""


def _recomputation_problem(job: LayoutJob, group: ProcessGroup, rows: Sequence[Datum], loss: LossSpec) -> str:
    """The gradient must not depend on which activations are kept: what is dropped is the same.

    Selective is also the one without our own product of adapters. Stages are compared with keeping all.
    """
    configured = job.config.model.activation_checkpointing
    other = "none" if configured == "selective" or group.degrees.pipeline > 1 else "selective"
    if other == configured:
        return ""
    gradients = []
    for kind in (other, configured):
        backend = make_backend(job, group, "none", checkpointing=kind, dropout=True)
        backend.forward_backward(rows, loss)
        gradients.append(_snapshot(backend, "gradients"))
    errors = tensor_errors(gradients[1], gradients[0])
    worst = max(errors, key=errors.__getitem__)
    if errors[worst] <= _RECOMPUTED:
        return ""
    return f"the gradient of {worst} depends on which activations are kept: off by {errors[worst]:.2g}"


def _name_step(facts: list[dict[str, Any]], number: int) -> str:
    return facts[number].get("where") or f"batch {number + 1}"


def is_refusal(error: BaseException) -> bool:
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
