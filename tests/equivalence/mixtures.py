"""Tiny mixtures of experts of several families in float64, and a mode in which nothing rounds to float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import transformers
from equivalence.plain import TINY, keep_float64
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lockstep.config import LoraConfig
from lockstep.model.lora import add_lora
from lockstep.model.policy import causal_lm
from lockstep.model.quantised import quantise_base
from lockstep.types import Datum

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    **TINY,
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# The last is computed by its own code alone: transformers knows no other way for it.
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**TINY, **EXPERTS, head_dim=8, num_experts=4),
    "mixtral": lambda: transformers.MixtralConfig(**TINY, num_local_experts=4),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**DEEPSEEK),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **TINY, num_local_experts=4, num_experts_per_tok=2, head_dim=8, rope_parameters=_PLAIN_ROPE
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**TINY, num_experts=4, num_experts_per_tok=2),
    "llama4_text": lambda: transformers.Llama4TextConfig(
        **TINY, num_local_experts=4, num_experts_per_tok=1, head_dim=8, intermediate_size_mlp=48
    ),
}


def build_mixture(family: str, *, lora: bool = False, changes: Mapping[str, Any] | None = None) -> Any:
    """`family` may end in +nf4: its frozen base is then held in that."""
    family, _, held = family.partition("+")
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.initializer_range = 0.2  # large, so that another expert shows in the log-probs
    for key, value in (changes or {}).items():
        setattr(config, key, value)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.set_experts_implementation("eager")
    keep_float64(model.eval())
    if not lora:
        return model
    model = add_lora(model, LoraConfig(rank=3)).double()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide the gradient of lora_A
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
    if held:
        with torch._C.DisableTorchFunction():  # scales are float32 in every precision
            quantise_base(model, "nf4")
    return model


def own_router_losses(model: Any, batch: Sequence[Datum]) -> tuple[Tensor, Tensor]:
    """(load-balancing loss as transformers itself computes it, over all texts as one batch with padding; z-loss)."""
    texts = [[*datum.prompt, *c.tokens] for datum in batch for c in datum.completions]
    length = max(map(len, texts))
    tokens = torch.tensor([[*text, *[0] * (length - len(text))] for text in texts])
    mask = torch.tensor([[*[1] * len(text), *[0] * (length - len(text))] for text in texts])
    causal = causal_lm(model)
    logits = causal.base_model(
        input_ids=tokens, attention_mask=mask, use_cache=False, output_router_logits=True
    ).router_logits
    config, rows = causal.config, mask.flatten().double()
    z = sum((torch.logsumexp(part.flatten(0, -2), dim=-1).square() * rows).sum() for part in logits)
    aux = load_balancing_loss_func(tuple(logits), logits[0].shape[-1], config.num_experts_per_tok, mask)
    return aux, z / (rows.sum() * len(logits))


class Float64(TorchFunctionMode):
    """Wherever code asks for float32, as routers and their losses do, it gets float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.view:  # of bytes as numbers
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        named = {key: torch.float64 if a is torch.float32 else a for key, a in (kwargs or {}).items()}
        return func(*wide, **named)


def widen_softmax(patch: pytest.MonkeyPatch) -> None:
    """A mode does not reach what is recomputed in backward; of Qwen3-MoE's routers the softmax is all that rounds."""
    honest = torch.nn.functional.softmax

    def softmax(x: Tensor, *arguments: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return honest(x, *arguments, dtype=x.dtype if x.dtype == torch.float64 else dtype, **options)

    patch.setattr(torch.nn.functional, "softmax", softmax)
