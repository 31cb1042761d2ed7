"""Policy gradients are their papers' formulas, token by token, however a batch is cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from equivalence.policy_plain import MAX_TOKENS, Sampled, plain_policy_loss
from torch import Tensor

from lockstep.algorithms.advantages import AGGREGATIONS, scale_of, token_weight
from lockstep.algorithms.losses import LOSSES, LossInputs
from lockstep.algorithms.policy_gradient import POLICY_GRADIENT

LENGTHS = (3, 7, 1, 4, 9, 2, 5, 5)
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"clip_low": 0.1, "clip_high": 0.4},
    "gspo": {"ratio": "sequence", "clip_low": 0.02, "clip_high": 0.03},
    "cispo": {"objective": "cispo", "clip_low": 1.0, "clip_high": 0.3},
    "cispo with a floor": {"objective": "cispo", "clip_low": 0.2, "clip_high": 0.3},
    "cispo of sequences": {"objective": "cispo", "ratio": "sequence", "clip_low": 0.1, "clip_high": 0.1},
    "dual clip": {"dual_clip": 1.3},
    "dual clip of sequences": {"ratio": "sequence", "dual_clip": 1.05},
    "k1": {"kl": "k1", "kl_coefficient": 0.3},
    "k2": {"kl": "k2", "kl_coefficient": 0.3},
    "k3": {"kl": "k3", "kl_coefficient": 0.3},
    "entropy": {"entropy_coefficient": 0.05},
    "less entropy": {"entropy_coefficient": -0.05},
    "corrected": {"importance_weighting": "token", "importance_cap": 1.2},
    "corrected sequences": {"importance_weighting": "sequence", "importance_cap": 1.4},
    "everything": {
        "ratio": "sequence",
        "clip_high": 0.28,
        "dual_clip": 3.0,
        "kl": "k2",
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.01,
        "importance_weighting": "token",
    },
}


def draw_answers(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Sampled]:
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int, spread: float) -> Tensor:
        return spread * torch.randn(count, generator=generator, dtype=torch.float64)

    answers = []
    for number, length in enumerate(lengths):
        now = (-1.5 + draw(length, 0.5)).requires_grad_()
        old = now.detach() + draw(length, 0.4)
        entropies = (1 + draw(length, 0.3).abs()).requires_grad_()
        sign = -1 if number % 2 else 1
        advantage = sign * (0.2 + float(draw(1, 1.0).abs()))
        answers.append(Sampled(now, old, old + draw(length, 0.3), old + draw(length, 0.5), entropies, advantage))
    return answers


def lockstep_loss(
    answers: Sequence[Sampled], options: Mapping[str, Any], aggregation: str, whole: Sequence[Sampled] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Of some answers of a batch: what a backend hands over of them."""
    whole = answers if whole is None else whole
    lengths = torch.tensor([len(a.logprobs) for a in answers])
    weights = [token_weight(aggregation, int(length)) for length in lengths]
    values = {
        "advantages": torch.tensor([a.advantage for a in answers], dtype=torch.float64).repeat_interleave(lengths),
        "old_logprobs": torch.cat([a.old for a in answers]),
        "behaviour_logprobs": torch.cat([a.behaviour for a in answers]),
        "reference_logprobs": torch.cat([a.reference for a in answers]),
        "entropies": torch.cat([a.entropies for a in answers]),
    }
    num_tokens = sum(len(a.logprobs) for a in whole)
    inputs = LossInputs(
        torch.tensor(weights, dtype=torch.float64).repeat_interleave(lengths),
        scale_of(aggregation, num_tokens=num_tokens, num_answers=len(whole), max_tokens=MAX_TOKENS),
        values,
        options,
        torch.arange(len(answers)).repeat_interleave(lengths),
        len(answers),
    )
    return LOSSES["policy_gradient"].fn(torch.cat([a.logprobs for a in answers]), inputs)


def gradients(loss: Tensor, answers: Sequence[Sampled]) -> list[Tensor]:
    leaves = [leaf for a in answers for leaf in (a.logprobs, a.entropies)]
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def assert_same(found: Tensor, expected: Tensor, answers: Sequence[Sampled]) -> None:
    assert expected.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(gradients(found, answers), gradients(expected, answers), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_is_its_formula(name, aggregation):
    answers = draw_answers()
    found, _ = lockstep_loss(answers, VARIANTS[name], aggregation)
    assert_same(found, plain_policy_loss(answers, VARIANTS[name], aggregation), answers)


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_differs_from_the_plain_one(name):
    """Otherwise the numbers of these tests would not reach what the variant changes."""
    answers = draw_answers()
    plain, found = (lockstep_loss(answers, options, "token")[0] for options in ({}, VARIANTS[name]))
    assert name == "grpo" or abs(plain.item() - found.item()) > 1e-6


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", VARIANTS)
def test_micro_batches_add_up_even_where_groups_are_cut(name, aggregation):
    answers, options = draw_answers(), VARIANTS[name]
    whole, metrics = lockstep_loss(answers, options, aggregation)
    cuts = [lockstep_loss(answers[p], options, aggregation, answers) for p in (slice(1), slice(1, 6), slice(6, None))]
    assert_same(sum(loss for loss, _ in cuts), whole, answers)
    for metric, value in metrics.items():
        assert sum(float(own[metric]) for _, own in cuts) == pytest.approx(float(value), rel=1e-12)


def test_completions_of_one_datum_need_not_be_together():
    assert not LOSSES["policy_gradient"].couples_completions({})
    assert LOSSES["preference"].couples_completions({})


@pytest.mark.parametrize("name", VARIANTS)
def test_a_loss_needs_what_its_options_use_and_names_what_it_measures(name):
    rule, options = LOSSES["policy_gradient"], VARIANTS[name]
    _, metrics = lockstep_loss(draw_answers(), options, "token")
    assert set(rule.metrics(options)) == metrics.keys()
    assert rule.needs_reference(options) == ("kl" in metrics) == ("kl_coefficient" in options)
    assert rule.needs_entropy(options) == ("entropy" in metrics) == ("entropy_coefficient" in options)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_micro_batch_without_answers_adds_nothing_but_a_graph(name):
    options = VARIANTS[name]
    logprobs = torch.zeros(1, requires_grad=True)
    inputs = LossInputs(torch.zeros(1), 1.0, {}, options, torch.zeros(1, dtype=torch.int64), 0)
    loss, metrics = LOSSES["policy_gradient"].fn(logprobs, inputs)
    loss.backward()
    assert (loss.item(), logprobs.grad.item()) == (0, 0)
    assert metrics.keys() == set(LOSSES["policy_gradient"].metrics(options))
    assert not any(metrics.values())


def test_the_first_update_has_the_gradient_of_reinforce():
    """Nothing has moved yet, so every ratio is one and nothing is clipped."""
    answers = [
        Sampled(a.logprobs, a.logprobs.detach(), a.behaviour, a.reference, a.entropies, a.advantage)
        for a in draw_answers()
    ]
    for options in ({}, {"objective": "cispo"}, {"dual_clip": 2.0}):
        reinforce = -sum(a.advantage * a.logprobs.sum() for a in answers) / sum(LENGTHS)
        loss, metrics = lockstep_loss(answers, options, "token")
        for mine, theirs in zip(gradients(loss, answers), gradients(reinforce, answers), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)
        assert metrics["ratio"].item() == sum(LENGTHS)
        assert metrics["clipped_low"] == metrics["clipped_high"] == metrics["policy_shift"] == 0


def test_clipped_tokens_are_counted_where_they_lose_their_gradient():
    answers, options = draw_answers(), {"clip_low": 0.1, "clip_high": 0.15}
    loss, metrics = lockstep_loss(answers, options, "token")
    stuck = {1: 0, -1: 0}
    for answer, own in zip(answers, gradients(loss, answers)[0::2], strict=True):
        stuck[1 if answer.advantage > 0 else -1] += int((own == 0).sum())
    assert (metrics["clipped_high"], metrics["clipped_low"]) == (stuck[1], stuck[-1])
    assert min(stuck.values()) > 0


def test_a_correction_is_cut_off_above_and_carries_no_gradient():
    (answer,) = draw_answers([3])
    gap = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    shifted = Sampled(answer.logprobs, answer.old, answer.old - gap, answer.reference, answer.entropies, 1.0)
    _, metrics = lockstep_loss([shifted], {"importance_weighting": "token", "importance_cap": 1.5}, "token")
    assert metrics["importance_weight"].item() == pytest.approx(1 + 1.5 + torch.exp(gap[2]).item(), rel=1e-12)


def test_a_ratio_beyond_all_numbers_stays_a_number():
    (answer,) = draw_answers([3])
    far = Sampled(answer.logprobs, answer.old - 2000, answer.old, answer.old + 2000, answer.entropies, -1.0)
    loss, _ = lockstep_loss([far], {"kl_coefficient": 1.0}, "token")
    assert torch.isfinite(loss)
    assert all(torch.isfinite(slope).all() for slope in gradients(loss, [far]))


@pytest.mark.parametrize("name", VARIANTS)
def test_on_policy_the_old_logprobs_are_these(name):
    """The same loss and gradient as with the log-probs of a pass before, which need not be given; and the gap."""
    answers = [replace(answer, old=answer.logprobs.detach()) for answer in draw_answers()]
    expected, _ = lockstep_loss(answers, VARIANTS[name], "token")
    unknown = [replace(answer, old=torch.full_like(answer.old, torch.nan)) for answer in answers]
    found, metrics = lockstep_loss(unknown, {**VARIANTS[name], "on_policy": True}, "token")
    logprobs = [answer.logprobs for answer in answers]
    assert torch.equal(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, logprobs, retain_graph=True), torch.autograd.grad(expected, logprobs), strict=True
    ):
        assert torch.equal(ours, theirs)
    gaps = torch.cat([(answer.logprobs - answer.behaviour).abs() for answer in answers])
    assert float(metrics["sampler_trainer_logprob_diff"]) == pytest.approx(float(gaps.sum()), rel=1e-12)


def test_stale_tokens_are_compared_apart_from_fresh_ones():
    logprobs, behaviour = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.25, -math.inf])
    values = {"advantages": torch.ones(3), "behaviour_logprobs": behaviour, "fresh": torch.tensor([1.0, 1.0, 0.0])}
    inputs = LossInputs(torch.ones(3), 1.0, values, {"on_policy": True, "stale_apart": True}, torch.zeros(3).long(), 1)
    _, metrics = POLICY_GRADIENT.fn(logprobs, inputs)
    assert float(metrics["sampler_trainer_logprob_diff"]) == 0.75
    assert float(metrics["stale_logprob_diff"]) == math.inf
    assert set(metrics) == set(POLICY_GRADIENT.metrics(inputs.options))
