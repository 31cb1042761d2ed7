"""The plainest policy gradients: the papers' formulas answer by answer and token by token, in float64.

Nothing here is shared with what it judges. The loss of a batch is written as each paper writes it, with its means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from equivalence.preference_plain import full_logprobs
from torch import Tensor, nn

from lockstep.types import Completion, Datum

MAX_TOKENS = 16  # of the aggregation fixed


@dataclass(frozen=True)
class Sampled:
    """The learned tokens of one answer. `entropies` has a gradient of its own."""

    logprobs: Tensor
    old: Tensor
    behaviour: Tensor
    reference: Tensor
    entropies: Tensor
    advantage: float


def plain_token_losses(answer: Sampled, options: Mapping[str, Any]) -> list[Tensor]:
    low, high = 1 - options.get("clip_low", 0.2), 1 + options.get("clip_high", 0.2)
    floor, ceiling = (torch.tensor(limit, dtype=torch.float64) for limit in (low, high))
    length, advantage = len(answer.logprobs), answer.advantage
    mean_gain = sum(answer.logprobs[t] - answer.old[t] for t in range(length)) / length
    sequence_gap = math.exp(sum(float(answer.old[t] - answer.behaviour[t]) for t in range(length)))
    losses = []
    for t in range(length):
        now = answer.logprobs[t]
        ratio = torch.exp(mean_gain if options.get("ratio") == "sequence" else now - answer.old[t])
        clipped = floor if ratio.item() < low else ceiling if ratio.item() > high else ratio
        if options.get("objective") == "cispo":
            gain = min(max(ratio.item(), low), high) * advantage * now
        else:
            gain = min(ratio * advantage, clipped * advantage, key=Tensor.item)
            limit = options.get("dual_clip")
            if limit is not None and advantage < 0 and gain.item() < limit * advantage:
                gain = torch.tensor(limit * advantage, dtype=torch.float64)
        weighting = options.get("importance_weighting", "none")
        if weighting != "none":
            own_gap = math.exp(float(answer.old[t] - answer.behaviour[t]))
            gain = gain * min(own_gap if weighting == "token" else sequence_gap, options.get("importance_cap", 2.0))
        loss = -gain
        if options.get("kl_coefficient"):
            further = now - answer.reference[t]
            estimates = {"k1": further, "k2": further**2 / 2, "k3": torch.exp(-further) - 1 + further}
            loss = loss + options["kl_coefficient"] * estimates[options.get("kl", "k3")]
        if options.get("entropy_coefficient"):
            loss = loss - options["entropy_coefficient"] * answer.entropies[t]
        losses.append(loss)
    return losses


def plain_policy_loss(answers: Sequence[Sampled], options: Mapping[str, Any], aggregation: str) -> Tensor:
    losses = [plain_token_losses(answer, options) for answer in answers]
    if aggregation == "token":  # DAPO: the mean over all tokens
        every = [loss for own in losses for loss in own]
        return sum(every) / len(every)
    if aggregation == "sequence":  # GRPO: the mean over answers of the mean over tokens
        return sum(sum(own) / len(own) for own in losses) / len(losses)
    return sum(sum(own) for own in losses) / (len(losses) * MAX_TOKENS)  # Dr. GRPO


def without_reference(batch: Sequence[Datum]) -> list[Datum]:
    """Rows whose reference the backend must compute."""

    def bare(completion: Completion) -> Completion:
        values = {name: v for name, v in completion.values.items() if name != "reference_logprobs"}
        return Completion(completion.tokens, completion.weights, values)

    return [Datum(d.prompt, [bare(c) for c in d.completions], d.origin) for d in batch]


def make_groups(seed: int = 0, rows: int = 4, *, aggregation: str = "token") -> list[Datum]:
    """Prompts with two to four answers, some of whose tokens are not the model's own, each with an advantage.

    Log-probs of trainer, sampler and reference among the values are near -log 97, as those of a small random model.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    def near(count: int, spread: float) -> list[float]:
        noise = torch.randn(count, generator=generator, dtype=torch.float64)
        return (-math.log(97) + spread * noise).tolist()

    def complete() -> Completion:
        (length,) = draw(2, 12, 1)
        learned = [place in (0, length - 1) or gap > 0 for place, gap in enumerate(draw(0, 5, length))]
        weight = 1 / sum(learned) if aggregation == "sequence" else 1.0
        advantage = float(torch.randn(1, generator=generator, dtype=torch.float64))
        values = {
            "advantages": [advantage] * length,
            "old_logprobs": near(length, 0.3),
            "behaviour_logprobs": near(length, 0.3),
            "reference_logprobs": near(length, 0.5),
        }
        return Completion(draw(0, 97, length), [weight if is_own else 0.0 for is_own in learned], values)

    return [
        Datum([0, *draw(0, 97, draw(1, 9, 1)[0])], [complete() for _ in range(draw(2, 5, 1)[0])], f"group {row}")
        for row in range(rows)
    ]


def scale_of_groups(batch: Sequence[Datum], aggregation: str) -> float:
    """As a loop decides it, once for the global batch."""
    completions = [c for datum in batch for c in datum.completions]
    num_tokens = sum(w != 0 for c in completions for w in c.weights)
    return 1 / {"token": num_tokens, "sequence": len(completions), "fixed": len(completions) * MAX_TOKENS}[aggregation]


def sampled_answers(
    model: nn.Module, batch: Sequence[Datum], reference: nn.Module | None = None, temperature: float = 1.0
) -> list[Sampled]:
    """Each answer in a pass of its own, with full logits. `reference` takes the place of the one among the values."""

    def distributions(network: nn.Module, tokens: Tensor) -> Tensor:
        return torch.log_softmax(full_logprobs(network, tokens, torch.ones_like(tokens))[0] / temperature, dim=-1)

    found = []
    for datum in batch:
        for completion in datum.completions:
            tokens = torch.tensor([[*datum.prompt, *completion.tokens]])
            targets = torch.tensor(completion.weights).nonzero()[:, 0]
            places = len(datum.prompt) + targets
            every = distributions(model, tokens)[places - 1]
            values = {name: torch.tensor(v, dtype=torch.float64)[targets] for name, v in completion.values.items()}
            if reference is not None:
                with torch.no_grad():
                    theirs = distributions(reference, tokens)[places - 1]
                values["reference_logprobs"] = theirs.gather(1, tokens[0, places, None])[:, 0]
            found.append(
                Sampled(
                    every.gather(1, tokens[0, places, None])[:, 0],
                    values["old_logprobs"],
                    values["behaviour_logprobs"],
                    values["reference_logprobs"],
                    -(every.exp() * every).sum(dim=1),
                    float(values["advantages"][0]),
                )
            )
    return found
