"""Ranks of one process group: however they end, the cause is named and no process is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.processes.ranks import run_ranks
from lockstep.processes.tree import start_time

STUB = """
import os, sys, time
from pathlib import Path
def main(arguments):
    rank = int(os.environ["RANK"])
    assert os.environ["WORLD_SIZE"] == "2"
    Path(arguments[0], f"seen-{rank}").write_text(str(os.getpid()))
    BODY
    return 0
"""


def read_failures(folder: Path) -> list[dict[str, Any]]:
    return [{"rank": 1, "message": path.read_text()} for path in folder.glob("failure")]


def run_stub(folder: Path, name: str, body: str, deadline_s: float) -> str:
    (folder / f"{name}.py").write_text(STUB.replace("BODY", body))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return run_ranks(name, folder, 2, deadline_s=deadline_s, read_failures=read_failures, preload=["torch"])


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The server that ranks are forked from has imported torch: the deadline of a hanging rank can be short."""
    assert run_stub(tmp_path_factory.mktemp("stub"), "stub_first", "pass", 120) == ""


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("pass", ""),
        ("if rank == 1: time.sleep(600)", "not done after 3 s: rank 1 still ran and was ended"),
        ("if rank == 1: os.kill(os.getpid(), 9)", "rank 1 was ended by signal 9 (SIGKILL)"),
        ("if rank == 1: print('the last word'); sys.stdout.flush(); os._exit(3)", "exit code 3: the last word"),
        (
            "if rank == 1: Path(arguments[0], 'failure').write_text('no'); os._exit(1)\n    time.sleep(600)",
            "rank 1: no",
        ),
    ],
    ids=["good", "hangs", "killed", "silent", "says why"],
)
def test_however_ranks_end_the_cause_is_reported_and_none_is_left(
    tmp_path: Path, body: str, said: str, request: pytest.FixtureRequest
) -> None:
    hangs = "not done" in said
    name = f"stub_{request.node.callspec.id.replace(' ', '_')}"
    found = run_stub(tmp_path, name, body, deadline_s=3 if hangs else 120)
    assert (said in found) if said else not found
    assert {path.name for path in tmp_path.glob("seen-*")} == {"seen-0", "seen-1"}
    assert not any(start_time(int(path.read_text())) for path in tmp_path.glob("seen-*"))
