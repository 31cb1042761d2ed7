"""What an evaluation asks, the same for every model: rows, questions with references, metrics, options.

Everything that can be wrong about rows and settings is found here, before a model is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config import DataConfig, RunConfig
from lockstep.data.formats.conversation import Conversation, Pair, Passage
from lockstep.evaluation.metrics import LIKELIHOOD, METRICS, check_references
from lockstep.evaluation.models import EvalModel
from lockstep.evaluation.questions import (
    ChosenRow,
    Question,
    RowChoice,
    check_answerable,
    choose_rows,
    make_question,
    read_contents,
    read_pairs,
)
from lockstep.types import SamplingParams

Track = Callable[[Iterable[Any], str, int], Iterable[Any]]
Source = str | Path | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """How answers are made and rows are read; the same for every model of one evaluation."""

    limit: int | None = None
    """Only the first rows: how many."""
    sample: int | None = None
    """This many rows, drawn at random with `seed`."""
    seed: int = 0
    max_tokens: int = 256
    temperature: float = 0.0
    batch_size: int = 8
    """Answers generated at a time; for an endpoint, concurrent requests."""
    max_length: int | None = None
    """Tokens of a row whose loss is measured. Default: as the run has it, otherwise 2048."""
    system: str | None = None
    """A system message for every row."""
    raw: bool = False
    """Prompts as plain text, without a chat template."""
    encoder: str | None = None
    """The encoder of bertscore: a model folder or a Hub id."""
    device: str = "auto"
    endpoint_timeout_s: float = 120.0

    def params(self) -> SamplingParams:
        seed = self.seed if self.temperature > 0 else None
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=seed)


@dataclass
class EvalTask:
    """What is asked, the same for every model: a question for each of the chosen rows."""

    data: DataConfig
    source: str
    chosen: list[ChosenRow]
    questions: list[Question]
    metrics: tuple[str, ...]
    options: EvalOptions
    track: Track
    warnings: list[str] = field(default_factory=list)

    @property
    def text_metrics(self) -> tuple[str, ...]:
        return tuple(name for name in self.metrics if name in METRICS)

    @property
    def wants_loss(self) -> bool:
        return any(name in LIKELIHOOD for name in self.metrics)

    @property
    def has_pairs(self) -> bool:
        """Whether every row is a preference pair: then the likelier answer of each pair is measured, too."""
        return all(row.format == "preference" for row in self.chosen)

    def pairs(self, has_template: bool) -> list[Pair]:
        return read_pairs(self.chosen, has_template=has_template, system=self.options.system)

    def contents(self, train_on: str, has_template: bool) -> list[Conversation | Passage]:
        contents = read_contents(self.chosen, train_on=train_on, has_template=has_template, system=self.options.system)
        return [content for content in contents.contents if content is not None]

    def identity(self, eval_models: Sequence[EvalModel]) -> dict[str, object]:
        """Everything that answers depend on: kept answers are used again only if this is equal."""
        digest = hashlib.sha256(json.dumps([asdict(q) for q in self.questions], default=str).encode()).hexdigest()
        options = {key: getattr(self.options, key) for key in ("max_tokens", "temperature", "seed", "system", "raw")}
        models = {model.name: model.fingerprint() for model in eval_models}
        return {
            "data": self.source,
            "questions": digest,
            **options,
            "batch_size": self.options.batch_size,
            "models": models,
        }


def prepare_task(
    eval_models: Sequence[EvalModel],
    data: Source | None,
    split: str | None,
    metrics: tuple[str, ...],
    options: EvalOptions,
    track: Track,
) -> EvalTask:
    if not eval_models:
        raise ValueError("nothing to evaluate: name a run, a model or an endpoint")
    if all(model.is_endpoint for model in eval_models) and not set(metrics) & METRICS.keys():
        raise ValueError(f"an endpoint gives answers and no loss: choose metrics from {', '.join(METRICS)}")
    config, sources, origins, name = _find_data(eval_models, data, split)
    chosen = choose_rows(sources, RowChoice(options.limit, options.sample, options.seed, origins))
    contents = read_contents(chosen, train_on="last", has_template=not options.raw, system=options.system)
    kept = [row for row, content in zip(chosen, contents.contents) if content is not None]
    if not kept:
        raise ValueError(f"{name}: no row is left to evaluate")
    questions = [make_question(content) for content in contents.contents if content is not None]
    task = EvalTask(config, name, kept, questions, metrics, options, track)
    if contents.num_disliked:
        task.warnings.append(f"{contents.num_disliked} rows hold answers that people disliked: they are left out")
    if task.text_metrics:
        check_answerable(questions, task.text_metrics)
        references = [question.reference or "" for question in questions]
        task.warnings += check_references(task.text_metrics, references, [question.origin for question in questions])
    return task


def _find_data(
    eval_models: Sequence[EvalModel], data: Source | None, split: str | None
) -> tuple[DataConfig, Sequence[Any], set[str] | None, str]:
    """(how rows are read, where they are, which of them, what to call them)."""
    run = next((model for model in eval_models if model.is_run), None)
    run_config = run.run_config() if run is not None else None
    if (data is None) == (split is None):
        raise ValueError("name the rows to evaluate: either a data file, or a split of a run")
    if split is not None:
        if run_config is None:
            raise ValueError(f"the split {split} is of a run's own data: name a run, or a data file")
        origins, part = _rows_of_split(run_config, split)
        return run_config.data, run_config.data.sources(part), origins, f"{split} rows of {run.name if run else ''}"
    source = data if isinstance(data, Mapping) else {"path": str(data)}
    shared = {"validation", "test", "validation_fraction", "test_fraction", "format", "train"}
    # Columns, roles, templates and the like are as in training; the format of another file is its own.
    settings = run_config.data.model_dump(exclude=shared) if run_config is not None else {}
    config = DataConfig.model_validate({**settings, "train": [source]})
    return config, config.sources("train"), None, str(source["path"])


def _rows_of_split(config: RunConfig, split: str) -> tuple[set[str], str]:
    """(the rows of the split by their origins, the part of the configuration whose files they are in)."""
    from lockstep.data.dataset import compile_data
    from lockstep.model.load import load_processor, load_run_tokenizer

    if split not in ("validation", "test"):
        raise ValueError(f"unknown split {split!r}: choose validation or test")
    if not getattr(config.data, split) and not getattr(config.data, f"{split}_fraction"):
        raise ValueError(f"the run has no {split} rows: name a data file")
    tokenizer = load_run_tokenizer(config)
    compiled = compile_data(config.data, tokenizer, seed=config.seed, images=load_processor(config.model, tokenizer))
    if compiled.has_images:
        raise ValueError("lockstep eval does not answer rows with images yet: evaluation.metrics does, in training")
    part = split if getattr(config.data, split) else "train"
    return {datum.origin for datum in getattr(compiled, split)}, part
