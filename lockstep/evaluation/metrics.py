"""Scores of answers against their references: exact match, numbers, ROUGE, BERTScore.

Pure functions on texts: two lists in, one dict of scores per row out, each score from 0 to 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

Scores = dict[str, float]
Metric = Callable[..., list[Scores]]

# 1,234.5  .5  3/4  1.5e3. A list like "1,2" is two numbers; the minus of "5-3" is no sign.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-\u2212])?(?:\s?[$€£¥](?P<inner>[-\u2212])?)?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?P<power>[eE][+-]?\d{1,3}(?!\d))?"
    r"(?:/(?P<below>\d+))?"
)
_DATE = re.compile(r"\d+(?:/\d+){2,}")
_FRACTION_COMMAND = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_LONGEST_NUMBER = 400  # characters; a model that repeats a digit for ever writes no number


def exact_match(answers: Sequence[str], references: Sequence[str]) -> list[Scores]:
    """1 where the texts are the same after runs of white space became one blank. Case counts."""
    return [
        {"exact_match": float(_collapse(answer) == _collapse(reference))}
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


def find_number(text: str) -> Fraction | None:
    r"""The number a text comes to: the first after the last "####", else the last in \boxed{}, else the last of all.

    Thousands commas, currency and percent signs do not count: "$1,800.0" is 1800 and "50%" is 50. "3/4" is a fraction.
    """
    marker = text.rfind("####")
    if marker >= 0 and (found := _numbers(text[marker + 4 :], first=True)) is not None:
        return found
    boxed = _last_boxed(text)
    if boxed is not None and (found := _numbers(boxed)) is not None:
        return found
    return _numbers(text)


def _numbers(text: str, *, first: bool = False) -> Fraction | None:
    """The first or the last number."""
    text = _FRACTION_COMMAND.sub(r"\1/\2", text).replace(r"\$", "$").replace("{,}", ",")
    text = _DATE.sub(lambda date: date[0].replace("/", " "), text)  # 1/2/2025 holds no fraction
    found = None
    for match in _NUMBER.finditer(text):
        found = _value(match)
        if first and found is not None:
            return found
    return found


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _LONGEST_NUMBER:
        return None
    value = Fraction(match["digits"].replace(",", "") + (match["power"] or ""))
    below = match["below"]
    if below is not None:
        if int(below) == 0:
            return None
        value /= int(below)
    return -value if match["sign"] or match["inner"] else value


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + 7 : end]
    return None


def rouge(answers: Sequence[str], references: Sequence[str]) -> list[Scores]:
    """F-measures of ROUGE-1, ROUGE-2 and ROUGE-L with Porter stemming, as the rouge-score package defines them."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise _missing_package("rouge", "rouge-score") from error
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    rows = []
    for answer, reference in _paired(answers, references):
        found = scorer.score(target=reference, prediction=answer)
        rows.append({name: float(found[name].fmeasure) for name in ("rouge1", "rouge2", "rougeL")})
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
    found = scorer.score([pairs[i][0] for i in written], [pairs[i][1] for i in written], batch_size=batch_size)
    for i, values in zip(written, zip(*(part.tolist() for part in found), strict=True), strict=True):
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
_PACKAGES = {"rouge": "rouge_score", "bertscore": "bert_score"}


def check_metrics(names: Iterable[str]) -> tuple[str, ...]:
    """The names, each once and in order; raises for one that is unknown or whose package is missing."""
    from importlib.util import find_spec

    chosen = tuple(dict.fromkeys(names))
    if not chosen:
        raise ValueError(f"no metric: choose from {', '.join([*LIKELIHOOD, *METRICS])}")
    for name in chosen:
        if name not in METRICS and name not in LIKELIHOOD:
            raise ValueError(f"unknown metric {name!r}: choose from {', '.join([*LIKELIHOOD, *METRICS])}")
        if name in _PACKAGES and find_spec(_PACKAGES[name]) is None:
            raise _missing_package(name, _PACKAGES[name].replace("_", "-"))
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


def _collapse(text: str) -> str:
    return " ".join(text.split())


def _shorten(text: str, length: int = 60) -> str:
    flat = _collapse(text)
    return flat if len(flat) <= length else flat[: length - 3] + "..."


def _missing_package(metric: str, package: str) -> ValueError:
    return ValueError(f"the metric {metric} needs {package}: pip install 'lockstep[eval]'")
