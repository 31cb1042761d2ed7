"""What can be said of a run before its first step: batch, steps, data, model, and what the model makes slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep.config import ConfigError, RunConfig
from lockstep.data.dataset import CompiledData, CompileProgress, compile_data
from lockstep.data.order import Batches
from lockstep.data.packing import partition
from lockstep.model.load import (
    build_model,
    check_model_source,
    check_trainable,
    choose_precision,
    load_hf_config,
    load_processor,
    load_run_tokenizer,
)
from lockstep.model.lora import measure_coverage
from lockstep.model.parts import Part, describe_parts, measure_parts
from lockstep.model.policy import setting_by_layer
from lockstep.model.quantised import describe_rest
from lockstep.parallel.group import choose_device
from lockstep.train import grpo
from lockstep.train.foresee import choose
from lockstep.train.preference_data import (
    RowsToLearn,
    computed_lengths,
    count_padded_tokens,
    row_warnings,
    rows_to_learn,
)
from lockstep.train.prepare import check_data, check_reference_model
from lockstep.train.reference import plan_reference
from lockstep.train.schedule import num_steps
from lockstep.types import Datum

if TYPE_CHECKING:
    from lockstep.backend.deepspeed.backend import DeepSpeedBackend
    from lockstep.backend.torch_backend import TorchBackend


def describe(config: RunConfig, on_progress: Callable[[CompileProgress], None] | None = None) -> dict[str, Any]:
    """What can be checked and reported without training: the effective batch, steps, data, model."""
    check_model_source(config.model)
    choose_device(config.launch.device)
    num_ranks = config.launch.procs
    check_trainable(config.model)
    architecture = load_hf_config(config.model)
    _check_layout(config, architecture.get_text_config())
    tokenizer = load_run_tokenizer(config)
    check_reference_model(config, tokenizer)
    parts, warnings = _measure_model(config)
    about = {
        "model": f"{(architecture.architectures or [type(architecture).__name__])[0]} from {config.model.path}",
        "algorithm": config.algorithm.kind,
        "training": "LoRA" if config.lora is not None else "full",
        "precision": choose_precision(config.model.precision, choose_device(config.launch.device))
        + (f", base {config.model.base_format}" if config.model.base_format else ""),
        "ranks": num_ranks,
        "trained": describe_parts(parts),
    }
    if config.algorithm.kind == "grpo":
        found: dict[str, Any] = _layout_of(config, None)[1] | grpo.describe(config, tokenizer)
        return about | found | {"warnings": [*warnings, *found["warnings"]]}
    data = compile_data(
        config.data,
        tokenizer,
        seed=config.seed,
        timeout_s=config.launch.timeout_s,
        on_progress=on_progress,
        images=load_processor(config.model, tokenizer),
    )
    check_data(config, data, num_ranks)
    rows = _describe_rows(config, data)
    return about | rows | {"warnings": [*warnings, *rows["warnings"]]}


def _describe_rows(config: RunConfig, data: CompiledData) -> dict[str, Any]:
    """The layout, the first batch in it, and all rows."""
    rows = rows_to_learn(config, data)
    config, layout = _layout_of(config, rows.train, has_images=data.has_images)
    degrees = config.parallel.degrees(config.launch.procs)
    batches = Batches(rows.train, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    batch, _ = batches.batch_at(0)
    lengths = computed_lengths(batch, config.batch.micro_batch_tokens)
    steps = partition(lengths, num_ranks=degrees.data, budget_tokens=config.batch.micro_batch_tokens)
    preference: dict[str, str] = {}
    if config.algorithm.kind != "sft":
        saved = 1 - sum(lengths) / count_padded_tokens(batch)
        preference = {"reference": str(plan_reference(config, rows.train)), "padding_saved": f"{saved:.0%}"}
    return layout | {
        "steps": num_steps(config, batches),
        "samples": len(batch),
        "tokens": sum(lengths),
        "supervised_tokens": sum(datum.num_supervised for datum in batch),
        "micro_batches": len(steps) * degrees.data,
        "micro_batches_per_rank": len(steps),
        "learning_rate": config.learning_rate,
        **preference,
        "train_rows": len(rows.train),
        "validation_rows": len(rows.validation),
        "train_tokens": int(rows.train.lengths.sum()),
        **({"images": data.report.totals.num_images} if data.has_images else {}),
        "prompts_cut": data.report.totals.prompts_cut,
        "answers_cut": data.report.totals.answers_cut,
        "warnings": [*data.report.warnings(), *row_warnings(config, data)],
    }


def _check_layout(config: RunConfig, text: Any) -> None:
    """What a run would refuse once its model is built, from the model's own configuration alone."""
    degrees = config.parallel.degrees(config.launch.procs)
    for key in ("num_attention_heads", "num_key_value_heads"):
        every = [heads for heads in setting_by_layer(text, key) if isinstance(heads, int)]
        if heads := next((heads for heads in every if heads % degrees.tensor), None):
            fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ConfigError(
                f"parallel.tensor {degrees.tensor} does not divide the model's {key} {heads}: choose one of {fitting}"
            )
    num_layers = getattr(text, "num_hidden_layers", None)
    if isinstance(num_layers, int) and degrees.pipeline > num_layers:
        raise ConfigError(
            f"parallel.pipeline {degrees.pipeline} is more than the model's {num_layers} layers: lower it to "
            f"{num_layers} or less"
        )


def _layout_of(
    config: RunConfig, rows: Sequence[Datum] | None, *, has_images: bool = False
) -> tuple[RunConfig, dict[str, str]]:
    """The configuration with the layout that it would have here, and what is said of that."""
    num_ranks = config.launch.procs
    if config.parallel.auto and not config.parallel.chosen_for(num_ranks):
        found = choose(config, rows, has_images=has_images)
        return found.config, {"layout": found.why}
    return config, {"layout": config.parallel.degrees(num_ranks).name}


def _measure_model(config: RunConfig) -> tuple[dict[str, Part], list[str]]:
    """Of the model that would be trained, without its weights: its parts, and what adapters and quantisation leave out
    of it."""
    with torch.device("meta"):
        model = build_model(config.model, config.lora, "fp32", with_weights=False)
    coverage, unquantised = measure_coverage(model), describe_rest(model)
    partial = [str(coverage)] if coverage is not None and coverage.is_partial else []
    return measure_parts(model), [*partial, *([unquantised] if unquantised else [])]


def check_positions(config: RunConfig, backend: TorchBackend | DeepSpeedBackend, rows: RowsToLearn) -> None:
    """Before the first step where a row is one text; of pairs and of sampled answers the backend checks each batch."""
    limit = backend.policy.max_positions
    if limit is None or config.algorithm.kind != "sft":
        return
    longest = max((int(part.lengths.max()) for part in (rows.train, rows.validation) if len(part)), default=0)
    if longest > limit:
        raise ConfigError(
            f"data.max_length {config.data.max_length} lets texts of {longest:,} tokens through, and "
            f"{config.model.path} learned positions for {limit:,}: set it to {limit} or less"
        )


def describe_cost(config: RunConfig, backend: TorchBackend | DeepSpeedBackend, rows: RowsToLearn) -> Iterator[str]:
    """What the model makes slower or different on these rows."""
    samples = config.algorithm.kind == "grpo"
    if not backend.policy.packs and not samples:  # of answers that are yet to be sampled nothing is known
        num_packed = -(-int(rows.train.lengths.sum()) // config.batch.micro_batch_tokens)
        yield (
            f"without packing, an epoch takes {len(rows.train):,} passes or more; packed into "
            f"batch.micro_batch_tokens {config.batch.micro_batch_tokens:,} it would be about {num_packed:,}"
        )
    if backend.policy.image_forward is None and "vision tower" in backend.parts:
        size = backend.parts["vision tower"].total
        yield f"no row has an image: the vision tower of the model ({size:,} parameters) is loaded and not used"
    for rule in backend.policy.rotary.rules:
        if config.data.max_length <= rule.limit:
            continue
        yield (
            f"texts of more than {rule.limit:,} tokens have other positions ({rule.kind}). Each has those of its own "
            "length; answers to one prompt on both sides of that length do not share it, which is slower"
        )
        if samples and rule.kind == "longrope":  # with the others no answer grows so long
            yield (
                f"an answer that grows past {rule.limit:,} tokens is learned with the positions of its whole length, "
                "and was sampled up to there with others: sampler and trainer differ on that part. To avoid it, set "
                f"data.max_length to {rule.limit}"
            )
