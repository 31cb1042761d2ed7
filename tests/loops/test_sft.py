"""The supervised loop: how many steps, with which rates and scales; when it validates and stops; what it writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loops.fake_run import (
    ScriptedBackend,
    batches_of,
    committed,
    make_config,
    make_rows,
    records_of,
    train,
    without_times,
)

from lockstep.backend.fake import FakeBackend
from lockstep.train.schedule import learning_rate_at
from lockstep.types import OptimStep

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
