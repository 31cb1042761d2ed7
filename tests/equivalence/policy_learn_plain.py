"""The plainest step of reinforcement learning: log-probs from full logits, advantages by hand, then the updates.

Nothing here is shared with what it judges but the shape of groups.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from equivalence.plain import STEP, make_optimizer
from equivalence.policy_plain import Sampled, plain_policy_loss
from equivalence.preference_plain import full_logprobs
from torch import Tensor, nn

from lockstep.config import GrpoConfig
from lockstep.data.prompts import PromptRow
from lockstep.rollouts.episode import Group, Rollout
from lockstep.rollouts.rewards import Outcome
from lockstep.train.grpo import policy_options


def make_scored_groups(seed: int, count: int = 6) -> list[Group]:
    """Two to four answers to each prompt; some are cut, one could not be scored, some words are not the model's."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, number: int = 1) -> list[int]:
        return torch.randint(low, high, (number,), generator=generator).tolist()

    def answer(place: int) -> Rollout:
        (length,) = draw(2, 12)
        own = [i in (0, length - 1) or gap > 0 for i, gap in enumerate(draw(0, 5, length))]
        logprobs = (-4.5 + 0.3 * torch.randn(length, generator=generator, dtype=torch.float64)).tolist()
        outcome = Outcome.failed("told so") if place == 7 else Outcome(draw(0, 5)[0] / 4)
        return Rollout(
            tokens=tuple(draw(0, 97, length)),
            sampled=tuple(own),
            logprobs=tuple(value if is_own else 0.0 for value, is_own in zip(logprobs, own, strict=True)),
            versions=(0,) * length,
            turns=("",),
            truncated=place % 5 == 4,
            outcome=outcome,
        )

    places = iter(range(1000))
    return [
        Group(
            PromptRow(f"group {i}", (0, *draw(0, 97, draw(1, 9)[0])), {}),
            i,
            tuple(answer(next(places)) for _ in range(draw(2, 5)[0])),
        )
        for i in range(count)
    ]


@dataclass
class _Learned:
    """An answer to learn from. `old` and `reference` are of its sampled tokens."""

    group: int
    prompt: tuple[int, ...]
    answer: Rollout
    old: Tensor
    reference: Tensor
    reward: float
    advantage: float = 0.0


class PlainLearner:
    """A model in training, and the one that it is compared with."""

    def __init__(self, model: nn.Module, reference: nn.Module | None, algorithm: GrpoConfig) -> None:
        self._model, self._reference, self._algorithm = model, reference, algorithm
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = make_optimizer(self.trained)
        self.losses: list[float] = []

    def learn(self, groups: Sequence[Group]) -> None:
        answers = self._choose(groups)
        self._compare(answers, groups)
        parts = self._cut(answers)
        for _ in range(self._algorithm.num_updates):
            for part in parts:
                self._update(part)

    def _choose(self, groups: Sequence[Group]) -> list[_Learned]:
        found = []
        for number, group in enumerate(groups):
            for answer in group.rollouts:
                is_masked = answer.truncated and self._algorithm.overlong == "mask"
                if answer.outcome.problem is None and not is_masked:
                    old, _ = self._measure(self._model, group.prompt.tokens, answer)
                    reference = (
                        old
                        if self._reference is None
                        else self._measure(self._reference, group.prompt.tokens, answer)[0]
                    )
                    made = (old.detach(), reference.detach(), answer.outcome.reward)
                    found.append(_Learned(number, group.prompt.tokens, answer, *made))
        return found

    def _compare(self, answers: Sequence[_Learned], groups: Sequence[Group]) -> None:
        """All scored answers are what others are compared with, masked ones too."""
        algorithm = self._algorithm
        rewards = {
            id(a): (n, a.outcome.reward) for n, g in enumerate(groups) for a in g.rollouts if not a.outcome.problem
        }
        for own in answers:
            if algorithm.kl_coefficient and algorithm.kl_in == "reward":
                gained = own.old - own.reference
                estimates = {"k1": gained, "k2": gained**2 / 2, "k3": torch.exp(-gained) - 1 + gained}
                distance = float(estimates[algorithm.kl].sum())
                rewards[id(own.answer)] = (own.group, own.reward - algorithm.kl_coefficient * distance)
        every = [reward for _, reward in rewards.values()]
        for own in answers:
            reward = rewards[id(own.answer)][1]
            mates = [other for group, other in rewards.values() if group == own.group]
            if algorithm.advantage == "reinforce++":
                own.advantage = (reward - statistics.mean(every)) / (statistics.stdev(every) + 1e-4)
            elif algorithm.advantage == "rloo":
                own.advantage = reward - (sum(mates) - reward) / (len(mates) - 1)
            else:
                assert algorithm.advantage == "grpo"
                own.advantage = (reward - statistics.mean(mates)) / (statistics.stdev(mates) + 1e-4)

    def _cut(self, answers: Sequence[_Learned]) -> list[list[_Learned]]:
        """By prompts, as level as may be."""
        prompts = sorted({own.group for own in answers})
        edges = [round(i * len(prompts) / self._algorithm.minibatches) for i in range(self._algorithm.minibatches + 1)]
        parts = [prompts[start:stop] for start, stop in pairwise(edges)]
        return [[own for own in answers if own.group in part] for part in parts]

    def _update(self, part: Sequence[_Learned]) -> None:
        sampled = []
        for own in part:
            now, entropies = self._measure(self._model, own.prompt, own.answer)
            places = torch.tensor(own.answer.sampled)
            behaviour = torch.tensor(own.answer.logprobs, dtype=torch.float64)[places]
            sampled.append(Sampled(now, own.old, behaviour, own.reference, entropies, own.advantage))
        loss = plain_policy_loss(sampled, policy_options(self._algorithm), self._algorithm.aggregation)
        loss.backward()
        self.losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(list(self.trained.values()), STEP.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _measure(self, model: nn.Module, prompt: Sequence[int], answer: Rollout) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of the answer's sampled tokens."""
        tokens = torch.tensor([[*prompt, *answer.tokens]])
        logits = full_logprobs(model, tokens, torch.ones_like(tokens))[0] / self._algorithm.temperature
        every = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1][torch.tensor(answer.sampled)]
        chosen = torch.tensor(answer.tokens)[torch.tensor(answer.sampled)]
        return every.gather(1, chosen[:, None])[:, 0], -(every.exp() * every).sum(dim=1)


def engine_settings(algorithm: dict[str, Any]) -> dict[str, Any]:
    """As `STEP`, for a configuration."""
    step = {name: getattr(STEP, name) for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay")}
    return {"algorithm": algorithm, "optim": {**step, "max_grad_norm": STEP.max_grad_norm}, "batch": {"samples": 6}}
