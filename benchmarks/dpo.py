"""Preference optimisation beside TRL: the same model, pairs, pairs a step and precision, in alternating turns.

    python benchmarks/dpo.py --rows pairs.json [--mode lora full] [--rounds 2]                 # CPU, SmolLM2-135M
    python benchmarks/dpo.py --rows pairs.json --device cuda --tokenizer FOLDER --pairs 16     # Qwen3-0.6B's shape

Needs lockstep[peers]. Rows are sorted by length, which is TRL's best case: it pads a batch to its longest row. Prints
pairs per second, peak memory and losses of each, and the ratios. `--prompt-share 4` makes prompts four times as long
as their answers and shows what computing them once brings, without TRL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LORA = {"rank": 16, "alpha": 32}
LEARNING_RATE = 1e-6
BETA = 0.1
QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}  # fmt: skip
CONTESTANTS = ("lockstep", "lockstep-unshared", "trl", "trl-checkpointing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="JSON pairs in sharegpt form")
    parser.add_argument("--mode", nargs="+", choices=("lora", "full"), default=["lora", "full"])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=["lockstep", "trl"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=4, help="pairs a step")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each turn")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a prompt with one answer")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096, help="of Lockstep")
    parser.add_argument("--reference", default="auto", help="of Lockstep: auto is adapter_off for LoRA, copy for full")
    parser.add_argument("--prompt-share", type=int, help="prompts this many times as long as answers")
    parser.add_argument("--model", help="model folder; default SmolLM2-135M-Instruct, on CUDA random weights")
    parser.add_argument("--tokenizer", help="tokenizer folder, for random weights")
    parser.add_argument("--turn", choices=CONTESTANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turn:
        print(json.dumps(take_turn(arguments)))
        return
    if arguments.model is None and arguments.device == "cpu":
        from lockstep.model.smollm2 import obtain

        arguments.model = str(obtain())
    if arguments.prompt_share:
        arguments.contestants = ["lockstep", "lockstep-unshared"]
    for mode in arguments.mode:
        compare(mode, arguments)


def compare(mode: str, arguments: argparse.Namespace) -> None:
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.contestants}
    for number in range(arguments.rounds):
        for name in arguments.contestants:
            turns[name].append(start_turn(name, mode, arguments))
            print(f"{mode} round {number + 1} {name}: {json.dumps(turns[name][-1])}", flush=True)
    speed = {name: max(t["pairs_per_s"] for t in found) for name, found in turns.items()}
    median = {name: max(t["pairs_per_s_median"] for t in found) for name, found in turns.items()}
    memory = {name: max(t["peak_gib"] for t in found) for name, found in turns.items()}
    ours, *others = arguments.contestants
    summary = {
        "mode": mode,
        "pairs_per_s": {name: round(v, 3) for name, v in speed.items()},
        "peak_gib": {name: round(v, 2) for name, v in memory.items()},
        "median_speed_over": {name: round(median[ours] / median[name], 2) for name in others},
        "speed_over": {name: round(speed[ours] / speed[name], 2) for name in others},
        "memory_over": {name: round(memory[ours] / memory[name], 2) for name in others},
    }
    print(json.dumps(summary), flush=True)


def start_turn(name: str, mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A process of its own, so that memory and warm-up are its own."""
    command = [sys.executable, __file__, "--turn", name, "--mode", mode]
    for key, value in vars(arguments).items():
        if key not in ("turn", "mode", "contestants", "rounds") and value is not None:
            command += [f"--{key.replace('_', '-')}", str(value)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{name} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def take_turn(arguments: argparse.Namespace) -> dict[str, Any]:
    run = run_trl if arguments.turn.startswith("trl") else run_lockstep
    result = run(arguments.mode[0], arguments)
    if arguments.device == "cuda":
        import torch

        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    else:
        result["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    return result


def load_model(mode: str, arguments: argparse.Namespace) -> Any:
    """Weights that are trained in float32, frozen ones under LoRA in what the device computes in."""
    import torch
    import transformers

    narrow = arguments.device == "cuda" and mode == "lora"
    dtype = torch.bfloat16 if narrow else torch.float32
    if arguments.model is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(arguments.device)
    torch.manual_seed(0)
    with torch.device(arguments.device):
        return transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**QWEN3_06B), dtype=dtype)


def load_tokenizer(arguments: argparse.Namespace) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(arguments.tokenizer or arguments.model)


def sorted_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Longest first, as many as are computed: memory shows in the first step."""
    rows = json.loads(arguments.rows.read_text())

    def size(row: dict[str, Any]) -> int:
        prompt = sum(len(turn["value"]) for turn in row["conversations"])
        return prompt + max(len(row["chosen"]["value"]), len(row["rejected"]["value"]))

    rows.sort(key=size, reverse=True)
    wanted = arguments.pairs * (arguments.steps + arguments.warmup)
    step = max(1, len(rows) // wanted)  # short and long ones alike
    return (rows[::step] * (wanted // len(rows[::step]) + 1))[:wanted]


def run_lockstep(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The real loop with its run directory, in this process."""
    from lockstep.backend.torch_backend import TorchBackend
    from lockstep.config import LoraConfig, RunConfig
    from lockstep.data.dataset import compile_data
    from lockstep.model.lora import add_lora
    from lockstep.rundir import RunDir
    from lockstep.train import dpo
    from lockstep.train.checkpoints import Checkpoints, Progress
    from lockstep.train.steps import LoopInputs

    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        rows.write_text(json.dumps(sorted_rows(arguments)))
        steps = arguments.steps + arguments.warmup
        config = RunConfig.model_validate(
            {
                "model": {"path": "given"},
                "lora": LORA if mode == "lora" else None,
                "data": {"train": [str(rows)], "max_length": arguments.max_length, "shuffle": False},
                "algorithm": {"kind": "dpo", "beta": BETA},
                "batch": {"samples": arguments.pairs, "micro_batch_tokens": arguments.micro_batch_tokens},
                "optim": {"learning_rate": LEARNING_RATE, "schedule": "constant", "warmup_steps": 0}
                | {"max_steps": steps},
            }
        )
        data: Any = list(compile_data(config.data, load_tokenizer(arguments), seed=0).train)
        if arguments.prompt_share:
            data = [with_long_prompt(datum, arguments.prompt_share) for datum in data]
        model = load_model(mode, arguments)
        model = add_lora(model, LoraConfig(**LORA)) if mode == "lora" else model
        reference = {"lora": "adapter_off", "full": "copy"}[mode] if arguments.reference == "auto" else "none"
        backend = TorchBackend(
            model, micro_batch_tokens=arguments.micro_batch_tokens, reference=reference, device=arguments.device
        )
        backend.policy.shares_prompts &= arguments.turn == "lockstep"
        if arguments.reference == "none":
            data = backend_free(data, backend)
        run = RunDir.create(Path(folder) / "run", config)
        checkpoints = Checkpoints(run, backend, config.checkpoint, data_digest="", timeout_s=600)
        checkpoints.save = lambda progress: None  # type: ignore[method-assign] # writing is not what is measured
        dpo.train(LoopInputs(config, backend, data, [], run, checkpoints, Progress()))
        records = run.metrics()
    # On a GPU the last step is left out: it is waited for, while the others are read when the next is under way.
    records = records[: -1 if arguments.device == "cuda" else None]
    timed = records[arguments.warmup :]
    ends = [r["time"] for r in records]
    return {
        **rates(ends, arguments),
        "tokens_per_pair": sum(r["tokens"] for r in timed) / (arguments.pairs * len(timed)),
        "losses": [round(r["loss"], 4) for r in records[:8]],
    }


def rates(ends: list[float], arguments: argparse.Namespace) -> dict[str, Any]:
    """Over all timed steps, and of the median one: now and then a step meets a shape that is new to some kernel."""
    times = [b - a for a, b in itertools.pairwise(ends)][arguments.warmup - 1 :]
    return {
        "pairs_per_s": arguments.pairs * len(times) / sum(times),
        "pairs_per_s_median": arguments.pairs / sorted(times)[len(times) // 2],
        "step_ms": [round(1000 * t) for t in times],
    }


def backend_free(data: list[Any], backend: Any) -> list[Any]:
    """With the reference's log-probs beside every token, as a run with a precomputed reference has them."""
    from dataclasses import replace

    found = []
    for datum in data:
        (row,) = backend.forward([datum])
        pairs = zip(datum.completions, row, strict=True)
        found.append(replace(datum, completions=[replace(c, values={"reference_logprobs": v}) for c, v in pairs]))
    return found


def with_long_prompt(datum: Any, share: int) -> Any:
    """Its own tokens, repeated until the prompt is `share` times as long as the longer answer."""
    from dataclasses import replace

    import numpy as np

    wanted = share * max(len(c.tokens) for c in datum.completions)
    return replace(datum, prompt=np.resize(np.asarray(datum.prompt), wanted))


def run_trl(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """TRL's own trainer, on the same pairs in the same order."""
    import copy

    import datasets
    import peft
    import torch
    import transformers
    import trl

    ends: list[float] = []

    class InOrder(trl.DPOTrainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    model = load_model(mode, arguments)
    lora = peft.LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules="all-linear")
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.DPOConfig(
            output_dir=folder,
            max_length=arguments.max_length,
            per_device_train_batch_size=arguments.pairs,
            max_steps=arguments.steps + arguments.warmup,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            beta=BETA,
            bf16=arguments.device == "cuda",
            use_cpu=arguments.device == "cpu",
            gradient_checkpointing=arguments.turn == "trl-checkpointing",
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = InOrder(
            model=model,
            ref_model=copy.deepcopy(model) if mode == "full" else None,
            args=settings,
            train_dataset=datasets.Dataset.from_list([as_messages(row) for row in sorted_rows(arguments)]),
            processing_class=load_tokenizer(arguments),
            peft_config=lora if mode == "lora" else None,
            callbacks=[Clock()],
        )
        trainer.train()
        losses = [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry]
    return {**rates(ends, arguments), "losses": losses[:8]}


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    roles = {"human": "user", "gpt": "assistant", "system": "system"}

    def turn(given: dict[str, str]) -> dict[str, str]:
        return {"role": roles[given["from"]], "content": given["value"]}

    prompt = [turn(given) for given in row["conversations"]]
    return {"prompt": prompt, "chosen": [turn(row["chosen"])], "rejected": [turn(row["rejected"])]}


if __name__ == "__main__":
    main()
