"""Scores of answers against their references: exact match, numbers, ROUGE, BERTScore.

Pure functions on texts: two lists in, one dict of scores per row out, each score from 0 to 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lockstep.data.answer_match import collapse_whitespace, find_number

Scores = dict[str, float]
Metric = Callable[..., list[Scores]]


def exact_match(answers: Sequence[str], references: Sequence[str]) -> list[Scores]:
    """1 where the texts are the same after runs of white space became one blank. Case counts."""
    return [
        {"exact_match": float(collapse_whitespace(answer) == collapse_whitespace(reference))}
        for answer, reference in _paired(answers, references)
    ]


def numeric(answers: Sequence[str], references: Sequence[str]) -> list[Scores]:
    """1 where answer and reference come to the same number (see `find_number`). An answer without one scores 0."""
    rows = []
    for position, (answer, reference) in enumerate(_paired(answers, references), start=1):
        wanted = find_number(reference)
        if wanted is None:
            raise ValueError(f"reference {position} has no number: {_shorten(reference)!r}")
        rows.append({"numeric": float(find_number(answer) == wanted)})
    return rows


def rouge(answers: Sequence[str], references: Sequence[str]) -> list[Scores]:
    """F-measures of ROUGE-1, ROUGE-2 and ROUGE-L with Porter stemming, as the rouge-score package defines them."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise _missing_package("rouge", "rouge-score") from error
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    rows = []
    for answer, reference in _paired(answers, references):
        scores = scorer.score(target=reference, prediction=answer)
        rows.append({name: float(scores[name].fmeasure) for name in ("rouge1", "rouge2", "rougeL")})
    return rows


def bertscore(
    answers: Sequence[str],
    references: Sequence[str],
    *,
    encoder: str = "roberta-large",
    batch_size: int = 64,
    device: str | None = None,
) -> list[Scores]:
    """Precision, recall and F1 of BERTScore, not rescaled. `encoder` is a model folder or a Hub id.

    Layers: those the bert-score package recommends where it knows the encoder, otherwise all. An empty answer scores 0.
    """
    pairs = _paired(answers, references)
    rows = [{"bertscore_precision": 0.0, "bertscore_recall": 0.0, "bertscore_f1": 0.0} for _ in pairs]
    written = [i for i, (answer, reference) in enumerate(pairs) if answer.strip() and reference.strip()]
    if not written:
        return rows
    scorer = _bert_scorer(encoder, device)
    scores = scorer.score([pairs[i][0] for i in written], [pairs[i][1] for i in written], batch_size=batch_size)
    for i, values in zip(written, zip(*(part.tolist() for part in scores), strict=True), strict=True):
        rows[i] = dict(zip(rows[i], values, strict=True))
    return rows


def _bert_scorer(encoder: str, device: str | None) -> Any:
    try:
        from bert_score import BERTScorer
        from bert_score.utils import model2layers
    except ImportError as error:
        raise _missing_package("bertscore", "bert-score") from error
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(encoder)
        num_layers = model2layers.get(encoder) or config.num_hidden_layers
        scorer = BERTScorer(model_type=encoder, num_layers=num_layers, device=device)
    except (OSError, ValueError, AttributeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"the encoder {encoder} of bertscore cannot be loaded: {reason}") from error
    # A tokenizer that states no limit would let a long answer run past the places its encoder knows.
    # Two places less: RoBERTa begins to count after its padding token.
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and scorer._tokenizer.model_max_length > positions:
        scorer._tokenizer.model_max_length = positions - 2
    return scorer


METRICS: dict[str, Metric] = {
    "exact_match": exact_match,
    "numeric": numeric,
    "rouge": rouge,
    "bertscore": bertscore,
}
LIKELIHOOD = ("loss", "perplexity")  # named beside the metrics, measured by a model
METRIC_PACKAGES = {"rouge": "rouge_score", "bertscore": "bert_score"}


def check_metrics(names: Iterable[str]) -> tuple[str, ...]:
    """The names, each once and in order; raises for one that is unknown or whose package is missing."""
    from importlib.util import find_spec

    chosen = tuple(dict.fromkeys(names))
    if not chosen:
        raise ValueError(f"no metric: choose from {', '.join([*LIKELIHOOD, *METRICS])}")
    for name in chosen:
        if name not in METRICS and name not in LIKELIHOOD:
            raise ValueError(f"unknown metric {name!r}: choose from {', '.join([*LIKELIHOOD, *METRICS])}")
        if name in METRIC_PACKAGES and find_spec(METRIC_PACKAGES[name]) is None:
            raise _missing_package(name, METRIC_PACKAGES[name].replace("_", "-"))
    return chosen


def check_references(names: Sequence[str], references: Sequence[str], origins: Sequence[str]) -> list[str]:
    """Raise for a reference that a metric cannot use, before anything is generated; returns warnings."""
    if "numeric" in names:
        for reference, origin in zip(references, origins, strict=True):
            if find_number(reference) is None:
                raise ValueError(
                    f"{origin}: the reference has no number for the metric numeric ({_shorten(reference)!r}): "
                    "leave the row or the metric out"
                )
    if "rouge" in names:
        blind = sum(not re.search(r"[A-Za-z0-9]", reference) for reference in references)
        if blind:
            return [f"rouge reads only words of a-z and 0-9: {blind} references have none, and score 0"]
    return []


def mean_scores(rows: Sequence[Scores]) -> Scores:
    """The mean of each score."""
    assert rows, "no rows to average"
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}


def standard_errors(rows: Sequence[Scores]) -> Scores:
    """How far each mean may lie from that of many more rows like these; nothing is known from a single row."""
    if len(rows) < 2:
        return {}
    errors = {}
    for name, mean in mean_scores(rows).items():
        variance = math.fsum((row[name] - mean) ** 2 for row in rows) / (len(rows) - 1)
        errors[name] = math.sqrt(variance / len(rows))
    return errors


def _paired(answers: Sequence[str], references: Sequence[str]) -> list[tuple[str, str]]:
    if len(answers) != len(references):
        raise ValueError(f"{len(answers)} answers cannot be scored against {len(references)} references")
    return list(zip(answers, references))


def _shorten(text: str, length: int = 60) -> str:
    flat = collapse_whitespace(text)
    return flat if len(flat) <= length else flat[: length - 3] + "..."


def _missing_package(metric: str, package: str) -> ValueError:
    return ValueError(f"the metric {metric} needs {package}: pip install 'lockstep[eval]'")
