"""One base model whose tensors all of its users share: those who train adapters on it, and the engine that samples."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.config import LoraConfig, ModelConfig
from lockstep.model.adapters import apply_adapter
from lockstep.model.float64 import keep_float64
from lockstep.model.load import DTYPES, choose_precision, load_causal_lm, load_tokenizer
from lockstep.model.lora import add_lora, targets_by_kind
from lockstep.model.policy import CausalLM, num_tokens
from lockstep.parallel.group import choose_device
from lockstep.rundir import MANIFEST, read_json_object
from lockstep.types import Tokenizer

ALPHA = 32.0
"""Of every adapter, whatever its rank, as the Tinker API has it."""


@dataclass(frozen=True)
class AdapterSpec:
    """Which layers get an adapter, and how wide it is. `seed`: of its first values; None: any."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


def load_adapted(base: BaseModel, folder: Path) -> CausalLM:
    """The base model with the adapter that was saved to a folder, for inference."""
    spec = AdapterSpec(**read_json_object(folder / MANIFEST)["extra"])
    model: Any = base.with_adapter(spec)
    apply_adapter(model, folder)
    return model.eval().requires_grad_(False)


class BaseModel:
    """Frozen, on its device. `copy` gives modules of their own around the same tensors."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        self.device = choose_device(device)
        self.precision = choose_precision(config.precision, self.device)
        model: Any = load_causal_lm(config, DTYPES[self.precision])
        if self.precision == "fp64":
            keep_float64(model)
        self._model: CausalLM = model.to(self.device).eval().requires_grad_(False)
        self.tokenizer: Tokenizer = load_tokenizer(config)
        self.num_tokens = num_tokens(self._model)
        self.num_positions: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)

    def copy(self) -> CausalLM:
        """What is done to its modules is done to them alone; a tensor must not be changed in place."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return copy.deepcopy(self._model, {id(tensor): tensor for tensor in tensors})

    def with_adapter(self, spec: AdapterSpec) -> CausalLM:
        """A copy with an adapter that changes nothing yet."""
        model: Any = self.copy()
        targets = targets_by_kind(model, attention=spec.train_attn, mlp=spec.train_mlp, head=spec.train_unembed)
        with torch.random.fork_rng(devices=[]):
            if spec.seed is not None:
                torch.manual_seed(spec.seed)
            return add_lora(model, LoraConfig(rank=spec.rank, alpha=ALPHA, targets=targets))
