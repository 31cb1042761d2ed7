"""One model on one task: the loss of the references, its own answers, and their scores.

One model is in memory at a time, and it is freed before answers are scored: encoders need the memory.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch

from lockstep.data.chat_template import Template, load_template
from lockstep.data.formats.conversation import Conversation
from lockstep.evaluation.likelihood import (
    EncodedRows,
    PairLogprobs,
    RowLoss,
    encode_rows,
    measure_losses,
    pair_logprobs,
)
from lockstep.evaluation.metrics import METRICS, mean_scores, standard_errors
from lockstep.evaluation.models import EvalModel
from lockstep.evaluation.questions import Question
from lockstep.evaluation.task import EvalTask
from lockstep.inference.chat import TextPrompt
from lockstep.inference.engine import LocalEngine
from lockstep.inference.openai.endpoint import EndpointEngine
from lockstep.model.load import load_causal_lm, load_for_inference, load_run_tokenizer
from lockstep.model.policy import CausalLM
from lockstep.rundir import RunDir, read_json_object, read_jsonl, write_atomically
from lockstep.types import SamplingParams, Tokenizer

SETTINGS, ANSWERS = "settings.json", "answers.jsonl"
_RECORD_KEYS = {"model", "row", "answer", "finish_reason"}
Answers = dict[int, dict[str, str]]  # question number: {"text", "finish_reason"}


class AnswerFile:
    """answers.jsonl of one evaluation, and its settings beside it: a second call generates only what is missing.

    Without a folder: memory only.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, object]) -> None:
        self._records: dict[str, Answers] = {}
        self._file: IO[str] | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        _check_settings(folder, settings)
        path = folder / ANSWERS
        records = [record for record in read_jsonl(path) if record.keys() >= _RECORD_KEYS]
        for record in records:
            self._keep(record)
        # Drops the partial last line of a killed writer. Settings first: answers without them cannot be matched.
        write_atomically(folder / SETTINGS, json.dumps(settings, indent=1))
        write_atomically(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        self._file = path.open("a", encoding="utf-8", errors="replace")

    def of(self, model: str) -> Answers:
        return self._records.setdefault(model, {})

    def add(self, model: str, number: int, origin: str, text: str, finish_reason: str) -> None:
        record = {"model": model, "row": number, "origin": origin, "answer": text, "finish_reason": finish_reason}
        self._keep(record)
        if self._file is not None:
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _keep(self, record: Mapping[str, Any]) -> None:
        answer = {"text": record["answer"], "finish_reason": record["finish_reason"]}
        self.of(record["model"])[int(record["row"])] = answer


def _check_settings(folder: Path, settings: Mapping[str, object]) -> None:
    """Refuse answers to other questions or of other models."""
    path = folder / SETTINGS
    if not path.exists():
        if (folder / ANSWERS).exists():
            raise ValueError(f"{folder} has {ANSWERS} and no {SETTINGS}: name another --out")
        return
    old = read_json_object(path)
    changed = sorted(key for key in {*old, *settings} if old.get(key) != settings.get(key))
    if changed:
        raise ValueError(
            f"{folder} holds an evaluation with other settings ({', '.join(changed)}): name another --out, "
            "or delete the folder to start over"
        )


def generate_answers(
    engine: LocalEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, done: Answers
) -> Iterator[tuple[int, str, str]]:
    """(question number, text, finish reason). Sorted by length, the longest first, to fail early.

    Batches are a pure function of the prompts, so a continued evaluation computes the same.
    """
    order = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number]), number))
    for start in range(0, len(order), engine.batch_size):
        batch = order[start : start + engine.batch_size]
        if all(number in done for number in batch):
            continue
        # Each batch has its own seed, so that equal prompts in two batches are sampled independently.
        seeded = params if params.seed is None else replace(params, seed=params.seed + start)
        for number, (answer,) in zip(batch, engine.sample([prompts[n] for n in batch], seeded), strict=True):
            if number not in done:
                yield number, answer.text, answer.finish_reason


def request_answers(
    engine: EndpointEngine, questions: Sequence[Question], params: SamplingParams, done: Answers
) -> Iterator[tuple[int, str, str]]:
    numbers = [number for number in range(len(questions)) if number not in done]
    rows = [TextPrompt(q.origin, q.content, q.tools) for q in (questions[number] for number in numbers)]
    for place, answer in engine.complete_all(rows, params):
        yield numbers[place], answer.text, answer.finish_reason


@dataclass
class EvalResult:
    """Of one model. Lists have an entry per row, None where a row was not measured."""

    metrics: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)
    losses: list[float | None] = field(default_factory=list)
    pairs: list[PairLogprobs | None] = field(default_factory=list)
    margins: list[float | None] = field(default_factory=list)
    answers: list[dict[str, object]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LoadedModel:
    """`template` is None where prompts are plain text."""

    name: str
    model: CausalLM
    tokenizer: Tokenizer
    template: Template | None

    @property
    def num_positions(self) -> int | None:
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)


def evaluate_model(
    task: EvalTask, eval_model: EvalModel, endpoint: EndpointEngine | None, answers: AnswerFile
) -> EvalResult:
    result, started = EvalResult(), time.monotonic()
    if eval_model.is_endpoint:
        assert endpoint is not None
        done = answers.of(eval_model.name)
        texts = request_answers(endpoint, task.questions, task.options.params(), done)
        _record_answers(task, eval_model.name, answers, texts)
    else:
        _evaluate_locally(task, eval_model, answers, result)
        free_memory()
    if task.text_metrics:
        _score_answers(task, eval_model.name, answers, result)
    result.facts["time_s"] = round(time.monotonic() - started, 3)
    return result


def _evaluate_locally(task: EvalTask, eval_model: EvalModel, answers: AnswerFile, result: EvalResult) -> None:
    done = answers.of(eval_model.name)
    has_all = len(done) == len(task.questions)
    if not task.wants_loss and (has_all or not task.text_metrics):
        return
    loaded = load_model(task, eval_model)
    if task.wants_loss:
        _measure_loss(task, loaded, result)
    if task.text_metrics and not has_all:
        engine = LocalEngine(loaded.model, loaded.tokenizer, batch_size=task.options.batch_size)
        prompts = _encode_prompts(task, engine, loaded.template)
        _check_prompt_lengths(task, prompts, loaded)
        _record_answers(task, loaded.name, answers, generate_answers(engine, prompts, task.options.params(), done))


def load_model(task: EvalTask, eval_model: EvalModel) -> LoadedModel:
    device = task.options.device
    if eval_model.base_of is None:
        model, tokenizer = load_for_inference(eval_model.source, device=device)
    else:
        config = RunDir(eval_model.base_of).config()
        place = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        base: Any = load_causal_lm(config.model, torch.bfloat16 if place.type == "cuda" else torch.float32)
        model, tokenizer = base.to(place).eval(), load_run_tokenizer(config)
    chat_template = "none" if task.options.raw else task.data.chat_template
    template = load_template(tokenizer, chat_template, task.data.template_options)
    return LoadedModel(eval_model.name, model, tokenizer, template)


def free_memory() -> None:
    """Call it after the last reference to a model is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _measure_loss(task: EvalTask, loaded: LoadedModel, result: EvalResult) -> None:
    """Loss and perplexity, per answer token as in training; rows that do not fit are counted."""
    rows, measured = measure_rows(task, loaded)
    losses = [answers[0] for answers in measured if answers is not None]
    total, weight = math.fsum(row.total for row in losses), math.fsum(row.weight for row in losses)
    loss = total / weight
    if not math.isfinite(loss):
        raise ValueError(f"the loss of {loaded.name} is {loss}: its weights hold nan or inf, or overflow")
    result.metrics |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # JSON has no larger number
    result.facts |= {
        "rows_measured": len(losses),
        "supervised_tokens": sum(row.num_tokens for row in losses),
        "rows_cut": rows.prompts_cut + rows.answers_cut,
        "rows_dropped": rows.dropped,
    }
    result.losses = [None if answers is None else answers[0].total / answers[0].weight for answers in measured]
    if task.has_pairs:
        result.pairs = [None if answers is None else pair_logprobs(answers) for answers in measured]
        add_scores(result, [{"pair_accuracy": float(p.chosen > p.rejected)} for p in result.pairs if p])
    for count, what in (
        (rows.answers_cut, "answers lost their end"),
        (rows.prompts_cut, "prompts were cut from the left"),
        (rows.dropped, "rows were left out of the loss"),
    ):
        if count:
            limit = _max_row_tokens(task, loaded)
            result.warnings.append(f"{loaded.name}: {count} {what} to fit {limit} tokens: raise --max-length")


def measure_rows(task: EvalTask, loaded: LoadedModel) -> tuple[EncodedRows, list[tuple[RowLoss, ...] | None]]:
    """The loss of every answer of every row: of a pair the preferred one first. None where a row was dropped."""
    has_template, max_length = loaded.template is not None, _max_row_tokens(task, loaded)
    contents = task.pairs(has_template) if task.has_pairs else task.contents(task.data.train_on, has_template)
    rows = encode_rows(contents, loaded.tokenizer, loaded.template, task.data, max_length)
    data = [datum for datum in rows.data if datum is not None]
    if not data:
        raise ValueError(f"no row fits into {max_length} tokens: raise --max-length")
    losses = iter(list(task.track(measure_losses(loaded.model, data), f"loss of {loaded.name}", len(data))))
    return rows, [None if datum is None else next(losses) for datum in rows.data]


def add_scores(result: EvalResult, scores: Sequence[dict[str, float]]) -> None:
    result.metrics |= mean_scores(scores)
    result.errors |= standard_errors(scores)


def _max_row_tokens(task: EvalTask, loaded: LoadedModel) -> int:
    return int(min(task.options.max_length or task.data.max_length, loaded.num_positions or math.inf))


def _encode_prompts(task: EvalTask, engine: LocalEngine, template: Template | None) -> list[list[int]]:
    """Rendered as in training up to the answer, with the template's generation prompt at the end."""
    prompts = []
    for content, question in zip(task.contents("last", template is not None), task.questions, strict=True):
        if isinstance(content, Conversation):
            assert template is not None
            text = template.write(content, content.messages[: content.learned[-1]], for_generation=True)
            prompts.append(list(engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]))
        else:
            prompts.append(engine.encode(content.prompt))
        if not prompts[-1]:
            raise ValueError(f"{question.origin}: the prompt has no tokens")
    return prompts


def _check_prompt_lengths(task: EvalTask, prompts: Sequence[Sequence[int]], loaded: LoadedModel) -> None:
    """Before the first answer is generated."""
    limit = loaded.num_positions
    for prompt, question in zip(prompts, task.questions, strict=True):
        if limit is not None and len(prompt) >= limit:
            raise ValueError(
                f"{question.origin}: a prompt of {len(prompt)} tokens: {loaded.name} takes {limit} with the answer: "
                "shorten the row or leave it out"
            )


def _record_answers(task: EvalTask, name: str, answers: AnswerFile, texts: Iterator[tuple[int, str, str]]) -> None:
    num_left = len(task.questions) - len(answers.of(name))
    for number, text, finish_reason in task.track(texts, f"answers of {name}", num_left):
        answers.add(name, number, task.questions[number].origin, text, finish_reason)


def _score_answers(task: EvalTask, name: str, answers: AnswerFile, result: EvalResult) -> None:
    by_number = answers.of(name)
    rows = [dict(by_number[number]) for number in range(len(task.questions))]
    texts, references = [row["text"] for row in rows], [q.reference or "" for q in task.questions]
    scores: list[dict[str, float]] = [{} for _ in rows]
    for metric in task.text_metrics:
        settings = {"encoder": task.options.encoder} if metric == "bertscore" and task.options.encoder else {}
        metric_scores = METRICS[metric](texts, references, **settings)
        add_scores(result, metric_scores)
        scores = [old | new for old, new in zip(scores, metric_scores, strict=True)]
    num_truncated = sum(row["finish_reason"] == "length" for row in rows)
    result.facts["answers_cut"] = num_truncated
    if num_truncated:
        limit = task.options.max_tokens
        result.warnings.append(
            f"{name}: {num_truncated} of {len(rows)} answers were cut at {limit} tokens: raise --max-tokens"
        )
    result.answers = [{**row, "scores": score} for row, score in zip(rows, scores, strict=True)]
