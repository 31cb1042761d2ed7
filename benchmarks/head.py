"""The output head alone on a GPU: log-probs and gradients of 8,192 tokens, beside the bare matrix products.

    python benchmarks/head.py [--tokens 8192 --hidden 4096 --vocabulary 151936]

Each way is timed after a warm-up; memory is what it adds, with weight, hidden states and gradients counted in.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.model.head import HeadOptions, target_logprobs, weighted_logprob_sum


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151936)
    sizes = parser.parse_args()
    full = sizes.tokens * sizes.vocabulary * 2
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
        "bare products": bare_products,
        "plain compiled cross-entropy": plain,
        "known gradient, one chunk (SFT)": known_gradient(sizes.tokens),
        "known gradient, chunks of 4096": known_gradient(4096),
        "known gradient, chunks of 1024": known_gradient(1024),
        "any loss, logits kept (DPO, RL)": any_loss(sizes.tokens, full),
        "any loss, chunks of 1024, computed again": any_loss(1024, 0),
        "any loss, head frozen": frozen(sizes.tokens),
        "any loss, head frozen, chunks of 1024": frozen(1024),
    }
    bare = None
    for name, way in ways.items():
        milliseconds, gib = measure(way, sizes)
        bare = bare or milliseconds
        print(json.dumps({"way": name, "ms": round(milliseconds, 1), "over_bare": round(milliseconds / bare, 2),
                          "gib": round(gib, 2)}), flush=True)  # fmt: skip


def measure(way: Callable[[Tensor, Tensor, Tensor], None], sizes: argparse.Namespace) -> tuple[float, float]:
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(sizes.tokens, sizes.hidden, **bf16).requires_grad_()  # type: ignore[call-overload]
    weight = torch.randn(sizes.vocabulary, sizes.hidden, **bf16).mul_(0.02).requires_grad_()  # type: ignore[call-overload]
    targets = torch.randint(sizes.vocabulary, (sizes.tokens,), device="cuda")

    def step() -> None:
        hidden.grad = weight.grad = None
        way(hidden, weight, targets)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[len(times) // 2], (torch.cuda.max_memory_allocated() - before) / 2**30


def bare_products(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    with torch.no_grad():
        logits = hidden @ weight.T
        hidden.grad, weight.grad = logits @ weight, logits.T @ hidden


@torch.compile
def _cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), targets)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    _cross_entropy(hidden, weight, targets).backward()


def known_gradient(chunk_tokens: int) -> Callable[[Tensor, Tensor, Tensor], None]:
    def way(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
        grad_logprobs = torch.full(targets.shape, -1 / len(targets), device="cuda")
        total, _ = weighted_logprob_sum(
            hidden, weight, None, targets, grad_logprobs, HeadOptions(chunk_tokens=chunk_tokens)
        )
        total.backward()

    return way


def any_loss(chunk_tokens: int, kept_bytes: int) -> Callable[[Tensor, Tensor, Tensor], None]:
    def way(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
        options = HeadOptions(chunk_tokens=chunk_tokens, kept_bytes=kept_bytes)
        torch.sigmoid(-target_logprobs(hidden, weight, None, targets, options)).mean().backward()

    return way


def frozen(chunk_tokens: int) -> Callable[[Tensor, Tensor, Tensor], None]:
    def way(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
        options = HeadOptions(chunk_tokens=chunk_tokens)
        torch.sigmoid(-target_logprobs(hidden, weight.detach(), None, targets, options)).mean().backward()

    return way


if __name__ == "__main__":
    main()
