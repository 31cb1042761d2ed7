"""Models and tokenizers from a Hub id, a folder or a GGUF file, for training and inference; newer weights in place."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.config import ConfigError, LoraConfig, ModelConfig, RunConfig
from lockstep.config.hub import is_only_here
from lockstep.model.experts import compute_experts_exactly
from lockstep.model.float64 import keep_float64
from lockstep.model.lora import add_lora
from lockstep.model.policy import CausalLM
from lockstep.model.quantised import dequantising_options, quantise_base, refuse_untrainable
from lockstep.model.vision import load_image_processor, sees, settle_vision
from lockstep.rundir import RunDir
from lockstep.types import ImageProcessor, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    from transformers import AutoTokenizer

    with _explaining(config, needs_weights=False):
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(**_source(config))
        except (OSError, ImportError):
            raise
        except Exception as error:  # tokenizers raises nothing narrower for a broken file
            raise ConfigError(_describe_tokenizer(config, error)) from error
        if _lacks_tokenizer(config) and len(tokenizer) < _FEWEST_TOKENS:  # made of nothing, by the model's class alone
            raise ConfigError(_describe_tokenizer(config))
        return tokenizer


_FEWEST_TOKENS = 1024


def _lacks_tokenizer(config: ModelConfig) -> bool:
    folder = Path(config.path)
    files = (*folder.glob("tokenizer*"), *folder.glob("vocab*"), *folder.glob("*.tiktoken"))
    return folder.is_dir() and not any(files)


def _describe_tokenizer(config: ModelConfig, error: Exception | None = None) -> str:
    """What is wrong with it, in one sentence: transformers says what it tried."""
    if _lacks_tokenizer(config):
        return f"model.path {config.path} has no tokenizer (tokenizer.json): copy its files from the model's own folder"
    reason = str(error).strip().split("\n")[0]
    return f"model.path {config.path}: its tokenizer cannot be read ({reason}): copy its files again"


def load_run_tokenizer(config: RunConfig) -> Tokenizer:
    """With the run's own chat template, if it has one, also for exports."""
    tokenizer = load_tokenizer(config.model)
    if config.data.chat_template not in ("auto", "none"):
        tokenizer.chat_template = Path(config.data.chat_template).read_text(encoding="utf-8")
    return tokenizer


def load_hf_config(config: ModelConfig) -> PreTrainedConfig:
    """The model's own configuration, without its weights, which need not be there."""
    from transformers import AutoConfig

    with _explaining(config, needs_weights=False):
        return AutoConfig.from_pretrained(**_source(config))


def load_causal_lm(config: ModelConfig, dtype: torch.dtype, *, with_weights: bool = True) -> PreTrainedModel:
    """On CPU. Without weights memory is not initialised, and costs nothing until it is written."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    with _explaining(config, needs_weights=with_weights):
        if with_weights:
            _refuse_adapter(config)
        hf_config = load_hf_config(config)
        auto: Any = AutoModelForImageTextToText if sees(hf_config, config.vision) else AutoModelForCausalLM
        if with_weights:
            options = _source(config) | dequantising_options(hf_config)
            loaded: Any = auto.from_pretrained(
                dtype=dtype,
                use_safetensors=_wants_safetensors(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with the name of the tensor
                **options,
            )
            model, report = loaded
            _refuse_other_sizes(config, report["mismatched_keys"])
            if "quantization_config" in options:
                _settle_dequantised(model, dtype)
            _refuse_missing(config, sorted(report["missing_keys"]))
        else:
            trust = config.trust_remote_code
            with no_init_weights():
                model = auto.from_config(hf_config, dtype=dtype, trust_remote_code=trust)
            model.tie_weights()  # skipped together with the initialisation
            _read_generation_config(config, model)
    settle_vision(model, config.vision)
    _keep_score_cap(model)
    compute_experts_exactly(model, dtype)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # GGUF weights are unpacked; an export could not be loaded with it
    return model


def _keep_score_cap(model: PreTrainedModel) -> None:
    """transformers 5.17 leaves the cap of Gemma 2's scores out of `sdpa` without a word; newer ones choose another."""
    text = model.config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None) is not None and text._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def check_trainable(config: ModelConfig) -> None:
    """Whether its weights are of a kind that can be trained on, before they are loaded."""
    refuse_untrainable(config.path, load_hf_config(config))


def _settle_dequantised(model: nn.Module, dtype: torch.dtype) -> None:
    """transformers gives some of them in bf16 or float32, though something wider is asked for."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.itemsize < dtype.itemsize:
            parameter.data = parameter.data.to(dtype)


def _read_generation_config(config: ModelConfig, model: PreTrainedModel) -> None:
    """End tokens are not always in the model's configuration, and every rank needs the same."""
    from transformers import GenerationConfig

    source = _source(config)
    if "gguf_file" in source:
        return
    source.pop("trust_remote_code")
    with contextlib.suppress(OSError):  # not every model has one
        model.generation_config = GenerationConfig.from_pretrained(
            source.pop("pretrained_model_name_or_path"), **source
        )


def _refuse_adapter(config: ModelConfig) -> None:
    """transformers would load whatever base an adapter's author names in it, also a folder of this machine."""
    from transformers.utils.peft_utils import find_adapter_config_file

    is_folder = Path(config.path).exists()  # checked: it is a whole model
    if not is_folder and find_adapter_config_file(config.path, revision=config.revision) is not None:
        raise ConfigError(
            f"model.path {config.path} holds an adapter and not a whole model: name its base model, or merge them first"
        )


def _refuse_missing(config: ModelConfig, names: list[str]) -> None:
    """transformers fills tensors that the weights do not have with random numbers, and only logs it."""
    if names:
        raise ConfigError(
            f"model.path {config.path}: its weights lack {len(names)} tensors of the model, first {names[0]!r}"
        )


def choose_precision(wanted: str, device: torch.device) -> str:
    """`auto` measures on CPUs: many emulate bf16 hundreds of times slower than fp32. With fp8_base, of all but that."""
    if wanted not in ("auto", "fp8_base"):
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if _cpu_claims_bf16() and _cpu_is_faster_in_bf16() else "fp32"


def _cpu_claims_bf16() -> bool:
    try:
        return "bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _cpu_is_faster_in_bf16() -> bool:
    """In a subprocess: on virtual machines that report AMX but forbid it, the first product is fatal."""
    program = """
import time, torch
def best(dtype):
    a = torch.ones(192, 192, dtype=dtype)
    times = []
    for _ in range(4):
        start = time.perf_counter(); a @ a; times.append(time.perf_counter() - start)
    return min(times)
print(best(torch.bfloat16) < 0.8 * best(torch.float32))
"""
    try:
        command = [sys.executable, "-c", program]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return False
    return result.returncode == 0 and result.stdout.strip() == "True"


def load_for_inference(source: str | Path, device: str = "auto") -> tuple[CausalLM, Tokenizer]:
    """(model, tokenizer) from a run directory (base and trained weights), a model or adapter folder, or a Hub id."""
    from lockstep.model.export import load_run

    path = Path(source)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    model: Any
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    if (path / "config.yaml").exists():
        model, tokenizer = load_run(RunDir(path), dtype)
    elif (path / "adapter_config.json").exists():
        model, tokenizer = _load_adapter(path, dtype)
    else:
        model, tokenizer = _load_named(ModelConfig(path=str(source)), dtype)
    return model.to(place).eval(), tokenizer


def _load_named(config: ModelConfig, dtype: torch.dtype) -> tuple[CausalLM, Tokenizer]:
    """By what somebody has written on a command line: there is no `model.path` to correct."""
    try:
        return load_causal_lm(config, dtype), load_tokenizer(config)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("model.path ")) from error


def _load_adapter(path: Path, dtype: torch.dtype) -> tuple[CausalLM, Tokenizer]:
    import peft
    from transformers import AutoTokenizer

    base = ModelConfig(path=peft.PeftConfig.from_pretrained(str(path)).base_model_name_or_path)
    model = peft.PeftModel.from_pretrained(load_causal_lm(base, dtype), str(path))
    # The folder of an adapter is no model folder: its tokenizer is read as it is.
    has_tokenizer = (path / "tokenizer_config.json").exists()
    tokenizer: Any = AutoTokenizer.from_pretrained(str(path)) if has_tokenizer else load_tokenizer(base)
    return model, tokenizer


def build_model(
    config: ModelConfig, lora: LoraConfig | None, precision: str, *, with_weights: bool, quantised: bool = True
) -> CausalLM:
    """The module that a run trains. Trainable parameters are float32 or wider; frozen ones are in `precision`, or
    quantised where the configuration says so and `quantised` is true."""
    check_trainable(config)
    compute = DTYPES[precision]
    held = compute if lora is not None or precision == "fp64" else torch.float32
    model = load_causal_lm(config, held, with_weights=with_weights)
    if precision == "fp64":
        keep_float64(model)
    if lora is None:
        return model
    adapted = add_lora(model, lora, config.vision, with_weights=with_weights)
    if quantised and config.base_format is not None:
        place = torch.device("cuda") if torch.cuda.is_available() else None
        quantise_base(adapted, config.base_format, place, with_weights=with_weights)
    return adapted


def load_processor(config: ModelConfig, tokenizer: Tokenizer) -> ImageProcessor | None:
    """Of a vision-language model: what makes arrays and tokens of images; otherwise None."""
    with _explaining(config):
        return load_image_processor(config, load_hf_config(config), tokenizer)


def _source(config: ModelConfig) -> dict[str, Any]:
    arguments: dict[str, object] = {"trust_remote_code": config.trust_remote_code}
    path = Path(config.path)
    if path.suffix == ".gguf":
        return arguments | {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if config.revision:
        arguments["revision"] = config.revision
    if is_only_here(config.path):
        arguments["local_files_only"] = True
    return arguments | {"pretrained_model_name_or_path": config.path}


def _wants_safetensors(config: ModelConfig) -> bool | None:
    """Pickled weights are refused: loading them runs code. GGUF is a format of its own."""
    return None if config.path.endswith(".gguf") else True


def _refuse_other_sizes(config: ModelConfig, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    for name, stored, wanted in sorted(mismatched):
        sizes = " x ".join(map(str, stored)), " x ".join(map(str, wanted))
        raise ConfigError(
            f"model.path {config.path}: its tensor {name!r} is {sizes[0]}, and its config.json asks for "
            f"{sizes[1]}: one of the two is of another model"
        )


@contextlib.contextmanager
def _explaining(config: ModelConfig, *, needs_weights: bool = True) -> Iterator[None]:
    """Turn what transformers raises about a missing or broken source into one sentence."""
    check_model_source(config, needs_weights=needs_weights)
    try:
        yield
    except (OSError, ImportError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        if Path(config.path).exists():
            raise ConfigError(f"model.path {config.path}: {reason}") from error
        raise ConfigError(
            f"model.path {config.path!r} is neither on disk nor could it be fetched from the Hub ({reason}): check "
            "the name, or give a folder"
        ) from error
    except ValueError as error:
        if (unknown := _unknown_kind(str(error))) is None:
            raise
        raise ConfigError(f"model.path {config.path}: {unknown}") from error


def _unknown_kind(text: str) -> str | None:
    """In one sentence what transformers says, with much else, of a model that it cannot build."""
    if "contains custom code" in text:
        return "it brings code of its own, which is not run: set model.trust_remote_code to true if you trust it"
    if found := re.search(r"model type `([^`]+)` but Transformers does not recognize", text):
        version = importlib.metadata.version("transformers")
        return f"transformers {version} knows no model of type {found[1]!r}: take a newer version, or another model"
    if found := re.search(r"Unrecognized configuration class <class '[\w.]*?(\w+)'> for this kind of AutoModel", text):
        return f"a {found[1]} is of no causal language model, and those are what is trained: take another model"
    return None


def check_model_source(config: ModelConfig, *, needs_weights: bool = True) -> None:
    """Checks of a local source that need no loading."""
    path = Path(config.path)
    if not path.exists():
        if path.is_absolute():
            raise ConfigError(f"model.path {path} does not exist: check the path")
        if config.path.startswith(("job:", "model:", "root:")):
            raise ConfigError(f"model.path {path} is a name within a job service: write the folder on this machine")
        return
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"model.path {path} is a file: give a model folder, a .gguf file or a Hub id")
        return
    if not (path / "config.json").exists():
        raise ConfigError(f"model.path {path} is {_describe_other_folder(path)}")
    if needs_weights and not any(path.glob("*.safetensors")):
        why = "no weights (*.safetensors)"
        if any(path.glob("*.bin")):
            why = "only pickled weights (*.bin), which are not loaded: convert them to safetensors"
        raise ConfigError(f"model.path {path} has {why}")
    _refuse_weights_elsewhere(path)


def _describe_other_folder(path: Path) -> str:
    """What a folder without a model is, and how to make one of it: people go on from their own runs and adapters."""
    is_adapter = (path / "adapter_config.json").exists()
    run = path.parents[1] if is_adapter and path.parent.name == "export" else path
    if (run / "config.yaml").exists():
        whole = next((run / "export" / kind for kind in ("model", "merged") if (run / "export" / kind).exists()), None)
        what = "the adapter of a run" if is_adapter else "a run directory"
        if whole is not None:
            return f"{what}, not a model folder: name the model that the run exported, {whole}"
        return f"{what}, not a model folder: write one with 'lockstep export {shlex.quote(str(run))}', and name that"
    if is_adapter:
        return (
            "an adapter, not a whole model: merge it into its base (with peft: merge_and_unload, then "
            "save_pretrained), and name the folder of that"
        )
    return "not a model folder: it has no config.json"


def _refuse_weights_elsewhere(folder: Path) -> None:
    """An index lists the files of the weights, and its author must not choose other files of this machine."""
    for index in folder.glob("*.safetensors.index.json"):
        try:
            names = set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} does not list the files of the weights: copy the model again") from error
        for name in sorted(names):
            if "/" in name or name == "..":
                raise ConfigError(f"{index} names {name!r}, which is not in its folder: copy the model again")


def apply_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy into the model, by its own names: all its tensors, or all tensors of its adapters.

    Of tied tensors one name is enough. Anything that does not fit is a ValueError, and nothing is changed.
    """
    held: dict[str, Tensor] = model.state_dict(keep_vars=True)
    _refuse_unknown(held, weights)
    _refuse_incomplete(held, weights, _adapter_names(model, held))
    for name, tensor in weights.items():
        _check_tensor(name, tensor, held[name])
    _refuse_contradictions(held, weights)
    with torch.no_grad():
        for name, tensor in weights.items():
            held[name].copy_(tensor)


def _refuse_unknown(held: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    unknown = sorted(weights.keys() - held.keys())
    if unknown:
        raise ValueError(f"{len(unknown)} of {len(weights)} tensors are not of this model, first {unknown[0]!r}")


def _refuse_incomplete(held: Mapping[str, Tensor], weights: Mapping[str, Tensor], adapter: set[str]) -> None:
    required = adapter if weights and weights.keys() <= adapter else held.keys()
    present = {id(held[name]) for name in weights}
    missing = sorted(name for name in required if id(held[name]) not in present)
    if missing:
        raise ValueError(f"{len(missing)} of {len(required)} tensors of the model are missing, first {missing[0]!r}")


def _check_tensor(name: str, tensor: Tensor, held: Tensor) -> None:
    if isinstance(held, DTensor):
        raise ValueError("the model is spread over several processes: it cannot take weights from memory")
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if tensor.shape != held.shape:
        raise ValueError(f"{name} has the shape {list(tensor.shape)}: the model's is {list(held.shape)}")
    if tensor.dtype != held.dtype:
        raise ValueError(f"{name} is {tensor.dtype}: the model holds {held.dtype}, convert it first")


def _refuse_contradictions(held: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Two names of one tensor must have the same values."""
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        other = first.setdefault(id(held[name]), name)
        if other != name and not torch.equal(tensor, weights[other]):
            raise ValueError(f"{name} and {other} are one tensor in the model, and two different ones here")


def _adapter_names(model: nn.Module, held: Mapping[str, Tensor]) -> set[str]:
    """The adapter tensors of a PEFT model, otherwise none."""
    prefix = getattr(getattr(model, "base_model", None), "prefix", None) if hasattr(model, "peft_config") else None
    return {name for name in held if prefix and (prefix in name or ".modules_to_save." in name)}


# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BYTES = 2**31 - 1, 2**27


def keep_freed_memory() -> None:
    """Freed memory stays with this process for the next step: on a CPU, allocating it anew costs a tenth of the time.

    Does nothing without glibc, or if the environment sets malloc's thresholds.
    """
    if "MALLOC_TRIM_THRESHOLD_" in os.environ or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
