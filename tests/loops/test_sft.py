"""The supervised loop with a fake backend and a real run directory: what it asks for, when, and what it writes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.backend.fake import FakeBackend
from lockstep.config import RunConfig
from lockstep.parallel.group import Group
from lockstep.rundir import RunDir
from lockstep.train import sft
from lockstep.train.progress import CheckpointError, Checkpoints, Progress
from lockstep.train.run import resume
from lockstep.train.schedule import learning_rate_at
from lockstep.types import Completion, Datum, Logprobs, OptimResult, OptimStep

DIGEST = "the rows of this test"
TIMES = {"time", "tokens_per_s", "step_time_s", "time_s"}


def make_config(**changes: dict[str, Any]) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"path": "none"},
        "data": {"train": ["none.jsonl"], "max_length": 16, "validation": ["none.jsonl"]},
        "batch": {"samples": 4},
        "optim": {"learning_rate": 0.1},
        "checkpoint": {"every_steps": 0, "keep_last": 100},
        "evaluation": {"every_steps": 0, "at_start": False},
        "logging": {"tensorboard": False},
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    return RunConfig.model_validate(tree)


def make_rows(count: int, *, length: int | None = None, name: str = "train.jsonl") -> list[Datum]:
    """Weights of several sizes, some zero; 5 to 9 tokens unless a length is given."""
    rows = []
    for i in range(count):
        num_answer = (length or 5 + i * 3 % 5) - 2
        weights = [(0.0, 1.0, 0.5)[(i + t) % 3] for t in range(num_answer)]
        answer = Completion([(i * 5 + t * 3) % 97 for t in range(num_answer)], [*weights[:-1], 1.0])
        rows.append(Datum([1, 2], [answer], f"{name}:{i + 1}"))
    return rows


def train(
    folder: Path,
    config: RunConfig,
    backend: FakeBackend,
    rows: Sequence[Datum],
    validation: Sequence[Datum] = (),
    timeout_s: float = 20.0,
) -> tuple[RunDir, Progress]:
    """The run in `folder`, from its start or from its newest checkpoint: what train.run does around the loop."""
    run = RunDir(folder, owner=True) if (folder / "config.yaml").exists() else RunDir.create(folder, config)
    run.sweep()
    progress = resume(run, backend, Group(0, 1, torch.device("cpu")), DIGEST)
    checkpoints = Checkpoints(
        run,
        backend,
        config.checkpoint,
        data_digest=DIGEST,
        timeout_s=timeout_s,
        last_step=progress.step or None,
    )
    try:
        return run, sft.train(config, backend, rows, validation, run, checkpoints, progress)
    finally:
        checkpoints.close()


def records_of(run: RunDir, split: str = "train") -> list[dict[str, Any]]:
    return [r for r in run.metrics() if r["split"] == split]


def committed(run: RunDir) -> list[int]:
    return [c.step for c in run.list_checkpoints()]


def batches_of(backend: FakeBackend) -> list[list[str]]:
    return [call.origins for call in backend.calls_of("forward_backward")]


def without_times(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records]


class ScriptedBackend(FakeBackend):
    """Its validation losses are given, one for each evaluation."""

    def __init__(self, losses: Sequence[float], **options: Any) -> None:
        super().__init__(**options)
        self.losses = list(losses)

    def forward(self, batch: Sequence[Datum]) -> list[Logprobs]:
        super().forward(batch)
        loss = self.losses.pop(0)
        return [[[-loss] * len(c.tokens) for c in datum.completions] for datum in batch]


# --- steps, rates, scales -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "optim", "expected"),
    [
        ({"samples": 4}, {}, 3),
        ({"samples": 4}, {"epochs": 2}, 6),
        ({"samples": 4}, {"epochs": 0.5}, 2),
        ({"samples": 4}, {"epochs": 100, "max_steps": 5}, 5),
        ({"samples": 4}, {"max_steps": 50}, 3),
        ({"samples": 100}, {"epochs": 3}, 3),
        ({"samples": None, "tokens": 24}, {}, 4),
        ({"samples": None, "tokens": 24}, {"epochs": 2}, 8),
        ({"samples": None, "tokens": 16}, {"epochs": 1}, 5),
    ],
)
def test_a_run_makes_the_steps_that_its_configuration_counts(batch, optim, expected, tmp_path):
    backend = FakeBackend()
    rows = make_rows(10, length=8)
    run, progress = train(tmp_path / "run", make_config(batch=batch, optim=optim), backend, rows)
    assert len(backend.calls_of("forward_backward")) == len(backend.calls_of("optim_step")) == expected
    assert progress.step == run.status()["step"] == run.status()["total_steps"] == expected
    assert progress.tokens == run.status()["tokens"] == 8 * sum(len(b) for b in batches_of(backend))


def test_every_row_is_trained_on_once_in_each_epoch(tmp_path):
    backend = FakeBackend()
    rows = make_rows(10)
    train(tmp_path / "run", make_config(optim={"epochs": 3}), backend, rows)
    seen = [origin for batch in batches_of(backend) for origin in batch]
    epochs = [seen[i : i + 10] for i in range(0, 30, 10)]
    assert all(sorted(epoch) == sorted(d.origin for d in rows) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_each_optimizer_step_receives_the_rate_of_the_schedule(schedule, tmp_path):
    optim = {"learning_rate": 0.3, "schedule": schedule, "warmup_steps": 2, "epochs": 3, "beta1": 0.5, "beta2": 0.7}
    config = make_config(optim={**optim, "eps": 1e-5, "weight_decay": 0.2, "max_grad_norm": 9.0})
    backend = FakeBackend()
    run, _ = train(tmp_path / "run", config, backend, make_rows(10))
    rates = [learning_rate_at(i, peak=0.3, num_steps=9, config=config.optim) for i in range(9)]
    asked = [call.argument for call in backend.calls_of("optim_step")]
    assert asked == [OptimStep(rate, 0.5, 0.7, 1e-5, 0.2, 9.0) for rate in rates]
    assert [r["learning_rate"] for r in records_of(run)] == rates


def test_the_loss_is_scaled_by_the_whole_weight_of_the_global_batch(tmp_path):
    backend = FakeBackend()
    run, _ = train(tmp_path / "run", make_config(optim={"learning_rate": 1e-12}), backend, make_rows(10))
    calls = backend.calls_of("forward_backward")
    assert [len(call.batch) for call in calls] == [4, 4, 2]
    for call, record in zip(calls, records_of(run), strict=True):
        pairs = [(w, t) for d in call.batch for c in d.completions for w, t in zip(c.weights, c.tokens, strict=True)]
        weight = sum(w for w, _ in pairs)
        assert call.argument.kind == "cross_entropy"
        assert call.argument.scale == pytest.approx(1 / weight, rel=1e-14)
        # The mean by hand, with the fake's log-prob of a token; its weight has hardly moved.
        mean = sum(w * (20.0 - t % 7) ** 2 / 2 for w, t in pairs) / weight
        assert record["loss"] == pytest.approx(mean, rel=1e-9)


def test_the_loss_falls(tmp_path):
    run, progress = train(tmp_path / "run", make_config(optim={"epochs": 10}), FakeBackend(), make_rows(10))
    losses = [r["loss"] for r in records_of(run)]
    assert losses[-1] < 0.5 * losses[0]
    assert progress.loss == run.status()["loss"] == losses[-1]


# --- validation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        ({"at_start": True, "every_steps": 0}, [0, 6]),
        ({"at_start": False, "every_steps": 0}, [6]),
        ({"at_start": True, "every_steps": 4}, [0, 4, 6]),
        ({"at_start": False, "every_steps": 3}, [3, 6]),
        ({"at_start": False, "every_steps": 1}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_validation_comes_at_the_start_then_every_few_steps_and_at_the_end(evaluation, expected, tmp_path):
    backend = FakeBackend()
    validation = make_rows(3, name="validation.jsonl")
    config = make_config(evaluation=evaluation, optim={"epochs": 2})
    run, progress = train(tmp_path / "run", config, backend, make_rows(10), validation)
    assert [r["step"] for r in records_of(run, "validation")] == expected
    assert [call.step for call in backend.calls_of("forward")] == expected
    assert progress.validation_loss == run.status()["validation_loss"] == records_of(run, "validation")[-1]["loss"]


def test_a_run_without_validation_rows_never_evaluates(tmp_path):
    backend = FakeBackend()
    config = make_config(evaluation={"at_start": True, "every_steps": 1})
    run, progress = train(tmp_path / "run", config, backend, make_rows(10))
    assert backend.calls_of("forward") == []
    assert progress.validation_loss is None
    assert committed(run) == [3]


def test_the_validation_loss_is_one_weighted_mean_over_rows_handed_over_in_pieces(tmp_path):
    backend = FakeBackend()
    validation = make_rows(600)
    config = make_config(evaluation={"at_start": True}, optim={"max_steps": 1})
    run, _ = train(tmp_path / "run", config, backend, make_rows(10), validation)
    pieces = [call.batch for call in backend.calls_of("forward") if call.step == 0]
    assert [d.origin for piece in pieces for d in piece] == [d.origin for d in validation]
    assert len(pieces) > 1
    pairs = [(w, t) for d in validation for c in d.completions for w, t in zip(c.weights, c.tokens, strict=True)]
    mean = sum(w * (20.0 - t % 7) ** 2 / 2 for w, t in pairs) / sum(w for w, _ in pairs)
    first = records_of(run, "validation")[0]
    assert first["loss"] == pytest.approx(mean, rel=1e-12)
    assert first["rows"] == 600


def test_the_best_step_is_that_of_the_lowest_validation_loss(tmp_path):
    backend = ScriptedBackend([5.0, 4.0, 3.0, 3.5, 3.2, 3.3, 3.4])
    config = make_config(evaluation={"at_start": True, "every_steps": 1}, optim={"epochs": 2})
    run, progress = train(tmp_path / "run", config, backend, make_rows(10), make_rows(2))
    assert (progress.best_step, progress.best_validation_loss, progress.validation_loss) == (2, 3.0, 3.4)
    assert (run.status()["best_step"], run.status()["best_validation_loss"]) == (2, 3.0)
    assert progress.step == 6


@pytest.mark.parametrize(
    ("evaluation", "losses", "stops_at", "best_step"),
    [
        ({"patience": 2}, [5.0, 4.0, 4.5, 4.4], 4, 2),
        ({"patience": 2}, [5.0, 5.1, 4.0, 4.1, 3.0, 3.1, 3.2], 7, 5),  # an improvement starts the count again
        ({"patience": 1}, [5.0, 5.0], 2, 1),  # equal is no improvement
        ({"patience": 2, "min_delta": 0.2}, [5.0, 4.9, 4.85], 3, 1),
        ({"patience": 2, "min_delta": 0.2}, [5.0, 4.9, 4.75, 4.7, 4.6], 5, 3),  # small ones add up
    ],
)
def test_a_run_stops_early_when_its_patience_is_used_up(evaluation, losses, stops_at, best_step, tmp_path):
    backend = ScriptedBackend(losses)
    config = make_config(evaluation={"every_steps": 1, **evaluation}, optim={"max_steps": 9, "epochs": 9})
    rows, validation = make_rows(10), make_rows(2)
    run, progress = train(tmp_path / "run", config, backend, rows, validation)
    assert (progress.step, progress.best_step) == (stops_at, best_step)
    assert [(e["step"], e["best_step"]) for e in run.events() if e["event"] == "early_stop"] == [(stops_at, best_step)]
    assert {best_step, stops_at} <= set(committed(run))

    again = ScriptedBackend([])
    _, resumed = train(tmp_path / "run", config, again, rows, validation)
    assert resumed.step == stops_at
    assert again.calls_of("forward_backward") == []


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({"every_steps": 2}, [2, 4, 6, 7]),
        ({"every_steps": 7}, [7]),
        ({"every_steps": 0}, [7]),
        ({"every_steps": 2, "asynchronous": False}, [2, 4, 6, 7]),
        ({"every_steps": 2, "keep_last": 2}, [6, 7]),
        ({"every_steps": 2, "keep_last": 1}, [7]),
    ],
)
def test_checkpoints_are_kept_of_the_steps_that_the_configuration_names(checkpoint, expected, tmp_path):
    backend = FakeBackend()
    config = make_config(checkpoint=checkpoint, optim={"epochs": 9, "max_steps": 7})
    run, _ = train(tmp_path / "run", config, backend, make_rows(10))
    assert committed(run) == expected
    every = checkpoint["every_steps"] or 7
    assert [call.step for call in backend.calls_of("save_state")] == sorted({*range(every, 8, every), 7})
    latest = run.latest_checkpoint()
    assert latest is not None
    assert latest.extra["data_digest"] == DIGEST


def test_the_best_checkpoints_are_kept_beside_the_last_ones(tmp_path):
    losses = [5.0, 2.0, 4.0, 1.0, 3.0, 6.0, 7.0]
    config = make_config(
        checkpoint={"every_steps": 2, "keep_last": 1, "keep_best": 2},
        evaluation={"every_steps": 1},
        optim={"epochs": 9, "max_steps": 7},
    )
    run, _ = train(tmp_path / "run", config, ScriptedBackend(losses), make_rows(10), make_rows(2))
    assert {c.step: c.validation_loss for c in run.list_checkpoints()} == {2: 2.0, 4: 1.0, 7: 7.0}


def test_a_new_best_step_is_saved_at_once_unless_no_best_is_kept(tmp_path):
    for keep_best, expected in ((1, [1, 3, 5]), (0, [5])):
        config = make_config(
            checkpoint={"keep_best": keep_best}, evaluation={"every_steps": 1}, optim={"epochs": 9, "max_steps": 5}
        )
        backend = ScriptedBackend([5.0, 5.5, 4.0, 4.5, 4.5])
        run, _ = train(tmp_path / f"run-{keep_best}", config, backend, make_rows(10), make_rows(2))
        assert committed(run) == expected


@pytest.mark.parametrize("batch", [{"samples": 4}, {"samples": None, "tokens": 24}], ids=["samples", "tokens"])
@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
def test_a_resumed_run_continues_as_if_it_had_never_stopped(batch, deferred, tmp_path):
    config = make_config(
        batch=batch,
        optim={"epochs": 4, "warmup_steps": 3},
        checkpoint={"every_steps": 3, "keep_best": 0, "asynchronous": False},
        evaluation={"every_steps": 2, "at_start": True, "patience": 50},
    )
    rows, validation = make_rows(10), make_rows(3, name="validation.jsonl")
    whole = FakeBackend(deferred=deferred)
    whole_run, whole_progress = train(tmp_path / "whole", config, whole, rows, validation)

    broken = FakeBackend(deferred=deferred, failures={("forward_backward", 8): RuntimeError("the power went")})
    with pytest.raises(RuntimeError, match="the power went"):
        train(tmp_path / "run", config, broken, rows, validation)
    second = FakeBackend(deferred=deferred)
    run, progress = train(tmp_path / "run", config, second, rows, validation)

    assert [e["step"] for e in run.events() if e["event"] == "resumed"] == [6]
    assert batches_of(second) == batches_of(whole)[6:]
    assert second.calls_of("optim_step") == whole.calls_of("optim_step")[6:]
    assert (second.weight, second.momentum) == (whole.weight, whole.momentum)
    assert progress == whole_progress
    assert without_times(run.metrics()) == without_times(whole_run.metrics())


def test_a_finished_run_that_is_resumed_does_nothing(tmp_path):
    config = make_config(evaluation={"at_start": True})
    train(tmp_path / "run", config, FakeBackend(), make_rows(10), make_rows(2))
    again = FakeBackend()
    _, progress = train(tmp_path / "run", config, again, make_rows(10), make_rows(2))
    assert progress.step == 3
    assert {call.name for call in again.calls} == {"load_state"}


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
def test_a_loss_that_is_not_a_number_ends_the_run_and_names_step_and_rows(deferred, tmp_path):
    backend = FakeBackend(deferred=deferred, nonfinite_at=[5])
    config = make_config(checkpoint={"every_steps": 1, "asynchronous": False}, optim={"epochs": 9})
    with pytest.raises(sft.Diverged) as caught:
        train(tmp_path / "run", config, backend, make_rows(10))
    run = RunDir(tmp_path / "run")
    guilty = backend.calls_of("forward_backward")[4].batch[0].origin
    assert f"the loss is nan at step 5, in rows {guilty}:" in str(caught.value)
    assert committed(run) == [1, 2, 3, 4]
    assert [call.step for call in backend.calls_of("save_state")] == [1, 2, 3, 4]
    assert [r["step"] for r in records_of(run)] == [1, 2, 3, 4]
    # Nothing was learned from it, nor after it.
    latest = run.latest_checkpoint()
    assert latest is not None
    sound = FakeBackend()
    sound.load_state(latest.path, with_optimizer=True)
    assert backend.weight == sound.weight


def test_a_gradient_that_is_not_finite_ends_the_run_and_names_the_whole_batch(tmp_path):
    class Overflowing(FakeBackend):
        def optim_step(self, step: OptimStep) -> OptimResult:
            super().optim_step(step)
            return OptimResult(lambda: math.inf)

    backend = Overflowing()
    with pytest.raises(sft.Diverged) as caught:
        train(tmp_path / "run", make_config(batch={"samples": 7}), backend, make_rows(10))
    first_five = ", ".join(batches_of(backend)[0][:5])
    assert f"the gradient norm is inf at step 1, in rows {first_five} and 2 more:" in str(caught.value)
    assert committed(RunDir(tmp_path / "run")) == []


def test_a_validation_loss_that_is_not_a_number_ends_the_run(tmp_path):
    config = make_config(evaluation={"every_steps": 1}, checkpoint={"every_steps": 1, "asynchronous": False})
    with pytest.raises(sft.Diverged, match="the validation loss is nan after step 2"):
        train(tmp_path / "run", config, ScriptedBackend([5.0, math.nan]), make_rows(10), make_rows(2))
    assert committed(RunDir(tmp_path / "run")) == [1]


@pytest.mark.parametrize("asynchronous", [True, False], ids=["in the background", "waited for"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_earlier_one(asynchronous, tmp_path):
    backend = FakeBackend(failures={("save_state", 4): OSError(28, "No space left on device")})
    config = make_config(checkpoint={"every_steps": 2, "asynchronous": asynchronous}, optim={"epochs": 9})
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "run", config, backend, make_rows(10))
    assert str(caught.value) == (
        "the checkpoint of step 4 could not be written: No space left on device; the last good checkpoint is of step 2"
    )
    # In the background the next steps may already be under way, but not the next checkpoint.
    assert backend.step in ({4, 5, 6} if asynchronous else {4})
    run = RunDir(tmp_path / "run")
    assert committed(run) == [2]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-2"]


def test_a_failed_write_surfaces_at_the_next_step_and_not_only_at_the_next_checkpoint(tmp_path):
    class Patient(FakeBackend):
        """Gives the thread that commits all the time it wants before the next step."""

        def optim_step(self, step: OptimStep) -> OptimResult:
            if self.step > 2:
                pytest.fail("a step was made after the failed write was known")
            return super().optim_step(step)

    backend = Patient(failures={("save_state", 2): OSError(5, "Input/output error")})
    config = make_config(checkpoint={"every_steps": 2}, optim={"epochs": 9})
    run = RunDir.create(tmp_path / "run", config)
    checkpoints = Checkpoints(run, backend, config.checkpoint, data_digest=DIGEST, timeout_s=20)
    poll, pending = checkpoints.poll, []

    def poll_when_done() -> None:
        if checkpoints._pending is not None:
            pending.append(checkpoints._pending.exception(timeout=20))
        poll()

    checkpoints.poll = poll_when_done  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="Input/output error; there is no checkpoint yet"):
        sft.train(config, backend, make_rows(10), [], run, checkpoints, Progress())
    assert len(pending) == 1
    checkpoints.close()


def test_a_checkpoint_that_never_ends_meets_a_deadline(tmp_path):
    class Stuck(FakeBackend):
        written: Future[None] = Future()

        def save_state(self, path: Path) -> Future[None]:
            return self.written

    with pytest.raises(CheckpointError, match="the checkpoint of step 3 was not written within 0 s"):
        train(tmp_path / "run", make_config(), Stuck(), make_rows(10), timeout_s=0.05)
    Stuck.written.set_exception(OSError(5, "let the thread go"))
    assert committed(RunDir(tmp_path / "run")) == []


# --- metrics --------------------------------------------------------------------------------------------------------


def documented_fields() -> tuple[set[str], set[str]]:
    """(training, validation) as docs/architecture.md lists them."""
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    paragraph = re.search(r"\*\*metrics\.jsonl\*\*: every record has (.*?)\n\n", text, re.DOTALL)
    assert paragraph
    both, rest = paragraph[1].split("Training adds")
    training, rest = rest.split("validation adds")
    names = [set(re.findall(r"`(\w+)`", part)) for part in (both, training, rest.split(".")[0])]
    names[0] -= {"train", "validation"}
    return names[0] | names[1], names[0] | names[2]


def test_every_step_has_one_record_with_the_fields_that_are_documented(tmp_path):
    config = make_config(evaluation={"every_steps": 2, "at_start": True}, optim={"epochs": 2})
    rows = make_rows(10)
    run, _ = train(tmp_path / "run", config, FakeBackend(), rows, make_rows(2))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(run.metrics()) == 6 + 4
    training, validation = documented_fields()
    assert all(r.keys() == training for r in records_of(run))
    assert all(r.keys() == validation for r in records_of(run, "validation"))
    assert [r["step"] for r in records_of(run)] == [1, 2, 3, 4, 5, 6]
    assert [r["epoch"] for r in records_of(run)] == [0.4, 0.8, 1.0, 1.4, 1.8, 2.0]
    assert sum(r["tokens"] for r in records_of(run)) == 2 * sum(d.num_tokens for d in rows)
    assert sum(r["supervised_tokens"] for r in records_of(run)) == 2 * sum(d.num_supervised for d in rows)


def test_fewer_records_are_written_on_request_and_always_that_of_the_last_step(tmp_path):
    config = make_config(logging={"every_steps": 3}, optim={"epochs": 9, "max_steps": 7})
    run, _ = train(tmp_path / "run", config, FakeBackend(), make_rows(10))
    assert [r["step"] for r in records_of(run)] == [3, 6, 7]


def test_deferred_results_give_the_same_metrics_and_are_read_when_the_next_step_is_under_way(tmp_path):
    config = make_config(
        checkpoint={"every_steps": 4}, evaluation={"every_steps": 5, "at_start": True}, optim={"epochs": 4}
    )
    found = {}
    for deferred in (False, True):
        backend = FakeBackend(deferred=deferred)
        run, progress = train(tmp_path / f"run-{deferred}", config, backend, make_rows(10), make_rows(2))
        found[deferred] = (without_times(run.metrics()), progress, backend.weight)
        order = [(c.name, c.step) for c in backend.calls if c.name in ("read", "forward_backward")]
        late = [order.index(("read", i)) > order.index(("forward_backward", i + 1)) for i in range(11)]
        # Steps 4, 5, 8 and 10 are read at once: they are saved or evaluated.
        assert late == [deferred and i + 1 not in (4, 5, 8, 10) for i in range(11)]
    assert found[False] == found[True]
