"""docs/architecture.md lists the calls from `lockstep train` to the optimizer: they are those of a real run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tiny
from pages import ROOT

from lockstep.cli import app
from lockstep.config import load_config
from lockstep.rundir import RunDir

# Run by a process of its own, as the launcher would start a rank: the worker takes over standard output.
RANK = """
import json, sys
sys.path[:0] = {path}
import test_hops, torch

def step(self, *arguments, **options):
    open(sys.argv[2], "w").write(json.dumps(test_hops.calls_of(sys._getframe())))
    raise SystemExit

torch.optim.AdamW.step = step
from lockstep.train.worker import main
main([sys.argv[1]])
"""


class Reached(BaseException):
    """Where a trace ends."""


def calls_of(frame: FrameType | None) -> list[str]:
    """The functions of lockstep on the stack, outermost first; comprehensions and lambdas do not count."""
    calls = []
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        if module.split(".")[0] == "lockstep" and "<" not in name.rsplit(".", 1)[-1]:
            calls.append(f"{module}.{name}")
        frame = frame.f_back
    return calls[::-1]


def documented(title: str) -> list[str]:
    """The numbered list below a heading, by what is in backquotes."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split(f"### {title}\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\d+\. `([\w.]+)`", section, re.MULTILINE)


def calls_of_the_command(config: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Until it starts a process."""
    calls: list[str] = []

    def popen(*arguments: object, **options: object) -> None:
        calls.extend(calls_of(sys._getframe()))
        raise Reached

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen)
        with pytest.raises(Reached):
            app(["train", str(config), "--run-dir", str(run_dir)], standalone_mode=False)
    return calls


def run_rank(program: str, *arguments: Path) -> None:
    path = [str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(path)}
    subprocess.run([sys.executable, "-c", program.format(path=path), *arguments], env=environment, check=False)


def test_the_calls_of_a_step_are_as_documented(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny.write_config(tmp_path, tiny_model)
    calls = calls_of_the_command(config, tmp_path / "command", monkeypatch)
    run = RunDir.create(tmp_path / "run", load_config(config))
    run_rank(RANK, run.path, tmp_path / "calls")
    calls += json.loads((tmp_path / "calls").read_text())
    assert documented("SFT") == calls, "\n".join(["docs/architecture.md, SFT, should list", *calls])


# As RANK, of a run with an engine: what leads to the buffer, to the engine's process, and there to the decoder's model.
GRPO_RANK = """
import sys
sys.path[:0] = {path}
import test_hops
from lockstep.processes.local import LocalWorker
from lockstep.rollouts.buffer import Buffer
from lockstep.rollouts.engines import pool

test_hops.record(Buffer, "take", sys.argv[2] + "/1-rank")
test_hops.record(LocalWorker, "call", sys.argv[2] + "/2-thread", lambda self, method, *rest: method == "sample")
pool.ENTRY = "test_hops:start_engine"
test_hops.os.environ["CALLS_FOLDER"] = sys.argv[2]
from lockstep.train.worker import main
main([sys.argv[1]])
"""


def record(owner: type, method: str, file: str, counts: Callable[..., bool] = lambda *arguments: True) -> None:
    """Whenever the method is called: who called whom to get there."""
    original = getattr(owner, method)

    def recorded(*arguments: Any, **options: Any) -> Any:
        if counts(*arguments):
            Path(file).write_text(json.dumps(calls_of(sys._getframe(1))))
        return original(*arguments, **options)

    setattr(owner, method, recorded)


def start_engine(settings: dict[str, Any]) -> Any:
    """The entry of the engine's process."""
    from transformers import LlamaModel

    from lockstep.rollouts.engines.worker import start

    record(LlamaModel, "forward", os.environ["CALLS_FOLDER"] + "/3-engine")
    return start(settings)


@pytest.mark.slow
def test_the_way_to_the_decoder_is_as_documented(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.jsonl").write_text('{"prompt": "one two", "answer": "x"}\n' * 4)
    algorithm = {"kind": "grpo", "reward": "exact", "group_size": 2, "max_tokens": 4}
    changes = {"algorithm": algorithm, "rollouts": {"engines": 1}, "optim": {"max_steps": 1}}
    config = tiny.write_config(tmp_path, tiny_model, **changes)
    calls = calls_of_the_command(config, tmp_path / "command", monkeypatch)
    (tmp_path / "calls").mkdir()
    run_rank(GRPO_RANK, RunDir.create(tmp_path / "run", load_config(config)).path, tmp_path / "calls")
    for file in sorted((tmp_path / "calls").iterdir()):
        calls += json.loads(file.read_text())
    assert len(list((tmp_path / "calls").iterdir())) == 3
    entered = [call for before, call in pairwise(["", *calls]) if module_of(before) != module_of(call)]
    assert documented("GRPO with engines") == entered, "\n".join(["docs/architecture.md should list", *entered])


def module_of(call: str) -> str:
    """lockstep.train.grpo of lockstep.train.grpo.train, and the same of methods."""
    parts = call.split(".")
    return next((name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in MODULES), "")


MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "lockstep").rglob("*.py")}
