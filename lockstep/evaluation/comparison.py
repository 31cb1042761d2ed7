"""Several models on one task: results.json, answers.jsonl, report.html.

`evaluate` is what `lockstep eval` calls and what a program may call.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.config import DpoConfig, KtoConfig
from lockstep.evaluation.likelihood import PairLogprobs, pair_logprobs, reward_margins
from lockstep.evaluation.measurement import (
    AnswerFile,
    EvalResult,
    add_scores,
    evaluate_model,
    free_memory,
    load_model,
    measure_rows,
)
from lockstep.evaluation.metrics import check_metrics
from lockstep.evaluation.models import EvalModel, base_of, find_models, unique_names
from lockstep.evaluation.task import EvalOptions, EvalTask, Source, Track, prepare_task
from lockstep.inference.openai.endpoint import EndpointEngine
from lockstep.reports.evaluation import write_report
from lockstep.rundir import write_atomically


def _untracked(items: Iterable[object], label: str, total: int) -> Iterable[object]:
    return items


def evaluate(
    models: str | Path | Sequence[str | Path] = (),
    data: Source | None = None,
    metrics: Sequence[str] = ("loss",),
    *,
    base: bool = False,
    split: str | None = None,
    endpoint: str | None = None,
    endpoint_model: str | None = None,
    api_key: str | None = None,
    out: str | Path | None = None,
    track: Track = _untracked,
    **options: Any,
) -> dict[str, object]:
    """Measure `metrics` of one or several models (runs, folders, Hub ids) on the rows of `data`, or of a run's `split`.

    `base` adds the model that the run started from, `endpoint` a served one. With `out`, the results, every answer
    and a page are kept there, and a second call goes on where the first was stopped. `options`: see EvalOptions.
    """
    settings, names = EvalOptions(**options), check_metrics(metrics)
    eval_models = find_models([models] if isinstance(models, (str, Path)) else models, with_base=base)
    engine = None
    if endpoint is not None:
        engine = EndpointEngine(
            endpoint,
            endpoint_model,
            api_key=api_key,
            batch_size=settings.batch_size,
            timeout_s=settings.endpoint_timeout_s,
        )
        eval_models = unique_names([*eval_models, EvalModel(engine.model, engine.url, is_endpoint=True)])
    task = prepare_task(eval_models, data, split, names, settings, track)
    folder = Path(out) if out is not None else None
    answers = AnswerFile(folder, task.identity(eval_models))
    try:
        model_results = [evaluate_model(task, eval_model, engine, answers) for eval_model in eval_models]
        _add_rewards(task, eval_models, model_results)
    finally:
        answers.close()
    results = _results(task, eval_models, model_results)
    if folder is not None:
        write_atomically(folder / "results.json", json.dumps(results, ensure_ascii=False, indent=1))
        write_report(results, folder / "report.html")
    return results


def _results(
    task: EvalTask, eval_models: Sequence[EvalModel], model_results: Sequence[EvalResult]
) -> dict[str, object]:
    rows = []
    for number, question in enumerate(task.questions):
        entries = {}
        for eval_model, result in zip(eval_models, model_results, strict=True):
            answer: dict[str, Any] = dict(result.answers[number]) if result.answers else {}
            if result.losses:
                answer["loss"] = result.losses[number]
            if result.margins and result.margins[number] is not None:
                answer["scores"] = {**answer.get("scores", {}), "reward_margin": result.margins[number]}
            entries[eval_model.name] = answer
        row = {"origin": question.origin, "question": question.content, "reference": question.reference}
        rows.append({**row, "models": entries})
    options = {key: value for key, value in asdict(task.options).items() if value is not None}
    return {
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "data": task.source,
        "num_rows": len(rows),
        "metrics": list(task.metrics),
        "options": options,
        "models": [
            {**model.facts(), "metrics": result.metrics, "standard_errors": result.errors, **result.facts}
            for model, result in zip(eval_models, model_results, strict=True)
        ],
        "warnings": [*task.warnings, *_token_warning(model_results), *(w for r in model_results for w in r.warnings)],
        "rows": rows,
    }


def _token_warning(model_results: Sequence[EvalResult]) -> list[str]:
    counts = {r.facts["supervised_tokens"] for r in model_results if "supervised_tokens" in r.facts}
    if len(counts) < 2:
        return []
    return ["the models split the answers into different tokens: their losses per token cannot be compared"]


def _add_rewards(task: EvalTask, eval_models: Sequence[EvalModel], model_results: Sequence[EvalResult]) -> None:
    """reward_margin and reward_accuracy of every run by dpo or kto; its reference, if it is there, has margin 0."""
    measured: dict[str, list[PairLogprobs | None]] = {}
    for eval_model, result in zip(eval_models, model_results, strict=True):
        if result.pairs and not eval_model.is_run:
            measured.setdefault(eval_model.source, result.pairs)
    for eval_model, result in zip(eval_models, model_results, strict=True):
        reference = _reference_of(eval_model)
        if reference is None or not result.pairs:
            continue
        if reference.source not in measured:
            measured[reference.source] = _measure_reference(task, reference)
        config = eval_model.run_config()
        assert config is not None
        algorithm = config.algorithm
        assert isinstance(algorithm, (DpoConfig, KtoConfig))
        result.margins = reward_margins(result.pairs, measured[reference.source], algorithm.beta)
        known = [margin for margin in result.margins if margin is not None]
        add_scores(result, [{"reward_accuracy": float(m > 0), "reward_margin": m} for m in known])
        result.facts |= {"reference": reference.source, "beta": algorithm.beta}
    references = {result.facts.get("reference") for result in model_results}
    for eval_model, result in zip(eval_models, model_results, strict=True):
        if eval_model.source in references and not eval_model.is_run:
            result.metrics["reward_margin"] = 0.0  # by definition


def _reference_of(eval_model: EvalModel) -> EvalModel | None:
    config = eval_model.run_config()
    if config is None or not isinstance(config.algorithm, (DpoConfig, KtoConfig)):
        return None
    other = config.algorithm.reference_model
    return base_of(eval_model, config) if other is None else EvalModel(other, other)


def _measure_reference(task: EvalTask, reference: EvalModel) -> list[PairLogprobs | None]:
    _, measured = measure_rows(task, load_model(task, reference))
    free_memory()
    return [None if answers is None else pair_logprobs(answers) for answers in measured]
