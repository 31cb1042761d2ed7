"""Whole commands on one CUDA GPU: `lockstep train` with a YAML file, from its start to its export, several times.

    python benchmarks/runs.py --data FOLDER --tokenizer FOLDER [--case sft dpo grpo grpo-lora] [--times 2]

Random weights in the shape of Qwen3-0.6B (Llama-3.1-8B for lora-8b). FOLDER holds alpaca_en_demo.json,
dpo_en_demo.json and gsm8k_test.jsonl. The first time compiles from nothing where --cold is given, the second finds what
the first compiled. Prints where the time of each command went, and its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
LORA = {"rank": 16, "alpha": 32}
SFT = {"data": {"train": "alpaca_en_demo.json", "format": "alpaca", "max_length": 4096}}
GRPO: dict[str, Any] = {
    "data": {"train": "gsm8k_test.jsonl", "max_length": 1024},
    "algorithm": {"kind": "grpo", "reward": "numeric", "group_size": 8, "max_tokens": 128},
    "batch": {"samples": 8, "micro_batch_tokens": 16384},
    "optim": {"learning_rate": 1e-5, "max_steps": 40, "epochs": 10},
}


def sft(tokens: int, steps: int, **sections: Any) -> dict[str, Any]:
    return {
        **SFT,
        "batch": {"tokens": tokens, "micro_batch_tokens": tokens},
        "optim": {"learning_rate": 1e-5, "max_steps": steps, "epochs": 1000},
        **sections,
    }


CASES: dict[str, dict[str, Any]] = {
    "sft": sft(16384, 60),
    "sft-saving": sft(16384, 60, checkpoint={"every_steps": 20}),
    "sft-32k": sft(32768, 40),
    "lora-8b": sft(8192, 30, lora={**LORA, "dropout": 0.1}),
    "dpo": {
        "data": {"train": "dpo_en_demo.json", "max_length": 1024},
        "algorithm": {"kind": "dpo", "reference": "copy"},
        "batch": {"samples": 16, "micro_batch_tokens": 16384},
        "optim": {"learning_rate": 1e-6, "max_steps": 30, "epochs": 10},
    },
    "grpo": GRPO,
    "grpo-lora": {**GRPO, "lora": LORA},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--case", nargs="+", choices=CASES, default=["sft", "dpo", "grpo", "grpo-lora"])
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--cold", action="store_true", help="with an empty cache folder of its own")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides, as of lockstep train")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.cold:
            os.environ["LOCKSTEP_CACHE"] = str(Path(folder) / "cache")
        for case in options.case:
            model = make_model(Path(folder), LLAMA_8B if case == "lora-8b" else QWEN3_06B, options.tokenizer)
            for number in range(options.times):
                run = Path(folder) / f"{case}-{number}"
                print(json.dumps({"case": case, "time": number + 1, **measure(case, model, run, options)}), flush=True)
                shutil.rmtree(run, ignore_errors=True)


def make_model(folder: Path, shape: dict[str, Any], tokenizer: Path) -> Path:
    path = folder / f"model-{shape['hidden_size']}"
    if path.exists():
        return path
    import torch
    import transformers

    kind = transformers.Qwen3Config if shape is QWEN3_06B else transformers.LlamaConfig
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(kind(**shape), dtype=torch.bfloat16)
    model.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(path)
    return path


def measure(case: str, model: Path, run: Path, options: argparse.Namespace) -> dict[str, Any]:
    tree = {"name": case, "model": str(model), **json.loads(json.dumps(CASES[case]))}
    tree["data"]["train"] = str((options.data / tree["data"]["train"]).absolute())
    config = run.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "lockstep", "train", str(config), *options.set, "--run-dir", str(run)]
    began_at, started = time.time(), time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stdout[-2000:]}{result.stderr[-3000:]}")
    status = json.loads((run / "status.json").read_text())
    around = {"before": status["started_at"] - began_at, "after": began_at + seconds - status["completed_at"]}
    return {"command_s": round(seconds, 1), **{k: round(v, 1) for k, v in around.items()}, **describe(run)}


def describe(run: Path) -> dict[str, Any]:
    status = json.loads((run / "status.json").read_text())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["split"] == "train"]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    times = [r["step_time_s"] for r in steps]
    later = times[3:] or times
    spent = steps[-1]["time"] - steps[2]["time"]  # with everything between steps
    keys = ("bytes", "copy_s", "write_s", "staging_gib")
    return {
        "seconds": status.get("seconds"),
        "compilations": status.get("compilations"),
        "compiled": [(e["step"], e["seconds"]) for e in events if e["event"] == "compiled" and e["seconds"] > 0.5],
        "slow": status.get("slow"),
        "first_steps_s": [round(t, 2) for t in times[:3]],
        "median_step_s": round(statistics.median(later), 3),
        "slowest_step_s": round(max(later), 3),
        "tokens_per_s": round(sum(r.get("tokens", 0) for r in steps[3:]) / spent),
        "samples_per_s": round(sum(r["row_range"][1] - r["row_range"][0] for r in steps[3:]) / spent, 1),
        "memory_gib": round(max(r.get("memory_gib") or 0 for r in steps), 1),
        "loss": [round(steps[i].get("loss") or 0, 4) for i in (0, -1)],
        "sampler_trainer_logprob_diff": max(r.get("sampler_trainer_logprob_diff", 0) for r in steps),
        "checkpoints": [{k: e[k] for k in keys if k in e} for e in events if e["event"] == "checkpoint"],
    }


if __name__ == "__main__":
    main()
