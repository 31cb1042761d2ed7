"""What is made of Slurm's answers: the commands are scripts that print what the real ones do."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from lockstep.config import resolve_config
from lockstep.launch import slurm_queue
from lockstep.launch.launcher import Resources
from lockstep.launch.slurm import SlurmLauncher
from lockstep.launch.slurm_queue import (
    QueuedJob,
    SlurmFull,
    SlurmRefused,
    SlurmSilent,
    ask,
    describe_waiting,
    find_job,
    list_jobs,
    look_at,
    place_in_queue,
)
from lockstep.rundir import RunDir


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def answer(folder: Path, command: str, out: str = "", err: str = "", code: int = 0, then: str = "") -> None:
    script = folder / command
    script.write_text(f"#!/bin/bash\ncat <<'END'\n{out}\nEND\ncat >&2 <<'END'\n{err}\nEND\n{then}\nexit {code}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def test_the_components_of_a_job_are_one_job(bin_folder: Path) -> None:
    lines = [
        "7|PENDING|Priority||gpu|2026-03-01T10:00:00|somebody's | comment",
        "12+0|COMPLETED|None|n1|gpu|N/A|lockstep:a",
        "12+1|RUNNING|None|n2|small|N/A|lockstep:a",
    ]
    answer(bin_folder, "squeue", "\n".join(lines))
    jobs = list_jobs()
    assert jobs["12"] == QueuedJob("RUNNING", "None", "n1,n2", "small", "N/A", "lockstep:a")
    assert jobs["7"].comment == "somebody's | comment"
    assert find_job("a") == "12"
    assert find_job("b", patience_s=0) is None


def test_a_place_counts_jobs_once_and_not_those_that_are_held(bin_folder: Path) -> None:
    answer(bin_folder, "squeue", "9|500\n4+0|400\n4+1|400\n5_[1-3]|300\n7|200\n3|0")
    assert place_in_queue("7", "gpu") == (4, 4)
    assert place_in_queue("4", "gpu") == (2, 4)
    assert place_in_queue("3", "gpu") is None
    view = QueuedJob("PENDING", "Priority", "", "gpu", "2026-03-01T10:00:00")
    assert describe_waiting("7", view, (4, 4)) == (
        "job 7 waits in Slurm's queue: others are before it, place 4 of 4 in gpu, expected to start at "
        "2026-03-01 10:00:00"
    )


def test_what_the_cluster_could_never_give_is_not_submitted(bin_folder: Path) -> None:
    tree = {"model": "m", "data": {"train": "rows"}, "launch": {"kind": "slurm", "nodes": 900}}
    run = RunDir.create(bin_folder / "run", resolve_config(tree))
    for command in ("squeue", "scancel"):
        answer(bin_folder, command)
    refusal = (
        'echo "$1" >> "$0.asked"; [ "$1" = --test-only ] && echo "sbatch: error: Node count invalid" >&2 && exit 1'
    )
    answer(bin_folder, "sbatch", "12", then=refusal)
    with pytest.raises(SlurmRefused, match="Node count invalid"):
        SlurmLauncher().start(run.path, Resources(1))
    assert (bin_folder / "sbatch.asked").read_text() == "--test-only\n"
    assert run.status()["state"] == "failed"


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", SlurmSilent, "try again later"),
        (
            "sbatch: error: AssocMaxSubmitJobLimit\n"
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's "
            "size and/or time limits)",
            SlurmFull,
            "wait until others of your jobs have ended",
        ),
        (
            "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
            "accounting/QOS policy (job submit limit, user's size and/or time limits)",
            SlurmFull,
            "takes no more jobs now",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            SlurmRefused,
            "set launch.account|set launch.partition",
        ),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", SlurmRefused, "set launch.qos"),
        ("sbatch: error: Access/permission denied", SlurmRefused, "ask the operator"),
        ("", SlurmRefused, "no reason"),
    ],
)
def test_every_refusal_is_a_sentence(bin_folder: Path, said: str, kind: type[Exception], words: str) -> None:
    answer(bin_folder, "sbatch", err=said, code=1)
    with pytest.raises(kind, match=words) as refusal:
        ask(["sbatch", "job.sh"])
    assert "\n" not in str(refusal.value)


def test_a_queue_in_which_sbatch_waits_is_full(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"
    answer(bin_folder, "sbatch", err=said, then="exec sleep 30")
    monkeypatch.setattr(slurm_queue, "_COMMAND_S", 0.5)
    with pytest.raises(SlurmFull, match="queue is full"):
        ask(["sbatch", "job.sh"])
    answer(bin_folder, "sbatch", then="exec sleep 30")
    with pytest.raises(SlurmSilent, match="no answer"):
        ask(["sbatch", "job.sh"])


def test_a_forgotten_job_is_none(bin_folder: Path) -> None:
    answer(bin_folder, "squeue", err="slurm_load_jobs error: Invalid job id specified", code=1)
    assert look_at("99") is None
