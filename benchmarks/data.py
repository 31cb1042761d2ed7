"""Compiling data beside TRL's preparation: the same rows, tokenizer and masks, each turn in a process of its own.

    python benchmarks/data.py [--rows 50000] [--rounds 2] [--data FOLDER] [--model FOLDER] [--json]   # lockstep[peers]

Rows are alpaca and GSM8K rows, repeated with small changes. TRL's time is that of SFTTrainer's own preparation of
prompts and completions, without reading the file; ours is from the file to mapped rows. The best round of each counts.
CPU seconds are those of all processes, and say more than the clock where others use the machine too.
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

CONTESTANTS = {
    "lockstep": "Lockstep, first compile",
    "lockstep-1": "Lockstep, first compile, one process",
    "lockstep-again": "Lockstep, second start",
    "trl": "TRL, its default (one process)",
    "trl-2": "TRL, two processes",
}
MAX_LENGTH = 2048
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory-rows", type=int, nargs="*", default=[10_000, 50_000, 200_000])
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--model", type=Path, default=Path("~/.cache/lockstep/models/SmolLM2-135M-Instruct"))
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--json", action="store_true", help="print only the results, as JSON")
    parser.add_argument("--turn", nargs=3, metavar=("CONTESTANT", "FILE", "CACHE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.model = arguments.model.expanduser()
    if arguments.turn:
        contestant, file, cache = arguments.turn
        take_turn = run_trl if contestant.startswith("trl") else run_lockstep
        print(json.dumps(take_turn(contestant, Path(file), Path(cache), arguments.model)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = {
            "rows": arguments.rows,
            "cores": os.cpu_count(),
            "speed": compare(arguments, Path(folder)),
            "memory": measure_memory(arguments, Path(folder)),
        }
    print(json.dumps(results) if arguments.json else show(results))


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    file = write_rows(folder / "rows.jsonl", arguments.rows, arguments.data)
    best: dict[str, dict[str, Any]] = {}
    for number, contestant in itertools.product(range(arguments.rounds), arguments.only):
        # A second start opens what the first compile of the same round has made.
        cache = folder / f"cache-{number}-{'lockstep' if contestant == 'lockstep-again' else contestant}"
        found = start_turn(contestant, file, cache, arguments)
        if contestant not in best or found["seconds"] < best[contestant]["seconds"]:
            best[contestant] = found
        if not arguments.json:
            print(f"round {number + 1}, {CONTESTANTS[contestant]}: {found}", file=sys.stderr, flush=True)
    return best


def measure_memory(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Of a first compile, by the number of rows: it should not grow with them."""
    measured = []
    for num_rows in arguments.memory_rows:
        file = write_rows(folder / f"{num_rows}.jsonl", num_rows, arguments.data)
        found = start_turn("lockstep", file, folder / f"cache-{num_rows}", arguments)
        measured.append({"rows": num_rows, "file_mib": round(file.stat().st_size / MIB), **found})
        if not arguments.json:
            print(f"memory: {measured[-1]}", file=sys.stderr, flush=True)
    return measured


def write_rows(path: Path, num_rows: int, data: Path) -> Path:
    """Conversations of two turns, none like another."""
    alpaca = json.loads((data / "alpaca_en_demo.json").read_text())
    gsm8k = [json.loads(line) for line in (data / "gsm8k_train.jsonl").read_text().splitlines()]
    exchanges = [("\n\n".join(filter(None, (row["instruction"], row["input"]))), row["output"]) for row in alpaca]
    exchanges += [(row["question"], row["answer"]) for row in gsm8k]
    with path.open("w") as file:
        for number in range(num_rows):
            repeat, place = divmod(number, len(exchanges))
            question, answer = exchanges[place]
            row = {
                "prompt": [{"role": "user", "content": f"{question} ({repeat})" if repeat else question}],
                "completion": [{"role": "assistant", "content": f"{answer}\n({repeat})" if repeat else answer}],
            }
            file.write(json.dumps(row) + "\n")
    return path


def start_turn(contestant: str, file: Path, cache: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--turn", contestant, str(file), str(cache), "--model", str(arguments.model)]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        raise SystemExit(f"{contestant} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def run_lockstep(contestant: str, file: Path, cache: Path, model: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from lockstep.config import DataConfig
    from lockstep.data import compile_data

    tokenizer = AutoTokenizer.from_pretrained(model)
    procs = 1 if contestant == "lockstep-1" else "auto"
    config = DataConfig(train=str(file), max_length=MAX_LENGTH, cache_dir=str(cache), procs=procs)
    before, cpu_before = peak_mib(), cpu_seconds()
    started = time.perf_counter()
    data = compile_data(config, tokenizer, seed=0)
    spent = (time.perf_counter() - started, cpu_seconds() - cpu_before)
    return describe(spent, before, len(data.train), data.report.totals.num_tokens, data.report.totals.num_supervised)


def run_trl(contestant: str, file: Path, cache: Path, model: Path) -> dict[str, Any]:
    """The trainer's constructor prepares the data; its model is tiny, so that nothing else takes time."""
    import datasets
    import trl
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model)
    tiny = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(cache))
    spent: list[tuple[float, float]] = []

    class Timed(trl.SFTTrainer):
        def _prepare_dataset(self, *arguments: Any, **options: Any) -> Any:
            started, cpu_before = time.perf_counter(), cpu_seconds()
            prepared = super()._prepare_dataset(*arguments, **options)
            spent.append((time.perf_counter() - started, cpu_seconds() - cpu_before))
            return prepared

    before = peak_mib()
    settings = trl.SFTConfig(
        output_dir=str(cache / "run"),
        max_length=MAX_LENGTH,
        dataset_num_proc=2 if contestant == "trl-2" else None,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    network = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **tiny))
    trainer = Timed(model=network, args=settings, train_dataset=rows, processing_class=tokenizer)
    prepared = trainer.train_dataset
    num_tokens = sum(len(row["input_ids"]) for row in prepared)
    num_supervised = sum(label != -100 for row in prepared for label in row["labels"])
    return describe(spent[0], before, len(prepared), num_tokens, num_supervised)


def describe(
    spent: tuple[float, float], before: float, num_rows: int, num_tokens: int, num_supervised: int
) -> dict[str, Any]:
    seconds, cpu = spent
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "rows_per_s": round(num_rows / seconds),
        "tokens": num_tokens,
        "supervised": num_supervised,
        "peak_mib": round(peak_mib()),
        "grown_mib": round(peak_mib() - before),  # above what libraries and tokenizer take
        "largest_worker_mib": round(children),
    }


def cpu_seconds() -> float:
    """Of this process and of those it has started and seen end."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(results: dict[str, Any]) -> str:
    lines = [f"{results['rows']:,} rows on {results['cores']} cores", ""]
    lines += ["| | seconds | CPU seconds | rows/s | tokens | learned | grown MiB |", "|---|---|---|---|---|---|---|"]
    for contestant, found in results["speed"].items():
        counts = f"{found['tokens']:,} | {found['supervised']:,} | {found['grown_mib']:,}"
        time_spent = f"{found['seconds']} | {found['cpu_seconds']} | {found['rows_per_s']:,}"
        lines.append(f"| {CONTESTANTS[contestant]} | {time_spent} | {counts} |")
    speed = {name: found["seconds"] for name, found in results["speed"].items()}
    for ours, theirs in itertools.product(("lockstep", "lockstep-again"), ("trl", "trl-2")):
        if ours in speed and theirs in speed:
            ratio = speed[theirs] / speed[ours]
            lines += ["", f"{CONTESTANTS[ours]} takes 1/{ratio:.1f} of the time of {CONTESTANTS[theirs]}."]
    if results["memory"]:
        lines += ["", "| rows | file MiB | rows/s | peak MiB | grown MiB | largest worker MiB |"]
        lines += ["|---|---|---|---|---|---|"]
    for found in results["memory"]:
        columns = ("rows", "file_mib", "rows_per_s", "peak_mib", "grown_mib", "largest_worker_mib")
        lines.append("| " + " | ".join(f"{found[name]:,}" for name in columns) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
