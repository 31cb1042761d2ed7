"""Configurations on which `lockstep verify` is tried with a fault in place: tiny, and each with what a fault needs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tiny
import yaml

_PAIRS = {"kind": "dpo", "beta": 0.5}
_LORA = {"rank": 4, "alpha": 12}
_TIED = {"tie_word_embeddings": True}
_EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
}
# By name: (kind of rows, changes of the model, changes of the configuration)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sft": ("answers", {}, {}),
    "lora": ("answers", {}, {"lora": _LORA}),
    "tied": ("answers", _TIED, {}),
    "biased": ("answers", {"attention_bias": True, "mlp_bias": True}, {}),
    "odd vocabulary": ("answers", {"vocab_size": tiny.VOCABULARY + 1}, {}),
    "qk norm": ("answers", {"model_type": "qwen3"}, {}),
    "window": ("answers", {"model_type": "mistral", "sliding_window": 6}, {}),
    "experts": ("answers", _EXPERTS, {"lora": _LORA, "model": {"router_aux_loss": 0.5}}),
    "experts in nf4": ("answers", _EXPERTS, {"lora": _LORA, "model": {"quantization": "nf4"}}),
    "sft experts": ("answers", _EXPERTS, {}),
    "dropout": ("answers", {}, {"lora": {**_LORA, "dropout": 0.4}}),
    "recomputed dropout": (
        "answers",
        {},
        {"lora": {**_LORA, "dropout": 0.4}, "model": {"activation_checkpointing": "full"}},
    ),
    "dpo": ("pairs", {}, {"algorithm": _PAIRS, "lora": _LORA}),
    "dpo wpo": ("pairs", {}, {"algorithm": {**_PAIRS, "wpo": True}, "lora": _LORA}),
    "dpo copy": ("pairs", {}, {"algorithm": {**_PAIRS, "reference": "copy"}}),
    "dpo follows": ("pairs", {}, {"algorithm": {**_PAIRS, "reference": "copy", "reference_sync_steps": 1}}),
    "grpo": (
        "prompts",
        {},
        {
            "algorithm": {
                "kind": "grpo",
                "group_size": 3,
                "temperature": 0.7,
                "max_tokens": 12,
                "kl_coefficient": 0.1,
                "reward": [{"name": "exact"}],
            },
            "lora": _LORA,
            "batch": {"samples": 3},
        },
    ),
}
_GRPO = CASES["grpo"][2]
CASES["replay"] = ("prompts", _EXPERTS, {**_GRPO, "algorithm": {**_GRPO["algorithm"], "router_replay": True}})
# A short convolution, which carries a state from token to token, beside attention.
CASES["hybrid"] = (
    "answers",
    {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    {},
)
# Optimizers besides AdamW; matrices of the second are large enough for eight bits.
_DECAY = {"weight_decay": 0.1}
CASES["muon"] = ("answers", {}, {"optim": {**_DECAY, "kind": "muon"}})
CASES["eight bits"] = ("answers", {"intermediate_size": 300}, {"optim": {**_DECAY, "kind": "adamw_8bit"}})
CASES["adafactor"] = ("answers", {}, {"optim": {**_DECAY, "kind": "adafactor"}})
CASES["lora plus"] = ("answers", {}, {"lora": {**_LORA, "b_learning_rate_ratio": 8.0}})
CASES["router biases"] = (
    "answers",
    {
        "model_type": "deepseek_v3",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    },
    {"model": {"router_bias_rate": 0.01}},
)
_HEADS = {"num_hidden_layers": 4, "num_key_value_heads": 2}


def write_case(name: str, folder: Path) -> Path:
    """The configuration of a case, with its model and rows, in `folder`."""
    kind, model, changes = CASES[name]
    path = _write_model(folder / "model", {**_HEADS, **model})
    rows = folder / "train.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in _rows(kind)))
    settings = {"batch": {"samples": 6}, "optim": {"weight_decay": 0.1}, **changes}
    of_model = settings.pop("model", {})
    written = tiny.write_config(folder, path, **settings)
    configured = yaml.safe_load(written.read_text())
    configured["model"] |= of_model
    written.write_text(yaml.safe_dump(configured))
    return written


def _write_model(folder: Path, changes: dict[str, Any]) -> Path:
    kind = changes.pop("model_type", "llama")
    if kind == "llama":
        return tiny.write_model(folder, **changes)
    import transformers

    settings = tiny.build_model(**{k: v for k, v in changes.items() if k != "sliding_window"}).config.to_dict()
    settings |= changes | {"model_type": kind}
    settings.pop("architectures", None)
    transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**{k: v for k, v in settings.items() if k != "head_dim"}, head_dim=8)
    ).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return folder


def _rows(kind: str) -> list[dict[str, Any]]:
    draw = random.Random(0)

    def text(fewest: int = 2, most: int = 6) -> str:
        return " ".join(draw.choices(tiny.WORDS, k=draw.randint(fewest, most)))

    if kind == "pairs":
        return [{"prompt": text(), "chosen": text(), "rejected": text(1, 3)} for _ in range(24)]
    if kind == "prompts":
        return [{"prompt": text(), "answer": text(1, 1)} for _ in range(24)]
    return [{"prompt": text(), "completion": text()} for _ in range(24)]
