"""Vision-language models: which part of a model sees, what of it is trained, and its own processor for images."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from lockstep.config import ConfigError, ModelConfig
from lockstep.config.hub import is_only_here
from lockstep.types import PreparedImage, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# What transformers calls the layers between a tower and a language model; a tower may hold them.
_CONNECTOR = re.compile(r"merger|connector|projector|projection|adapter", re.IGNORECASE)
_PROCESSOR_FILES = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("chat_template.json", "chat_template.jinja"),
)


def sees(config: PreTrainedConfig, setting: str) -> bool:
    """Whether a model of this configuration is loaded with its vision tower. `setting` is model.vision."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as SEEING

    if type(config) not in SEEING or getattr(config, "vision_config", None) is None:
        return False
    has_blind_class = type(config) in CAUSAL and CAUSAL[type(config)] is not SEEING[type(config)]
    return setting != "auto" or not has_blind_class


def vision_modules(causal: nn.Module) -> dict[str, nn.Module]:
    """The modules beside the language model that a model which sees has, by their names; otherwise none."""
    if getattr(getattr(causal, "config", None), "vision_config", None) is None:
        return {}
    head, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()  # type: ignore[operator]
    found: dict[str, nn.Module] = {}
    waiting: list[tuple[str, nn.Module]] = list(causal.named_children())
    while waiting:
        name, module = waiting.pop()
        if module is head or not any(True for _ in module.parameters()):
            continue
        if embedding not in module.modules():
            found[name] = module
        elif not _is_language_model(module, embedding):
            waiting += [(f"{name}.{child}", part) for child, part in module.named_children()]
    return found


def _is_language_model(module: nn.Module, embedding: nn.Module) -> bool:
    """Whether it holds the embedding of tokens itself, beside its layers."""
    return any(child is embedding for child in module.children())


def language_model(causal: PreTrainedModel) -> PreTrainedModel:
    """The innermost model around the embedding of tokens."""
    embedding = causal.get_input_embeddings()
    around = [m for m in causal.modules() if hasattr(m, "set_attn_implementation") and embedding in m.modules()]
    return around[-1]  # type: ignore[return-value] # outer modules come first


def vision_parameters(causal: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """(name, "vision tower" or "connector", parameter)."""
    for prefix, module in vision_modules(causal).items():
        for name, parameter in module.named_parameters(prefix):
            yield name, "connector" if _CONNECTOR.search(name) else "vision tower", parameter


def settle_vision(causal: PreTrainedModel, setting: str) -> None:
    """Freeze what model.vision does not train. `setting`: auto and frozen, connector, trained."""
    parts = list(vision_parameters(causal))
    if setting in ("connector", "trained") and not parts:
        raise ConfigError(f"model.vision {setting}: {type(causal).__name__} has no vision tower: leave it out")
    for _, kind, parameter in parts:
        parameter.requires_grad_(setting == "trained" or (setting == "connector" and kind == "connector"))


def blind_to(causal: nn.Module, setting: str) -> str | None:
    """A pattern of the modules that get no adapter because they are not of the language model; None: there are none."""
    modules = vision_modules(causal)
    if not modules or setting == "trained":
        return None
    prefixes = "|".join(re.escape(name) for name in modules)
    if setting == "connector":
        return rf"(?!.*({_CONNECTOR.pattern}))({prefixes})(\..*)?"
    return rf"({prefixes})(\..*)?"


class VisionProcessor:
    """types.ImageProcessor of a transformers processor, by way of Pillow: the same pixels on every machine."""

    def __init__(self, processor: Any, token_id: int) -> None:
        self._processor = processor
        self._options = _image_options(processor)
        self.placeholder: str = processor.image_token
        self.token_id = token_id
        described = {"images": processor.image_processor.to_dict(), "options": self._options}
        described["own"] = {key: value for key, value in vars(processor).items() if isinstance(value, (int, str))}
        text = json.dumps([type(processor).__name__, described], sort_keys=True, default=repr)
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def prepare(self, image: Any) -> PreparedImage:
        made = self._processor.image_processor([[image]], return_tensors=None, **self._options)
        inputs = {key: _as_array(value) for key, value in made.items()}
        text: str = self._processor.replace_image_token(made, image_idx=0)
        ids = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        kept = {key: value for key, value in inputs.items() if value is not None}
        return PreparedImage(kept, text, list(ids).count(self.token_id), image.size)


def _image_options(processor: Any) -> dict[str, Any]:
    """What a processor tells its image processor where the caller says nothing: transformers has it in the processor's
    class from 5.23 on, and in the class of its arguments before."""
    defaults = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", None) or {}
    told = (
        getattr(processor, "images_kwargs", {}) | defaults.get("images_kwargs", {}) | defaults.get("common_kwargs", {})
    )
    return {name: value for name, value in told.items() if name != "return_tensors"}


def _as_array(value: Any) -> np.ndarray | None:
    """None for what is no table of numbers."""
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return array if array.dtype.kind in "fiub" and array.ndim else None


def load_image_processor(
    config: ModelConfig, hf_config: PreTrainedConfig, tokenizer: Tokenizer
) -> VisionProcessor | None:
    """None for a model that does not see, or has no processor, or without Pillow: its rows may then have no images.

    A tokenizer without a chat template gets that of the processor.
    """
    if not sees(hf_config, config.vision) or not _has_pillow():
        return None
    # By its module: under transformers itself, 5.17 has it only where torchvision is installed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    here: dict[str, Any] = {"local_files_only": is_only_here(config.path)}
    if config.revision:
        here["revision"] = config.revision
    token_id = getattr(hf_config, "image_token_id", None) or getattr(hf_config, "image_token_index", None)
    if (
        type(hf_config) not in PROCESSOR_MAPPING
        or token_id is None
        or find_file(config, "preprocessor_config.json") is None
    ):
        return None
    kind: Any = PROCESSOR_MAPPING[type(hf_config)]
    options, _ = kind.get_processor_dict(config.path, **here)
    images = AutoImageProcessor.from_pretrained(
        config.path, backend="pil", trust_remote_code=config.trust_remote_code, **here
    )
    processor = _build(kind, images, tokenizer, options)
    if not tokenizer.chat_template and processor.chat_template:
        tokenizer.chat_template = processor.chat_template
    return VisionProcessor(processor, int(token_id))


def _build(kind: Any, images: object, tokenizer: Tokenizer, options: Mapping[str, object]) -> Any:
    """A processor of images and text alone: readers of videos need more packages, and are not used."""
    parts = {"image_processor": images, "tokenizer": tokenizer}
    names = kind.get_attributes()
    known = {key: value for key, value in options.items() if key not in (*names, "auto_map", "processor_class")}
    _, known = kind.validate_init_kwargs(
        processor_config=known, valid_kwargs=kind.__init__.__code__.co_varnames[: kind.__init__.__code__.co_argcount]
    )
    processor = kind.__new__(kind)
    processor.check_argument_for_proper_class = lambda *arguments: None  # None is of no class
    processor.__init__(**{name: parts.get(name) for name in names}, **known)
    del processor.check_argument_for_proper_class
    return processor


def _has_pillow() -> bool:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return False
    return True


def find_file(config: ModelConfig, name: str) -> Path | None:
    """A file of the model, from its folder or the Hub."""
    from transformers.utils import cached_file

    if Path(config.path).is_file():
        return None
    found = cached_file(
        config.path,
        name,
        revision=config.revision or "main",
        local_files_only=is_only_here(config.path),
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def copy_processor(config: ModelConfig, folder: Path) -> None:
    """The files of the model's processor beside exported weights, so that transformers' AutoProcessor finds them."""
    for name in _PROCESSOR_FILES:
        found = find_file(config, name)
        if found is not None and not (folder / name).exists():
            (folder / name).write_bytes(found.read_bytes())
