"""Real ranks that are asked to stop: a signal to any of them, one checkpoint, the weights of an undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import tiny
from distributed import test_grpo_async, test_preference_resume, test_resume
from distributed.test_elastic import LAYOUTS
from ranks import exported, newest_step, run_to_the_end, start_ranks

from lockstep.processes.stop_notice import SAVE_ON_SIGTERM_VARIABLE
from lockstep.rundir import EXIT_INTERRUPTED, RunDir


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2, initializer_range=0.05)


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def ask_to_stop(run: RunDir, num_ranks: int, at_step: int, asked: list[int], number: signal.Signals) -> int:
    """The step at which it ended."""
    environment = {SAVE_ON_SIGTERM_VARIABLE: "1"} if number == signal.SIGTERM else {}
    with start_ranks(run, num_ranks, environment) as ranks:
        assert ranks.wait_until(lambda: newest_step(run) >= at_step), "the run ended too early"
        ranks.signal(number, asked)
        codes = ranks.wait()
    assert codes == [EXIT_INTERRUPTED] * num_ranks
    status = run.status()
    assert (status["state"], status.get("error"), run.failures()) == ("interrupted", None, [])
    assert run.list_checkpoints()[-1].step == status["step"] >= at_step
    return int(status["step"])


@pytest.mark.parametrize(
    ("layout", "asked", "number"),
    [
        ("fsdp", [1], signal.SIGUSR1),
        pytest.param("ddp", [0], signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("one", [0], signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("fsdp", [0, 1], signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_any_rank_was_asked_to_stop_goes_on_bit_for_bit(
    tmp_path: Path, tiny_model: Path, layout: str, asked: list[int], number: signal.Signals
) -> None:
    no_checkpoints: dict[str, Any] = {"checkpoint": {"every_steps": 0}}
    run, undisturbed = (
        test_resume.make_run(tmp_path / name, tiny_model, layout, **no_checkpoints) for name in ("asked", "undisturbed")
    )
    num_ranks = test_resume.num_ranks_of(run)
    run_to_the_end(undisturbed, num_ranks)
    ask_to_stop(run, num_ranks, 5, asked, number)
    run_to_the_end(run, num_ranks)
    test_resume.assert_same_result(run, undisturbed)


@pytest.mark.slow
def test_preferences(tmp_path: Path, policy: Path) -> None:
    run, undisturbed = (
        test_preference_resume.make_run(make_folder(tmp_path / name), policy, "fsdp-2", "copy")
        for name in ("asked", "undisturbed")
    )
    run_to_the_end(undisturbed, 2)
    ask_to_stop(run, 2, 3, [1], signal.SIGUSR1)
    run_to_the_end(run, 2)
    assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(undisturbed))


@pytest.mark.slow
@pytest.mark.parametrize("engines", [0, 2])
@pytest.mark.parametrize("asked", [[0], [1]])
def test_reinforcement_learning(tmp_path: Path, policy: Path, engines: int, asked: list[int]) -> None:
    """With engines, rank 0 stops while they sample; where the ranks sample, and for rank 1, after the step."""
    layout, rollouts = "fsdp-2", {"engines": engines} if engines else {}
    run, undisturbed = (
        test_grpo_async.make_run(make_folder(tmp_path / name), policy, rollouts, layout)
        for name in ("asked", "undisturbed")
    )
    test_grpo_async.run_to_the_end(undisturbed, LAYOUTS[layout][0])
    ask_to_stop(run, LAYOUTS[layout][0], 2, asked, signal.SIGUSR1)
    test_grpo_async.run_to_the_end(run, LAYOUTS[layout][0])
    assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(undisturbed))
