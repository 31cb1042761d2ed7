"""One model at its exam: the loss of the references, its own answers, and their scores.

One model is in memory at a time, and it is gone before answers are scored: encoders need the room.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.data.chat_template import Template, load_template
from lockstep.data.formats.conversation import Conversation
from lockstep.evaluation.answers import AnswerFile, answer_locally, answer_remotely
from lockstep.evaluation.candidates import EvalModel
from lockstep.evaluation.exam import EvalTask
from lockstep.evaluation.likelihood import EncodedRows, RowLoss, encode_rows, measure_losses
from lockstep.evaluation.metrics import METRICS, mean_scores, standard_errors
from lockstep.evaluation.pairs import PairLogprobs, pair_logprobs
from lockstep.inference.engine import LocalEngine
from lockstep.inference.openai.endpoint import EndpointEngine
from lockstep.model.load import load_causal_lm, load_for_inference, load_run_tokenizer
from lockstep.rundir import RunDir


@dataclass
class EvalResult:
    """What one model came to; a list has an entry per row, None where there is nothing."""

    metrics: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    losses: list[float | None] = field(default_factory=list)
    pairs: list[PairLogprobs | None] = field(default_factory=list)
    margins: list[float | None] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def examine(exam: EvalTask, candidate: EvalModel, endpoint: EndpointEngine | None, answers: AnswerFile) -> EvalResult:
    outcome, started = EvalResult(), time.monotonic()
    if candidate.is_endpoint:
        assert endpoint is not None
        questions, done = exam.questions, answers.of(candidate.name)
        found = answer_remotely(endpoint, questions, exam.options.params(), done)
        _keep(exam, candidate, answers, found)
    else:
        _examine_locally(exam, candidate, answers, outcome)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if exam.text_metrics:
        _score(exam, candidate, answers, outcome)
    outcome.facts["time_s"] = round(time.monotonic() - started, 3)
    return outcome


def _examine_locally(exam: EvalTask, candidate: EvalModel, answers: AnswerFile, outcome: EvalResult) -> None:
    has_all = len(answers.of(candidate.name)) == len(exam.questions)
    if not exam.wants_loss and (has_all or not exam.text_metrics):
        return  # every answer is there already
    model, tokenizer = load_candidate(candidate, exam.options.device)
    template = load_template(
        tokenizer, "none" if exam.options.raw else exam.data.chat_template, exam.data.template_options
    )
    if exam.wants_loss:
        _measure(exam, candidate, outcome, model, tokenizer, template)
    if exam.text_metrics and not has_all:
        engine = LocalEngine(model, tokenizer, batch_size=exam.options.batch_size)
        prompts = _encode_prompts(exam, engine, template)
        _refuse_long(exam, prompts, _num_positions(model), candidate)
        done = answers.of(candidate.name)
        _keep(exam, candidate, answers, answer_locally(engine, prompts, exam.options.params(), done))


def load_candidate(candidate: EvalModel, device: str) -> tuple[Any, Any]:
    if candidate.base_of is None:
        return load_for_inference(candidate.source, device=device)
    config = RunDir(candidate.base_of).config()
    place = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    model = load_causal_lm(config.model, torch.bfloat16 if place.type == "cuda" else torch.float32)
    return model.to(place).eval(), load_run_tokenizer(config)


def _measure(
    exam: EvalTask, candidate: EvalModel, outcome: EvalResult, model: Any, tokenizer: Any, template: Template | None
) -> None:
    """Loss and perplexity, per answer token as in training; rows that do not fit are counted."""
    max_length = longest_row(exam, model)
    rows, measured = measure_rows(exam, candidate, model, tokenizer, template, max_length)
    losses = [answers[0] for answers in measured if answers is not None]
    total, weight = math.fsum(row.total for row in losses), math.fsum(row.weight for row in losses)
    loss = total / weight
    if not math.isfinite(loss):
        raise ValueError(f"the loss of {candidate.name} is {loss}: its weights hold nan or inf, or overflow")
    outcome.metrics |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # beyond it JSON has no number
    outcome.facts |= {
        "rows_measured": len(losses),
        "supervised_tokens": sum(row.num_tokens for row in losses),
        "rows_cut": rows.prompts_cut + rows.answers_cut,
        "rows_dropped": rows.dropped,
    }
    outcome.losses = [None if answers is None else _mean(answers[0]) for answers in measured]
    if exam.has_pairs:
        outcome.pairs = [None if answers is None else pair_logprobs(answers) for answers in measured]
        note_scores(outcome, [{"pair_accuracy": float(p.chosen > p.rejected)} for p in outcome.pairs if p])
    for count, what in (
        (rows.answers_cut, "answers lost their end"),
        (rows.prompts_cut, "prompts were cut from the left"),
        (rows.dropped, "rows were left out of the loss"),
    ):
        if count:
            outcome.warnings.append(f"{candidate.name}: {count} {what} to fit {max_length} tokens: raise --max-length")


def measure_rows(
    exam: EvalTask, candidate: EvalModel, model: Any, tokenizer: Any, template: Template | None, max_length: int
) -> tuple[EncodedRows, list[tuple[RowLoss, ...] | None]]:
    """The loss of every answer of every row: of a pair the preferred one first. None where a row was dropped."""
    has_template = template is not None
    contents = exam.pairs(has_template) if exam.has_pairs else exam.contents(exam.data.train_on, has_template)
    rows = encode_rows(contents, tokenizer, template, exam.data, max_length)
    data = [datum for datum in rows.data if datum is not None]
    if not data:
        raise ValueError(f"no row fits into {max_length} tokens: raise --max-length")
    found = iter(list(exam.track(measure_losses(model, data), f"loss of {candidate.name}", len(data))))
    return rows, [None if datum is None else next(found) for datum in rows.data]


def note_scores(outcome: EvalResult, scores: Sequence[dict[str, float]]) -> None:
    outcome.metrics |= mean_scores(scores)
    outcome.errors |= standard_errors(scores)


def _mean(row: Any) -> float:
    return float(row.total / row.weight)


def longest_row(exam: EvalTask, model: Any) -> int:
    """In tokens."""
    return int(min(exam.options.max_length or exam.data.max_length, _num_positions(model) or math.inf))


def _num_positions(model: Any) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _encode_prompts(exam: EvalTask, engine: LocalEngine, template: Template | None) -> list[list[int]]:
    """As training writes what comes before an answer, with the start of an answer behind it."""
    prompts = []
    for content, question in zip(exam.contents("last", template is not None), exam.questions, strict=True):
        if isinstance(content, Conversation):
            assert template is not None
            text = template.write(content, content.messages[: content.learned[-1]], for_generation=True)
            prompts.append(list(engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]))
        else:
            prompts.append(engine.encode(content.prompt))
        if not prompts[-1]:
            raise ValueError(f"{question.origin}: the prompt has no tokens")
    return prompts


def _refuse_long(exam: EvalTask, prompts: Sequence[Sequence[int]], limit: int | None, candidate: EvalModel) -> None:
    """Before the first answer, not after a thousand of them."""
    for prompt, question in zip(prompts, exam.questions, strict=True):
        if limit is not None and len(prompt) >= limit:
            raise ValueError(
                f"{question.origin}: a prompt of {len(prompt)} tokens: {candidate.name} takes {limit} with the answer: "
                "shorten the row or leave it out"
            )


def _keep(exam: EvalTask, candidate: EvalModel, answers: AnswerFile, found: Any) -> None:
    num_left = len(exam.questions) - len(answers.of(candidate.name))
    for number, text, finish_reason in exam.track(found, f"answers of {candidate.name}", num_left):
        answers.add(candidate.name, number, exam.questions[number].origin, text, finish_reason)


def _score(exam: EvalTask, candidate: EvalModel, answers: AnswerFile, outcome: EvalResult) -> None:
    found = answers.of(candidate.name)
    rows = [dict(found[number]) for number in range(len(exam.questions))]
    texts, references = [row["text"] for row in rows], [q.reference or "" for q in exam.questions]
    scores: list[dict[str, float]] = [{} for _ in rows]
    for name in exam.text_metrics:
        settings = {"encoder": exam.options.encoder} if name == "bertscore" and exam.options.encoder else {}
        found_scores = METRICS[name](texts, references, **settings)
        outcome.metrics |= mean_scores(found_scores)
        outcome.errors |= standard_errors(found_scores)
        scores = [old | new for old, new in zip(scores, found_scores, strict=True)]
    cut = sum(row["finish_reason"] == "length" for row in rows)
    outcome.facts["answers_cut"] = cut
    if cut:
        limit = exam.options.max_tokens
        outcome.warnings.append(
            f"{candidate.name}: {cut} of {len(rows)} answers were cut at {limit} tokens: raise --max-tokens"
        )
    outcome.answers = [{**row, "scores": score} for row, score in zip(rows, scores, strict=True)]
