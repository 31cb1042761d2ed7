"""Preference losses and KTO are their papers' formulas, token by token, however a batch is cut or ordered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from equivalence.preference_plain import Answer, plain_kto, plain_loss_of_pairs
from torch import Tensor

from lockstep.algorithms.losses import LOSSES, LossInputs
from lockstep.algorithms.preference import FORMULAS
from lockstep.config.algorithm import PREFERENCE_LOSSES

SCORED = [name for name, part in PREFERENCE_LOSSES.items() if part.scored]
SMOOTHED = [name for name, part in PREFERENCE_LOSSES.items() if part.smoothed]
PAIRED = [name for name, part in PREFERENCE_LOSSES.items() if part.paired]
NEEDS_SMOOTHING = {"exo_pair": 0.001}


def draw_answers(lengths: Sequence[int], seed: int = 0, spread: float = 1.0) -> list[Answer]:
    """Answers of these lengths. Every third has tokens that count half."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64)

    answers = []
    for number, length in enumerate(lengths):
        logprobs = (-0.05 - spread * draw(length)).requires_grad_()
        weights = torch.where(draw(length) < 0.3, 0.5, 1.0) if number % 3 == 0 else torch.ones(length)
        reference = logprobs.detach() + spread * (draw(length) - 0.5)
        answers.append(Answer(logprobs, reference, weights.double(), -2 * draw(length)))
    return answers


LENGTHS = (3, 7, 1, 4, 9, 2, 5, 5, 6, 1)


def inputs_of(
    answers: Sequence[Answer],
    options: Mapping[str, Any],
    *,
    scale: float,
    labels: Sequence[bool] = (),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, LossInputs]:
    """What a backend hands over: (log-probs of all tokens, the rest)."""

    def join(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).to(dtype)

    lengths = torch.tensor([len(a.logprobs) for a in answers])
    values = {
        "reference_logprobs": join([a.reference for a in answers]),
        "log_sum_sq_probs": join([a.log_sum_sq_probs for a in answers]),
    }
    if labels:
        values["label"] = torch.tensor(labels).to(dtype).repeat_interleave(lengths)
    inputs = LossInputs(
        join([a.weights for a in answers]),
        scale,
        values,
        options,
        torch.arange(len(answers)).repeat_interleave(lengths),
        len(answers),
    )
    return join([a.logprobs for a in answers]), inputs


def in_pairs(answers: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    return list(zip(answers[0::2], answers[1::2], strict=True))


def with_tokens(options: Mapping[str, Any], answers: Sequence[Answer]) -> dict[str, Any]:
    return {**options, "num_chosen_tokens": sum(len(a.logprobs) for a in answers[0::2])}


def lockstep_loss(answers: Sequence[Answer], options: Mapping[str, Any], scale: float | None = None) -> Tensor:
    scale = scale if scale is not None else 2 / len(answers)
    return LOSSES["preference"].fn(*inputs_of(answers, options, scale=scale))[0]


def gradients(loss: Tensor, answers: Sequence[Answer]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [a.logprobs for a in answers], allow_unused=True, materialize_grads=True))


def assert_same(found: Tensor, expected: Tensor, answers: Sequence[Answer]) -> None:
    assert expected.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(gradients(found, answers), gradients(expected, answers), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def check_against_formulas(options: dict[str, Any], lengths: Sequence[int] = LENGTHS) -> None:
    answers = draw_answers(lengths)
    options = with_tokens(options, answers)
    assert_same(lockstep_loss(answers, options), plain_loss_of_pairs(in_pairs(answers), options), answers)


def alone(name: str, **options: Any) -> dict[str, Any]:
    return {"losses": {name: 1.0}, "label_smoothing": NEEDS_SMOOTHING.get(name, 0.0), **options}


def test_every_loss_has_a_formula_or_is_cross_entropy_alone():
    assert set(PREFERENCE_LOSSES) == {*FORMULAS, "sft"}


@pytest.mark.parametrize("beta", [0.1, 1.7])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_each_loss_is_its_formula(name, beta):
    check_against_formulas(alone(name, beta=beta))


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_each_loss_is_its_formula_for_a_single_pair(name):
    check_against_formulas(alone(name), lengths=(4, 6))


@pytest.mark.parametrize("name", SMOOTHED)
def test_label_smoothing(name):
    check_against_formulas(alone(name, beta=0.8) | {"label_smoothing": 0.2})


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js", "alpha"])
@pytest.mark.parametrize("name", SCORED)
def test_divergences(name, divergence):
    check_against_formulas(alone(name, beta=0.6, divergence=divergence, divergence_alpha=0.3))


@pytest.mark.parametrize("alpha", [1 - 1e-9, 1.0])
def test_an_alpha_of_one_is_reverse_kl(alpha):
    answers = draw_answers(LENGTHS)
    found = lockstep_loss(answers, alone("sigmoid", divergence="alpha", divergence_alpha=alpha))
    assert found.item() == lockstep_loss(answers, alone("sigmoid")).item()


@pytest.mark.parametrize("name", [name for name in PAIRED if name != "sft"])
def test_wpo_weighs_pairs_and_leaves_cross_entropy_alone(name):
    check_against_formulas(alone(name, wpo=True, beta=0.5))


@pytest.mark.parametrize(
    "options",
    [
        {"margin": 1.3, "losses": {"simpo": 1.0}, "beta": 2.0},
        {"discopop_tau": 0.5, "losses": {"discopop": 1.0}},
        {"cpo_alpha": 0.2, "losses": {"cpo": 1.0}},
        {"cpo_alpha": 0.0, "losses": {"cpo": 1.0}},
        {"bco_shift": True, "losses": {"bco_pair": 1.0}, "beta": 0.7},
    ],
    ids=lambda options: next(iter(options)),
)
def test_settings_of_single_losses(options):
    check_against_formulas(options)


@pytest.mark.parametrize("extra", [{}, {"wpo": True}, {"divergence": "js"}], ids=["plain", "wpo", "js"])
def test_several_losses_at_once_with_weights(extra):
    losses = {"sigmoid": 0.5, "exo_pair": 2.0, "sft": 0.3, "sigmoid_norm": 0.1}
    check_against_formulas({"losses": losses, "label_smoothing": 0.1, **extra})


def test_every_loss_at_once():
    check_against_formulas(
        {"losses": {name: 1 + 0.1 * n for n, name in enumerate(PREFERENCE_LOSSES)}, "label_smoothing": 0.1}
    )


def cut(answers: Sequence[Answer], options: Mapping[str, Any]) -> Tensor:
    """The batch in three micro-batches."""
    scale = 2 / len(answers)
    return sum(lockstep_loss(answers[p], options, scale) for p in (slice(2), slice(2, 8), slice(8, None)))


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_micro_batches_change_only_what_is_not_separable(name, shift):
    answers = draw_answers(LENGTHS)
    options = with_tokens(alone(name, bco_shift=shift), answers)
    whole, parts = lockstep_loss(answers, options), cut(answers, options)
    if LOSSES["preference"].is_separable(options):
        assert_same(parts, whole, answers)
    else:
        assert name in ("aot", "aot_unpaired", "bco_pair")
        assert abs(parts.item() - whole.item()) > 1e-6


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_grad_logprobs_of_the_whole_batch_make_a_linear_loss_with_the_same_gradient(name):
    answers = draw_answers(LENGTHS)
    options = with_tokens(alone(name, bco_shift=True), answers)
    logprobs, inputs = inputs_of(answers, options, scale=0.2)
    leaf = logprobs.detach().requires_grad_()
    (grad_logprobs,) = torch.autograd.grad(LOSSES["preference"].fn(leaf, inputs)[0], leaf)
    linear = gradients((grad_logprobs * logprobs).sum(), answers)
    for mine, theirs in zip(linear, gradients(lockstep_loss(answers, options), answers), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_the_order_of_pairs_does_not_matter(name):
    answers = draw_answers(LENGTHS)
    options = with_tokens(alone(name, bco_shift=True), answers)
    shuffled = [answer for place in (3, 0, 4, 2, 1) for answer in answers[2 * place : 2 * place + 2]]
    assert_same(lockstep_loss(shuffled, options), lockstep_loss(answers, options), answers)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_the_scale_multiplies_the_loss_and_not_the_metrics(name):
    """But the mean over chosen tokens stays what it is: the scale only says how many pairs there are."""
    answers = draw_answers(LENGTHS)
    options = with_tokens(alone(name), answers)
    (one, metrics), (half, others) = (
        LOSSES["preference"].fn(*inputs_of(answers, options, scale=scale)) for scale in (1.0, 0.5)
    )
    share = {"sft": 1.0, "orpo": 1.0, "cpo": 1.0}.get(name, 0.0)
    entropy = -torch.cat([a.logprobs for a in answers[0::2]]).mean().item()
    assert half.item() - share * entropy == pytest.approx((one.item() - share * entropy) / 2, rel=1e-12, abs=1e-14)
    assert metrics == others


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_float32_is_as_good_as_float32_can_be(name):
    """Sums of thousands of tokens must not lose what two of them differ by."""
    answers = draw_answers((4000, 3000, 1, 2), spread=0.2)
    options = with_tokens(alone(name), answers)
    logprobs, inputs = inputs_of(answers, options, scale=0.5, dtype=torch.float32)
    rounded = [
        Answer(a.logprobs.float().double(), a.reference.float().double(), a.weights, a.log_sum_sq_probs)
        for a in answers
    ]
    found, _ = LOSSES["preference"].fn(logprobs, inputs)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(lockstep_loss(rounded, options).item(), rel=2e-7)


def extreme(chosen: float, rejected: float) -> list[Answer]:
    """A pair of two tokens each; the reference knows nothing of it, or is as far off the other way."""
    values = (torch.full((2,), value, dtype=torch.float64) for value in (chosen, rejected))
    ones = torch.ones(2, dtype=torch.float64)
    return [Answer(v.requires_grad_(), -500 - v.detach(), ones, -ones) for v in values]


KINDS_AND_DIVERGENCES = [(name, "reverse_kl") for name in PREFERENCE_LOSSES] + [
    (name, divergence) for name in SCORED for divergence in ("forward_kl", "js", "alpha")
]


@pytest.mark.parametrize("logprobs", [(-1000.0, 0.0), (0.0, -1000.0), (0.0, 0.0), (-1000.0, -1000.0)])
@pytest.mark.parametrize(("name", "divergence"), KINDS_AND_DIVERGENCES)
def test_extreme_log_probs_give_finite_losses_and_gradients(name, divergence, logprobs):
    answers = extreme(*logprobs)
    loss = lockstep_loss(answers, with_tokens(alone(name, divergence=divergence), answers))
    assert math.isfinite(loss.item())
    for gradient in gradients(loss, answers):
        assert torch.isfinite(gradient.float()).all()


@pytest.mark.parametrize("name", [*PREFERENCE_LOSSES, "kto"])
def test_a_micro_batch_that_runs_along_gives_zero_with_a_graph(name):
    kind, options = ("kto", {}) if name == "kto" else ("preference", alone(name) | {"num_chosen_tokens": 7})
    logprobs = torch.tensor([-3.0], requires_grad=True)
    loss, metrics = LOSSES[kind].fn(logprobs, LossInputs(torch.zeros(1), options=options))
    loss.backward()
    assert loss.item() == 0
    assert logprobs.grad.tolist() == [0.0]
    assert set(metrics) == set(LOSSES[kind].metrics(options))
    assert all(value.item() == 0 for value in metrics.values())


def measure(losses: dict[str, float], **options: Any) -> dict[str, float]:
    """Of two pairs; the second is the wrong way round, and both of its answers have two tokens."""
    tokens = [(-1.0, -2.0, -1.5), (-4.0,), (-3.0, -3.0), (-1.0, -0.5)]
    answers = []
    for row in tokens:
        logprobs = torch.tensor(row, dtype=torch.float64)
        answers.append(Answer(logprobs, logprobs * 2, torch.ones(len(row)), logprobs))
    options = with_tokens({"losses": losses, "beta": 0.5, **options}, answers)
    _, metrics = LOSSES["preference"].fn(*inputs_of(answers, options, scale=0.5))
    assert set(metrics) == set(LOSSES["preference"].metrics(options))
    return {name: value.item() for name, value in metrics.items()}


def test_metrics_are_sums_over_pairs():
    metrics = measure({"sigmoid": 1.0})
    assert metrics == {
        "chosen_reward": 0.5 * (4.5 + 6.0),
        "rejected_reward": 0.5 * (4.0 + 1.5),
        "margin": 0.5 * (0.5 + 4.5),
        "accuracy": 2.0,
        "chosen_logprob": -10.5,
        "rejected_logprob": -5.5,
    }


def test_rewards_without_a_reference_are_log_probs():
    assert measure({"cpo": 1.0})["chosen_reward"] == 0.5 * (-4.5 - 6.0)
    assert measure({"sft": 1.0})["rejected_reward"] == 0.5 * (-4.0 - 1.5)
    assert measure({"cpo": 1.0})["accuracy"] == 0.0
    for name in ("simpo", "orpo"):
        metrics = measure({name: 1.0})
        assert metrics["chosen_reward"] == 0.5 * (-1.5 - 3.0)
        assert metrics["margin"] == pytest.approx(0.5 * (-4.5 + 4.75))
        assert metrics["accuracy"] == 1.0


def test_equal_rewards_are_no_right_choice():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    twin = Answer(logprobs, logprobs, torch.ones(2), logprobs)
    _, metrics = LOSSES["preference"].fn(*inputs_of([twin, twin], alone("sigmoid"), scale=1.0))
    assert metrics["accuracy"].item() == 0


def test_parts_are_measured_when_there_are_several():
    both = measure({"sigmoid": 2.0, "sft": 0.5})
    margins = 0.5 * torch.tensor([0.5, 4.5])
    assert both["loss_sigmoid"] == pytest.approx(torch.log1p(torch.exp(-margins)).sum().item(), rel=1e-6)
    assert both["loss_sft"] == pytest.approx(2 * (4.5 + 6.0) / 5)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_only_losses_with_a_reference_read_one(name):
    answers = draw_answers(LENGTHS)
    options = with_tokens(alone(name), answers)
    logprobs, inputs = inputs_of(answers, options, scale=1.0)
    inputs.values.pop("reference_logprobs")
    if LOSSES["preference"].needs_reference(options):
        with pytest.raises(KeyError, match="reference_logprobs"):
            LOSSES["preference"].fn(logprobs, inputs)
    else:
        assert name in ("sft", "simpo", "orpo", "cpo")
        LOSSES["preference"].fn(logprobs, inputs)


def test_only_wpo_reads_log_sum_sq_probs():
    assert LOSSES["preference"].needs_log_sum_sq_probs({"losses": {"sigmoid": 1.0}, "wpo": True})
    assert not LOSSES["preference"].needs_log_sum_sq_probs({"losses": {"sigmoid": 1.0}})
    logprobs, inputs = inputs_of(draw_answers(LENGTHS), alone("sigmoid"), scale=1.0)
    inputs.values.pop("log_sum_sq_probs")
    LOSSES["preference"].fn(logprobs, inputs)


def test_cross_entropy_of_chosen_answers_must_know_their_tokens():
    with pytest.raises(ValueError, match="sft needs the option num_chosen_tokens"):
        lockstep_loss(draw_answers(LENGTHS), alone("sft"))


KTO_OPTIONS = [
    {},
    {"beta": 0.7, "kl": 0.4},
    {"desirable_weight": 1.5, "undesirable_weight": 0.25, "kl": 1.0},
    {"loss": "apo_zero_unpaired", "beta": 0.3, "desirable_weight": 2.0, "kl": 0.9},
]
LABELS = [True, False, False, True, True, True, False, True, False, True]


@pytest.mark.parametrize("options", KTO_OPTIONS, ids=["default", "beta", "weights", "apo"])
def test_kto_is_its_formula(options):
    answers = draw_answers(LENGTHS)
    found, _ = LOSSES["kto"].fn(*inputs_of(answers, options, scale=1 / len(answers), labels=LABELS))
    assert_same(found, plain_kto(answers, LABELS, options), answers)


def test_micro_batches_and_order_do_not_change_kto():
    answers, options = draw_answers(LENGTHS), {"kl": 0.3}

    def loss(places: Sequence[int]) -> Tensor:
        rows, labels = [answers[p] for p in places], [LABELS[p] for p in places]
        return LOSSES["kto"].fn(*inputs_of(rows, options, scale=0.1, labels=labels))[0]

    assert_same(loss([9, 3, 5]) + loss([0, 1, 2]) + loss([8, 7, 6, 4]), loss(range(10)), answers)


def test_kto_takes_float32():
    answers, options = draw_answers(LENGTHS), {"kl": 0.3}
    logprobs, inputs = inputs_of(answers, options, scale=0.1, labels=LABELS, dtype=torch.float32)
    found, _ = LOSSES["kto"].fn(logprobs, inputs)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(plain_kto(answers, LABELS, options).item(), rel=1e-6)


def test_metrics_of_kto():
    answers, options = draw_answers(LENGTHS), {"kl": 0.3, "beta": 0.5}
    _, metrics = LOSSES["kto"].fn(*inputs_of(answers, options, scale=0.1, labels=LABELS))
    rewards = [0.5 * answer.ratio.item() for answer in answers]
    assert set(metrics) == set(LOSSES["kto"].metrics(options))
    assert metrics["num_chosen"].item() == 6
    assert metrics["num_rejected"].item() == 4
    assert metrics["kl"].item() == pytest.approx(3.0)
    for side, name in ((True, "chosen"), (False, "rejected")):
        mine = [n for n, label in enumerate(LABELS) if label == side]
        assert metrics[f"{name}_reward"].item() == pytest.approx(sum(rewards[n] for n in mine))
        assert metrics[f"{name}_logprob"].item() == pytest.approx(sum(answers[n].total.item() for n in mine))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*PREFERENCE_LOSSES, "kto"])
def test_on_a_gpu_nothing_waits_and_everything_repeats(name):
    answers = draw_answers([500, 300, 1, 4] * 40)
    kind, options = ("kto", {}) if name == "kto" else ("preference", with_tokens(alone(name), answers))
    labels = [True, False] * (len(answers) // 2)
    logprobs, inputs = inputs_of(answers, options, scale=0.1, labels=labels, dtype=torch.float32)
    expected, _ = LOSSES[kind].fn(logprobs, inputs)
    values = {key: value.cuda() for key, value in inputs.values.items()}
    there = LossInputs(inputs.weights.cuda(), 0.1, values, options, inputs.completions.cuda(), inputs.num_completions)

    def run() -> tuple[Tensor, Tensor]:
        leaf = logprobs.detach().cuda().requires_grad_()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss, _ = LOSSES[kind].fn(leaf, there)
            (grad_logprobs,) = torch.autograd.grad(loss, leaf)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return loss.detach().cpu(), grad_logprobs.cpu()

    (loss, grad_logprobs), (again, grad_again) = run(), run()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(loss, again)
    assert torch.equal(grad_logprobs, grad_again)
