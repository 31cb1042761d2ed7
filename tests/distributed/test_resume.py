"""Nothing is lost: kill a run at any moment, resume it, and its weights are those of a run that was never killed.

The SHA-256 of the weights is compared: parameters, optimizer moments, the random state of dropout and data order count.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from ranks import exported, newest_step, run_to_the_end, start_ranks

from lockstep.config import load_config
from lockstep.model.checkpoint_storage import INDEX
from lockstep.rundir import MANIFEST, RunDir

NUM_STEPS = 24
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"launch": {"procs": 1}},
    "fsdp": {"launch": {"procs": 2}},
    "ddp": {"launch": {"procs": 2}, "parallel": {"replicate": 2, "shard": 1}},
}
TRAINED: dict[str, dict[str, Any]] = {"lora": {"lora": {"rank": 4, "dropout": 0.1}}, "full": {"lora": None}}
CHECKPOINTS = {"every_steps": 3, "keep_last": 2, "keep_best": 0, "asynchronous": True}


def make_run(folder: Path, model: Path, layout: str = "one", trained: str = "lora", **changes: Any) -> RunDir:
    """24 steps; validation and a checkpoint, written in the background, after every third."""
    folder.mkdir(exist_ok=True)
    tiny.write_rows(folder / "validation.jsonl", 8, seed=1)
    settings = {
        "data": {"validation": "validation.jsonl"},
        "optim": {"epochs": 2, "learning_rate": 0.01},
        "evaluation": {"every_steps": 3},
        "checkpoint": CHECKPOINTS,
        **changes,
    }
    config = tiny.write_config(folder, model, **LAYOUTS[layout], **TRAINED[trained], **settings)
    return RunDir.create(folder / "run", load_config(config))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str, str], RunDir]:
    """The run that was never killed, by layout and what is trained; made once."""
    made: dict[tuple[str, str], RunDir] = {}

    def get(layout: str, trained: str) -> RunDir:
        if (layout, trained) not in made:
            run = make_run(tmp_path_factory.mktemp(f"{layout}-{trained}"), tiny_model, layout, trained)
            run_to_the_end(run, num_ranks_of(run))
            made[layout, trained] = run
        return made[layout, trained]

    return get


def num_ranks_of(run: RunDir) -> int:
    return run.config().launch.procs


def assert_same_result(run: RunDir, reference: RunDir) -> None:
    assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(reference))
    assert [losses_of(record) for record in run.metrics()] == [losses_of(record) for record in reference.metrics()]


def losses_of(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(key) for key in ("step", "split", "loss", "grad_norm", "learning_rate", "epoch"))


def kill_at_step(run: RunDir, step: int, delay_s: float, victims: list[int] | None) -> None:
    """SIGKILL some ranks (None: all) a moment after a step was logged; the others end by themselves."""
    with start_ranks(run, num_ranks_of(run)) as ranks:
        assert ranks.wait_until(lambda: newest_step(run) >= step), "the run ended too early"
        time.sleep(delay_s)
        ranks.signal(signal.SIGKILL, victims)
        codes = ranks.wait()
    assert [code for rank, code in enumerate(codes) if victims is None or rank in victims] == [-signal.SIGKILL] * (
        len(codes) if victims is None else len(victims)
    )
    assert 0 not in codes


def kill_while_writing(run: RunDir, victims: list[int] | None) -> None:
    """SIGKILL in the middle of a checkpoint that is not the first.

    The ranks are frozen first, so that the folder which is seen half-written is half-written when the signal comes.
    """

    def is_in_the_middle() -> bool:
        return bool(half_written(run) and run.list_checkpoints())

    with start_ranks(run, num_ranks_of(run)) as ranks:
        while True:
            assert ranks.wait_until(is_in_the_middle), "no checkpoint was caught half-written"
            ranks.signal(signal.SIGSTOP)
            time.sleep(0.02)  # a signal takes a moment to arrive
            if is_in_the_middle():
                break
            ranks.signal(signal.SIGCONT)
        ranks.signal(signal.SIGKILL, victims)
        ranks.signal(signal.SIGCONT)
        codes = ranks.wait()
    assert -signal.SIGKILL in codes


def half_written(run: RunDir) -> list[int]:
    """Steps. Two, when one rank begins the next checkpoint while another still commits the last."""
    return [int(path.name.rsplit("-", 1)[1]) for path in run.checkpoints.glob("writing-step-*")]


# --- kill and resume ------------------------------------------------------------------------------------------------

# Ten moments: (layout, trained, seed of the moment); the first three are enough for every day.
MOMENTS = [
    ("fsdp", "lora", 1),
    ("ddp", "full", 2),
    ("one", "lora", 3),
    *(
        pytest.param(layout, trained, seed, marks=pytest.mark.slow)
        for layout, trained, seed in [
            ("fsdp", "lora", 4),
            ("fsdp", "full", 5),
            ("fsdp", "full", 6),
            ("ddp", "lora", 7),
            ("ddp", "lora", 8),
            ("one", "full", 9),
            ("one", "lora", 10),
        ]
    ),
]


@pytest.mark.parametrize(("layout", "trained", "seed"), MOMENTS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, tiny_model: Path, uninterrupted: Callable[[str, str], RunDir], layout: str, trained: str, seed: int
) -> None:
    """Killed once or twice, one rank or all, at drawn moments."""
    draw = random.Random(seed)
    run = make_run(tmp_path, tiny_model, layout, trained)
    steps = sorted(draw.sample(range(2, NUM_STEPS - 3), draw.choice([1, 2])))
    for step in steps:
        victims = draw.choice([None, [draw.randrange(num_ranks_of(run))]])
        kill_at_step(run, step, delay_s=draw.uniform(0, 0.08), victims=victims)
    run_to_the_end(run, num_ranks_of(run))
    assert_same_result(run, uninterrupted(layout, trained))
    resumed = [event["step"] for event in run.events() if event["event"] == "resumed"]
    assert resumed or steps[-1] < 6, "a checkpoint was there to resume from"


@pytest.mark.parametrize(
    ("layout", "trained", "victims"),
    [
        ("fsdp", "lora", [1]),
        pytest.param("fsdp", "full", None, marks=pytest.mark.slow),
        pytest.param("ddp", "lora", [0], marks=pytest.mark.slow),
        pytest.param("one", "full", None, marks=pytest.mark.slow),
    ],
)
def test_a_kill_in_the_middle_of_a_checkpoint_costs_only_that_checkpoint(
    tmp_path: Path,
    tiny_model: Path,
    uninterrupted: Callable[[str, str], RunDir],
    layout: str,
    trained: str,
    victims: list[int] | None,
) -> None:
    run = make_run(tmp_path, tiny_model, layout, trained)
    kill_while_writing(run, victims)
    before = run.list_checkpoints()[-1].step
    # None, where the killed rank had written all of its part, and the other could commit it.
    assert all(step > before for step in half_written(run))
    run_to_the_end(run, num_ranks_of(run))
    assert [e["step"] for e in run.events() if e["event"] == "resumed"] == [before]
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["step-21", "step-24"], "the rest is swept"
    assert_same_result(run, uninterrupted(layout, trained))


@pytest.mark.slow
def test_the_command_names_the_killed_rank_and_resumes_to_the_same_weights(
    tmp_path: Path, tiny_model: Path, uninterrupted: Callable[[str, str], RunDir]
) -> None:
    run = make_run(tmp_path / "made", tiny_model, "fsdp", "lora")
    shutil.copy(run.config_path, tmp_path / "config.yaml")
    run = RunDir(tmp_path / "run")
    once = "launch.max_restarts=0"
    command = tiny.start_lockstep("train", tmp_path / "config.yaml", once, "--run-dir", run.path)
    try:
        deadline = time.monotonic() + 300
        while newest_step(run) < 5:
            assert command.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(tiny.pid_of_rank(run, 1), signal.SIGKILL)
        out, err = command.communicate(timeout=300)
    finally:
        command.kill()
    assert command.returncode == 1
    assert err.startswith("error: rank 1 was ended by signal 9 (SIGKILL)")
    assert "Traceback" not in out + err
    assert f"lockstep train --resume {run.path}" in out

    code, out, err = tiny.run_lockstep("train", "--resume", run.path)
    assert (code, err) == (0, "")
    assert_same_result(run, uninterrupted("fsdp", "lora"))


# --- what is left after a kill --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> RunDir:
    """A run on one process, killed after step 13: it has the checkpoints of steps 9 and 12."""
    run = make_run(tmp_path_factory.mktemp("killed"), tiny_model)
    kill_at_step(run, 13, delay_s=0.0, victims=None)
    return run


@pytest.fixture
def copy(killed: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(shutil.copytree(killed.path, tmp_path / "run"), owner=True)


def newest_checkpoint(run: RunDir) -> Path:
    return run.list_checkpoints()[-1].path


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["rank-0.safetensors", INDEX, MANIFEST])
def test_a_damaged_checkpoint_is_passed_over_and_named(
    copy: RunDir, uninterrupted: Callable[[str, str], RunDir], name: str
) -> None:
    flip_a_bit(newest_checkpoint(copy) / name)
    steps = [checkpoint.step for checkpoint in copy.list_checkpoints() if checkpoint.path != newest_checkpoint(copy)]
    damaged_step = max(int(path.name.removeprefix("step-")) for path in copy.checkpoints.glob("step-*"))
    run_to_the_end(copy, 1)
    (event,) = [e for e in copy.events() if e["event"] == "checkpoint_damaged"]
    assert event["step"] == damaged_step
    assert name in event["problem"]
    assert [e["step"] for e in copy.events() if e["event"] == "resumed"][-1] in steps or name == MANIFEST
    assert_same_result(copy, uninterrupted("one", "lora"))


def test_a_half_written_checkpoint_is_swept(copy: RunDir, uninterrupted: Callable[[str, str], RunDir]) -> None:
    half = copy.begin_checkpoint(15)
    shutil.copy(newest_checkpoint(copy) / "rank-0.safetensors", half)
    (copy.checkpoints / "deleting-step-3").mkdir()
    run_to_the_end(copy, 1)
    assert sorted(path.name for path in copy.checkpoints.iterdir()) == ["step-21", "step-24"]
    assert_same_result(copy, uninterrupted("one", "lora"))


def test_every_step_is_in_the_metrics_once(copy: RunDir) -> None:
    with (copy.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "spl')  # killed in the middle of a line
    run_to_the_end(copy, 1)
    assert [record["step"] for record in copy.metrics() if record["split"] == "train"] == list(range(1, NUM_STEPS + 1))
    assert [record["step"] for record in copy.metrics() if record["split"] == "validation"] == list(range(0, 25, 3))
    lines = (copy.path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) > NUM_STEPS, "steps after the checkpoint were made again, and written again"


def test_other_data_is_refused(copy: RunDir, tmp_path: Path) -> None:
    rows = tiny.write_rows(tmp_path / "other.jsonl", 48, seed=1)
    config = copy.config()
    other = config.model_copy(update={"data": config.data.model_copy(update={"train": (str(rows),)})})
    copy.config_path.write_text(other.to_yaml())
    with start_ranks(copy, 1) as ranks:
        assert ranks.wait() == [2]
    (failure,) = copy.failures()
    assert failure["message"].startswith("the data is not what step ")
    assert "put the data back" in failure["message"]


def test_a_run_killed_after_its_last_checkpoint_only_exports(
    tmp_path: Path, uninterrupted: Callable[[str, str], RunDir]
) -> None:
    reference = uninterrupted("one", "lora")
    run = RunDir(shutil.copytree(reference.path, tmp_path / "run"), owner=True)
    run.write_status(state="running")
    shutil.rmtree(run.export)
    before = (newest_checkpoint(run) / MANIFEST).stat().st_ino
    run_to_the_end(run, 1)
    assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(reference))
    assert (newest_checkpoint(run) / MANIFEST).stat().st_ino == before, "replacing it would risk the only one"


# --- early stopping -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> RunDir:
    """Overfits quickly, and so stops early."""
    run = make_early_stopping_run(tmp_path_factory.mktemp("stopped"), tiny_model)
    run_to_the_end(run, 1)
    assert 6 < run.status()["step"] < NUM_STEPS * 5
    return run


def make_early_stopping_run(folder: Path, model: Path) -> RunDir:
    return make_run(
        folder,
        model,
        evaluation={"every_steps": 2, "patience": 4},
        checkpoint={**CHECKPOINTS, "keep_best": 1},
        optim={"epochs": 12, "learning_rate": 0.1, "schedule": "constant"},
    )


def outcome_of(run: RunDir) -> dict[str, Any]:
    keys = ("step", "loss", "validation_loss", "best_validation_loss", "best_step", "tokens")
    return {key: run.status()[key] for key in keys}


def test_patience_and_the_best_survive_a_kill(tmp_path: Path, tiny_model: Path, stopped: RunDir) -> None:
    best, last = stopped.status()["best_step"], stopped.status()["step"]
    run = make_early_stopping_run(tmp_path, tiny_model)
    kill_at_step(run, (best + last) // 2 + 1, delay_s=0.0, victims=None)  # some patience is used up
    run_to_the_end(run, 1)
    assert outcome_of(run) == outcome_of(stopped)
    assert [e["step"] for e in run.events() if e["event"] == "early_stop"] == [last]
    assert best in [checkpoint.step for checkpoint in run.list_checkpoints()], "the best is kept"
    assert_same_result(run, stopped)


def test_a_run_that_stopped_early_does_not_train_on_when_resumed(tmp_path: Path, stopped: RunDir) -> None:
    run = RunDir(shutil.copytree(stopped.path, tmp_path / "run"), owner=True)
    run.write_status(state="running")  # killed while it exported
    num_lines = len((run.path / "metrics.jsonl").read_text().splitlines())
    run_to_the_end(run, 1)
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) == num_lines
    assert outcome_of(run) == outcome_of(stopped)
    assert_same_result(run, stopped)


def test_the_manifest_says_what_the_loop_must_remember(stopped: RunDir) -> None:
    manifest = json.loads((newest_checkpoint(stopped) / MANIFEST).read_text())
    progress = manifest["extra"]["progress"]
    assert progress["step"] == stopped.status()["step"]
    assert progress["evaluations_without_improvement"] == 4
