"""The plainest preference losses: the papers' formulas pair by pair, and a padded, unpacked pass with full logits.

Everything is in float64 and nothing here is shared with what it judges.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.types import Completion, Datum


@dataclass(frozen=True)
class Answer:
    """Supervised tokens of one completion: under the policy, under the reference, their weights, log sum p^2."""

    logprobs: Tensor
    reference: Tensor
    weights: Tensor
    log_sum_sq_probs: Tensor

    @property
    def total(self) -> Tensor:
        return (self.weights * self.logprobs).sum()

    @property
    def ratio(self) -> Tensor:
        return self.total - (self.weights * self.reference).sum()

    @property
    def mean(self) -> Tensor:
        return self.total / len(self.logprobs)


PlainPair = tuple[Answer, Answer]


def log_sigmoid(x: Tensor) -> Tensor:
    return torch.log(torch.sigmoid(x))


def slope_of_divergence(ratio: Tensor, options: Mapping[str, Any]) -> Tensor:
    """f'(t): Wang et al. 2023, table 1, with f'(1) = 0."""
    kind, t = options.get("divergence", "reverse_kl"), torch.exp(ratio)
    if kind == "forward_kl":
        return 1 - 1 / t
    if kind == "js":
        return torch.log(2 * t / (1 + t))
    if kind == "alpha":
        alpha = options.get("divergence_alpha", 0.5)
        return (t ** (alpha - 1) - 1) / (alpha - 1)
    return torch.log(t)


def plain_part(name: str, pair: PlainPair, options: Mapping[str, Any]) -> Tensor:
    """The loss of one pair, for those that look at one pair alone."""
    won, lost = pair
    beta, wrong = options.get("beta", 0.1), options.get("label_smoothing", 0.0)
    score_won, score_lost = slope_of_divergence(won.ratio, options), slope_of_divergence(lost.ratio, options)
    margin = beta * (score_won - score_lost)
    mean_gap = score_won / len(won.logprobs) - score_lost / len(lost.logprobs)
    reward_won, reward_lost = beta * won.ratio, beta * lost.ratio
    shift = options.get("plain_shift", 0.0)

    def conservative(margin: Tensor) -> Tensor:
        return (1 - wrong) * -log_sigmoid(margin) + wrong * -log_sigmoid(-margin)

    match name:
        case "sigmoid":
            return conservative(margin)
        case "sigmoid_norm":
            return conservative(beta * mean_gap)
        case "hinge":
            return torch.maximum(1 - margin, torch.zeros_like(margin))
        case "ipo":
            return (mean_gap - 1 / (2 * beta)) ** 2
        case "robust":
            return ((1 - wrong) * -log_sigmoid(margin) - wrong * -log_sigmoid(-margin)) / (1 - 2 * wrong)
        case "exo_pair":
            policy = torch.softmax(beta * torch.stack([score_won, score_lost]), dim=0)
            judge = torch.tensor([1 - wrong, wrong], dtype=torch.float64)
            return (policy * torch.log(policy / judge)).sum()
        case "discopop":
            mixing = torch.sigmoid(margin / options.get("discopop_tau", 0.05))
            return (1 - mixing) * torch.log(1 + torch.exp(-margin)) + mixing * torch.exp(-margin)
        case "nca_pair":
            return -log_sigmoid(reward_won) - (log_sigmoid(-reward_won) + log_sigmoid(-reward_lost)) / 2
        case "bco_pair":
            return -log_sigmoid(reward_won - shift) - log_sigmoid(-(reward_lost - shift))
        case "sppo_hard":
            eta = 1 / beta
            return (won.ratio - eta * (1 - 0.5)) ** 2 + (lost.ratio - eta * (0 - 0.5)) ** 2
        case "apo_zero":
            return 1 - torch.sigmoid(reward_won) + torch.sigmoid(reward_lost)
        case "apo_down":
            return torch.sigmoid(reward_won) + 1 - torch.sigmoid(reward_won - reward_lost)
        case "simpo":
            return conservative(beta * won.mean - beta * lost.mean - options.get("margin", 0.5))
        case "cpo":
            return conservative(beta * won.total - beta * lost.total)
        case "orpo":
            odds_won, odds_lost = (torch.exp(a.mean) / (1 - torch.exp(a.mean)) for a in pair)
            return beta * -log_sigmoid(torch.log(odds_won / odds_lost))
    raise AssertionError(f"no formula for {name}")


def plain_quantiles(name: str, pairs: Sequence[PlainPair], options: Mapping[str, Any]) -> Tensor:
    """AOT: the mean loss of two sorted samples. (One term for each rank of the sample, not for each pair.)"""
    if name == "aot":
        upper = [won.total - lost.total for won, lost in pairs]
        lower = [(w.weights * w.reference).sum() - (r.weights * r.reference).sum() for w, r in pairs]
    else:
        upper, lower = [won.ratio for won, _ in pairs], [lost.ratio for _, lost in pairs]
    wrong, total = options.get("label_smoothing", 0.0), torch.zeros((), dtype=torch.float64)
    for high, low in zip(sorted(upper, key=Tensor.item), sorted(lower, key=Tensor.item)):
        margin = options.get("beta", 0.1) * (high - low)
        total = total + (1 - wrong) * -log_sigmoid(margin) + wrong * -log_sigmoid(-margin)
    return total / len(pairs)


def emphasis(pair: PlainPair) -> float:
    """WPO: Zhou et al. 2024, equation 2."""
    return math.prod(math.exp((a.logprobs - a.log_sum_sq_probs).mean().item()) for a in pair)


def plain_loss_of_pairs(pairs: Sequence[PlainPair], options: Mapping[str, Any]) -> Tensor:
    """The mean over pairs of all parts, each with its weight."""
    if options.get("bco_shift"):
        rewards = [options.get("beta", 0.1) * answer.ratio.item() for pair in pairs for answer in pair]
        options = {**options, "plain_shift": sum(rewards) / len(rewards)}
    total = torch.zeros((), dtype=torch.float64)
    for name, weight in options["losses"].items():
        if name in ("aot", "aot_unpaired"):
            total = total + weight * plain_quantiles(name, pairs, options)
        elif name != "sft":
            for pair in pairs:
                counts = emphasis(pair) if options.get("wpo") else 1.0
                total = total + weight * counts * plain_part(name, pair, options) / len(pairs)
        if name in ("sft", "orpo", "cpo"):
            share = options.get("cpo_alpha", 1.0) if name == "cpo" else 1.0
            tokens = torch.cat([won.logprobs for won, _ in pairs])
            total = total - weight * share * tokens.mean()
    return total


def plain_kto(answers: Sequence[Answer], wanted: Sequence[bool], options: Mapping[str, Any]) -> Tensor:
    """The mean over answers: Ethayarajh et al. 2024, equation 8, or the unpaired half of APO-zero."""
    origin = options.get("kl", 0.0) if options.get("loss", "kto") == "kto" else 0.0
    total = torch.zeros((), dtype=torch.float64)
    for answer, good in zip(answers, wanted, strict=True):
        value = options.get("beta", 0.1) * (answer.ratio - origin)
        if good:
            total = total + options.get("desirable_weight", 1.0) * (1 - torch.sigmoid(value))
        else:
            total = total + options.get("undesirable_weight", 1.0) * (1 - torch.sigmoid(-value))
    return total / len(answers)


def make_pairs(seed: int = 0, rows: int = 5) -> list[Datum]:
    """Pairs of unequal lengths, with gaps inside answers, and tokens past the shared length that count half."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    def complete(length: int, shared: int, half: float) -> Completion:
        gaps = draw(0, 4, length - 1)
        weights = [0.0 if gap == 0 else 1.0 if place < shared else half for place, gap in enumerate(gaps)]
        return Completion(draw(0, 97, length), [*weights, 1.0 if length <= shared else half])

    batch = []
    for row in range(rows):
        lengths = draw(2, 14, 2)
        half = 1.0 if row % 2 else 0.5
        completions = [complete(length, min(lengths), half) for length in lengths]
        batch.append(Datum([0, *draw(0, 97, draw(1, 9, 1)[0])], completions, f"pair {row}"))
    return batch


def padded_answers(model: nn.Module, reference: nn.Module, batch: Sequence[Datum], side: str) -> list[Answer]:
    """Every completion with its prompt, in one batch padded on one side: chosen answers first, then rejected ones."""
    rows = [(datum, c) for c in range(len(batch[0].completions)) for datum in batch]
    texts = [[*datum.prompt, *datum.completions[c].tokens] for datum, c in rows]
    longest = max(map(len, texts))
    starts = [longest - len(text) if side == "left" else 0 for text in texts]
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, (start, text) in enumerate(zip(starts, texts)):
        tokens[row, start : start + len(text)] = torch.tensor(text)
        # What stands behind a text cannot be seen from it.
        mask[row, start:] = 1
    every = full_logprobs(model, tokens, mask)
    with torch.no_grad():
        every_reference = full_logprobs(reference, tokens, mask)
    answers = []
    for row, (datum, c) in enumerate(rows):
        weights = torch.tensor(datum.completions[c].weights, dtype=torch.float64)
        supervised = weights.nonzero()[:, 0]
        places = starts[row] + len(datum.prompt) + supervised
        targets = tokens[row, places]
        answers.append(
            Answer(
                every[row, places - 1, targets],
                every_reference[row, places - 1, targets],
                weights[supervised],
                torch.logsumexp(2 * every[row, places - 1].detach(), dim=-1),
            )
        )
    return answers


def full_logprobs(model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    extra = {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        extra["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False, **extra).logits
    return torch.log_softmax(logits, dim=-1)


def plain_preference(
    model: nn.Module, batch: Sequence[Datum], reference: nn.Module, options: Mapping[str, Any], *, side: str = "right"
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, every trained parameter's gradient)."""
    answers = padded_answers(model, reference, batch, side)
    loss = plain_loss_of_pairs(list(zip(answers[: len(batch)], answers[len(batch) :], strict=True)), options)
    return loss.detach(), gradients_of(model, loss)


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(trained.items(), found)}
