"""What would tests and `lockstep verify` let through? One fault at a time, in a copy of the tree.

    python tests/mutation/run.py OUT.jsonl [--only TEXT] [--survivors EARLIER.jsonl] [--verify | --tests]

Every fault runs in a process forked from this one, which has imported what takes long and nothing of Lockstep; ranks
are forked from that in turn. A fault whose text is no longer there is an error: mend the list.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from mutation import faults, faults_loops, faults_memory, faults_models, faults_optimizers  # noqa: E402
from mutation.faults import Fault  # noqa: E402

ALL = (
    *faults.NAMED,
    *faults.BACKEND,
    *faults.CHECKPOINTS,
    *faults_models.PARALLEL,
    *faults_models.MODELS,
    *faults_loops.ALGORITHMS,
    *faults_loops.TRAIN,
    *faults_loops.DATA,
    *faults_memory.MEMORY,
    *faults_memory.LAUNCH,
    *faults_optimizers.STEPPED,
)
TIMEOUT_S = 900
QUICK = "not slow and not gpu and not peers"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="faults whose name or file contains this")
    parser.add_argument("--survivors", type=Path, help="only what survived in this earlier OUT.jsonl")
    parser.add_argument("--verify", action="store_true", help="`lockstep verify` alone")
    parser.add_argument("--tests", action="store_true", help="tests alone")
    arguments = parser.parse_args()
    chosen = [f for f in ALL if arguments.only in f.name or arguments.only in f.file]
    stale = [f.name for f in chosen if (ROOT / "lockstep" / f.file).read_text().count(f.old) != 1]
    if stale:
        print("the text of these faults is not there (once):", *stale, sep="\n  ")
        return 2
    known = {(r["fault"], r["by"]) for r in map(json.loads, _lines(arguments.out))}
    survived = {(r["fault"], r["by"]) for r in map(json.loads, _lines(arguments.survivors)) if r["result"] != "killed"}
    _preload()
    for fault in chosen:
        for by, body in (("tests", _run_tests), ("verify", _run_verify)):
            wanted = not (arguments.tests or arguments.verify) or getattr(arguments, by)
            wanted &= not survived or (fault.name, by) in survived
            if not wanted or (fault.name, by) in known or (by == "verify" and fault.verify is None):
                continue
            record = {"fault": fault.name, "file": fault.file, "by": by, **_try(fault, body)}
            with arguments.out.open("a") as out:
                out.write(json.dumps(record) + "\n")
            print(f"{record['result']:9} {by:6} {record['seconds']:6.1f} s  {fault.name}: {record['what']}", flush=True)
    return 0


def _lines(path: Path | None) -> list[str]:
    return path.read_text().splitlines() if path is not None and path.exists() else []


def _preload() -> None:
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor

    torch.set_num_threads(1)
    assert not any(name.split(".")[0] == "lockstep" for name in sys.modules)


def _try(fault: Fault, body: Any) -> dict[str, Any]:
    """In a copy of the tree with the fault, in a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    try:
        for name in ("lockstep", "tests", "examples", "docs"):
            shutil.copytree(ROOT / name, folder / name, copy_function=shutil.copy2, symlinks=True)
        for name in ("pyproject.toml", "Makefile", "README.md"):
            shutil.copy2(ROOT / name, folder / name)
        file = folder / "lockstep" / fault.file
        file.write_text(file.read_text().replace(fault.old, fault.new))
        started = time.monotonic()
        result = _in_child(folder, fault, body)
        return {**result, "seconds": round(time.monotonic() - started, 1)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _in_child(folder: Path, fault: Fault, body: Any) -> dict[str, Any]:
    answer = folder / "answer.json"
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with contextlib.suppress(BaseException):
            _enter(folder)
            answer.write_text(json.dumps(body(folder, fault)))
        os._exit(0)
    deadline = time.monotonic() + TIMEOUT_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"result": "killed", "what": f"not done after {TIMEOUT_S} s"}
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it may have left running
    return json.loads(answer.read_text()) if answer.exists() else {"result": "killed", "what": "the process ended"}


def _enter(folder: Path) -> None:
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder / "tests")]
    sys.path.remove(str(ROOT / "tests"))
    for name in [n for n in sys.modules if n.split(".")[0] == "mutation"]:
        del sys.modules[name]
    os.environ |= {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.environ |= {"LOCKSTEP_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}
    tempfile.tempdir = str(folder)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _fork_ranks()


def _fork_ranks() -> None:
    """Ranks are forked from here, instead of importing everything again."""
    import torch.multiprocessing

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, **options: Any) -> Any:
        return torch.multiprocessing.start_processes(fn, args, nprocs, join, start_method="fork")

    torch.multiprocessing.spawn = spawn  # type: ignore[assignment]
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context(  # type: ignore[assignment]
        "fork" if method == "forkserver" else method
    )


class _FirstFailure:
    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = f"{report.nodeid} (collection)"


def _run_tests(folder: Path, fault: Fault) -> dict[str, Any]:
    import pytest

    num_run = 0
    for part in fault.tests:
        arguments = shlex.split(part)
        if not (folder / arguments[0].split("::")[0]).exists():
            continue
        seen = _FirstFailure()
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", QUICK, *arguments], plugins=[seen])
        if code == 1 or seen.name:
            return {"result": "killed", "what": seen.name}
        if code != 0:
            return {"result": "error", "what": f"pytest {part}: exit code {code}"}
        num_run += 1
    return {"result": "survived", "what": f"{num_run} of {len(fault.tests)} parts of the tests pass"}


def _run_verify(folder: Path, fault: Fault) -> dict[str, Any]:
    from lockstep.config import load_config
    from lockstep.verification import verify
    from mutation.cases import write_case

    assert fault.verify is not None
    name, layouts = fault.verify
    place = folder / "case"
    place.mkdir()
    try:
        report = verify(load_config(write_case(name, place)), layouts=layouts)
    except Exception as error:
        return {"result": "killed", "what": f"{type(error).__name__}: {error}"[:200]}
    said = [f"{v.layout.name}: {v.problem}" for v in report.verdicts if not v.passed]
    return {"result": "killed" if said else "survived", "what": (said or ["all layouts pass"])[-1][:200]}


if __name__ == "__main__":
    sys.exit(main())
