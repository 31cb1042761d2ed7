"""Answers of a model to questions, kept as they come: who is stopped and started again asks only for the rest.

Must not know metrics. Batches are a pure function of the questions, so a continued evaluation computes the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from lockstep.evaluation.questions import Question
from lockstep.inference.openai.endpoint import EndpointEngine
from lockstep.inference.prompts import PromptRow
from lockstep.rundir import read_jsonl, write_atomically
from lockstep.types import SamplingParams

SETTINGS, ANSWERS = "settings.json", "answers.jsonl"
Answered = dict[int, dict[str, str]]  # question number: {"text", "finish_reason"}


class AnswerFile:
    """answers.jsonl of one evaluation, and what was asked in settings.json beside it. Without a folder: memory only."""

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self._records: dict[str, Answered] = {}
        self._file: IO[str] | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        _check_same(folder, settings)
        path = folder / ANSWERS
        records = list(read_jsonl(path))
        for record in records:
            self._keep(record)
        # What a killed writer left of its last line goes; settings come first: answers without them belong to nobody.
        write_atomically(folder / SETTINGS, json.dumps(settings, indent=1))
        write_atomically(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        self._file = path.open("a", encoding="utf-8", errors="replace")

    def of(self, model: str) -> Answered:
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


def _check_same(folder: Path, settings: Mapping[str, Any]) -> None:
    """Answers to other questions, or of other models, must not be taken for these."""
    path = folder / SETTINGS
    if not path.exists():
        if (folder / ANSWERS).exists():
            raise ValueError(f"{folder} has {ANSWERS} and no {SETTINGS}: name another --out")
        return
    old = json.loads(path.read_text(encoding="utf-8"))
    changed = sorted(key for key in {*old, *settings} if old.get(key) != settings.get(key))
    if changed:
        raise ValueError(
            f"{folder} holds an evaluation with other settings ({', '.join(changed)}): name another --out, "
            "or delete the folder to start over"
        )


def answer_locally(
    engine: Any, prompts: Sequence[Sequence[int]], params: SamplingParams, done: Answered
) -> Iterator[tuple[int, str, str]]:
    """(question number, text, finish reason). Prompts of one length go together; the longest first, to fail early."""
    order = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number]), number))
    for start in range(0, len(order), engine.batch_size):
        batch = order[start : start + engine.batch_size]
        if all(number in done for number in batch):
            continue
        # A seed of its own for each batch: equal prompts in two batches are two draws.
        seeded = params if params.seed is None else replace(params, seed=params.seed + start)
        for number, (answer,) in zip(batch, engine.sample([prompts[n] for n in batch], seeded), strict=True):
            if number not in done:
                yield number, answer.text, answer.finish_reason


def answer_remotely(
    engine: EndpointEngine, questions: Sequence[Question], params: SamplingParams, done: Answered
) -> Iterator[tuple[int, str, str]]:
    numbers = [number for number in range(len(questions)) if number not in done]
    rows = [PromptRow(q.origin, q.content, q.tools) for q in (questions[number] for number in numbers)]
    for place, answer in engine.answer(rows, params):
        yield numbers[place], answer.text, answer.finish_reason
