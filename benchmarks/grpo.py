"""Reinforcement learning beside TRL: the same model, prompts, samples, lengths and reward, in alternating turns.

    python benchmarks/grpo.py [--mode lora full] [--rounds 1]                          # CPU, SmolLM2-135M: 4 x 4 x 32
    python benchmarks/grpo.py --device cuda --tokenizer FOLDER --mode full             # Qwen3-0.6B's shape: 8 x 8 x 128

Needs lockstep[peers]. TRL's GRPOTrainer generates with transformers. A turn is a process of its own; ours is a whole
run with its directory. Prints samples per second, where the time went, peak memory and rewards of each, and the
ratios. The reward is the share of letters up to m.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LORA = {"rank": 16, "alpha": 32}
QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}  # fmt: skip
SUBJECTS = ("a lighthouse", "an old tram", "the first snow", "a lost key", "two brothers", "a night train", "a garden",
            "the harbour", "a broken clock", "an empty house", "a red kite", "the last ferry")  # fmt: skip
CONTESTANTS = ("lockstep", "trl")


def early_letters(answer: str, row: Any = None) -> float:
    letters = [letter for letter in answer.lower() if letter.isalpha()]
    return sum(letter <= "m" for letter in letters) / max(len(letters), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=("lora", "full"), default=["lora"])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompts", type=int, help="prompts a step; default 4, on CUDA 8")
    parser.add_argument("--samples", type=int, help="answers to each; default 4, on CUDA 8")
    parser.add_argument("--tokens", type=int, help="longest answer; default 32, on CUDA 128")
    parser.add_argument("--steps", type=int, help="timed steps; default 3, on CUDA 20")
    parser.add_argument("--warmup", type=int, help="steps before them; default 1, on CUDA 3")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--model", help="model folder; default SmolLM2-135M-Instruct, on CUDA random weights")
    parser.add_argument("--tokenizer", help="tokenizer folder, for random weights")
    parser.add_argument("--turn", choices=CONTESTANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    defaults = {"prompts": (4, 8), "samples": (4, 8), "tokens": (32, 128), "steps": (3, 20), "warmup": (1, 3)}
    for key, pair in defaults.items():
        if getattr(arguments, key) is None:
            setattr(arguments, key, pair[on_gpu])
    if arguments.turn:
        print(json.dumps(take_turn(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.model = arguments.model or obtain_model(arguments, Path(folder) / "model")
        for mode in arguments.mode:
            compare(mode, arguments)


def obtain_model(arguments: argparse.Namespace, folder: Path) -> str:
    if arguments.device == "cpu":
        from lockstep.model.smollm2 import obtain

        return str(obtain())
    import torch
    import transformers

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3Config(**QWEN3_06B), dtype=torch.bfloat16
        )
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(arguments.tokenizer).save_pretrained(folder)
    return str(folder)


def compare(mode: str, arguments: argparse.Namespace) -> None:
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.contestants}
    for number in range(arguments.rounds):
        for name in arguments.contestants:
            turns[name].append(start_turn(name, mode, arguments))
            print(f"{mode} round {number + 1} {name}: {json.dumps(turns[name][-1])}", flush=True)
    best = {name: max(found, key=lambda turn: turn["samples_per_s"]) for name, found in turns.items()}
    ours, *others = arguments.contestants
    summary = {
        "mode": mode,
        "samples_per_s": {name: round(turn["samples_per_s"], 2) for name, turn in best.items()},
        "peak_gib": {name: round(turn["peak_gib"], 2) for name, turn in best.items()},
        "speed_over": {n: round(best[ours]["samples_per_s"] / best[n]["samples_per_s"], 2) for n in others},
        "median_step_over": {n: round(best[n]["median_step_s"] / best[ours]["median_step_s"], 2) for n in others},
    }
    print(json.dumps(summary), flush=True)
    print("step  " + "  ".join(f"{name:>9}" for name in best) + "   reward")
    for step, row in enumerate(itertools.zip_longest(*(turn["rewards"] for turn in best.values())), start=1):
        print(f"{step:>4}  " + "  ".join(f"{'' if value is None else format(value, '.3f'):>9}" for value in row))


def start_turn(name: str, mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A process of its own, so that memory and warm-up are its own."""
    command = [sys.executable, __file__, "--turn", name, "--mode", mode]
    for key, value in vars(arguments).items():
        if key not in ("turn", "mode", "contestants", "rounds") and value is not None:
            command += [f"--{key.replace('_', '-')}", str(value)]
    # Processes that compute rewards import them from here.
    here = str(Path(__file__).resolve().parent)
    paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        raise SystemExit(f"{name} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def take_turn(arguments: argparse.Namespace) -> dict[str, Any]:
    result = {"trl": run_trl, "lockstep": run_lockstep}[arguments.turn](arguments.mode[0], arguments)
    if arguments.device == "cuda":
        import torch

        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    else:
        result["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    return result


def rates(ends: list[float], arguments: argparse.Namespace) -> dict[str, Any]:
    """Over all timed steps, the slow ones too, and of the median one."""
    times = [b - a for a, b in itertools.pairwise(ends)][arguments.warmup - 1 :]
    num_samples = arguments.prompts * arguments.samples
    return {
        "samples_per_s": num_samples * len(times) / sum(times),
        "median_step_s": round(sorted(times)[len(times) // 2], 3),
        "step_s": [round(t, 2) for t in times],
    }


def make_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    count = arguments.prompts * (arguments.steps + arguments.warmup)
    subjects = itertools.islice(itertools.cycle(SUBJECTS), count)
    return [
        {"prompt": [{"role": "user", "content": f"Write a long story about {subject}. It is the {number}th one."}]}
        for number, subject in enumerate(subjects)
    ]


def run_lockstep(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a rank of `lockstep train` does."""
    from lockstep.config import resolve_config
    from lockstep.rundir import RunDir
    from lockstep.train.run import run as train

    on_gpu = arguments.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps({"messages": row["prompt"]}) + "\n" for row in make_rows(arguments)))
        settings = {
            "model": {"path": arguments.model, "precision": "bf16" if on_gpu else "fp32"},
            "lora": LORA if mode == "lora" else None,
            "data": {"train": [str(rows)], "max_length": 128 + arguments.tokens, "shuffle": False},
            "algorithm": {"kind": "grpo", "reward": "grpo:early_letters", "group_size": arguments.samples,
                          "max_tokens": arguments.tokens, "reward_procs": 1},
            "batch": {"samples": arguments.prompts, "micro_batch_tokens": 16384 if on_gpu else 4096},
            "optim": {"learning_rate": arguments.learning_rate, "schedule": "constant", "warmup_steps": 0},
            "checkpoint": {"every_steps": 0, "export": "none"},
            "launch": {"device": arguments.device},
        }  # fmt: skip
        config = resolve_config(settings)
        run = RunDir.create(Path(folder) / "run", config)
        train(run.path)
        records = run.metrics()
    timed = records[arguments.warmup :]
    return {
        **rates([record["time"] for record in records], arguments),
        "sampling_share": round(sum(r["sample_time_s"] for r in timed) / sum(r["step_time_s"] for r in timed), 2),
        "length": round(sum(r["length"] for r in timed) / len(timed), 1),
        "sampler_trainer_logprob_diff": max(record.get("sampler_trainer_logprob_diff", 0.0) for record in records),
        "rewards": [round(record["reward"], 4) for record in records],
    }


def run_trl(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """TRL's own trainer, on the same prompts in the same order."""
    import datasets
    import peft
    import torch
    import transformers
    import trl

    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [early_letters(completion[0]["content"]) for completion in completions]

    narrow = arguments.device == "cuda" and mode == "lora"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16 if narrow else torch.float32
    )
    lora = peft.LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules="all-linear")
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=arguments.prompts * arguments.samples,
            num_generations=arguments.samples,
            max_completion_length=arguments.tokens,
            max_steps=arguments.steps + arguments.warmup,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            shuffle_dataset=False,
            bf16=arguments.device == "cuda",
            use_cpu=arguments.device == "cpu",
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings,
            train_dataset=datasets.Dataset.from_list(make_rows(arguments)),
            processing_class=transformers.AutoTokenizer.from_pretrained(arguments.model),
            peft_config=lora if mode == "lora" else None,
            callbacks=[Clock()],
        )
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        **rates(ends, arguments),
        "length": round(sum(entry["completions/mean_length"] for entry in history) / len(history), 1),
        "rewards": [round(entry["reward"], 4) for entry in history],
    }


if __name__ == "__main__":
    main()
