"""A rank that follows the script named by its configuration instead of training, through the real worker entry.

Quick: nothing heavy is imported. Every start leaves a line in starts.txt, so that a test can count them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

from lockstep.rundir import EXIT_INTERRUPTED, RunDir
from lockstep.train import worker

NUM_STEPS = 5


class Evicted(Exception):
    exit_code = EXIT_INTERRUPTED


def steps(run: RunDir, count: int = NUM_STEPS, pause_s: float = 0.02) -> None:
    run.write_status(state="running", phase="training", step=0, total_steps=count, started_at=time.time())
    for step in range(1, count + 1):
        print(f"line {step} of {run.path.name}", flush=True)
        run.log_metrics({"step": step, "split": "train", "time": time.time(), "loss": 1 / step, "step_time_s": pause_s})
        run.write_status(step=step)
        time.sleep(pause_s)


def behave(run: RunDir, name: str, rank: int) -> None:
    if name == "bad":
        raise ValueError("data.train is empty: name a file")
    if name == "dies" or (name == "dies-on-rank-1" and rank == 1):
        raise RuntimeError("the gradient exploded")
    if name == "flaky" and len((run.path / "starts.txt").read_text().splitlines()) == 1:
        steps(run, 2)
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "evicted" and len((run.path / "starts.txt").read_text().splitlines()) == 1:
        steps(run, 2)
        run.write_status(state="interrupted", phase=None)
        raise Evicted
    if name == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        quiet = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", quiet], start_new_session=True)
    if name in ("stubborn", "hangs", "dies-on-rank-1"):
        run.write_status(state="running")
        (run.path / "ready").touch()
        time.sleep(600)
    if name == "slow":
        steps(run, 60, 0.1)
    elif name == "long":
        steps(run, 200, 0.1)
    else:
        steps(run)
    (run.path / "export").mkdir(exist_ok=True)
    (run.path / "export" / "weights.bin").write_bytes(bytes(range(256)) * 4)


def scripted_run(path: Path, asked_to_stop: object = None) -> None:
    rank = int(os.environ.get("RANK", "0"))
    run = RunDir(path, owner=rank == 0)
    with (run.path / "starts.txt").open("a") as file:
        file.write(f"{os.getpid()}\n")
    behave(run, run.config().name, rank)
    with (run.path / "ends.txt").open("a") as file:
        file.write(f"{os.getpid()}\n")
    run.write_status(state="completed", phase="done", completed_at=time.time())


if __name__ == "__main__":
    if RunDir(sys.argv[1]).config().name != "real":  # which trains a model
        loop = types.ModuleType("lockstep.train.run")
        loop.run = scripted_run  # type: ignore[attr-defined]
        sys.modules["lockstep.train.run"] = loop
    sys.exit(worker.main())
