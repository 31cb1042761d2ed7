"""Supervised fine-tuning on a CPU, beside TRL: the same model, rows, tokens a step and precision, in alternating turns.

    python benchmarks/sft.py --rows alpaca.json [--mode lora full] [--rounds 2] [--steps 6]      # needs lockstep[peers]

Prints real tokens per second (padding never counts), peak memory and losses of each, and the ratios. The matrix
product rate is measured in the same run; what each method must compute is counted by `required_flops`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LENGTH = 1024  # tokens a step, and the longest row
LORA = {"rank": 16, "alpha": 32}
LEARNING_RATE = 1e-4
CONTESTANTS = ("lockstep", "trl-packed", "trl-padded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="JSON rows in alpaca form")
    parser.add_argument("--mode", nargs="+", choices=("lora", "full"), default=["lora", "full"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each turn; one more comes before them")
    parser.add_argument("--model", help="model folder; default SmolLM2-135M-Instruct")
    parser.add_argument("--turn", choices=CONTESTANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turn:
        print(json.dumps(take_turn(arguments)))
        return
    if arguments.model is None:
        from lockstep.model.smollm2 import obtain

        arguments.model = str(obtain())
    for mode in arguments.mode:
        compare(mode, arguments)


def compare(mode: str, arguments: argparse.Namespace) -> None:
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    rates = [product_rate()]
    for number in range(arguments.rounds):
        for name in CONTESTANTS:
            turns[name].append(start_turn(name, mode, arguments))
            rates.append(product_rate())
            latest = turns[name][-1]
            print(
                f"{mode} round {number + 1} {name}: {latest['tokens_per_s']:.0f} tokens/s, "
                f"{latest['peak_gib']:.1f} GiB, losses {latest['losses']}",
                flush=True,
            )
    best = {name: max(t["tokens_per_s"] for t in found) for name, found in turns.items()}
    memory = {name: max(t["peak_gib"] for t in found) for name, found in turns.items()}
    ours = max(turns["lockstep"], key=lambda t: t["tokens_per_s"])
    rate = sorted(rates)[len(rates) // 2]
    summary = {
        "mode": mode,
        "tokens_per_s": {name: round(v) for name, v in best.items()},
        "peak_gib": {name: round(v, 2) for name, v in memory.items()},
        "speed_over_trl_packed": round(best["lockstep"] / best["trl-packed"], 2),
        "speed_over_trl_padded": round(best["lockstep"] / best["trl-padded"], 2),
        "memory_over_trl_packed": round(memory["lockstep"] / memory["trl-packed"], 2),
        "product_gflop_per_s": round(rate / 1e9),
        "share_of_product_rate": round(ours["flops_per_s"] / rate, 2),
    }
    print(json.dumps(summary), flush=True)


def start_turn(name: str, mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A process of its own, so that memory and warm-up are its own."""
    command = [sys.executable, __file__, "--turn", name, "--mode", mode, "--rows", str(arguments.rows)]
    command += ["--steps", str(arguments.steps), "--model", arguments.model]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{name} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def take_turn(arguments: argparse.Namespace) -> dict[str, Any]:
    mode = arguments.mode[0]
    records = run_lockstep(mode, arguments) if arguments.turn == "lockstep" else run_trl(mode, arguments)
    timed = records[1:]
    seconds = sum(r["seconds"] for r in timed)
    return {
        "tokens_per_s": sum(r["tokens"] for r in timed) / seconds,
        "flops_per_s": sum(r.get("flops", 0.0) for r in timed) / seconds,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30,
        "losses": [round(r["loss"], 3) for r in records],
    }


def run_lockstep(mode: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The real loop with its run directory, in this process."""
    import os

    from lockstep.config import RunConfig
    from lockstep.model.load import load_hf_config
    from lockstep.rundir import RunDir
    from lockstep.train.run import run

    config = RunConfig.model_validate(
        {
            "model": {"path": arguments.model},
            "lora": LORA if mode == "lora" else None,
            "data": {"train": [str(arguments.rows.resolve())], "max_length": LENGTH},
            "batch": {"tokens": LENGTH, "micro_batch_tokens": LENGTH},
            "optim": {"learning_rate": LEARNING_RATE, "schedule": "constant", "warmup_steps": 0}
            | {"max_steps": arguments.steps + 1},
            "checkpoint": {"export": "none", "every_steps": 0},
        }
    )
    os.environ.pop("WORLD_SIZE", None)
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDir.create(Path(folder) / "run", config)
        run(directory.path)
        metrics = directory.metrics()
    architecture = load_hf_config(config.model)
    return [
        {
            "tokens": m["tokens"],
            "seconds": m["step_time_s"],
            "loss": m["loss"],
            "flops": required_flops(architecture, mode, m["tokens"], m["supervised_tokens"]),
        }
        for m in metrics
    ]


def run_trl(mode: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """TRL's own trainer: packed (its best on a CPU) or padded (its default)."""
    import datasets
    import peft
    import torch
    import transformers
    import trl

    packed = arguments.turn == "trl-packed"
    rows = json.loads(arguments.rows.read_text())
    conversations = [
        {
            "prompt": [{"role": "user", "content": "\n\n".join(filter(None, (r["instruction"], r.get("input"))))}],
            "completion": [{"role": "assistant", "content": r["output"]}],
        }
        for r in rows
    ]
    records: list[dict[str, Any]] = []

    class Counted(trl.SFTTrainer):
        def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
            mask = inputs.get("attention_mask")
            tokens = int(inputs["input_ids"].numel() if mask is None else mask.sum())
            started = time.perf_counter()
            loss = super().training_step(model, inputs, num_items_in_batch)
            records.append({"tokens": tokens, "started": started, "loss": float(loss)})
            return loss

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            records[-1]["seconds"] = time.perf_counter() - records[-1]["started"]

    with tempfile.TemporaryDirectory() as folder:
        settings = trl.SFTConfig(
            output_dir=folder,
            packing=packed,
            max_length=LENGTH,
            per_device_train_batch_size=1 if packed else 5,  # 5 rows are about LENGTH real tokens
            max_steps=arguments.steps + 1,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = Counted(
            model=transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
            args=settings,
            train_dataset=datasets.Dataset.from_list(conversations),
            processing_class=transformers.AutoTokenizer.from_pretrained(arguments.model),
            peft_config=peft.LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules="all-linear")
            if mode == "lora"
            else None,
            callbacks=[Clock()],
        )
        trainer.train()
    return records


def required_flops(architecture: Any, mode: str, tokens: int, supervised: int) -> float:
    """Matrix products of one step that no method can leave out; attention scores are not counted.

    A product costs two operations per weight and token, and as much again for each gradient that is needed: with
    respect to the input always, to the weight only where it is trained. The head works on supervised tokens alone.
    """
    a = architecture
    head_dim = getattr(a, "head_dim", None) or a.hidden_size // a.num_attention_heads
    attention = a.hidden_size * head_dim * (2 * a.num_attention_heads + 2 * a.num_key_value_heads)
    weights = a.num_hidden_layers * (attention + 3 * a.hidden_size * a.intermediate_size)
    passes = 3 if mode == "full" else 2
    return 2.0 * passes * (weights * tokens + a.hidden_size * a.vocab_size * supervised)


def product_rate() -> float:
    """Floating-point operations per second of a plain float32 matrix product of the model's size."""
    import torch

    a, b = torch.randn(LENGTH, 576), torch.randn(576, 1536)
    best = float("inf")
    for _ in range(40):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2.0 * LENGTH * 576 * 1536 / best


if __name__ == "__main__":
    main()
