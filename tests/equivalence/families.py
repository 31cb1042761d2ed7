"""Every family of transformers' causal language models as a tiny random model, in float64.

Sizes are set by the names that configurations have in common; what a family needs beyond them is in HINTS.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_SIZES: dict[int, str] = {
    97: "vocab_size",
    32: "hidden_size d_model n_embd dim dim_model embedding_size emb_dim embed_dim word_embed_proj_dim "
    "hidden_size_global",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim dim_ff n_inner ffn_hidden_size feed_forward_size "
    "shared_expert_intermediate_size decoder_intermediate_size ffn_intermediate_size dense_intermediate_size",
    16: "moe_intermediate_size expert_ffn_hidden_size q_lora_rank o_lora_rank shared_intermediate_size lru_width",
    4: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads "
    "encoder_attention_heads decoder_attention_heads conv_kernel mamba_d_conv linear_conv_kernel_dim num_experts "
    "n_routed_experts num_local_experts moe_num_experts qk_rope_head_dim mamba_num_heads mamba_n_heads n_mamba_heads "
    "linear_num_value_heads linear_num_key_heads",
    2: "num_key_value_heads encoder_layers decoder_layers num_kv_heads num_experts_per_tok moe_topk moe_k "
    "top_k_experts",
    8: "head_dim kv_lora_rank qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim chunk_size "
    "mamba_d_state ssm_state_size state_size mamba_head_dim mamba_d_head index_head_dim mamba_chunk_size",
    128: "max_position_embeddings n_positions max_seq_len n_ctx max_length max_target_positions",
    1: "n_group topk_group num_expert_group num_limited_groups n_shared_experts mamba_n_groups n_groups "
    "num_nextn_predict_layers mamba_expand",
    6: "sliding_window attention_window_size",
}
SIZES: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2, "init_std": 0.2}

_GEMMA4: dict[str, Any] = {
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {1: {"head_dim": 16}, 3: {"head_dim": 16}},
}
_QWEN4: dict[str, Any] = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
    "ple_embed_dim": 32,
}
_DOTS3: dict[str, Any] = {  # two layers choose their keys; two have windows, and heads of another number and size
    "index_n_heads": 16,  # with few, many scores are zero, and which of the equal ones are chosen is left to chance
    "index_topk": 5,
    "head_dim": 16,
    "shared_experts_intermediate_size": 16,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 12,
    "swa_kv_lora_rank": 12,
    "swa_head_dim": 10,
    "swa_qk_nope_head_dim": 6,
    "swa_v_head_dim": 6,
}
_INKLING: dict[str, Any] = {
    "d_rel": 8,
    "rel_extent": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 6,
}
_MUSIC: dict[str, Any] = {"dropout": 0.0}

HINTS: dict[str, dict[str, Any]] = {
    "blt": {
        "global_config": {"intermediate_size": 48},
        "encoder_hash_byte_group_vocab": 20,
        "encoder_hash_byte_group_size": [3],
    },
    "bailing_hybrid": {"num_experts_per_token": 2, "layer_group_size": 2, "first_k_dense_replace": 1},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 100.0}},
    },
    "dbrx": {
        "ffn_config": {"hidden_size": 32, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 100.0, "clip_qkv": 8.0},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32, "mlp_layer_types": ["dense", "sparse"] * 2},
        "audio_config": {
            "adapter_input_size": 32,
            "adapter_out_dim": 32,
            "feature_size": 8,
            "downsample_hidden_size": 8,
        },
    },
    "dots3_note_text": _DOTS3,
    "falcon_h1": {"mamba_d_ssm": 32},
    "gemma3": {"text_config": {"layer_types": ["sliding_attention", "full_attention"] * 2}},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 97}},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    # transformers 5.23 does not build its own default, in which every layer takes its keys from another one.
    "gemma4_unified_assistant": {
        "text_config": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    },
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "gptj": {"rotary_dim": 4},
    "inkling_text": _INKLING,
    "inkling2_text": {
        **_INKLING,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "n_layers_per_attn_res_block": 2,
        "log_scaling_n_floor": 4,
        "vocab_size": 104,
        "unpadded_vocab_size": 97,
    },
    "kimi_linear": {
        "num_experts_per_token": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "longcat_flash": {"head_dim": 4, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "modernbert-decoder": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "musicgen": _MUSIC,
    "musicgen_melody": _MUSIC,
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"axial_pos_embds": False, "local_attn_chunk_length": 8, "attn_layers": ["local"] * 2},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": 20,
        "shape_embed_dim": 8,
        "shape_vocab_size": 20,
    },
    "xlnet": {"d_inner": 48, "d_head": 8},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
        "mamba_expand": 2,
        "num_key_value_heads": 4,
        "attention_head_dim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(name: str) -> transformers.PretrainedConfig:
    config_class = transformers.CONFIG_MAPPING[name]
    return config_class(**_merge(_sizes_for(config_class), HINTS.get(name, {})))


def _sizes_for(config_class: Any) -> dict[str, Any]:
    config = config_class()
    defaults = config.to_dict()
    found = {
        name: SIZES[name] for name in defaults if name in SIZES and (defaults[name] is not None or name == "head_dim")
    }
    if "qk_rope_head_dim" in found:  # latent attention: no head size of its own, as many key heads as query heads
        found.pop("head_dim", None)
        found["num_key_value_heads"] = found["num_attention_heads"]
    found |= {name: 0.0 for name, value in defaults.items() if _is_dropout(name, value)}
    if "is_decoder" in defaults:
        found["is_decoder"] = True
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            found[name] = _sizes_for(type(part))
    return found


def _merge(settings: dict[str, Any], hints: dict[str, Any]) -> dict[str, Any]:
    merged = {**settings, **hints}
    for name, value in hints.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            merged[name] = _merge(settings[name], value)
    return {name: value for name, value in merged.items() if value is not ...}


def _is_dropout(name: str, value: object) -> bool:
    return isinstance(value, float) and ("dropout" in name or name.endswith(("pdrop", "_drop")))


def build(name: str) -> Any:
    """With every parameter moved a little: what is initialised to zero or one must matter."""
    config = tiny_config(name)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no float64
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # in transformers 5.17 `sdpa`, its default, does not cap
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter.dtype), alpha=0.05)
    return model.double().eval()


class _Wide(TorchFunctionMode):
    """What models compute in float32 whatever they are in, such as norms and softmax, is float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(default)
