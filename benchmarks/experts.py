"""The experts of one layer, forward and backward: Lockstep's products beside transformers' own, and adapters on them
beside PEFT's own.

    python benchmarks/experts.py [--tokens 2048 --experts 64 --chosen 4 --hidden 512 --inner 256 --rank 16]

Each way is timed after a warm-up, the best of several. On a GPU in bf16, otherwise in float32.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from lockstep.config import LoraConfig
from lockstep.model.experts import compute_experts
from lockstep.model.lora import add_lora

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in {"tokens": 2048, "experts": 64, "chosen": 4, "hidden": 512, "inner": 256, "rank": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--repeats", type=int, default=5)
    sizes = parser.parse_args()
    model = build(sizes)
    experts = model.model.layers[0].mlp.experts
    for kind in ("eager", "grouped_mm"):
        model.set_experts_implementation(kind)
        report(f"transformers {kind}, full", experts, sizes)
    report("lockstep, full", lambda *given: compute_experts(experts, *given, {}), sizes, experts)
    model.set_experts_implementation("grouped_mm")
    adapted = add_lora(build(sizes), LoraConfig(rank=sizes.rank)).to(DEVICE, DTYPE)
    report("lockstep, adapters", adapted.get_base_model().model.layers[0].mlp.experts, sizes)
    config = peft.LoraConfig(r=sizes.rank, target_modules=[], target_parameters=list(NAMES))
    plain: Any = peft.get_peft_model(build(sizes), config).to(DEVICE, DTYPE)
    report("PEFT, adapters", plain.get_base_model().model.layers[0].mlp.experts, sizes)


NAMES = ("experts.gate_up_proj", "experts.down_proj")


def build(sizes: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.inner,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.chosen,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return transformers.Qwen3MoeForCausalLM(config).to(DEVICE, DTYPE)


def report(name: str, way: Callable[..., Tensor], sizes: argparse.Namespace, module: Any = None) -> None:
    module = module or way
    torch.manual_seed(1)
    hidden = torch.randn(sizes.tokens, sizes.hidden, device=DEVICE, dtype=DTYPE, requires_grad=True)
    scores = torch.rand(sizes.tokens, sizes.experts, device=DEVICE).topk(sizes.chosen)
    chosen, weights = scores.indices, scores.values.to(DTYPE)
    best = float("inf")
    for _ in range(sizes.repeats + 1):
        module.zero_grad(set_to_none=True)
        wait()
        started = time.perf_counter()
        way(hidden, chosen, weights).square().sum().backward()
        wait()
        best = min(best, time.perf_counter() - started)
    print(json.dumps({"way": name, "ms": round(best * 1e3, 1)}), flush=True)


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
