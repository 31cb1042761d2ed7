"""Trained weights as a folder that plain transformers or peft load; and checkpoints of runs read back."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import ConfigError
from lockstep.model.pissa import as_plain_adapter, has_beginnings
from lockstep.model.policy import CausalLM, causal_lm
from lockstep.model.routing import BIAS
from lockstep.model.stages import PassThrough
from lockstep.model.vision import copy_processor
from lockstep.rundir import Checkpoint, RunDir, damage
from lockstep.types import Tokenizer

# Names of trained parameters in a checkpoint begin so.
PARAMETER_PREFIX = "model."


def save_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a Hugging Face folder from whole tensors: the adapter of a PEFT model, otherwise the model."""
    whole = _with_every_layer(model)
    writing = path.with_name(f"writing-{path.name}")
    shutil.rmtree(writing, ignore_errors=True)
    if has_beginnings(model):
        weights, settings = as_plain_adapter(model, weights)
        own, whole.peft_config = whole.peft_config, {"default": settings}
        try:
            whole.save_pretrained(writing, state_dict=dict(weights), save_embedding_layers=False)
        finally:
            whole.peft_config = own
    else:
        # PEFT would write the whole head beside an adapter on it, though that is the base model's own.
        options = {"save_embedding_layers": False} if is_adapted(whole) else {"is_main_process": True}
        whole.save_pretrained(writing, state_dict=dict(weights), **options)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(writing, path)


def _with_every_layer(model: Any) -> Any:
    """The model itself, or for a pipeline stage a whole one on the meta device: writers leave out adapters of layers
    that they do not find."""
    if not any(isinstance(module, PassThrough) for module in model.modules()):
        return model
    cut: Any = causal_lm(model)
    with torch.device("meta"):
        whole = type(cut)(copy.deepcopy(cut.config)).to(cut.dtype)
        whole.generation_config = cut.generation_config
        if not is_adapted(model):
            return whole
        import peft

        return peft.get_peft_model(whole, copy.deepcopy(model.active_peft_config))


def load_run(run: RunDir, dtype: torch.dtype | None = None, step: int | None = None) -> tuple[CausalLM, Tokenizer]:
    """(model with the trained weights of a checkpoint, tokenizer). LoRA stays an adapter on top of the base."""
    return _load_checkpoint(run, find_checkpoint(run, step), dtype)


def _load_checkpoint(run: RunDir, checkpoint: Checkpoint, dtype: torch.dtype | None) -> tuple[CausalLM, Tokenizer]:
    from lockstep.model.load import DTYPES, build_model, load_causal_lm, load_run_tokenizer
    from lockstep.model.lora import add_lora

    config = run.config()
    if dtype is None:
        precision = run.status().get("precision", "fp32")
        model = build_model(config.model, config.lora, precision, with_weights=True, quantised=False)
    else:
        model = load_causal_lm(config.model, dtype, with_weights=True)
        model = add_lora(model, config.lora, config.model.vision) if config.lora is not None else model
    assert dtype is None or dtype in DTYPES.values()
    trained: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if config.model.router_bias_rate:
        trained |= {n: bias for n, bias in model.named_buffers() if n.endswith(f".{BIAS}")}
    read_parameters(checkpoint.path, trained)
    return model, load_run_tokenizer(config)


def find_checkpoint(run: RunDir, step: int | None = None) -> Checkpoint:
    """The newest sound checkpoint, or the one of a given step."""
    if step is None:
        latest = run.latest_checkpoint()
        if latest is None:
            raise ConfigError(f"{run.path} has no sound checkpoint yet: wait for one, or train it further (--resume)")
        return latest
    known = {c.step: c for c in run.list_checkpoints()}
    if step not in known:
        steps = ", ".join(str(s) for s in known) or "none"
        raise ConfigError(f"{run.path} has no checkpoint of step {step}: it has {steps}")
    if problem := damage(known[step].path):
        raise ConfigError(f"the checkpoint of step {step} is damaged: {problem}")
    return known[step]


def read_parameters(checkpoint: Path, parameters: Mapping[str, Tensor]) -> None:
    """Trained parameters of a checkpoint, in place, converted to the dtype of each parameter."""
    from lockstep.model.checkpoint_storage import read_index, read_tensors

    stored = read_index(checkpoint)
    buffers: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if PARAMETER_PREFIX + name not in stored:
            raise ConfigError(f"the checkpoint {checkpoint} does not have {name!r}: was the model changed?")
        kind = stored[PARAMETER_PREFIX + name].dtype
        buffers[PARAMETER_PREFIX + name] = torch.empty(parameter.shape, dtype=kind)
    read_tensors(checkpoint, buffers)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(buffers[PARAMETER_PREFIX + name])


def export_run(run_dir: str | Path, to: Path | None = None, *, adapter: bool = False, step: int | None = None) -> dict:
    """Write a checkpoint as a model folder (LoRA merged) or a PEFT adapter. Returns path, kind, bytes, drift, step."""
    run = RunDir(run_dir)
    config = run.config()
    if adapter and config.lora is None:
        raise ConfigError(f"{run.path} was not trained with LoRA: there is no adapter to export")
    kind = "adapter" if adapter else "merged" if config.lora is not None else "model"
    path = Path(os.path.abspath(to)) if to else run.export / kind
    if to and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{to} already exists: name a new folder or an empty one")
    checkpoint = find_checkpoint(run, step)
    model, tokenizer = _load_checkpoint(run, checkpoint, None)
    drift = None
    if kind == "merged":
        model, drift = merge(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_weights(model, model.state_dict(), path)
        tokenizer.save_pretrained(path)
        copy_processor(config.model, path)
    except OSError as error:
        raise ConfigError(f"cannot write the export {path}: {error.strerror or error}") from error
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    return {"path": str(path), "kind": kind, "bytes": size, "drift": drift, "step": checkpoint.step}


@torch.no_grad()
def merge(model: Any) -> tuple[CausalLM, float]:
    """(the base with adapters merged, the largest change of a log-prob by merging, on probe tokens)."""
    model.eval()
    vocabulary = model.config.get_text_config().vocab_size
    probe = ((17 * torch.arange(48)) % vocabulary)[None]
    before = torch.log_softmax(model(probe).logits.float(), -1)
    _untie_adapted(causal_lm(model))
    merged = model.merge_and_unload(safe_merge=True)
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    if head.weight is not embedding.weight:
        _say_untied(merged)
    after = torch.log_softmax(merged(probe).logits.float(), -1)
    return merged, float((after - before).abs().max())


def _untie_adapted(causal: Any) -> None:
    """PEFT adapts the embedding or the head, and not the other that shares its matrix: merged, both would change."""
    ends = (causal.get_input_embeddings(), causal.get_output_embeddings())
    embedding, head = (getattr(end, "base_layer", getattr(end, "original_module", end)) for end in ends)
    if (embedding, head) != ends and embedding.weight is head.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        _say_untied(causal)


def _say_untied(causal: Any) -> None:
    for config in {id(c): c for c in (causal.config, causal.config.get_text_config())}.values():
        config.tie_word_embeddings = False


def is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")
