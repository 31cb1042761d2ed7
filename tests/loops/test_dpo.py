"""The loop on preferences: its losses and scales, its reference, what it measures, and going on after a kill."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from loops.fake_run import (
    batches_of,
    committed,
    make_config,
    make_labelled,
    make_pairs,
    records_of,
    train,
    without_times,
)

from lockstep.algorithms.losses import LOSSES
from lockstep.backend.fake import FakeBackend
from lockstep.config import RunConfig
from lockstep.train.preference_data import label_options, pair_options
from lockstep.train.schedule import learning_rate_at
from lockstep.types import Completion, Datum

SCORES = {"chosen_reward", "rejected_reward", "margin", "accuracy", "chosen_logprob", "rejected_logprob"}


def dpo_config(algorithm: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    return make_config(algorithm={"kind": "dpo", **(algorithm or {})}, **changes)


def kto_config(**changes: Any) -> RunConfig:
    return make_config(algorithm={"kind": "kto"}, **changes)


def logprob(weight: float, completion: Completion) -> float:
    """As the fake defines it."""
    return -sum(w * (weight - t % 7) ** 2 / 2 for w, t in zip(completion.weights, completion.tokens, strict=True))


def margin(pair: Datum, policy: float, reference: float = 20.0, beta: float = 0.1) -> float:
    chosen, rejected = (logprob(policy, c) - logprob(reference, c) for c in pair.completions)
    return beta * (chosen - rejected)


# --- steps ----------------------------------------------------------------------------------------------------------


def test_every_step_tells_the_loss_all_that_it_must_know_of_the_global_batch(tmp_path):
    backend = FakeBackend()
    config = dpo_config({"loss": {"sigmoid": 1.0, "sft": 0.5}, "beta": 0.3})
    rows = make_pairs(10)
    train(tmp_path / "run", config, backend, rows)
    calls = backend.calls_of("forward_backward")
    assert [len(call.batch) for call in calls] == [4, 4, 2]
    for call in calls:
        loss = call.argument
        assert loss.kind == "preference"
        assert loss.scale == 1 / len(call.batch)
        num_chosen = sum(sum(w != 0 for w in pair.completions[0].weights) for pair in call.batch)
        assert loss.options == pair_options(config.algorithm, num_chosen)
        assert (loss.options["losses"], loss.options["beta"]) == ({"sigmoid": 1.0, "sft": 0.5}, 0.3)
    assert sorted(origin for batch in batches_of(backend) for origin in batch) == sorted(d.origin for d in rows)


def test_each_optimizer_step_receives_the_rate_of_its_own_step(tmp_path):
    config = dpo_config(optim={"learning_rate": 0.3, "warmup_steps": 2, "epochs": 2, "schedule": "linear"})
    backend = FakeBackend()
    run, _ = train(tmp_path / "run", config, backend, make_pairs(10))
    rates = [learning_rate_at(i, peak=0.3, num_steps=6, config=config.optim) for i in range(6)]
    assert len(set(rates)) == 6
    assert [call.argument.learning_rate for call in backend.calls_of("optim_step")] == rates
    assert [record["learning_rate"] for record in records_of(run)] == rates


def test_the_margin_grows_and_the_loss_falls(tmp_path):
    config = dpo_config(optim={"epochs": 10, "learning_rate": 0.02})
    run, progress = train(tmp_path / "run", config, FakeBackend(), make_pairs(10))
    records = records_of(run)
    assert records[0]["loss"] == pytest.approx(math.log(2))
    assert records[0]["margin"] == 0
    assert records[-1]["loss"] < 0.9 * math.log(2)
    assert records[-1]["margin"] > 0.1
    assert progress.loss == records[-1]["loss"]


def test_the_numbers_of_a_step_are_means_over_its_pairs(tmp_path):
    backend = FakeBackend()
    run, _ = train(tmp_path / "run", dpo_config(optim={"max_steps": 2}), backend, make_pairs(10))
    weights = [20.0, backend.weight]
    weights[1:] = [20.0 - backend.calls_of("optim_step")[0].argument.learning_rate * _gradient(backend)]
    for call, record, weight in zip(backend.calls_of("forward_backward"), records_of(run), weights, strict=True):
        margins = [margin(pair, weight) for pair in call.batch]
        chosen = [logprob(weight, pair.completions[0]) for pair in call.batch]
        assert record["margin"] == pytest.approx(sum(margins) / 4, abs=1e-12)
        assert record["accuracy"] == sum(m > 0 for m in margins) / 4
        assert record["chosen_logprob"] == pytest.approx(sum(chosen) / 4)
        assert record["chosen_reward"] - record["rejected_reward"] == pytest.approx(record["margin"])
        assert record.keys() >= SCORES


def _gradient(backend: FakeBackend) -> float:
    """Of the first step, clipped to 1 as the configuration has it; at the start every margin is zero."""
    batch = backend.calls_of("forward_backward")[0].batch
    grad_logprobs = [
        -0.05
        * sum(s * w * -(20.0 - t % 7) for c, s in zip(pair.completions, (1, -1)) for t, w in zip(c.tokens, c.weights))
        for pair in batch
    ]
    return max(-1.0, min(1.0, sum(grad_logprobs) / len(batch)))


def test_tokens_that_one_answer_has_more_than_the_other_count_less_on_request(tmp_path):
    backend = FakeBackend()
    train(tmp_path / "run", dpo_config({"ld_alpha": 0.25}), backend, make_pairs(10))
    by_origin = {pair.origin: pair for pair in make_pairs(10)}
    seen = [pair for call in backend.calls_of("forward_backward") for pair in call.batch]
    assert len(seen) == 10
    for pair in seen:
        plain = by_origin[pair.origin].completions
        shared = min(sum(w != 0 for w in c.weights) for c in plain)
        for completion, before in zip(pair.completions, plain, strict=True):
            supervised = [w for w in completion.weights if w]
            assert supervised == [1.0] * shared + [0.25] * (len(supervised) - shared)
            assert [w != 0 for w in completion.weights] == [w != 0 for w in before.weights]


def test_what_padding_would_have_cost_is_said(tmp_path):
    rows = [Datum([1] * 10, [Completion([1] * 2, [1.0] * 2), Completion([1] * 6, [1.0] * 6)], f"a:{i}") for i in (1, 2)]
    run, progress = train(tmp_path / "run", dpo_config(batch={"samples": 2}), FakeBackend(), rows)
    (record,) = records_of(run)
    assert record["tokens"] == progress.tokens == 2 * (10 + 2 + 6)
    assert record["padding_saved"] == pytest.approx(1 - 36 / (4 * 16))


# --- reference ------------------------------------------------------------------------------------------------------


def with_reference(rows: list[Datum], weight: float) -> list[Datum]:
    def value(c: Completion) -> dict[str, list[float]]:
        found = [-((weight - t % 7) ** 2) / 2 if w else 0.0 for t, w in zip(c.tokens, c.weights, strict=True)]
        return {"reference_logprobs": found}

    return [Datum(d.prompt, [Completion(c.tokens, c.weights, value(c)) for c in d.completions], d.origin) for d in rows]


def test_a_reference_that_rows_bring_with_them_gives_the_same_run_as_that_of_the_backend(tmp_path):
    config = dpo_config(evaluation={"every_steps": 2, "at_start": True}, optim={"epochs": 2})
    rows, held_out = make_pairs(10), make_pairs(4, name="v.jsonl")
    computing, reading = FakeBackend(), FakeBackend()
    reading.reference = 0.0  # not what the rows bring: must not be used
    one, _ = train(tmp_path / "one", config, computing, rows, held_out)
    prepared = [with_reference(part, 20.0) for part in (rows, held_out)]
    two, _ = train(tmp_path / "two", config, reading, *prepared)
    assert without_times(one.metrics()) == without_times(two.metrics())
    assert computing.weight == reading.weight
    assert not any(call.reference for call in reading.calls_of("forward"))


def test_the_reference_follows_the_policy_every_few_steps(tmp_path):
    backend = FakeBackend()
    config = dpo_config({"reference_sync_steps": 2, "reference_mix": 0.25}, optim={"epochs": 2})
    train(tmp_path / "run", config, backend, make_pairs(10))
    assert [(call.step, call.argument) for call in backend.calls_of("mix_reference")] == [
        (2, 0.25),
        (4, 0.25),
        (6, 0.25),
    ]
    assert backend.reference not in (20.0, backend.weight)


# --- validation -----------------------------------------------------------------------------------------------------


def test_held_out_pairs_are_judged_by_the_loss_of_training(tmp_path):
    backend = FakeBackend()
    backend.weight = 19.0
    held_out = make_pairs(300, name="v.jsonl")
    config = dpo_config({"beta": 0.2}, evaluation={"at_start": True}, optim={"max_steps": 1, "learning_rate": 1e-12})
    run, _ = train(tmp_path / "run", config, backend, make_pairs(10), held_out)
    first = records_of(run, "validation")[0]
    margins = [margin(pair, 19.0, beta=0.2) for pair in held_out]
    assert first["loss"] == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins) / 300, rel=1e-12)
    assert first["margin"] == pytest.approx(sum(margins) / 300, rel=1e-12)
    assert first["accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 300)
    assert (first["rows"], first.keys() >= SCORES) == (300, True)
    assert run.status()["validation_scores"]["margin"] == records_of(run, "validation")[-1]["margin"]


def test_the_validation_loss_is_that_of_the_loss_function_on_the_whole_set(tmp_path):
    """Also of parts that divide by tokens, where rows are handed over in pieces."""
    import torch

    from lockstep.algorithms.losses import LossInputs

    held_out = make_pairs(300, name="v.jsonl")
    config = dpo_config({"loss": ["ipo", "sft"]}, evaluation={"at_start": True}, optim={"max_steps": 1})
    backend = FakeBackend()
    backend.weight = 18.0
    run, _ = train(tmp_path / "run", config, backend, make_pairs(10), held_out)
    tokens = [
        (number, t)
        for number, c in enumerate(c for pair in held_out for c in pair.completions)
        for t, w in zip(c.tokens, c.weights, strict=True)
        if w
    ]

    def logprobs(weight: float) -> torch.Tensor:
        return torch.tensor([-((weight - t % 7) ** 2) / 2 for _, t in tokens], dtype=torch.float64)

    num_chosen = sum(number % 2 == 0 for number, _ in tokens)
    inputs = LossInputs(
        torch.ones(len(tokens), dtype=torch.float64),
        1 / 300,
        {"reference_logprobs": logprobs(20.0)},
        pair_options(config.algorithm, num_chosen),
        torch.tensor([number for number, _ in tokens]),
        600,
    )
    value, metrics = LOSSES["preference"].fn(logprobs(18.0), inputs)
    first = records_of(run, "validation")[0]
    assert first["loss"] == pytest.approx(float(value), rel=1e-12)
    assert first["loss_ipo"] == pytest.approx(float(metrics["loss_ipo"]) / 300, rel=1e-12)


def test_statistics_of_the_batch_are_taken_over_as_many_held_out_rows_as_a_step_has(tmp_path):
    config = dpo_config({"loss": "aot"}, evaluation={"at_start": True}, optim={"max_steps": 1})
    backend = FakeBackend()
    train(tmp_path / "run", config, backend, make_pairs(10), make_pairs(9, name="v.jsonl"))
    sizes = [len(call.batch) for call in backend.calls_of("forward") if call.step == 0 and not call.reference]
    assert sizes == [4, 4, 1]


def test_the_best_checkpoint_is_that_of_the_lowest_validation_loss(tmp_path):
    config = dpo_config(
        evaluation={"every_steps": 1, "patience": 3},
        checkpoint={"every_steps": 0, "keep_last": 1},
        optim={"epochs": 30, "learning_rate": 0.05},
    )
    run, progress = train(tmp_path / "run", config, FakeBackend(), make_pairs(10), make_pairs(4, name="v.jsonl")[2:])
    losses = {r["step"]: r["loss"] for r in records_of(run, "validation")}
    assert progress.best_step == min(losses, key=losses.__getitem__)
    assert progress.best_step in committed(run)


# --- labels ---------------------------------------------------------------------------------------------------------


def test_labels_are_learned_against_the_distance_from_the_reference(tmp_path):
    backend = FakeBackend()
    backend.weight = 15.0
    config = kto_config(optim={"max_steps": 3}, data={"train": ["none"], "max_length": 16})
    run, _ = train(tmp_path / "run", config, backend, make_labelled(10))
    for step, (call, record) in enumerate(zip(backend.calls_of("forward_backward"), records_of(run), strict=True)):
        loss = call.argument
        mixed = [c for c in backend.calls_of("forward") if c.step == step]
        assert [c.reference for c in mixed] == [False, True]
        assert mixed[0].batch == mixed[1].batch
        prompts = {d.origin: list(d.prompt) for d in call.batch}
        answers = {d.origin: list(d.completions[0].tokens) for d in call.batch}
        for datum in mixed[0].batch:
            assert list(datum.prompt) == prompts[datum.origin]
            others = [answers[o] for o in answers if prompts[o] != prompts[datum.origin]]
            assert list(datum.completions[0].tokens) in others
        assert loss.options == label_options(config.algorithm, loss.options["kl"])
        assert record["kl"] == loss.options["kl"] >= 0
        assert loss.scale == 1 / len(call.batch)
    first = backend.calls_of("forward")[0].batch
    gained = [logprob(15.0, d.completions[0]) - logprob(20.0, d.completions[0]) for d in first]
    assert records_of(run)[0]["kl"] == pytest.approx(max(sum(gained) / len(first), 0))
    assert records_of(run)[0]["kl"] > 0


def test_the_distance_from_the_reference_is_never_negative(tmp_path):
    backend = FakeBackend()
    backend.weight = 25.0  # every token is less likely than under the reference
    run, _ = train(tmp_path / "run", kto_config(optim={"max_steps": 1}), backend, make_labelled(10))
    assert backend.calls_of("forward") != []
    assert records_of(run)[0]["kl"] == 0


def test_each_label_has_the_means_of_its_own_rows_and_a_batch_may_lack_one(tmp_path):
    good = [row for row in make_labelled(10) if row.completions[0].values["label"][0] == 1]
    backend = FakeBackend()
    run, _ = train(tmp_path / "both", kto_config(optim={"max_steps": 1}), backend, make_labelled(4))
    (both,) = records_of(run)
    chosen = [logprob(20.0, row.completions[0]) for row in make_labelled(4)[::2]]
    assert both["chosen_logprob"] == pytest.approx(sum(chosen) / 2)
    assert both.keys() >= {"chosen_reward", "rejected_reward", "margin", "kl"}
    run, _ = train(tmp_path / "good", kto_config(optim={"max_steps": 1}), FakeBackend(), good)
    (one,) = records_of(run)
    assert "rejected_reward" not in one
    assert "margin" not in one


def test_without_two_prompts_nothing_can_be_mixed(tmp_path):
    rows = [Datum([1], d.completions, d.origin) for d in make_labelled(6)]
    backend = FakeBackend()
    run, _ = train(tmp_path / "run", kto_config(), backend, rows)
    assert backend.calls_of("forward") == []
    assert all(r["kl"] == 0 for r in records_of(run))


# --- going on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
def test_a_resumed_run_continues_as_if_it_had_never_stopped(kind: str, deferred: bool, tmp_path: Path):
    config = make_config(
        algorithm={"kind": kind, "reference_sync_steps": 2},
        optim={"epochs": 4, "warmup_steps": 3, "learning_rate": 0.02},
        checkpoint={"every_steps": 3, "keep_best": 0, "asynchronous": False},
        evaluation={"every_steps": 2, "at_start": True, "patience": 50},
    )
    make = make_pairs if kind == "dpo" else make_labelled
    rows, held_out = make(10), make(4, name="v.jsonl")
    whole = FakeBackend(deferred=deferred)
    whole_run, whole_progress = train(tmp_path / "whole", config, whole, rows, held_out)
    broken = FakeBackend(deferred=deferred, failures={("forward_backward", 8): RuntimeError("the power went")})
    with pytest.raises(RuntimeError, match="the power went"):
        train(tmp_path / "run", config, broken, rows, held_out)
    second = FakeBackend(deferred=deferred)
    run, progress = train(tmp_path / "run", config, second, rows, held_out)
    assert batches_of(second) == batches_of(whole)[6:]
    assert (second.weight, second.momentum, second.reference) == (whole.weight, whole.momentum, whole.reference)
    assert progress == whole_progress
    assert without_times(run.metrics()) == without_times(whole_run.metrics())
