"""LoRA on one CUDA GPU with its base in bf16, FP8 and NF4: tokens per second and memory, from random weights.

    python benchmarks/quantised_base.py [--case 8b-nf4 8b-fp8 8b-bf16 70b-nf4] [--steps 8] [--seconds 200]

Weights are made and quantised one matrix at a time on the GPU: 70 B never exist in bf16. Steps are whole ones of the
backend (forward, backward, clipping, AdamW) on packed documents; the first ones, which compile, are left out.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.model.lora import add_lora
from lockstep.model.quantised import quantise_base
from lockstep.model.quantised_layers import QUANTISED, QuantisedLinear
from lockstep.types import Completion, Datum, LossSpec, OptimStep

_LLAMA = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
CASES = ("8b-nf4", "8b-fp8", "70b-nf4", "8b-bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--document", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no case after this long")
    arguments = parser.parse_args()
    started = time.monotonic()
    for case in arguments.case:
        if time.monotonic() - started > arguments.seconds:
            print(f"{case}: no time left", flush=True)
            continue
        try:
            print(json.dumps(measure(case, arguments)), flush=True)
        except Exception:
            traceback.print_exc()
        torch.cuda.empty_cache()


def measure(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    name, _, held = case.partition("-")
    begun = time.monotonic()
    torch.cuda.reset_peak_memory_stats()
    model = random_model({**_LLAMA, **SHAPES[name]}, held)
    built_s, weights = time.monotonic() - begun, torch.cuda.memory_allocated()
    checkpointing = "full" if name == "70b" else "none"
    backend = TorchBackend(
        model, micro_batch_tokens=arguments.tokens, precision="bf16", activation_checkpointing=checkpointing
    )
    draw = torch.Generator().manual_seed(0)
    batch = []
    for i in range(arguments.tokens // arguments.document):
        tokens = torch.randint(0, 128256, (arguments.document,), generator=draw).tolist()
        batch.append(Datum(tokens[:1], [Completion(tokens[1:], [1.0] * (len(tokens) - 1))], f"piece {i}"))
    times = []
    for _ in range(2 + arguments.steps):
        torch.cuda.synchronize()
        start = time.monotonic()
        result = backend.forward_backward(batch, LossSpec(scale=1 / arguments.tokens))
        backend.optim_step(OptimStep(learning_rate=1e-4, max_grad_norm=1.0))
        loss = result.loss
        torch.cuda.synchronize()
        times.append(time.monotonic() - start)
    median = sorted(times[2:])[len(times[2:]) // 2]
    return {
        "case": case,
        "tokens_per_s": round(arguments.tokens / median),
        "step_ms": round(1000 * median, 1),
        "first_step_s": round(times[0], 1),
        "weights_gib": round(weights / 2**30, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "built_s": round(built_s, 1),
        "loss": round(loss, 3),
    }


def random_model(shape: dict[str, Any], held: str) -> nn.Module:
    """On the GPU, one matrix after another."""
    config = transformers.LlamaConfig(**shape)
    with torch.device("meta"):
        model = add_lora(transformers.LlamaForCausalLM(config).to(torch.bfloat16), LoraConfig(rank=16, alpha=32))
    if held != "bf16":
        quantise_base(model, held)  # type: ignore[arg-type]
    for module in [module for module in model.modules() if not isinstance(module, QuantisedLinear)]:
        for key, child in list(module.named_children()):
            if isinstance(child, QuantisedLinear):
                weight = 0.02 * torch.randn(child.out_features, child.in_features, device="cuda", dtype=torch.bfloat16)
                like: Any = SimpleNamespace(weight=weight, bias=None)
                setattr(module, key, QUANTISED[held](like, weight))  # type: ignore[index]
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                module.register_parameter(key, nn.Parameter(_values(parameter), parameter.requires_grad))
    rotary = model.get_base_model().model  # type: ignore[operator]
    rotary.rotary_emb = type(rotary.rotary_emb)(config).cuda()
    return model


def _values(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.ndim == 1:
        return torch.ones(parameter.shape, dtype=parameter.dtype, device="cuda")
    return 0.02 * torch.randn(parameter.shape, dtype=parameter.dtype, device="cuda")


if __name__ == "__main__":
    main()
