"""Tiny random vision-language models of five families with their processors, as folders; and rows with drawn images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

IMAGE_TOKENS = {
    "qwen2_vl": "<|image_pad|>",
    "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>",
    "gemma3": "<image_soft_token>",
    "idefics3": "<image>",
}
FAMILIES = tuple(IMAGE_TOKENS)
_SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>"),
    *("<|vision_end|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<image>"),
    *("<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
]
_QWEN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GEMMA = _QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>")
# Reads only lists of parts, and writes nothing of a plain string, as the published one.
_IDEFICS = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
TEMPLATES = {"gemma3": _GEMMA, "idefics3": _IDEFICS}
_TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}


def build_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """One token per byte; special tokens first."""
    vocabulary = {t: i for i, t in enumerate([*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    extra = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": IMAGE_TOKENS[family]}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=extra
    )
    wrapped.chat_template = TEMPLATES.get(family, _QWEN)
    return wrapped


def build_config(family: str) -> transformers.PretrainedConfig:
    tokens = {"image_token_id": _SPECIAL.index(IMAGE_TOKENS[family])}
    if family == "idefics3":
        vision = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        return transformers.Idefics3Config(
            vision_config={**vision, "image_size": 32, "patch_size": 8},
            text_config={**_TEXT, "model_type": "llama"},
            scale_factor=2,
            pad_token_id=0,
            **tokens,
        )
    if family == "gemma3":
        vision = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        layers = ["sliding_attention", "full_attention"]
        return transformers.Gemma3Config(
            vision_config={**vision, "image_size": 32, "patch_size": 8},
            text_config={
                **_TEXT,
                "head_dim": 8,
                "sliding_window": 7,
                "layer_types": layers,
                "query_pre_attn_scalar": 8,
            },
            mm_tokens_per_image=4,
            boi_token_index=_SPECIAL.index("<start_of_image>"),
            eoi_token_index=_SPECIAL.index("<end_of_image>"),
            **tokens,
        )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    tokens |= {
        name: _SPECIAL.index(f"<|{name.removesuffix('_token_id')}|>")
        for name in ("vision_start_token_id", "vision_end_token_id")
    }
    tokens["video_token_id"] = _SPECIAL.index("<|video_pad|>")
    text = {**_TEXT, "rope_parameters": rope}
    if family == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
        return transformers.Qwen2VLConfig(vision_config=vision, text_config=text, **tokens)
    if family == "qwen2_5_vl":
        vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24}
        vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
        return transformers.Qwen2_5_VLConfig(vision_config=vision, text_config=text, **tokens)
    vision = {"depth": 3, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24}
    vision |= {"patch_size": 4, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return transformers.Qwen3VLConfig(vision_config=vision, text_config={**text, "head_dim": 8}, **tokens)


def build_model(family: str, *, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.AutoModelForImageTextToText.from_config(build_config(family))


def _image_processor(family: str) -> dict[str, Any]:
    if family == "idefics3":
        size = {"longest_edge": 64}
        return {"image_processor_type": "Idefics3ImageProcessor", "size": size, "max_image_size": {"longest_edge": 32}}
    if family == "gemma3":
        return {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}}
    bounds = {"shortest_edge": 64, "longest_edge": 1024}
    return {"image_processor_type": "Qwen2VLImageProcessor", "size": bounds, "patch_size": 4, "merge_size": 2}


def write_model(folder: Path, family: str, *, seed: int = 0) -> Path:
    build_model(family, seed=seed).save_pretrained(folder)
    return write_processor(folder, family)


def write_processor(folder: Path, family: str) -> Path:
    """All of a model's folder but its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    build_config(family).save_pretrained(folder)
    build_tokenizer(family).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_image_processor(family)))
    own = {"idefics3": {"image_seq_len": 4}, "gemma3": {"image_seq_length": 4}}.get(family, {})
    (folder / "processor_config.json").write_text(json.dumps(own))
    return folder


def draw(seed: int, width: int = 24, height: int = 16) -> Any:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write_rows(folder: Path, count: int = 8) -> Path:
    """Rows with no, one or two images of several sizes, as files beside train.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        names = [f"{i}-{n}.png" for n in range((1, 2, 0, 1)[i % 4])]
        for n, name in enumerate(names):
            draw(10 * i + n, 16 + 8 * ((i + n) % 4), 16 + 8 * (i % 3)).save(folder / name)
        parts = [{"type": "image", "path": name} for name in names] + [{"type": "text", "text": f"what is {i}?"}]
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a " * (i % 3) + f"thing {i}"}]
        lines.append(json.dumps({"messages": turns}) + "\n")
    path = folder / "train.jsonl"
    path.write_text("".join(lines))
    return path
