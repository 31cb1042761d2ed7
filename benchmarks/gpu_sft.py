"""Supervised fine-tuning on one CUDA GPU: tokens per second and memory of the real loop, after a check for correctness.

    python benchmarks/gpu_sft.py --rows alpaca.json --tokenizer FOLDER [--case full-16k full-32k lora-8b]

Random weights in the shapes of Qwen3-0.6B and Llama-3.1-8B; loader, logging and metrics are part of what is timed.
Tokens are real ones: there is no padding to count. The steps before `--warmup` (compilation) are left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import RunConfig
from lockstep.data.dataset import compile_data
from lockstep.data.order import Batches
from lockstep.model.lora import add_lora
from lockstep.rundir import RunDir
from lockstep.train import sft
from lockstep.train.checkpoints import Checkpoints, Progress
from lockstep.train.steps import LoopInputs
from lockstep.types import Completion, Datum, LossSpec

QWEN3_06B = transformers.Qwen3Config(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
)  # fmt: skip
LLAMA_8B = transformers.LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False,
)  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "full-16k": {"shape": QWEN3_06B, "tokens": 16384},
    "full-32k": {"shape": QWEN3_06B, "tokens": 32768},
    "lora-8b": {"shape": LLAMA_8B, "tokens": 8192, "document": 4096, "lora": {"rank": 16, "alpha": 32, "dropout": 0.1}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="JSON or JSONL rows, alpaca form")
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=5, help="times the rows are laid end to end")
    parser.add_argument("--profile", action="store_true", help="print where the time of one step goes")
    parser.add_argument("--skip-check", action="store_true")
    arguments = parser.parse_args()
    if not arguments.skip_check:
        check_against_float64()
    print(f"matrix products alone: {product_rate() / 1e12:.0f} TFLOP/s in bf16 (8192 cubed)", flush=True)
    for name in arguments.case:
        print(json.dumps(measure(name, arguments)), flush=True)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    case = CASES[name]
    config = run_config(case, arguments)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.tokenizer)
    # Several times the file, so that the smaller batch at the end of an epoch is rare, as it is with real data.
    rows = [*compile_data(config.data, tokenizer, seed=0).train] * arguments.repeat
    data = long_documents(rows, case["document"]) if "document" in case else rows
    torch.cuda.reset_peak_memory_stats()
    backend = TorchBackend(
        random_model(case, config), micro_batch_tokens=config.batch.micro_batch_tokens, precision="bf16"
    )
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(Path(folder) / "run", config)
        checkpoints = Checkpoints(run, backend, config.checkpoint, data_digest="", timeout_s=600)
        checkpoints.save = lambda progress: None  # type: ignore[method-assign] # writing to disk is not what is measured
        sft.train(LoopInputs(config, backend, data, [], run, checkpoints, Progress()))
        records = run.metrics()
    # The last step is left out: it is waited for, while the others are read when the next is under way.
    timed = records[arguments.warmup : -1]
    seconds = timed[-1]["time"] - records[arguments.warmup - 1]["time"]
    result = {
        "case": name,
        "tokens_per_s": round(sum(r["tokens"] for r in timed) / seconds),
        "tokens_per_step": round(sum(r["tokens"] for r in timed) / len(timed)),
        "supervised_share": round(sum(r["supervised_tokens"] for r in timed) / sum(r["tokens"] for r in timed), 3),
        "step_ms": round(1000 * seconds / len(timed), 1),
        "inside_step_ms": round(1000 * sum(r["step_time_s"] for r in timed) / len(timed), 1),
        "peak_gib": round(timed[-1]["memory_gib"], 1),
        "first_step_s": round(records[0]["step_time_s"], 1),
        "step_times_ms": [round(1000 * r["step_time_s"]) for r in records[1:]],
        "loss": [round(records[i]["loss"], 3) for i in (0, len(records) // 2, -1)],
    }
    if arguments.profile:
        print(json.dumps(result), flush=True)
        profile(backend, Batches(data, config.batch, seed=0, shuffle=True).batch_at(0)[0], config)
    return result


def run_config(case: dict[str, Any], arguments: argparse.Namespace) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"path": "random"},
        "data": {"train": [str(arguments.rows)], "format": "alpaca", "max_length": 4096},
        "batch": {"tokens": case["tokens"], "micro_batch_tokens": case["tokens"]},
        "optim": {"learning_rate": 1e-5, "max_steps": arguments.steps, "epochs": 1000},
        "lora": case.get("lora"),
    }
    return RunConfig.model_validate(tree)


def random_model(case: dict[str, Any], config: RunConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        dtype = torch.bfloat16 if config.lora is not None else torch.float32
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(case["shape"]), dtype=dtype)
    return add_lora(model, config.lora) if config.lora is not None else model


def long_documents(rows: Any, length: int) -> list[Datum]:
    """The rows' tokens cut into documents of one length, everything learned."""
    stream = [int(t) for row in rows for t in (*row.prompt, *row.completions[0].tokens)]
    pieces = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]
    return [Datum(p[:1], [Completion(p[1:], [1.0] * (length - 1))], f"piece {i}") for i, p in enumerate(pieces)]


def check_against_float64() -> None:
    """Two layers of the real shape: our bf16 gradient must be as near to float64 as the model's own plain bf16 one."""
    shape = transformers.Qwen3Config(**{**QWEN3_06B.to_dict(), "num_hidden_layers": 2, "layer_types": None})
    for lengths in ((700, 37, 250, 5), (512, 512)):
        error, bound = gradient_errors(shape, lengths)
        verdict = "PASS" if error <= 1.2 * bound else "FAIL"
        print(
            f"gradient against float64, documents of {lengths}: ours {error:.2e}, "
            f"plain transformers in bf16 {bound:.2e}: {verdict}",
            flush=True,
        )
        if verdict == "FAIL":
            raise SystemExit(1)


def gradient_errors(shape: Any, lengths: tuple[int, ...]) -> tuple[float, float]:
    torch.manual_seed(1)
    documents = [torch.randint(0, 50000, (n,)) for n in lengths]
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    exact = plain_gradients(shape, weights, documents, torch.float64)
    plain = plain_gradients(shape, weights, documents, torch.bfloat16)
    backend = TorchBackend(model, micro_batch_tokens=1024, precision="bf16")
    batch = [Datum(d[:1].tolist(), [Completion(d[1:].tolist(), [1.0] * (len(d) - 1))]) for d in documents]
    backend.forward_backward(batch, LossSpec(scale=1 / sum(n - 1 for n in lengths)))
    ours = {name: p.grad for name, p in backend.parameters().items()}
    return distance(ours, exact), distance(plain, exact)


def plain_gradients(shape: Any, weights: dict, documents: list[torch.Tensor], dtype: torch.dtype) -> dict:
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="eager")
    model.load_state_dict(weights)
    total = sum(len(d) - 1 for d in documents)
    for document in documents:
        tokens = document.cuda()[None]
        logits = model(tokens).logits[0, :-1].to(torch.float64 if dtype == torch.float64 else torch.float32)
        (torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum") / total).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def distance(found: dict, exact: dict) -> float:
    above = sum(float((found[n].double() - g).square().sum()) for n, g in exact.items())
    return (above / sum(float(g.square().sum()) for g in exact.values())) ** 0.5


def product_rate() -> float:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - start)


def profile(backend: TorchBackend, batch: list[Datum], config: RunConfig) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    def step() -> None:
        backend.forward_backward(batch, LossSpec(scale=1e-4))
        backend.optim_step(sft.optim_step(config, 1e-5))

    step()
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    print(recorded.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=70))


if __name__ == "__main__":
    main()
