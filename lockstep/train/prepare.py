"""What a run learns from, made and checked before a model is loaded: rows, and the reference's vocabulary."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from lockstep.config import ConfigError, RunConfig
from lockstep.data.dataset import CompiledData, CompileProgress, compile_data
from lockstep.evaluation import metrics
from lockstep.model.load import load_processor, load_tokenizer
from lockstep.rollouts.source import PromptData, read_prompt_data
from lockstep.rundir import RunDir, write_atomically
from lockstep.train.preference_data import RowsToLearn, row_warnings, rows_to_learn
from lockstep.types import ImageProcessor, Tokenizer


def prepare_rows(
    config: RunConfig, tokenizer: Tokenizer, run: RunDir, num_ranks: int
) -> tuple[CompiledData | PromptData, RowsToLearn, ImageProcessor | None]:
    """The third is that of the model, where rows have images."""
    if config.algorithm.kind == "grpo":
        prompts = read_prompt_data(config, tokenizer)
        for message in prompts.warnings():
            run.log_event("warning", message=message)
        return prompts, RowsToLearn(prompts.train, prompts.validation), None
    images = load_processor(config.model, tokenizer)
    data = prepare_data(config, tokenizer, images, run, num_ranks)
    return data, rows_to_learn(config, data), images if data.has_images else None


def prepare_data(
    config: RunConfig, tokenizer: Tokenizer, images: ImageProcessor | None, run: RunDir, num_ranks: int
) -> CompiledData:
    def show(progress: CompileProgress) -> None:
        run.write_status(phase=f"{progress.phase} {progress.split}: {progress.rows:,} rows")

    data = compile_data(
        config.data,
        tokenizer,
        seed=config.seed,
        timeout_s=config.launch.timeout_s,
        on_progress=show,
        images=images,
    )
    for message in [*data.report.warnings(), *row_warnings(config, data)]:
        run.log_event("warning", message=message)
    run.log_event("data", **asdict(data.report))
    if run.owner and data.report.skipped_files:
        rows = [Path(file).read_text(encoding="utf-8") for file in data.report.skipped_files]
        write_atomically(run.path / "skipped.jsonl", "".join(rows))
    check_data(config, data, num_ranks)
    if config.evaluation.metrics:
        metrics.check_metrics(config.evaluation.metrics)  # a missing package is reported before the model is loaded
    return data


def check_data(config: RunConfig, data: CompiledData, num_ranks: int) -> None:
    """Ranks of the other axes have the rows of their neighbours. `auto` chooses a layout by this."""
    parallel = config.parallel
    num_ranks = 1 if parallel.auto and not parallel.chosen_for(num_ranks) else parallel.degrees(num_ranks).data
    rows = rows_to_learn(config, data)
    config.batch.check_ranks(num_ranks)
    if len(rows.train) < num_ranks:
        raise ConfigError(f"{num_ranks} ranks for {len(rows.train)} training rows: use at most one rank per row")

    if data.has_images:
        _check_images(config)


def _check_images(config: RunConfig) -> None:
    """What rows with images do not go together with."""
    parallel = config.parallel
    for axis in ("tensor", "context", "pipeline"):
        if getattr(parallel, axis) > 1:
            raise ConfigError(f"rows with images are not learned from with parallel.{axis} above 1: set it to 1")
    if parallel.backend != "torch":
        raise ConfigError(f"rows with images are not learned from with parallel.backend {parallel.backend}: use torch")


def check_reference_model(config: RunConfig, tokenizer: Tokenizer) -> None:
    """A reference_model must have the same vocabulary, with the same ids."""
    path = getattr(config.algorithm, "reference_model", None)
    if path is None:
        return
    other = load_tokenizer(reference_config(config).model).get_vocab()
    own = tokenizer.get_vocab()
    if own == other:
        return
    token = next((t for t in [*own, *other] if own.get(t) != other.get(t)), "")
    raise ConfigError(
        f"algorithm.reference_model {path} has another vocabulary than {config.model.path} ({len(other):,} and "
        f"{len(own):,} tokens; {token!r} is {other.get(token, 'unknown')} there and {own.get(token, 'unknown')} here), "
        "so its log-probs are of other tokens: use a model of the same family"
    )


def reference_config(config: RunConfig) -> RunConfig:
    """The run's configuration with the reference as its model."""
    path = getattr(config.algorithm, "reference_model", None)
    if path is None:
        return config
    model = config.model.model_copy(update={"path": path, "revision": None})
    return config.model_copy(update={"model": model, "lora": None})
