"""docs/architecture.md lists the calls from `lockstep train` to the optimizer: they are those of a real run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FrameType

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


def test_the_calls_of_a_step_are_as_documented(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny.write_config(tmp_path, tiny_model)
    calls: list[str] = []

    def popen(*arguments: object, **options: object) -> None:
        calls.extend(calls_of(sys._getframe()))
        raise Reached

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen)
        with pytest.raises(Reached):
            app(["train", str(config), "--run-dir", str(tmp_path / "command")], standalone_mode=False)
    run = RunDir.create(tmp_path / "run", load_config(config))
    path = [str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT)]
    program = RANK.format(path=path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", program, run.path, tmp_path / "calls"], env=environment, check=False)
    calls += json.loads((tmp_path / "calls").read_text())
    assert documented("SFT") == calls, "\n".join(["docs/architecture.md, SFT, should list", *calls])
