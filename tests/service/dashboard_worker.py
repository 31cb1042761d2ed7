"""Stands in for a rank that trains: writes what a run writes, at a pace, and ends as the run's name says.

Started by the launcher as `python -m dashboard_worker RUN_DIR`. No torch, so a job begins at once.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.rundir import RunDir

HOSTILE_KEY = "<img src=x onerror=alert(1)>"
HOSTILE_LINE = "<script>alert('log')</script>"
FAILURE = (
    'Traceback (most recent call last):\n  File "sft.py", line 50, in train\nRuntimeError: the loss is nan at step 7\n'
)


def main(run_dir: Path) -> int:
    run = RunDir(run_dir, owner=True)
    config = run.config()
    total, name = config.optim.max_steps or 20, config.name
    sys.stdout = sys.stderr = (run.logs / "rank-0.log").open("a", buffering=1)
    run.write_status(state="preparing", phase="loading the model", started_at=time.time())
    run.log_event("data", num_train=320, num_validation=40)
    if "warned" in name or "hostile" in name:
        warning = (
            HOSTILE_LINE if "hostile" in name else "12 answers do not fit and lose their end: raise data.max_length"
        )
        run.log_event("warning", message=warning)
    if "preparing" in name:
        time.sleep(600)
    run.write_status(state="running", phase="training", step=0, total_steps=total)
    run.log_metrics({"step": 0, "split": "validation", "time": time.time(), **validation_record(name, 0, total)})
    for step in range(1, total + 1):
        if "halfway" in name and step * 10 > total * 6:
            time.sleep(600)
        if "paced" in name:
            time.sleep(0.25)
        if "failing" in name and step == 7:
            print(FAILURE)
            run.record_failure(0, "the loss is nan at step 7: lower optim.learning_rate")
            run.write_status(state="failed", error="the loss is nan at step 7: lower optim.learning_rate")
            return 1
        print(f"step {step} of {total}: loss {train_loss(name, step, total):.3f}")
        run.log_metrics({"step": step, "split": "train", "time": time.time(), **train_record(name, step, total)})
        run.write_status(step=step)
        if step % 5 == 0:
            keep(run, name, step, total)
    if "hostile" in name:
        print(HOSTILE_LINE)
    (run.export / "adapter").mkdir(parents=True)
    (run.export / "adapter" / "adapter_config.json").write_text(json.dumps({"r": 16}))
    seconds = {"start": 8.2, "training": 190.0, "checkpoints": 17.4, "export": 0.3}
    compilations = {"count": 3, "seconds": 42.0}
    in_engines = {"engine-0": {"count": 2, "seconds": 21.0}, "engine-1": {"count": 1, "seconds": 20.0}}
    run.write_status(
        state="completed",
        phase="done",
        step=total,
        seconds=seconds,
        compilations=compilations,
        engine_compilations=in_engines,
    )
    return 0


def keep(run: RunDir, name: str, step: int, total: int) -> None:
    """A validation, a sample answer and a checkpoint."""
    record = validation_record(name, step, total)
    run.log_metrics({"step": step, "split": "validation", "time": time.time(), **record})
    (run.begin_checkpoint(step) / "weights.bin").write_bytes(b"0" * 4096)
    run.commit_checkpoint(step, {}, record["loss"])
    run.log_event("checkpoint", step=step, validation_loss=record["loss"])
    sample = {
        "step": step,
        "prompt": "Why is the sky blue?",
        "answer": "Air scatters blue light most.\nTry it: look up.",
    }
    with (run.path / "samples.jsonl").open("a") as file:
        file.write(json.dumps({**sample, "exact_match": 0.0}) + "\n")


def train_loss(name: str, step: int, total: int) -> float:
    speed = 1 + sum(map(ord, name)) % 5
    return 2.4 + 1.9 * math.exp(-speed * step / total) + 0.12 * math.sin(step * 1.7)


def validation_record(name: str, step: int, total: int) -> dict[str, Any]:
    return {"loss": train_loss(name, step, total) + 0.1 - 0.1 * math.sin(step * 1.7), "rows": 40, "time_s": 0.2}


def train_record(name: str, step: int, total: int) -> dict[str, Any]:
    part = step / total
    record: dict[str, Any] = {
        "loss": train_loss(name, step, total),
        "grad_norm": 1.4 * math.exp(-2 * part) + 0.2,
        "learning_rate": 1e-4 * (1 + math.cos(math.pi * part)),
        "epoch": part,
        "row_range": [16 * (step - 1), 16 * step],
        "tokens": 1100 + 40 * (step % 3),
        "supervised_tokens": 520 + 20 * (step % 3),
        "tokens_per_s": 4200 + 300 * math.sin(step),
        "step_time_s": 0.25,
        "memory_gib": 2.2 + 0.4 * part,
        "memory_gib_max": 2.3 + 0.4 * part,
        "compute_s": 0.18,
        "wait_s": 0.05,
        "traffic/shard/all_gather": 500973696.0,
        "traffic/shard/reduce_scatter": 9768960.0,
        "cost_balance": 1.001 + 0.001 * math.sin(step),
    }
    if "pairs" in name:
        record |= {"chosen_reward": 0.9 * part, "rejected_reward": -0.6 * part, "margin": 1.5 * part}
        record["accuracy"] = 0.5 + 0.4 * part
    if "hostile" in name:
        record[HOSTILE_KEY] = part
    return record


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
