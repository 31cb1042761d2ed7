"""Completions per second of the local engine beside transformers' generate: same model, prompts, lengths and sampling.

    python benchmarks/generate.py [--model FOLDER] [--prompts 4 --samples 4 --tokens 32] [--repeats 3]

On a CPU the model is SmolLM2-135M-Instruct in float32. On a GPU it has the shape of Qwen3-0.6B in bf16, with random
weights, and the defaults are 8 prompts, 8 samples, 128 tokens. No completion ends early; the two alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lockstep.inference.engine import LocalEngine
from lockstep.types import SamplingParams

SMOLLM2 = Path.home() / ".cache/lockstep/models/SmolLM2-135M-Instruct"
QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 40960, "rope_theta": 1_000_000,
}  # fmt: skip


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder instead")
    parser.add_argument("--prompts", type=int, default=8 if on_gpu else 4)
    parser.add_argument("--samples", type=int, default=8 if on_gpu else 4)
    parser.add_argument("--tokens", type=int, default=128 if on_gpu else 32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    model = load(options.model, on_gpu)
    prompts = make_prompts(options.prompts, options.prompt_tokens, model.config.vocab_size)
    ours, theirs = our_way(model, prompts, options), their_way(model, prompts, options)
    num_tokens = options.prompts * options.samples * options.tokens
    seconds: dict[str, list[float]] = {"lockstep": [], "transformers": []}
    ours(), theirs()  # the first call allocates, captures and compiles
    for _ in range(options.repeats):
        for name, way in (("lockstep", ours), ("transformers", theirs)):
            seconds[name].append(measure(way))
    for name, times in seconds.items():
        rate = num_tokens / statistics.median(times)
        print(json.dumps({"engine": name, "tokens": num_tokens, "s": [round(t, 3) for t in times],
                          "tokens_per_s": round(rate, 1)}), flush=True)  # fmt: skip
    ratio = statistics.median(seconds["transformers"]) / statistics.median(seconds["lockstep"])
    print(json.dumps({"faster": round(ratio, 2), "device": str(model.device), "threads": torch.get_num_threads()}))


def load(folder: Path | None, on_gpu: bool) -> Any:
    model: Any
    if folder is None and on_gpu:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**QWEN3_06B), dtype=torch.bfloat16)
    else:
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder or SMOLLM2, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.to("cuda" if on_gpu else "cpu").eval()


class SilentTokenizer:
    """For answers that nobody reads and nothing ends."""

    eos_token_id = pad_token_id = bos_token_id = chat_template = None

    def decode(self, tokens: list[int], **options: Any) -> str:
        return ""


def make_prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = [length - 8 * (number % 4) for number in range(count)]
    return [torch.randint(10, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def our_way(model: Any, prompts: list[list[int]], options: argparse.Namespace) -> Callable[[], None]:
    rows = options.prompts * options.samples
    engine = LocalEngine(model, SilentTokenizer(), batch_size=rows, compiles=model.device.type == "cuda")
    params = SamplingParams(options.tokens, temperature=1.0, seed=0, num_samples=options.samples, logprobs=True)

    def answer() -> None:
        found = engine.sample(prompts, params)
        assert all(len(answer.tokens) == options.tokens for group in found for answer in group)

    return answer


def their_way(model: Any, prompts: list[list[int]], options: argparse.Namespace) -> Callable[[], None]:
    width = max(map(len, prompts))
    rows = [row for row in prompts for _ in range(options.samples)]
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=model.device)
    seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)

    def answer() -> None:
        with torch.inference_mode():
            found = model.generate(
                tokens, attention_mask=seen, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
                max_new_tokens=options.tokens,
            )  # fmt: skip
        assert found.shape[1] == width + options.tokens

    return answer


def measure(way: Callable[[], None]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    way()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
