"""From a run's configuration to what is planned: the model described, the rows of a step, the layout, the machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from lockstep.config import ConfigError, GrpoConfig, RunConfig, SftConfig
from lockstep.plan.description import ModelDescription, read_description
from lockstep.plan.hardware import DEVICES, NETWORKS, Calibrations, Device, GpuCluster
from lockstep.plan.search import PlanTask
from lockstep.plan.work import Options, RankLayout, Sampling, StepRows
from lockstep.rundir import write_atomically

_FORMAT = 7  # of descriptions on disk: count up when what is counted changes
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
    )


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
        compression=config.parallel.compression,
        optimizer=config.optim.kind,
    )


def precision_of(config: RunConfig, cluster: GpuCluster) -> str:
    wanted = config.model.precision
    if wanted == "fp8_base":
        return "bf16"
    return wanted if wanted != "auto" else "fp32" if cluster.device.name == "cpu" else "bf16"


def layout_of(config: RunConfig, cluster: GpuCluster) -> RankLayout:
    parallel = config.parallel
    return RankLayout(
        parallel.degrees(cluster.num_ranks, cluster.per_node),
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
    return _with_algorithm(rows, config)


def measured_rows(config: RunConfig, batches: Sequence[Sequence[TextLengths]], steps: int | None) -> StepRows:
    """From some batches of the data."""
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
    return _with_algorithm(rows, config)


def _with_algorithm(rows: StepRows, config: RunConfig) -> StepRows:
    algorithm = config.algorithm
    if isinstance(algorithm, (SftConfig, GrpoConfig)) or not algorithm.needs_reference:
        return replace(rows, linear=isinstance(algorithm, SftConfig))
    wanted = algorithm.reference
    kind = wanted if wanted != "auto" else "adapter_off" if config.lora is not None else "copy"
    return replace(rows, linear=False, reference=kind, reference_passes=int(kind in ("copy", "adapter_off")))


def _sampled_rows(config: RunConfig, algorithm: GrpoConfig) -> StepRows:
    """Answers as long as they may be; prompts of a quarter of what is left, at most 512 tokens."""
    prompts, size = config.batch.samples_per_step or 1, algorithm.group_size
    prompt = min(max((config.data.max_length - algorithm.max_tokens) // 4, 16), 512)
    answers = size * algorithm.max_tokens
    length = prompt + answers
    pairs = prompt**2 / 2 + size * algorithm.max_tokens * (prompt + algorithm.max_tokens / 2)
    kept = algorithm.needs_reference
    kind = "none" if not kept else "adapter_off" if config.lora is not None else "copy"
    has_own_sampler = config.rollouts.engines > 0 or config.rollouts.endpoint is not None
    sampling = Sampling(
        prompts * size, prompt, algorithm.max_tokens, prompts, not has_own_sampler, config.rollouts.engines
    )
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
        sampling=sampling,
        steps=config.optim.max_steps,
        assumed=f"prompts of {prompt} tokens, answers of all {algorithm.max_tokens}" + _beside(config),
    )


def _beside(config: RunConfig) -> str:
    if config.rollouts.engines > 0:
        return "; engines have GPUs of their own, and their time is not in it"
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
