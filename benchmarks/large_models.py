"""LoRA on models that fill one CUDA GPU, from random weights: tokens per second, memory, and where the time goes.

    python benchmarks/large_models.py [--case 30b-a3b 30b-a3b-kept 30b-a3b-grpo next 70b-nf4] [--seconds 120]
    python benchmarks/large_models.py --tiny                                # a few layers of a few numbers, on a CPU

Weights are made and quantised on the GPU, one matrix of each size: 70 B never exist in bf16. Steps are whole ones of
the backend (forward, backward, clipping, AdamW) on packed documents; the first ones, which compile, are left out. A
step of GRPO samples with the engine from the model in training, and learns from all answers.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.inference.engine import LocalEngine
from lockstep.model.experts import hold_in_nf4
from lockstep.model.lora import add_lora
from lockstep.model.quantised import quantise_base, quantise_stack
from lockstep.model.quantised_layers import QUANTISED, QuantisedLinear
from lockstep.types import Completion, Datum, LossSpec, OptimStep, SamplingParams

_LLAMA = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": False}
_MIXTURE = {
    "hidden_size": 2048,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "8b": ("Llama", {**_LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
                     "num_hidden_layers": 32, "num_attention_heads": 32}),
    "70b": ("Llama", {**_LLAMA, "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
                      "num_hidden_layers": 80, "num_attention_heads": 64}),
    "30b-a3b": ("Qwen3Moe", {**_MIXTURE, "vocab_size": 151936, "num_hidden_layers": 48, "num_attention_heads": 32,
                             "num_key_value_heads": 4, "intermediate_size": 6144}),
    # Qwen3-Next-80B-A3B with a third of its layers and a quarter of its experts.
    "next": ("Qwen3Next", {**_MIXTURE, "vocab_size": 151936, "num_hidden_layers": 16, "num_attention_heads": 16,
                           "num_key_value_heads": 2, "head_dim": 256, "num_experts_per_tok": 10,
                           "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
                           "intermediate_size": 5120}),
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


class Case(NamedTuple):
    shape: str
    held: str = "bf16"  # the frozen base
    document: int = 4096
    checkpointing: str = "none"
    method: str = "sft"


CASES = {
    "30b-a3b": Case("30b-a3b", checkpointing="full"),
    "30b-a3b-kept": Case("30b-a3b", checkpointing="selective"),
    "30b-a3b-nf4": Case("30b-a3b", "nf4", checkpointing="full"),
    "30b-a3b-grpo": Case("30b-a3b", checkpointing="full", method="grpo"),
    "next": Case("next"),
    "next-short": Case("next", document=256),
    "70b-nf4": Case("70b", "nf4", checkpointing="full"),
    "8b-nf4": Case("8b", "nf4"),
    "8b-fp8": Case("8b", "fp8"),
    "8b-bf16": Case("8b"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES)[:7])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--micro", type=int, help="of a micro-batch; default all of the step")
    parser.add_argument("--prompts", type=int, default=16, help="of a step of GRPO")
    parser.add_argument("--samples", type=int, default=8, help="answers to each")
    parser.add_argument("--answer", type=int, default=128, help="tokens of each")
    parser.add_argument("--seconds", type=int, default=120, help="the most for a case")
    parser.add_argument("--profile", action="store_true", help="also say what kernels took the time of one step")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), help="instead of the case's own")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.tokens, options.prompts, options.samples, options.answer = 256, 2, 2, 8
    options.device = torch.device("cpu" if options.tiny and not torch.cuda.is_available() else "cuda")
    for name in options.case:
        try:
            with at_most(options.seconds):
                found, step = measure(CASES[name], options)
                print(json.dumps({"case": name, **found}), flush=True)
                if options.profile:  # under a profiler a step may take many times as long
                    print(json.dumps({"case": name, "profile": profile(step)}), flush=True)
        except Exception:
            print(f"{name} failed", flush=True)
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def measure(case: Case, options: argparse.Namespace) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """What was found, and the step that was measured."""
    begun = time.monotonic()
    model = random_model(case, options)
    wait(options)
    built_s, weights = time.monotonic() - begun, allocated(options)
    backend = TorchBackend(
        model,
        micro_batch_tokens=options.micro or options.tokens,
        precision="fp32" if options.device.type == "cpu" else "bf16",
        activation_checkpointing=options.checkpointing or case.checkpointing,
        compile=False if options.eager else "auto",
        device=options.device.type,
    )
    step = policy_step(backend, options) if case.method == "grpo" else supervised_step(backend, case, options)
    first = [timed(step, options) for _ in range(2)]
    if options.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = [timed(step, options) for _ in range(options.steps)]
    median = sorted(found, key=lambda result: result["s"])[len(found) // 2]
    result = {
        "tokens_per_s": round(median["tokens"] / median["s"]),
        **{key: value for key, value in median.items() if key not in ("s", "tokens")},
        "step_ms": round(1000 * median["s"], 1),
        "first_step_s": round(first[0]["s"], 1),
        "weights_gib": round(weights / 2**30, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if options.device.type == "cuda" else None,
        "built_s": round(built_s, 1),
        "slow": backend.slow,
    }
    return result, step


def timed(step: Callable[[], dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    wait(options)
    started = time.monotonic()
    found = step()
    wait(options)
    return {**found, "s": time.monotonic() - started}


def wait(options: argparse.Namespace) -> None:
    if options.device.type == "cuda":
        torch.cuda.synchronize()


def allocated(options: argparse.Namespace) -> int:
    return torch.cuda.memory_allocated() if options.device.type == "cuda" else 0


# --- steps ----------------------------------------------------------------------------------------------------------


def supervised_step(backend: TorchBackend, case: Case, options: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    draw, vocabulary = torch.Generator().manual_seed(0), backend.policy.model.config.vocab_size  # type: ignore[union-attr]
    size, batch = min(case.document, options.tokens), []
    for number in range(options.tokens // size):
        tokens = torch.randint(0, vocabulary, (size,), generator=draw).tolist()
        batch.append(Datum(tokens[:1], [Completion(tokens[1:], [1.0] * (size - 1))], f"piece {number}"))

    def step() -> dict[str, Any]:
        result = backend.forward_backward(batch, LossSpec(scale=1 / options.tokens))
        backend.optim_step(OptimStep(learning_rate=1e-4, max_grad_norm=1.0))
        return {"tokens": options.tokens, "loss": round(result.loss, 3)}

    return step


def policy_step(backend: TorchBackend, options: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """Prompts of 64 tokens; advantages are drawn. Tokens are those of answers."""
    from generate import SilentTokenizer

    draw, vocabulary = torch.Generator().manual_seed(0), backend.policy.model.config.vocab_size  # type: ignore[union-attr]
    prompts = [torch.randint(0, vocabulary, (64,), generator=draw).tolist() for _ in range(options.prompts)]
    params = SamplingParams(options.answer, temperature=1.0, num_samples=options.samples, logprobs=True)
    num_tokens = options.prompts * options.samples * options.answer
    engines: list[LocalEngine] = []

    def step() -> dict[str, Any]:
        started = time.monotonic()
        with backend.lend_model(stable=True) as model:
            if not engines:
                model.generation_config.eos_token_id = None  # type: ignore[union-attr]
                engines.append(LocalEngine(model, SilentTokenizer()))  # type: ignore[arg-type]
            groups = engines[0].sample(prompts, params)
        wait(options)
        sampled = time.monotonic() - started
        batch = [Datum(prompt, [_answer(a, draw) for a in group]) for prompt, group in zip(prompts, groups)]
        result = backend.forward_backward(batch, LossSpec("policy_gradient", 1 / num_tokens, {"on_policy": True}))
        backend.optim_step(OptimStep(learning_rate=1e-5, max_grad_norm=1.0))
        return {
            "tokens": num_tokens,
            "sampling_ms": round(1000 * sampled, 1),
            "loss": round(result.loss, 4),
            "sampler_trainer_logprob_diff": round(
                result.metrics.get("sampler_trainer_logprob_diff", 0.0) / num_tokens, 5
            ),
        }

    return step


def _answer(answer: Any, draw: torch.Generator) -> Completion:
    advantage = float(torch.randn((), generator=draw))
    values = {"advantages": [advantage] * len(answer.tokens), "behaviour_logprobs": answer.logprobs}
    return Completion(answer.tokens, [1.0] * len(answer.tokens), values)


# --- where the time goes --------------------------------------------------------------------------------------------

# Of the names of kernels, the first that fits decides.
_KINDS = {
    "grouped products": ("grouped", "GroupProblemShape", "ProblemVisitor"),
    "dequantise": ("dequantise",),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "delta rule": ("chunk_", "delta", "wy_"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "splitK", "xmma"),
    "optimizer": ("multi_tensor", "adam"),
    "sorting": ("sort", "scan", "searchsorted", "topk", "histogram"),
    "gather and scatter": ("index", "gather", "scatter"),
    "copies": ("copy", "memcpy", "memset", "cat"),
    "compiled": ("triton_",),
    "elementwise": ("elementwise", "reduce", "softmax", "vectorized"),
}


def profile(step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of one step's kernels by kind, and the kernels that took longest."""
    activity = torch.profiler.ProfilerActivity
    on_gpu = torch.cuda.is_available()
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as recorded:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    kinds, names = Counter[str](), Counter[str]()
    for event in recorded.key_averages():
        taken = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000
        kind = next((k for k, parts in _KINDS.items() if any(p.lower() in event.key.lower() for p in parts)), "others")
        kinds[kind] += taken
        names[event.key[:90]] += taken
    return {
        "ms": {kind: round(ms, 1) for kind, ms in kinds.most_common()},
        "longest": {name: round(ms, 1) for name, ms in names.most_common(14)},
    }


# --- models ---------------------------------------------------------------------------------------------------------


def random_model(case: Case, options: argparse.Namespace) -> nn.Module:
    """On the device, one matrix after another."""
    family, shape = SHAPES[case.shape]
    kind, of_config = (getattr(transformers, f"{family}{end}") for end in ("ForCausalLM", "Config"))
    config = of_config(
        **{**shape, **({k: v for k, v in TINY.items() if k in dir(of_config())} if options.tiny else {})}
    )
    with torch.device("meta"):
        model = add_lora(kind(config).to(torch.bfloat16), LoraConfig(rank=16, alpha=32))
    if case.held != "bf16":
        quantise_base(model, case.held)  # type: ignore[arg-type]
    draw = torch.Generator(options.device).manual_seed(0)

    def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=options.device).normal_(std=0.02, generator=draw)

    known: dict[tuple[int, int], nn.Module] = {}

    def quantised(child: QuantisedLinear) -> nn.Module:
        """The same matrix for all layers of a size: to quantise each takes minutes, and no product is faster for it."""
        size = (child.out_features, child.in_features)
        if size not in known:
            like: Any = SimpleNamespace(weight=values(size, torch.bfloat16), bias=None)
            known[size] = QUANTISED[case.held](like, like.weight)  # type: ignore[index]
        return copy.deepcopy(known[size])

    for module in [module for module in model.modules() if not isinstance(module, QuantisedLinear)]:
        for key, child in list(module.named_children()):
            if isinstance(child, QuantisedLinear):
                setattr(module, key, quantised(child))
        _fill(module, values, options.device)
    _place_buffers(model, config, options.device)
    return model


def _fill(module: Any, values: Callable[[tuple[int, ...], torch.dtype], Tensor], device: torch.device) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        if parameter.dtype == torch.uint8:
            continue
        if parameter.ndim == 1:  # norms; of delta rules, small numbers
            value = torch.ones(parameter.shape, dtype=parameter.dtype, device=device)
        else:
            value = values(tuple(parameter.shape), parameter.dtype)
        module.register_parameter(key, nn.Parameter(value, parameter.requires_grad))
    stacks = {
        key: _random_stack(parameter, values)
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dtype == torch.uint8 and parameter.ndim == 3
    }
    if stacks:
        hold_in_nf4(module, stacks)


def _random_stack(codes: Tensor, values: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> Any:
    """Here too the same matrix for all experts."""
    one = quantise_stack(values((1, codes.shape[1], 2 * codes.shape[2]), torch.bfloat16))
    return [part.expand(codes.shape[0], *part.shape[1:]).contiguous() for part in one]


def _place_buffers(model: Any, config: Any, device: torch.device) -> None:
    base = model.get_base_model().model
    base.rotary_emb = type(base.rotary_emb)(config).to(device)
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not left, f"without values: {left[:3]}"


if __name__ == "__main__":
    main()
