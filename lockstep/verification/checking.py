"""Verifies a configuration: reference, ranks of each layout, comparison, report. What composes the rest of the package.

Runs layouts one after another, each under a deadline; a rank that crashes is a failed layout, not an error here.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config import ConfigError, GrpoConfig, RunConfig, SftConfig
from lockstep.model.load import load_hf_config
from lockstep.train.reference import ReferenceChoice, plan_reference
from lockstep.types import OptimStep
from lockstep.verification.job import LayoutJob, LayoutResult, agreed_refusal, read_result
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
from lockstep.verification.plain_loop import PlainAdamW, StepValues, plain_batches, run_plain_loop
from lockstep.verification.plain_policy import train_policy_plainly
from lockstep.verification.plain_preference import PlainPreference
from lockstep.verification.ranks import WORKER_MODULE, run_ranks
from lockstep.verification.reduced import Reduction, build_reduced, choose_reduction, find_limits, reference_config
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

DEADLINE_S = 180.0
_COLLECTIVE_S = 60.0  # the deadline of one collective
_MIN_LAYERS = 4  # two ranks with two stages each
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Verdict:
    """Of one layout. `problem` says what is wrong, or nothing. Loss, norm and metrics are of the first batch.

    `refused`: all ranks say, in the same words, that the model cannot be laid out like this.
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
    """Everything that verify found. `notes` say what was reduced, changed or left out.

    `metrics` are what a loss besides cross-entropy measures, as sums over the first batch.
    """

    model: str
    tolerance: float
    loss: float
    grad_norm: float
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        layouts = []
        for verdict in self.verdicts:
            layout = verdict.layout
            row = {"layout": layout.name, "processes": layout.degrees.num_ranks, "passed": verdict.passed}
            row |= {key: getattr(verdict, key) for key in ("loss", "grad_norm", "metrics", "seconds", "warnings")}
            row |= {"problem": verdict.problem or None, "errors": verdict.errors and asdict(verdict.errors)}
            layouts.append(row)
        facts = {key: getattr(self, key) for key in ("passed", "model", "tolerance", "notes")}
        plain = {"loss": self.loss, "grad_norm": self.grad_norm, "metrics": self.metrics}
        return {**facts, "reference": plain, "layouts": layouts}


@dataclass(frozen=True)
class _Prepared:
    """`job` is of one rank; the other layouts have the same with themselves in it."""

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
    """Make two steps in the plainest way and in every layout, and compare all that can be compared.

    `layouts` as in `--layouts`; without it, those that fit the model and this machine. The one-rank backend comes
    first: it says how exact the model is. `deadline_s` is for each layout.
    """
    tell = on_progress or (lambda name, number, total: None)
    tell("the plain loop", 0, 0)
    asked = None if layouts is None else parse_layouts(layouts, config)
    prepared = _prepare(config, asked)
    chosen, notes = _choose(config, asked, prepared.limits)
    total = len(chosen) + 1

    def check(layout: Layout, number: int, tolerance: float) -> tuple[Verdict, LayoutResult | None]:
        tell(layout.name, number, total)
        return _check(replace(prepared.job, layout=layout), prepared.expected, worker_module, deadline_s, tolerance)

    first, found = check(ONE, 1, TOLERANCE)
    plain = prepared.expected[0]
    notes = [*prepared.notes, *notes]
    report = Report(_model_name(config), TOLERANCE, plain.loss, plain.norm, [first], notes, plain.metrics)
    if first.errors is not None and TOLERANCE < first.errors.largest <= LOOSE_TOLERANCE:
        _loosen(report, first, first.errors)
    if asked is None and found is not None and not found.packs:
        chosen = _without_packing(chosen, own_layout(config), report)
    for number, layout in enumerate(chosen, start=2):
        verdict, _ = check(layout, number, report.tolerance)
        if verdict.refused and asked is None and layout != own_layout(config):
            report.notes.append(left_out(layout, verdict.refused))
        else:
            report.verdicts.append(verdict)
    return report


def _prepare(config: RunConfig, asked: Sequence[Layout] | None) -> _Prepared:
    """The sample, the reduced model and the plain steps on it."""
    rows = compile_rows(config)
    choice = plan_reference(config, rows)
    taken = plain_batches(rows, config)
    tokens = distinct_tokens([part.data for part in taken])
    numbered = [replace(part, data=renumber(part.data, tokens)) for part in taken]
    stages = [layout.num_stages for layout in (*(asked or ()), own_layout(config))]
    reduction = choose_reduction(config, tokens, num_layers=max(_MIN_LAYERS, *stages))
    limits = _limit_sampling(config, find_limits(config, reduction))
    o = config.optim
    step = OptimStep(config.learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay)
    clips = o.max_grad_norm is not None
    model = build_reduced(config, reduction)
    size = sum(p.numel() for p in model.parameters())
    other = None
    if getattr(config.algorithm, "reference_model", None) is not None:
        other = choose_reduction(reference_config(config), tokens, reduction.num_layers)
    optimizer = PlainAdamW(model, step, clip_at_half=clips)
    expected = _plain_steps(config, model, numbered, choice.kind, optimizer, other)
    step = optimizer.step
    budgets = choose_budgets([part.data for part in numbered])
    job = LayoutJob(config, ONE, reduction, tokens, budgets, step, _COLLECTIVE_S, choice.kind, other)
    notes = _describe_changes(config, job, size, [len(p.data) for p in numbered])
    return _Prepared(job, expected, limits, [*notes, *_describe_reference(config, choice, expected)])


def _plain_steps(
    config: RunConfig,
    model: Any,
    taken: Sequence[SampleBatch],
    reference: str,
    optimizer: PlainAdamW,
    other: Reduction | None,
) -> list[StepValues]:
    if isinstance(config.algorithm, GrpoConfig):
        expected = train_policy_plainly(config, model, taken, reference, optimizer)
        if not expected:
            raise ConfigError("nothing could be learned from made-up answers to the first prompts: give more of them")
        return expected
    learn = None
    if not isinstance(config.algorithm, SftConfig):
        other_model = None if other is None else build_reduced(reference_config(config), other)
        learn = PlainPreference(config, model, reference, other_model).learn
    return run_plain_loop(model, taken, optimizer, learn)


def _limit_sampling(config: RunConfig, limits: ModelLimits) -> ModelLimits:
    """What a run that samples cannot be laid out like, whatever its model."""
    algorithm = config.algorithm
    if not isinstance(algorithm, GrpoConfig):
        return limits
    limits = replace(limits, not_pipeline="grpo samples from the whole model on each rank")
    if algorithm.entropy_coefficient and not limits.not_context:
        limits = replace(limits, not_context="algorithm.entropy_coefficient needs all tokens of an answer on one rank")
    return limits


def _choose(config: RunConfig, asked: Sequence[Layout] | None, limits: ModelLimits) -> tuple[list[Layout], list[str]]:
    """What is asked for must be possible, and so must the configuration's own layout."""
    for layout in [own_layout(config)] if asked is None else asked:
        if why_not := problem(layout, limits):
            raise ConfigError(f"{layout.name}: {why_not}")
    if asked is None:
        return default_layouts(config, limits, num_processes())
    return [layout for layout in asked if layout != ONE], []


def _check(
    job: LayoutJob, expected: Sequence[StepValues], worker_module: str, deadline_s: float, tolerance: float
) -> tuple[Verdict, LayoutResult | None]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as name:
        folder = Path(name)
        job.write(folder)
        failed = run_ranks(folder, job.layout.degrees.num_ranks, module=worker_module, deadline_s=deadline_s)
        refused = agreed_refusal(folder, job.layout.degrees.num_ranks) if failed else ""
        found = None if failed else read_result(folder)
    seconds = time.monotonic() - started
    if found is None:
        return Verdict(job.layout, seconds, failed, refused=refused), None
    errors = compare(found.steps, expected, tolerance)
    wrong = errors.first or next(iter(found.disagreements), "")
    first = found.steps[0]
    warnings = tuple(found.warnings)
    verdict = Verdict(job.layout, seconds, wrong, first.loss, first.norm, errors, warnings, metrics=first.metrics)
    return verdict, found


def _loosen(report: Report, first: Verdict, errors: StepErrors) -> None:
    report.tolerance = LOOSE_TOLERANCE
    report.verdicts[0] = replace(first, problem="")
    report.notes.append(
        f"one rank is {errors.largest:.1g} from the plain loop: this model computes a part in float32 whatever it is "
        f"in, so errors up to {LOOSE_TOLERANCE:g} are allowed"
    )


def _without_packing(chosen: Sequence[Layout], own: Layout, report: Report) -> list[Layout]:
    """A model whose documents cannot be packed cannot be split by tokens or into stages; that is no fault."""
    kept = []
    for layout in chosen:
        if layout != own and (layout.degrees.context > 1 or layout.degrees.pipeline > 1):
            report.notes.append(left_out(layout, "it needs packed documents, which this model does not take"))
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
    if config.lora is not None and config.lora.dropout:
        notes.append(f"lora.dropout {config.lora.dropout:g} is set to 0: what is left out at random cannot be compared")
    if job.step.max_grad_norm is not None:
        notes.append("gradients are clipped to half of the first one's norm, so that clipping is seen")
    if config.algorithm.kind == "grpo":
        notes += _describe_answers(config.algorithm.group_size)
    notes.append("AdamW's eps is raised to the size of the gradient, so that its step shows more than signs")
    return notes


def _describe_answers(num_samples: int) -> list[str]:
    return [
        f"answers, rewards and the sampler's log-probs are made up, {min(num_samples, MAX_ANSWERS)} to each prompt: "
        "what is compared is how they are learned",
        "log-probs from before the updates, where there are several, are moved: so ratios and clipping are seen",
    ]


def _describe_reference(config: RunConfig, choice: ReferenceChoice, expected: Sequence[StepValues]) -> list[str]:
    algorithm = config.algorithm
    if isinstance(algorithm, SftConfig):
        return []
    notes = [f"the reference is {choice}"]
    if choice.kind != "none":
        notes.append("the model is moved away from its reference before the first batch: otherwise margins would be 0")
    if algorithm.reference_sync_steps is not None:
        notes.append(f"the reference follows by {algorithm.reference_mix:g} after the first batch, not only later")
    if algorithm.kind == "kto" and algorithm.loss == "kto" and not any(step.metrics["kl"] for step in expected):
        notes.append("kto's estimate of how far the model is from its reference is below 0 here, and counts as 0")
    return notes


def _model_name(config: RunConfig) -> str:
    architecture = load_hf_config(config.model)
    return (architecture.architectures or [type(architecture).__name__])[0]


TOLERANCE = 1e-10
LOOSE_TOLERANCE = 1e-6  # for models that compute a part in float32 whatever they are in
# Errors are relative to a tensor's largest entry, but to no less than this share of the largest of all: an entry that
# is zero but for rounding has no relative error worth the name.
_FLOOR = 1e-4


@dataclass
class StepErrors:
    """The largest relative errors over all steps. `first` names the first thing that is further off than allowed.

    `reference` is of the reference's log-probs, `metrics` of rewards, margin, ratios and the like: neither is of sft.
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


def compare(found: Sequence[StepValues], expected: Sequence[StepValues], tolerance: float) -> StepErrors:
    errors = StepErrors()
    if len(found) != len(expected):
        errors.first = f"{len(found)} optimizer steps instead of {len(expected)}"
        errors.loss = math.inf
    for number, (ours, plain) in enumerate(zip(found, expected), start=1):
        _compare_step(errors, ours, plain, plain.where or f"batch {number}", tolerance)
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
    for name, error in tensor_errors(ours.weights, plain.weights).items():
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
        found = ours.get(name)
        if found is None or found.shape != expected.shape:
            errors[name] = math.inf
            continue
        size = max(float(expected.abs().max()), _FLOOR * largest, 1e-30)
        errors[name] = _finite(float(torch.sub(found, expected).abs().max()) / size)
    return errors


def _finite(error: float) -> float:
    return error if math.isfinite(error) else math.inf
