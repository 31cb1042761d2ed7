"""Several models at one exam, and what comes of it: results.json, answers.jsonl, report.html.

`evaluate` is what `lockstep eval` calls and what a program may call. Must not know terminals.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.evaluation.answers import AnswerFile
from lockstep.evaluation.candidates import EvalModel, distinguish, find_candidates
from lockstep.evaluation.exam import EvalTask, Options, Source, Track, prepare_exam
from lockstep.evaluation.metrics import check_metrics
from lockstep.evaluation.rewards import add_rewards
from lockstep.evaluation.trial import EvalResult, examine
from lockstep.inference.openai.endpoint import EndpointEngine
from lockstep.reports.evaluation import write_report
from lockstep.rundir import write_atomically


def _untracked(items: Iterable[Any], label: str, total: int) -> Iterable[Any]:
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
) -> dict[str, Any]:
    """Measure `metrics` of one or several models (runs, folders, Hub ids) on the rows of `data`, or of a run's `split`.

    `base` adds the model that the run started from, `endpoint` a served one. With `out`, the results, every answer
    and a page are kept there, and a second call goes on where the first was stopped. `options`: see Options.
    """
    settings, names = Options(**options), check_metrics(metrics)
    candidates = find_candidates([models] if isinstance(models, (str, Path)) else models, with_base=base)
    engine = None
    if endpoint is not None:
        engine = EndpointEngine(
            endpoint,
            endpoint_model,
            api_key=api_key,
            batch_size=settings.batch_size,
            timeout_s=settings.endpoint_timeout_s,
        )
        candidates = distinguish([*candidates, EvalModel(engine.model, engine.url, is_endpoint=True)])
    exam = prepare_exam(candidates, data, split, names, settings, track)
    folder = Path(out) if out is not None else None
    answers = AnswerFile(folder, exam.identity(candidates))
    try:
        outcomes = [examine(exam, candidate, engine, answers) for candidate in candidates]
        add_rewards(exam, candidates, outcomes)
    finally:
        answers.close()
    results = _results(exam, candidates, outcomes)
    if folder is not None:
        write_atomically(folder / "results.json", json.dumps(results, ensure_ascii=False, indent=1))
        write_report(results, folder / "report.html")
    return results


def _results(exam: EvalTask, candidates: Sequence[EvalModel], outcomes: Sequence[EvalResult]) -> dict[str, Any]:
    rows = []
    for number, question in enumerate(exam.questions):
        found = {}
        for candidate, outcome in zip(candidates, outcomes, strict=True):
            answer: dict[str, Any] = dict(outcome.answers[number]) if outcome.answers else {}
            if outcome.losses:
                answer["loss"] = outcome.losses[number]
            if outcome.margins and outcome.margins[number] is not None:
                answer["scores"] = {**answer.get("scores", {}), "reward_margin": outcome.margins[number]}
            found[candidate.name] = answer
        rows.append(
            {"origin": question.origin, "question": question.content, "reference": question.reference, "models": found}
        )
    options = {key: value for key, value in asdict(exam.options).items() if value is not None}
    return {
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "data": exam.source,
        "num_rows": len(rows),
        "metrics": list(exam.metrics),
        "options": options,
        "models": [
            {**c.facts(), "metrics": o.metrics, "standard_errors": o.errors, **o.facts}
            for c, o in zip(candidates, outcomes, strict=True)
        ],
        "warnings": [*exam.warnings, *_token_warning(outcomes), *(w for o in outcomes for w in o.warnings)],
        "rows": rows,
    }


def _token_warning(outcomes: Sequence[EvalResult]) -> list[str]:
    counts = {o.facts["supervised_tokens"] for o in outcomes if "supervised_tokens" in o.facts}
    if len(counts) < 2:
        return []
    return ["the models split the answers into different tokens: their losses per token cannot be compared"]
