"""Verifies a configuration: the plain loop, the ranks of each layout, the comparison, the report.

Layouts run one after another, each under a deadline; a rank that crashes is a failed layout, not an error here.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.config import ConfigError, GrpoConfig, RunConfig, SftConfig
from lockstep.config.reference import ReferenceChoice
from lockstep.model.load import load_hf_config
from lockstep.processes.ranks import run_ranks
from lockstep.train.reference import plan_reference
from lockstep.types import OptimStep
from lockstep.verification.job import LayoutJob, LayoutResult, agreed_refusal, read_failures, read_result
from lockstep.verification.layouts import (
    ONE,
    Layout,
    ModelLimits,
    default_layouts,
    left_out,
    num_processes,
    own_layout,
    parse_layouts,
    problem,
)
from lockstep.verification.plain_loop import StepValues, plain_batches, run_plain_loop
from lockstep.verification.plain_optimizers import PlainOptimizer
from lockstep.verification.plain_policy import run_plain_policy
from lockstep.verification.plain_preference import PlainPreference
from lockstep.verification.reduced import (
    Reduction,
    build_reduced,
    choose_limit,
    choose_reduction,
    drops_out,
    find_length_limits,
    find_limits,
    reference_config,
)
from lockstep.verification.sample import (
    MAX_ANSWERS,
    MAX_ROWS,
    MAX_TOKENS,
    SampleBatch,
    choose_budgets,
    compile_rows,
    distinct_tokens,
    renumber,
)

if TYPE_CHECKING:
    from torch import nn

WORKER_MODULE = "lockstep.verification.worker"
_PRELOAD = (WORKER_MODULE, "transformers.models.auto.modeling_auto", "peft")  # what every rank imports
DEADLINE_S = 180.0
_COLLECTIVE_S = 60.0  # the deadline of one collective
_MIN_LAYERS = 4  # two ranks with two stages each
TOLERANCE = 1e-10
LOOSE_TOLERANCE = 1e-6  # for models that compute a part in float32 whatever their dtype
# Errors are relative to a tensor's largest entry, but to no less than this fraction of the largest of all tensors: a
# tensor that is zero up to rounding has no meaningful relative error.
_FLOOR = 1e-4
OnProgress = Callable[[str, int, int], None]


@dataclass
class StepErrors:
    """The largest relative errors over all steps. `first` names the first value that exceeds the tolerance.

    `reference` is the error of the reference's log-probs, `metrics` that of rewards, margins and ratios; sft has none.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    logprobs: float = 0.0
    gradients: float = 0.0
    weights: float = 0.0
    reference: float = 0.0
    metrics: float = 0.0
    worst_parameter: str = ""
    first: str = ""
    by_parameter: dict[str, float] = field(default_factory=dict)

    @property
    def largest(self) -> float:
        first, second = (self.loss, self.grad_norm, self.logprobs), (self.gradients, self.weights)
        return max(*first, *second, self.reference, self.metrics)


@dataclass(frozen=True)
class Verdict:
    """Of one layout. `problem` is empty if it passed. Loss, norm and metrics are of the first batch.

    `refused`: the reason, where all ranks agree that the model does not support this layout.
    """

    layout: Layout
    seconds: float
    problem: str = ""
    loss: float | None = None
    grad_norm: float | None = None
    errors: StepErrors | None = None
    warnings: tuple[str, ...] = ()
    refused: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.problem


@dataclass
class Report:
    """The result of `verify`. `notes` say what was reduced, changed or left out, `not_covered` what a pass says
    nothing about.

    `metrics` are those of the loss, as sums over the first batch; cross-entropy has none.
    """

    model: str
    tolerance: float
    loss: float
    grad_norm: float
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    not_covered: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    def as_json(self) -> dict[str, object]:
        layouts = []
        for verdict in self.verdicts:
            layout = verdict.layout
            row = {"layout": layout.name, "processes": layout.degrees.num_ranks, "passed": verdict.passed}
            row |= {key: getattr(verdict, key) for key in ("loss", "grad_norm", "metrics", "seconds", "warnings")}
            row |= {"problem": verdict.problem or None, "errors": verdict.errors and asdict(verdict.errors)}
            layouts.append(row)
        facts = {key: getattr(self, key) for key in ("passed", "model", "tolerance", "notes", "not_covered")}
        plain = {"loss": self.loss, "grad_norm": self.grad_norm, "metrics": self.metrics}
        return {**facts, "reference": plain, "layouts": layouts}


@dataclass(frozen=True)
class _Prepared:
    """`job` has the layout of one rank; every layout gets a copy with itself in it."""

    job: LayoutJob
    expected: list[StepValues]
    limits: ModelLimits
    notes: list[str]


def verify(
    config: RunConfig,
    *,
    layouts: str | None = None,
    worker_module: str = WORKER_MODULE,
    deadline_s: float = DEADLINE_S,
    on_progress: OnProgress | None = None,
) -> Report:
    """Make two steps with the plain loop and with every layout, and compare losses, gradients and weights.

    `layouts` as in `--layouts`; without it, those that fit the model and this machine. One rank comes first: its error
    shows how exact the model itself is. `deadline_s` is for each layout.
    """
    report_progress = on_progress or (lambda name, number, total: None)
    report_progress("the plain loop", 0, 0)
    requested = None if layouts is None else parse_layouts(layouts, config)
    prepared = _prepare(config, requested)
    chosen, notes = _choose(config, requested, prepared.limits)
    total = len(chosen) + 1

    def check(layout: Layout, number: int, tolerance: float) -> tuple[Verdict, LayoutResult | None]:
        report_progress(layout.name, number, total)
        return _check(replace(prepared.job, layout=layout), prepared.expected, worker_module, deadline_s, tolerance)

    first, result = check(ONE, 1, TOLERANCE)
    plain = prepared.expected[0]
    notes = [*prepared.notes, *notes]
    report = Report(_model_name(config), TOLERANCE, plain.loss, plain.norm, [first], notes, plain.metrics)
    report.not_covered = describe_limits(config)
    if first.errors is not None and TOLERANCE < first.errors.largest <= LOOSE_TOLERANCE:
        _loosen(report, first, first.errors)
    if requested is None and result is not None and not result.packs:
        chosen = _without_packing(chosen, own_layout(config), report)
    for number, layout in enumerate(chosen, start=2):
        verdict, _ = check(layout, number, report.tolerance)
        if verdict.refused and requested is None and layout != own_layout(config):
            report.notes.append(left_out(layout, verdict.refused))
        else:
            report.verdicts.append(verdict)
    return report


def _prepare(config: RunConfig, requested: Sequence[Layout] | None) -> _Prepared:
    """The sample, the reduced model and the plain steps on it."""
    rows = compile_rows(config)
    choice = plan_reference(config, rows)
    batches = plain_batches(rows, config)
    tokens = distinct_tokens([batch.data for batch in batches])
    batches = [replace(batch, data=renumber(batch.data, tokens)) for batch in batches]
    stages = [layout.num_stages for layout in (*(requested or ()), own_layout(config))]
    lengths = [len(d.prompt) + len(c.tokens) for batch in batches for d in batch.data for c in d.completions]
    limit = choose_limit(lengths)
    reduction = choose_reduction(config, tokens, max(_MIN_LAYERS, *stages), limit)
    limits = _limit_sampling(config, find_limits(config, reduction))
    o = config.optim
    step = OptimStep(config.learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay)
    clips = o.max_grad_norm is not None
    model = build_reduced(config, reduction, quantised=False)
    size = sum(p.numel() for p in model.parameters())
    other = None
    if getattr(config.algorithm, "reference_model", None) is not None:
        other = choose_reduction(reference_config(config), tokens, reduction.num_layers, limit)
    optimizer = PlainOptimizer(model, step, clip_at_half=clips, config=config)
    expected = _plain_steps(config, model, batches, choice.kind, optimizer, other)
    step = optimizer.step
    budgets = choose_budgets([batch.data for batch in batches])
    job = LayoutJob(config, ONE, reduction, tokens, budgets, step, _COLLECTIVE_S, choice.kind, other)
    notes = _describe_changes(config, job, size, [len(batch.data) for batch in batches])
    notes += [*_describe_optimizer(config, optimizer), *_describe_length_limits(config, limit, lengths)]
    return _Prepared(job, expected, limits, [*notes, *describe_reference(config, choice, expected)])


def _plain_steps(
    config: RunConfig,
    model: nn.Module,
    batches: Sequence[SampleBatch],
    reference: str,
    optimizer: PlainOptimizer,
    other: Reduction | None,
) -> list[StepValues]:
    if isinstance(config.algorithm, GrpoConfig):
        expected = run_plain_policy(config, model, batches, reference, optimizer)
        if not expected:
            raise ConfigError("the made-up answers to the first prompts give no gradient: add prompts")
        return expected
    forward_backward = None
    if not isinstance(config.algorithm, SftConfig):
        other_model = None if other is None else build_reduced(reference_config(config), other)
        forward_backward = PlainPreference(config, model, reference, other_model).forward_backward
    return run_plain_loop(model, batches, optimizer, forward_backward, config.model)


def _limit_sampling(config: RunConfig, limits: ModelLimits) -> ModelLimits:
    """Adds the layouts that runs with sampling do not support, whatever the model."""
    algorithm = config.algorithm
    if not isinstance(algorithm, GrpoConfig):
        return limits
    limits = replace(limits, not_pipeline="grpo samples from the whole model on each rank")
    if algorithm.entropy_coefficient and not limits.not_context:
        limits = replace(limits, not_context="algorithm.entropy_coefficient needs all tokens of an answer on one rank")
    return limits


def _choose(
    config: RunConfig, requested: Sequence[Layout] | None, limits: ModelLimits
) -> tuple[list[Layout], list[str]]:
    """The requested layouts must be possible; without any, so must the configuration's own."""
    for layout in [own_layout(config)] if requested is None else requested:
        if why_not := problem(layout, limits):
            raise ConfigError(f"{layout.name}: {why_not}")
    if requested is None:
        return default_layouts(config, limits, num_processes())
    return [layout for layout in requested if layout != ONE], []


def _check(
    job: LayoutJob, expected: Sequence[StepValues], worker_module: str, deadline_s: float, tolerance: float
) -> tuple[Verdict, LayoutResult | None]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as name:
        folder = Path(name)
        job.write(folder)
        failed = run_ranks(
            worker_module,
            folder,
            job.layout.degrees.num_ranks,
            deadline_s=deadline_s,
            read_failures=read_failures,
            preload=_PRELOAD,
        )
        refused = agreed_refusal(folder, job.layout.degrees.num_ranks) if failed else ""
        result = None if failed else read_result(folder)
    seconds = time.monotonic() - started
    if result is None:
        return Verdict(job.layout, seconds, failed, refused=refused), None
    errors = compare(result.steps, expected, tolerance)
    difference = errors.first or next(iter(result.disagreements), "")
    first = result.steps[0]
    warnings = tuple(result.warnings)
    verdict = Verdict(job.layout, seconds, difference, first.loss, first.norm, errors, warnings, metrics=first.metrics)
    return verdict, result


def _loosen(report: Report, first: Verdict, errors: StepErrors) -> None:
    report.tolerance = LOOSE_TOLERANCE
    report.verdicts[0] = replace(first, problem="")
    report.notes.append(
        f"one rank differs from the plain loop by {errors.largest:.1g}: this model computes a part in float32 whatever "
        f"its dtype, so errors up to {LOOSE_TOLERANCE:g} are allowed"
    )


def _without_packing(chosen: Sequence[Layout], own: Layout, report: Report) -> list[Layout]:
    """Without packing, a model can be split neither by tokens nor into stages: those layouts are left out."""
    kept = []
    for layout in chosen:
        if layout != own and (layout.degrees.context > 1 or layout.degrees.pipeline > 1):
            report.notes.append(left_out(layout, "it needs packed documents, which this model does not support"))
        else:
            kept.append(layout)
    return kept


def _describe_changes(config: RunConfig, job: LayoutJob, size: int, rows: Sequence[int]) -> list[str]:
    how = "fewer layers, narrower" if job.reduction.narrow else "fewer layers"
    *_, budget, last_budget = job.micro_batch_tokens
    rows_cut = "groups are cut" if config.algorithm.kind == "grpo" else "pairs are cut in two"
    cut = f"; in the last batch {last_budget}, so that some {rows_cut}" if last_budget != budget else ""
    notes = [
        f"the model is a reduced copy ({how}, random weights): {job.reduction.num_layers} layers, {size:,} parameters, "
        "float64",
        f"the data are the first {len(rows)} batches of the run: {' and '.join(map(str, rows))} rows, at most "
        f"{MAX_ROWS} of each batch and {MAX_TOKENS // 2} tokens of each prompt and of each answer",
        f"a micro-batch has {budget} tokens, so that there are several{cut}",
    ]
    if config.parallel.compression != "none":
        notes.append(
            f"parallel.compression {config.parallel.compression} is not applied: it changes the numbers by design"
        )
    if drops_out(config):
        notes.append(
            "dropout is 0 where numbers are compared, and checked by itself: in training alone, each rank its own, the "
            "same in a pass that is computed twice, going on after a resume"
        )
    if job.step.max_grad_norm is not None:
        notes.append(
            "the first gradient is clipped to half of its norm, so that clipping has an effect; no later one is clipped"
        )
    notes.append("before the second batch every layout is built anew, and reads a checkpoint of the first")
    if config.algorithm.kind == "grpo":
        notes += _describe_answers(config.algorithm.group_size)
    return notes


def _describe_optimizer(config: RunConfig, optimizer: PlainOptimizer) -> list[str]:
    notes = []
    if config.optim.kind != "adafactor":  # which has none
        notes.append(
            "AdamW's eps is raised to the size of the gradient, so that its step depends on more than the gradient's "
            "signs"
        )
    if config.optim.kind == "adamw_8bit" and not optimizer.holds_eight_bits:
        notes.append("no matrix of the reduced copy is large enough for moments in eight bits: they are float64")
    if optimizer.unsettled:
        notes.append(
            f"weights of {len(optimizer.unsettled)} parameters are not compared: their gradient is zero but for "
            f"rounding, of which {config.optim.kind} makes whole steps"
        )
    return notes


def _describe_length_limits(config: RunConfig, limit: int, lengths: Sequence[int]) -> list[str]:
    found = find_length_limits(load_hf_config(config.model), at_least=limit)
    if not found:
        return []
    num_longer = sum(length > limit for length in lengths)
    lowered = ", ".join(f"{name} {value:,}" for name, value in found.items())
    only = "" if num_longer < len(lengths) else ", so that texts up to that length are not verified"
    return [
        f"what changes with the length of a text ({lowered}) does so at {limit} tokens here: {num_longer} of "
        f"{len(lengths)} texts are longer{only}"
    ]


def describe_limits(config: RunConfig) -> list[str]:
    """What a pass says nothing about, for this configuration."""
    precision = "the run's precision" if config.model.precision == "auto" else config.model.precision
    limits = [
        f"rounding in {precision}, CUDA kernels and compiled code: everything is computed in float64 on CPU",
        "texts of other lengths than these rows, and what shows only with other weights",
        "how rows become tokens, the learning rate's schedule, validation, export",
        "a resume in another layout",
    ]
    if config.algorithm.kind != "sft":
        limits.append("the formula of the loss: what it gives for given log-probs is computed by the same code")
    if config.algorithm.kind == "grpo":
        limits.append("sampling, rewards and advantages: answers are made up, advantages computed by the same code")
        if config.model.router_aux_loss != "off" or config.model.router_z_loss:
            limits.append("losses of routers: they are left out")
    if config.optim.stochastic_rounding:
        limits.append("optim.stochastic_rounding: weights are float64")
    if config.parallel.backend == "deepspeed":
        limits.append("DeepSpeed: layouts are those of the torch backend")
    if config.parallel.compression != "none":
        limits.append(f"parallel.compression {config.parallel.compression}: gradients are sent whole")
    return limits


def _describe_answers(group_size: int) -> list[str]:
    return [
        f"answers, rewards and the sampler's log-probs are made up, {min(group_size, MAX_ANSWERS)} to each prompt: "
        "what is compared is the training on them",
        "with several updates, the log-probs from before them are shifted, so that ratios and clipping have an effect",
    ]


def describe_reference(config: RunConfig, choice: ReferenceChoice, expected: Sequence[StepValues]) -> list[str]:
    algorithm = config.algorithm
    if isinstance(algorithm, SftConfig):
        return []
    notes = [f"the reference is {choice}"]
    if choice.kind != "none":
        notes.append("the model is moved away from its reference before the first batch: margins would be 0 otherwise")
    if algorithm.reference_sync_steps is not None:
        notes.append(
            f"the reference is mixed with {algorithm.reference_mix:g} of the model already after the first batch"
        )
    if algorithm.kind == "kto" and algorithm.loss == "kto" and not any(step.metrics["kl"] for step in expected):
        notes.append("kto's estimate of how far the model is from its reference is below 0 here, and counts as 0")
    return notes


def _model_name(config: RunConfig) -> str:
    architecture = load_hf_config(config.model)
    return (architecture.architectures or [type(architecture).__name__])[0]


def compare(ours: Sequence[StepValues], expected: Sequence[StepValues], tolerance: float) -> StepErrors:
    errors = StepErrors()
    if len(ours) != len(expected):
        errors.first = f"{len(ours)} optimizer steps instead of {len(expected)}"
        errors.loss = math.inf
    for number, (step, plain) in enumerate(zip(ours, expected), start=1):
        _compare_step(errors, step, plain, plain.where or f"batch {number}", tolerance)
    return errors


def _compare_step(errors: StepErrors, ours: StepValues, plain: StepValues, where: str, tolerance: float) -> None:
    def note(what: str, error: float) -> float:
        if not error <= tolerance and not errors.first:
            errors.first = f"{what} ({where}): off by {error:.2g}"
        return error

    if not errors.first:
        errors.first = _rows_differ(ours, plain, where)
    errors.logprobs = max(errors.logprobs, note("log-probs", _list_error(ours.logprobs, plain.logprobs)))
    error = note("log-probs of the reference", _list_error(ours.reference_logprobs, plain.reference_logprobs))
    errors.reference = max(errors.reference, error)
    for name, error in tensor_errors(_as_tensors(ours.metrics), _as_tensors(plain.metrics)).items():
        errors.metrics = max(errors.metrics, note(name, error))
    errors.loss = max(errors.loss, note("loss", relative_error(ours.loss, plain.loss)))
    for name, error in tensor_errors(ours.gradients, plain.gradients).items():
        errors.gradients = max(errors.gradients, note(f"gradient of {name}", error))
        errors.by_parameter[name] = max(errors.by_parameter.get(name, 0.0), error)
    errors.grad_norm = max(errors.grad_norm, note("gradient norm", relative_error(ours.norm, plain.norm)))
    # Of what has a gradient, the plain loop leaves out weights that follow from rounding alone.
    weights = {n: t for n, t in ours.weights.items() if n in plain.weights or n not in plain.gradients}
    for name, error in tensor_errors(weights, plain.weights).items():
        errors.weights = max(errors.weights, note(f"weights of {name} after the step", error))
        errors.by_parameter[name] = max(errors.by_parameter.get(name, 0.0), error)
    errors.worst_parameter = max(errors.by_parameter, key=errors.by_parameter.__getitem__, default="")


def _rows_differ(ours: StepValues, plain: StepValues, where: str) -> str:
    for place, (one, other) in enumerate(zip(ours.names, plain.names), start=1):
        if one != other:
            return f"rows of {where}: place {place} has {one} instead of {other}"
    if len(ours.names) != len(plain.names):
        return f"rows of {where}: {len(ours.names)} instead of {len(plain.names)}"
    if ours.cursor != plain.cursor:
        return f"cursor after {where}: {ours.cursor} instead of {plain.cursor}"
    return ""


def relative_error(ours: float, plain: float) -> float:
    return _finite(abs(ours - plain) / max(abs(plain), 1e-30))


def _list_error(ours: Sequence[float], plain: Sequence[float]) -> float:
    if len(ours) != len(plain):
        return math.inf
    return max((relative_error(a, b) for a, b in zip(ours, plain)), default=0.0)


def _as_tensors(metrics: dict[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def tensor_errors(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> dict[str, float]:
    """By name, in the order of the model; infinite where one side has no such tensor or another shape."""
    largest = max((float(t.abs().max()) for t in plain.values()), default=0.0)
    errors = {name: math.inf for name in ours if name not in plain}
    for name, expected in plain.items():
        tensor = ours.get(name)
        if tensor is None or tensor.shape != expected.shape:
            errors[name] = math.inf
            continue
        size = max(float(expected.abs().max()), _FLOOR * largest, 1e-30)
        errors[name] = _finite(float(torch.sub(tensor, expected).abs().max()) / size)
    return errors


def _finite(error: float) -> float:
    return error if math.isfinite(error) else math.inf
