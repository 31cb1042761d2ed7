"""The parts of `lockstep verify` that are for preferences and need no second process."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from equivalence.plain import make_model
from equivalence.preference_plain import gradients_of, make_pairs, padded_answers, plain_kto, plain_preference

from lockstep.backend.batching import documents_of, plan_micro_batches
from lockstep.cli.verify import verdict_table
from lockstep.config import ConfigError, RunConfig, load_config
from lockstep.config.reference import ReferenceChoice
from lockstep.model.float64 import keep_float64
from lockstep.train.preference_data import count_chosen_tokens, discount_length, mismatch, pair_options
from lockstep.types import Completion, Datum
from lockstep.verification import reduced
from lockstep.verification.checking import Report, StepErrors, Verdict, describe_reference
from lockstep.verification.layouts import ONE
from lockstep.verification.plain_loop import StepValues
from lockstep.verification.plain_preference import PlainPreference
from lockstep.verification.reduced import leave_reference
from lockstep.verification.sample import add_reference, choose_budgets, compile_rows, renumber, shorten


def configure(folder: Path, model: Path, **changes: Any) -> RunConfig:
    rows = [{"prompt": f"q {i}", "chosen": "good " * (1 + i % 4), "rejected": "bad"} for i in range(12)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_config(tiny.write_config(folder, model, **changes))


# --- the sample -----------------------------------------------------------------------------------------------------


def pair(prompt: Sequence[int], *answers: Sequence[int]) -> Datum:
    return Datum(prompt, [Completion(tokens, [1.0] * len(tokens)) for tokens in answers], "a:1")


def test_a_pair_stays_a_pair_and_both_answers_are_cut() -> None:
    short = shorten(pair(range(50), range(100, 140), range(200, 205)), max_tokens=20)
    assert [list(c.tokens) for c in short.completions] == [list(range(100, 110)), list(range(200, 205))]
    assert list(short.prompt) == list(range(40, 50))


@pytest.mark.parametrize(
    ("chosen", "rejected", "pieces"),
    [
        ([*range(30), 77, 78], [*range(30), 88], [[28, 29, 77, 78], [28, 29, 88]]),
        ([*range(30), 77], [*range(30)], [[28, 29, 77], [28, 29]]),
    ],
    ids=["part late", "one begins the other"],
)
def test_answers_that_begin_alike_are_cut_where_they_part(
    chosen: list[int], rejected: list[int], pieces: list[list[int]]
) -> None:
    short = shorten(pair([1], chosen, rejected), max_tokens=20)
    assert [list(c.tokens) for c in short.completions] == pieces


def test_labels_are_cut_with_their_tokens() -> None:
    row = Datum([1, 2], [Completion(range(9), [0.0] * 6 + [1.0] * 3, {"label": [0, 0, 0, 0, 5, 6, 7, 8, 9]})])
    (short,) = shorten(row, max_tokens=6).completions
    assert list(short.tokens) == [4, 5, 6]
    assert short.values == {"label": [5, 6, 7]}
    (numbered,) = renumber([Datum([1], [short])], list(range(10)))
    assert numbered.completions[0].values == short.values


def test_pairs_are_whole_in_the_first_batch_and_some_are_cut_in_the_last() -> None:
    batches = [make_pairs(0), make_pairs(1)]
    whole, cutting = choose_budgets(batches)
    for batch, budget, is_whole in ((batches[0], whole, True), (batches[1], cutting, False)):
        documents = documents_of(batch, max_shared_tokens=budget)
        plan = plan_micro_batches(documents, rank=0, num_ranks=1, budget_tokens=budget)
        assert plan.is_whole == is_whole
        assert len(plan.micro_batches) > 1
        assert (len(documents) == len(batch)) == is_whole
        assert len(documents) < 2 * len(batch)


def test_one_pair_alone_is_cut_in_the_last_batch() -> None:
    (datum,) = batch = [pair([1, 2], [3, 4, 5], [6])]
    whole, cutting = choose_budgets([batch, batch])
    assert whole >= 6
    assert cutting == 5
    assert len(documents_of([datum], max_shared_tokens=cutting)) == 2


def test_rows_of_another_sort_than_the_algorithm_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train holds preference pairs, and algorithm\.kind sft"):
        compile_rows(configure(tmp_path, tiny_model))


def test_kto_takes_pairs_as_labelled_rows(tmp_path: Path, tiny_model: Path) -> None:
    rows = compile_rows(configure(tmp_path, tiny_model, algorithm={"kind": "kto"}))
    assert len(rows) == 24
    assert set(rows[1].completions[0].values["label"]) == {0.0}


def test_rows_bring_the_log_probs_of_their_reference() -> None:
    (row,) = add_reference([pair([1], [2, 3], [4])], [[[-1.0, -2.0], [-3.0]]])
    assert [c.values["reference_logprobs"] for c in row.completions] == [[-1.0, -2.0], [-3.0]]


# --- the plain loop -------------------------------------------------------------------------------------------------


def load(folder: Path, model: Path, algorithm: dict[str, Any], **changes: Any) -> RunConfig:
    return configure(folder, model, algorithm=algorithm, **changes)


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("copy", {"loss": {"sigmoid": 1.0, "sft": 0.3}, "ld_alpha": 0.25}),
        ("copy", {"loss": {"sigmoid": 1.0, "ipo": 0.5}, "wpo": True}),
        ("none", {"loss": "orpo"}),
        ("adapter_off", {"loss": "bco_pair", "bco_shift": True}),
        ("copy", {"loss": "aot"}),
    ],
    ids=["weighed", "wpo", "none", "adapters", "quantiles"],
)
def test_pairs_are_learned_like_a_padded_batch(
    tmp_path: Path, tiny_model: Path, kind: str, algorithm: dict[str, Any]
) -> None:
    lora = kind == "adapter_off"
    model = make_model("llama", lora=lora)
    config = load(tmp_path, tiny_model, {"kind": "dpo", **algorithm}, **({"lora": {"rank": 4}} if lora else {}))
    batch = make_pairs(0)
    reference = make_model("llama", lora=False)
    learned = PlainPreference(config, model, kind).forward_backward(batch)

    again = make_model("llama", lora=lora)
    if kind != "none":
        leave_reference(p.data for p in again.parameters() if p.requires_grad)
    options = pair_options(config.algorithm, count_chosen_tokens(batch))  # type: ignore[arg-type]
    weighed = discount_length(batch, options["ld_alpha"])
    loss, gradients = plain_preference(again, weighed, reference, options)
    assert learned.loss == pytest.approx(float(loss), rel=1e-12)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-12)
    assert len(learned.logprobs) == sum(d.num_supervised for d in batch)
    assert len(learned.reference_logprobs) == (0 if kind == "none" else len(learned.logprobs))
    assert {"margin", "accuracy", "chosen_reward"} <= learned.metrics.keys()


def test_labels_are_learned_against_the_distance_of_the_whole_batch(tmp_path: Path, tiny_model: Path) -> None:
    config = load(tmp_path, tiny_model, {"kind": "kto", "undesirable_weight": 1.5})
    model = make_model("llama", lora=False)
    with torch.no_grad():
        for parameter in model.parameters():  # sure of itself, so that the policy is less so
            parameter.mul_(4)
    reference = copy.deepcopy(model)
    rows, wanted = [], [True, False, False, True, False]
    for datum, good in zip(make_pairs(0), wanted, strict=True):
        answer = datum.completions[0]
        label = {"label": [float(good)] * len(answer.tokens)}
        rows.append(Datum(datum.prompt, [Completion(answer.tokens, answer.weights, label)]))
    learned = PlainPreference(config, model, "copy").forward_backward(rows)

    again = copy.deepcopy(reference)
    leave_reference(p.data for p in again.parameters())
    mixed = padded_answers(again, reference, mismatch(rows, 128), "right")
    kl = sum(float(answer.ratio.detach()) for answer in mixed) / len(mixed)
    assert kl > 0
    loss = plain_kto(padded_answers(again, reference, rows, "right"), wanted, {"kl": kl, "undesirable_weight": 1.5})
    assert learned.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    assert learned.metrics["kl"] == pytest.approx(kl * len(rows), rel=1e-12)
    for name, gradient in gradients_of(again, loss).items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("follows", [True, False])
def test_a_reference_follows_after_the_first_batch(tmp_path: Path, tiny_model: Path, follows: bool) -> None:
    settings = {"reference_sync_steps": 5, "reference_mix": 0.25} if follows else {"reference": "copy"}
    config = load(tmp_path, tiny_model, {"kind": "dpo", **settings})
    model = make_model("llama", lora=False)
    plain = PlainPreference(config, model, "copy")
    first, second = plain.forward_backward(make_pairs(0)), plain.forward_backward(make_pairs(0))
    assert (first.reference_logprobs != second.reference_logprobs) == follows
    mixed = make_model("llama", lora=False)
    with torch.no_grad():
        for mine, policy in zip(mixed.parameters(), model.parameters(), strict=True):
            mine.add_(policy - mine, alpha=0.25 if follows else 0.0)
    answers = padded_answers(model, mixed, make_pairs(0), "right")
    order = [answers[i + side * 5] for i in range(5) for side in (0, 1)]
    assert second.reference_logprobs == pytest.approx(torch.cat([a.reference for a in order]).tolist(), rel=1e-12)


def test_another_model_is_the_reference_where_there_is_one(tmp_path: Path, tiny_model: Path) -> None:
    config = load(tmp_path, tiny_model, {"kind": "dpo", "reference_model": str(tiny_model)})
    other = make_model("qwen3", lora=False)
    learned = PlainPreference(config, make_model("llama", lora=False), "precomputed", other).forward_backward(
        make_pairs(0)
    )
    answers = padded_answers(other, other, make_pairs(0)[:1], "right")
    assert learned.reference_logprobs[0] == pytest.approx(float(answers[0].reference[0]), rel=1e-12)
    assert reduced.reference_config(config).model.path == str(tiny_model)


def test_nothing_to_learn_is_said(tmp_path: Path, tiny_model: Path) -> None:
    config = load(tmp_path, tiny_model, {"kind": "dpo"})
    empty = Datum([1], [Completion([2], [0.0]), Completion([3], [0.0])])
    with pytest.raises(ConfigError, match="nothing to learn in the first 1 rows"):
        PlainPreference(config, make_model("llama", lora=False), "copy").forward_backward([empty])


# --- the reduced model ----------------------------------------------------------------------------------------------


def test_norms_do_not_round() -> None:
    model = tiny.build_model().double()
    norm = model.model.norm
    hidden = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = hidden / torch.sqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    assert float((norm(hidden) - exact).detach().abs().max()) > 1e-9
    keep_float64(model)
    assert float((norm(hidden) - exact).detach().abs().max()) < 1e-14
    twin = copy.deepcopy(model)
    twin.model.norm.weight.data.zero_()
    assert not twin.model.norm(hidden).any()
    assert norm(hidden).all()


def test_a_part_of_a_tensor_leaves_as_it_does_within_the_whole() -> None:
    whole = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    part, before = whole[13:40].clone(), whole.clone()
    leave_reference([whole, part])
    torch.testing.assert_close(part, whole[13:40], rtol=1e-14, atol=0)
    assert float((whole - before).abs().mean()) > 0.1


# --- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kl", "said"), [(0.0, True), (0.3, False)])
def test_a_distance_that_counts_as_zero_is_said(tmp_path: Path, tiny_model: Path, kl: float, said: bool) -> None:
    config = load(tmp_path, tiny_model, {"kind": "kto", "reference_sync_steps": 2})
    step = StepValues((), 0, 0.0, 0.0, [], {}, {}, metrics={"kl": kl})
    notes = " ".join(describe_reference(config, ReferenceChoice("copy", "it must follow"), [step]))
    assert "the reference is copy: it must follow" in notes
    assert "mixed with 0.6 of the model already after the first batch" in notes
    assert ("counts as 0" in notes) == said


def test_the_errors_of_preferences_are_shown_where_there_are_any() -> None:
    errors = StepErrors(reference=2e-15, metrics=3e-15, logprobs=1e-15)
    verdict = Verdict(ONE, 1.0, "", 2.0, 3.0, errors, metrics={"margin": 0.5})
    report = Report("Model", 1e-10, 2.0, 3.0, [verdict], metrics={"margin": 0.5})
    cells = {str(column.header): list(column.cells) for column in verdict_table(report).columns}
    assert [cells[name][1] for name in ("log-probs", "reference", "rewards")] == ["1.0e-15", "2.0e-15", "3.0e-15"]
    (row,) = report.as_json()["layouts"]
    assert row["metrics"] == report.as_json()["reference"]["metrics"] == {"margin": 0.5}
    assert row["errors"]["metrics"] == 3e-15
    report.metrics = {}
    assert "rewards" not in {str(column.header) for column in verdict_table(report).columns}
    report.verdicts = [Verdict(ONE, 1.0, "it broke")]
    assert {len(list(column.cells)) for column in verdict_table(report).columns} == {2}
