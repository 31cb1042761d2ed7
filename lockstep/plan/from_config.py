"""From a run's configuration to what is planned: the model described, the rows of a step, the layout, the machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import yaml

from lockstep.config import ConfigError, GrpoConfig, RunConfig, SftConfig, resolve_config
from lockstep.config.reference import choose_reference, estimates_kl
from lockstep.plan.description import ModelDescription, read_description
from lockstep.plan.hardware import DEVICES, NETWORKS, Calibrations, Device, GpuCluster
from lockstep.plan.search import PlanTask
from lockstep.plan.work import Options, RankLayout, Sampling, StepRows
from lockstep.rundir import write_atomically

_FORMAT = 8  # of descriptions on disk: count up when what is counted changes
_UNKNOWN_SOURCE = "no entry in the table of devices: its rates are a guess"


@dataclass(frozen=True)
class TextLengths:
    """One row: tokens of its prompt, of each completion, and how many are learned."""

    prompt: int
    completions: tuple[int, ...]
    supervised: int


def task_of(config: RunConfig, cluster: GpuCluster, rows: StepRows, *, price_per_hour: float | None = None) -> PlanTask:
    """Describes the model, which takes seconds: the rest is arithmetic."""
    if config.parallel.backend == "deepspeed":
        raise ConfigError("no plan for parallel.backend deepspeed: its memory is DeepSpeed's own; use backend torch")
    options = options_of(config, cluster)
    on_gpu = options.device == "cuda"
    compiled = on_gpu if config.model.compile == "auto" else bool(config.model.compile)
    model = described(config, precision_of(config, cluster), compiled=compiled)
    return PlanTask(
        model,
        rows,
        options,
        cluster,
        config.batch.micro_batch_tokens,
        config.model.activation_checkpointing,
        pipelines=not isinstance(config.algorithm, GrpoConfig) and not config.model.activation_offload,
        price_per_hour=price_per_hour,
        check=partial(_changed, config),
        changed=lambda change: task_of(_changed(config, change), cluster, rows, price_per_hour=price_per_hour),
        widens=on_gpu and config.model.precision in ("fp32", "fp64"),
    )


def _changed(config: RunConfig, change: str) -> RunConfig:
    return resolve_config(yaml.safe_load(config.to_yaml()), overrides=change.split())


def described(config: RunConfig, precision: str, *, compiled: bool) -> ModelDescription:
    """Tracing takes seconds: what was found is kept, for the same model, settings and versions."""
    import torch
    import transformers

    from lockstep.model.load import load_hf_config
    from lockstep.plan.trace import describe_model

    settings = config.model.model_dump(mode="json", exclude={"logits_gib"}) | {"compile": compiled}
    about = [load_hf_config(config.model).to_dict(), settings, config.lora and config.lora.model_dump(mode="json")]
    versions = [precision, torch.__version__, transformers.__version__, _FORMAT]
    digest = hashlib.sha256(json.dumps([about, versions], sort_keys=True, default=str).encode()).hexdigest()
    path = Calibrations().folder.parent / "descriptions" / f"{digest[:32]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # an old or broken one is made again
        return read_description(json.loads(path.read_text(encoding="utf-8")))
    found = describe_model(config, precision, compiled=compiled)
    with contextlib.suppress(OSError):  # a place that cannot be written to costs the time, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(found)), durable=False)
    return found


def options_of(config: RunConfig, cluster: GpuCluster) -> Options:
    return Options(
        device="cpu" if cluster.device.name == "cpu" else "cuda",
        logits_gib=config.model.logits_gib,
        activation_offload=config.model.activation_offload,
        checkpoint_in_background=config.checkpoint.asynchronous,
        compression=config.parallel.compression,
        optimizer=config.optim.kind,
        device_gib=cluster.device.memory_gib,
    )


def precision_of(config: RunConfig, cluster: GpuCluster) -> str:
    wanted = config.model.precision
    if wanted == "fp8_base":
        return "bf16"
    return wanted if wanted != "auto" else "fp32" if cluster.device.name == "cpu" else "bf16"


def layout_of(config: RunConfig, cluster: GpuCluster) -> RankLayout:
    parallel = config.parallel
    degrees = parallel.degrees(cluster.num_ranks, cluster.per_node)
    parallel.check_precision(precision_of(config, cluster))
    if not isinstance(config.algorithm, GrpoConfig):
        config.batch.check_ranks(degrees.data)
    return RankLayout(
        degrees,
        cluster.per_node,
        parallel.keep_parameters,
        parallel.prefetch,
        parallel.offload,
        parallel.schedule,
    )


# --- rows -------------------------------------------------------------------------------------------------------------


def assumed_rows(config: RunConfig) -> StepRows:
    """Without data: every row as long as it may be, and all of it learned. An upper bound."""
    length = config.data.max_length
    if isinstance(config.algorithm, GrpoConfig):
        return _sampled_rows(config, config.algorithm)
    tokens = config.batch.tokens or length * (config.batch.samples_per_step or 1)
    said = f"rows of data.max_length {length} tokens, all learned"
    rows = StepRows(tokens, length, float(length), steps=config.optim.max_steps, assumed=said)
    return _with_algorithm(rows, config, None)


def measured_rows(
    config: RunConfig, batches: Sequence[Sequence[TextLengths]], steps: int, steps_of_epoch: int
) -> StepRows:
    """From some batches of the data. `steps`: of the run; `steps_of_epoch`: in which every row comes once."""
    tokens = texts = targets = keys = longest = 0
    pairs = 0.0
    for row in (row for batch in batches for row in batch):
        tokens += row.prompt + sum(row.completions)
        texts += len(row.completions)
        targets += row.supervised
        keys += row.prompt * len(row.completions) + sum(row.completions)
        pairs += row.prompt**2 / 2 + sum(n * (row.prompt + n / 2) for n in row.completions)
        longest = max(longest, row.prompt + sum(row.completions))
    per_row = tokens / max(sum(len(batch) for batch in batches), 1)
    rows = StepRows(
        round(tokens / max(len(batches), 1)),
        min(longest, config.data.max_length),
        per_row,
        targets / max(tokens, 1),
        pairs / max(tokens, 1),
        keys / max(tokens, 1),
        steps=steps,
    )
    return _with_algorithm(rows, config, steps_of_epoch)


def _with_algorithm(rows: StepRows, config: RunConfig, steps_of_epoch: int | None) -> StepRows:
    algorithm = config.algorithm
    if isinstance(algorithm, (SftConfig, GrpoConfig)):
        return replace(rows, linear=isinstance(algorithm, SftConfig))
    if steps_of_epoch is None:  # rows are not known: a run that counts its steps may end before it has seen all
        num_rows, num_seen = 1, int(config.optim.max_steps is None and config.optim.epochs >= 1)
    else:
        num_rows, num_seen = steps_of_epoch, rows.steps or 0
    kind = choose_reference(config, num_rows=num_rows, num_seen=num_seen).kind
    depends = kind == "copy" and steps_of_epoch is None
    depends = depends and choose_reference(config, num_rows=1, num_seen=1).kind != "copy"
    compares = estimates_kl(algorithm)  # answers behind other prompts, under both models
    at_hand = kind in ("copy", "adapter_off")
    if depends:
        rows = replace(rows, assumed=f"{rows.assumed}; fewer steps than would see all rows, so a copy as the reference")
    return replace(
        rows,
        linear=False,
        reference=kind,
        reference_passes=(2 if compares else 1) if at_hand else 0,
        reference_is_assumed=depends,
        extra_forwards=int(compares),
        precomputed_steps=float(steps_of_epoch or 0) if kind == "precomputed" else 0.0,
    )


def _sampled_rows(config: RunConfig, algorithm: GrpoConfig) -> StepRows:
    """Answers as long as they may be; prompts of a quarter of what is left, at most 512 tokens."""
    prompts, size = config.batch.samples_per_step or 1, algorithm.group_size
    prompt = min(max((config.data.max_length - algorithm.max_tokens) // 4, 16), 512)
    answers = size * algorithm.max_tokens
    length = prompt + answers
    pairs = prompt**2 / 2 + size * algorithm.max_tokens * (prompt + algorithm.max_tokens / 2)
    kept = algorithm.needs_reference
    kind = choose_reference(config, num_rows=1, num_seen=1).kind
    engines = config.rollouts.engines if config.rollouts.device != "cpu" else 0
    colocated = not config.rollouts.samples_elsewhere
    sampling = Sampling(prompts * size, prompt, algorithm.max_tokens, prompts, colocated, engines)
    return StepRows(
        prompts * length,
        min(length, config.batch.micro_batch_tokens),
        float(length),
        answers / length,
        pairs / length,
        (size * prompt + answers) / length,
        linear=False,
        reference=kind,
        reference_passes=int(kept),
        extra_forwards=int(algorithm.updates > 1 or (kept and algorithm.kl_in == "reward")),
        updates=algorithm.num_updates,
        optimizer_steps=algorithm.updates,
        sampling=sampling,
        steps=config.optim.max_steps,
        assumed=f"prompts of {prompt} tokens, answers of all {algorithm.max_tokens}" + _beside(config),
    )


def _beside(config: RunConfig) -> str:
    if config.rollouts.engines > 0:
        own = "sample on CPUs" if config.rollouts.device == "cpu" else "have GPUs of their own"
        return f"; engines {own}, and their time is not in it"
    return "; an endpoint samples: its memory and time are not in it" if config.rollouts.endpoint is not None else ""


# --- this machine -----------------------------------------------------------------------------------------------------


def this_machine(config: RunConfig, num_ranks: int | None = None, per_node: int | None = None) -> GpuCluster:
    """What the run would start on: the GPUs that torch sees here, with a calibration if there is one; or CPUs.

    `num_ranks`, `per_node`: as they are, where the run has started; otherwise as launch says.
    """
    import torch

    from lockstep.parallel.group import choose_device

    place = choose_device(config.launch.device)
    procs = num_ranks or config.launch.procs
    nodes = getattr(config.launch, "nodes", 1) if per_node is None else max(procs // per_node, 1)
    if place.type != "cuda":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / max(procs // nodes, 1)
        host = Device("cpu", memory, 1e11, 2e10, 2e9, 3e10, "one core of a server, roughly")
        return GpuCluster(host, max(procs // nodes, 1), nodes, NETWORKS["eth25"], Calibrations().read("cpu"))
    found = torch.cuda.get_device_properties(place)
    memory = found.total_memory / 2**30
    device = _known_device(found.name, memory)
    return GpuCluster(
        replace(device, memory_gib=memory),
        max(procs // nodes, 1),
        nodes,
        NETWORKS["ib400"],
        Calibrations().read(found.name),
    )


def _known_device(name: str, memory_gib: float) -> Device:
    """The entry whose name is in the device's own, and whose memory is nearest."""
    plain = "".join(c for c in name.lower() if c.isalnum())
    fitting = [d for d in DEVICES.values() if d.name.split("-")[0] in plain]
    if fitting:
        return min(fitting, key=lambda d: abs(d.memory_gib - memory_gib))
    return Device(name, memory_gib, 100e12, 800e9, 20e9, 40e12, _UNKNOWN_SOURCE)
