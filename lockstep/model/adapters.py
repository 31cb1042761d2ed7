"""LoRA adapters as plain low-rank pairs, apart from any model: read from a PEFT folder or from a run's checkpoint."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.rundir import RunDir

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
# Settings of PEFT that change what an adapter computes, beyond a low-rank pair for each layer, where they are set.
_BEYOND_PAIRS = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "trainable_token_indices",
    "target_parameters",
)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # these initialisations also move the base weights


@dataclass(frozen=True)
class LowRankPair:
    """A layer's output gets `scale * x @ down.T @ up.T` more."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    scale: float


@dataclass(frozen=True)
class LoraAdapter:
    """`layers`: by the names that modules have in the base model. `base`: the model it was trained on, as it says."""

    layers: Mapping[str, LowRankPair]
    base: str = ""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], scales: Mapping[str, float] | float, base: str = "") -> Any:
        """PEFT's names. `scales`: alpha / rank, of all layers or by layer."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise ValueError(f"it trains {name!r}, and only plain LoRA can be switched from row to row: merge it")
            if not tensor.isfinite().all():
                raise ValueError(f"{name!r} holds nan or inf: these weights are no good")
            parts.setdefault(match["layer"], {})[match["part"]] = tensor
        layers = {}
        for layer, pair in parts.items():
            if pair.keys() != {"A", "B"} or pair["A"].ndim != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
                raise ValueError(f"its tensors of {layer!r} are no low-rank pair")
            scale = scales if isinstance(scales, (int, float)) else scales[layer]
            layers[layer] = LowRankPair(pair["A"], pair["B"], float(scale))
        if not layers:
            raise ValueError("it holds no LoRA tensors")
        return cls(layers, base)


def load_adapter(source: str | Path) -> LoraAdapter:
    """`source`: a run that was trained with LoRA, or a folder that PEFT wrote."""
    path = Path(source)
    try:
        if (path / "config.yaml").exists():
            return _read_run(path)
        if (path / "adapter_config.json").exists():
            return _read_folder(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"the adapter {source} cannot be used: {error}") from error
    raise ConfigError(
        f"{source} is neither a run nor an adapter folder: it has no config.yaml and no adapter_config.json"
    )


def apply_adapter(model: Any, folder: Path) -> None:
    """The weights of a folder that PEFT wrote, for a model with an adapter of the same shape."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    result: Any = set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    missing = [name for name in result.missing_keys if ".lora_" in name]
    if missing or result.unexpected_keys:
        other = (missing or result.unexpected_keys)[0]
        raise ValueError(f"the adapter in {folder} does not fit this model: {other} is in one of them only")


def _read_run(path: Path) -> LoraAdapter:
    from lockstep.model.checkpoint_storage import read_index, read_tensors
    from lockstep.model.export import PARAMETER_PREFIX, find_checkpoint

    run = RunDir(path)
    config = run.config()
    if config.lora is None:
        raise ConfigError("it was not trained with LoRA: serve the run itself")
    checkpoint = find_checkpoint(run).path
    stored = read_index(checkpoint)
    names = [name for name in stored if name.startswith(PARAMETER_PREFIX)]
    tensors = {name: torch.empty(stored[name].shape, dtype=stored[name].dtype) for name in names}
    read_tensors(checkpoint, tensors)
    trained = {name.removeprefix(PARAMETER_PREFIX): tensor for name, tensor in tensors.items()}
    if config.lora.init == "pissa":
        raise ConfigError("with lora.init pissa its adapter does not fit the base model: use the exported adapter")
    divisor = math.sqrt(config.lora.rank) if config.lora.rslora else config.lora.rank
    return LoraAdapter.from_tensors(trained, config.lora.alpha / divisor, config.model.path)


def _read_folder(path: Path) -> LoraAdapter:
    from safetensors.torch import load_file

    settings = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    if not isinstance(settings, dict) or str(settings.get("peft_type")).upper() != "LORA":
        raise ValueError("its adapter_config.json is not that of a LoRA adapter")
    beyond = [name for name in _BEYOND_PAIRS if settings.get(name)]
    if settings.get("bias", "none") != "none":
        beyond.append("bias")
    if str(settings.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        beyond.append("init_lora_weights")
    if beyond:
        raise ValueError(f"it sets {', '.join(beyond)}, and only plain LoRA can be switched from row to row: merge it")
    weights = path / "adapter_model.safetensors"
    if not weights.exists():
        raise ValueError("it has no adapter_model.safetensors (pickled weights are not loaded)")
    tensors = load_file(weights)
    scales = {
        match["layer"]: _scale(settings, match["layer"], tensor.shape[0])
        for name, tensor in tensors.items()
        if (match := _TENSOR.fullmatch(name)) is not None and match["part"] == "A"
    }
    return LoraAdapter.from_tensors(tensors, scales, str(settings.get("base_model_name_or_path") or ""))


def _scale(settings: Mapping[str, Any], layer: str, rank: int) -> float:
    """As PEFT scales a layer: the first pattern that its name ends with decides alpha."""
    alpha = settings["lora_alpha"]
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(?:.*\.)?({pattern})", layer):
            alpha = value
            break
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)
