"""The plainest computation there is: one rank, one document at a time, the model's own forward, full logits, float64.

Attention is the model's default: transformers' eager one computes its softmax in float32 whatever the model is in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from lockstep.config import LoraConfig
from lockstep.model.lora import add_lora
from lockstep.model.quantised import dequantise_base, quantise_base
from lockstep.model.quantised_layers import QUANTISED
from lockstep.types import Completion, Datum, OptimStep

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**TINY, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=8, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**TINY, sliding_window=6),
    "gemma": lambda: transformers.GemmaConfig(**TINY, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**TINY, head_dim=8, sliding_window=6),
    "phi3": lambda: transformers.Phi3Config(**TINY),
    "gpt2": lambda: transformers.GPT2Config(**_GPT2, **_NO_DROPOUT, eos_token_id=2),
    "granite": lambda: transformers.GraniteConfig(**TINY, logits_scaling=3.0),
    "olmo": lambda: transformers.OlmoConfig(**TINY),
    "bloom": lambda: transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
}


def _with_sequence_regions(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """Norms are to be computed on a part of the tokens. transformers knows this style; no plan of its own has it."""
    norms = ("norm", "layers.*.input_layernorm", "layers.*.post_attention_layernorm")
    config.base_model_tp_plan = {**config.base_model_tp_plan, **dict.fromkeys(norms, "sequence_parallel")}
    return config


SEQUENCE_FAMILIES = {
    f"{family}-sequence": lambda family=family: _with_sequence_regions(FAMILIES[family]())
    for family in ("llama", "qwen3")
}

# With what FAMILIES do not have: layers that are split by rows and have a bias.
BIASED_FAMILIES = {
    "llama-biased": lambda: transformers.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "llama-wide": lambda: transformers.LlamaConfig(**{**TINY, "intermediate_size": 300}, attention_bias=True),
}

STEP = OptimStep(learning_rate=1e-2, beta2=0.99, eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)


ADAPTERS: dict[str, dict[str, Any]] = {
    "pissa": {"init": "pissa", "rslora": True},
    "ends": {"targets": ("q_proj", "down_proj", "embed_tokens", "lm_head")},
    "saved": {"modules_to_save": ("embed_tokens", "lm_head", "norm")},
}


def make_model(family: str, *, lora: bool) -> nn.Module:
    """`family` may end in +nf4 or +fp8: the frozen base is then held in that; or in + and one of `ADAPTERS`."""
    family, _, what = family.partition("+")
    torch.manual_seed(0)
    config = {**FAMILIES, **SEQUENCE_FAMILIES, **BIASED_FAMILIES}[family]()
    model = keep_float64(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64))
    if not lora:
        return model
    model = add_lora(model, LoraConfig(rank=4, alpha=8, **ADAPTERS.get(what, {})))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and what != "pissa":  # zero at first, which would hide the gradient of lora_A
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
    model = model.double()
    if what in QUANTISED:
        quantise_base(model, what)  # type: ignore[arg-type]
    return model


def keep_float64(model: nn.Module) -> nn.Module:
    """Norms compute in float32 whatever the model is in, and round gradients to it on the way back.

    A prompt that is computed once, for two answers, gets the rounded sum of what two prompts get as a sum of rounded
    ones. To see that they are otherwise the same, norms must not round.
    """
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            # Given the module, not its weight: layouts put other tensors into its place.
            module.forward = functools.partial(_rms_norm, module)
        elif name == "OlmoLayerNorm":
            module.forward = functools.partial(
                nn.functional.layer_norm, normalized_shape=module.normalized_shape, eps=1e-5
            )
    return model


def _rms_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    scaled = (wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)).to(hidden.dtype)
    return scaled * (1 + module.weight if type(module).__name__.startswith("Gemma") else module.weight)


def make_batch(seed: int = 0, rows: int = 11) -> list[Datum]:
    """Documents of 4 to 41 tokens, weights of several sizes, gaps inside answers, one row with two completions.

    Each begins with token 0, the padding token, whose embedding gets no gradient.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    batch = []
    for row in range(rows):
        completions = []
        for _ in range(2 if row == 3 else 1):
            (length,) = draw(2, 30, 1)
            weights = [[0.0, 1.0, 0.5][w] for w in draw(0, 3, length)]
            completions.append(Completion(draw(0, 97, length), [*weights[:-1], 1.0]))
        batch.append(Datum([0, *draw(0, 97, draw(1, 10, 1)[0])], completions, f"row {row}"))
    return batch


def forget_lengths(model: nn.Module) -> None:
    """Dynamic NTK keeps the frequencies of the longest text so far: each text is to be the first."""
    for module in model.modules():
        if hasattr(module, "original_inv_freq") and hasattr(module, "original_max_seq_len"):
            module.inv_freq = module.original_inv_freq
            module.max_seq_len_cached = module.original_max_seq_len


def logprobs_of(model: nn.Module, datum: Datum, completion: Completion) -> torch.Tensor:
    forget_lengths(model)
    tokens = torch.tensor([*datum.prompt, *completion.tokens])
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    every = torch.log_softmax(logits, dim=-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    return every[len(datum.prompt) - 1 :]


def plain_loss(model: nn.Module, batch: Sequence[Datum], scale: float) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for datum in batch:
        for completion in datum.completions:
            weights = torch.tensor(completion.weights, dtype=torch.float64) * scale
            total = total - (weights * logprobs_of(model, datum, completion)).sum()
    return total


def plain_run(family: str, *, lora: bool, batches: Sequence[Sequence[Datum]]) -> dict:
    """Loss, gradients, norm and log-probs of the first batch, and the weights after a step on each."""
    model = make_model(family, lora=lora)
    dequantise_base(model, torch.float64)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(trained)
    found: dict = {}
    with torch.no_grad():
        found["logprobs"] = [[logprobs_of(model, d, c).tolist() for c in d.completions] for d in batches[0]]
    for batch in batches:
        loss = plain_loss(model, batch, scale_of(batch))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in trained.items()}
        norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), STEP.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.setdefault("loss", loss.item())
        found.setdefault("gradients", gradients)
        found.setdefault("norm", norm.item())
    found["weights"] = {name: p.detach().clone() for name, p in trained.items()}
    return found


def make_optimizer(trained: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    """AdamW that makes `STEP`, but for clipping. Norms and biases do not decay."""
    decaying = [p for p in trained.values() if p.ndim >= 2]
    flat = [p for p in trained.values() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decaying, "weight_decay": STEP.weight_decay}, {"params": flat, "weight_decay": 0.0}],
        lr=STEP.learning_rate,
        betas=(STEP.beta1, STEP.beta2),
        eps=STEP.eps,
    )


def scale_of(batch: Sequence[Datum]) -> float:
    return 1.0 / sum(datum.total_weight for datum in batch)
