"""The plainest learning from preferences: every answer by itself behind its own prompt, under a whole second model too.

Shares with training what no layout can get wrong: how a loop weighs a batch, and the formula of the loss, applied once
to the whole batch. Must not know the backend or micro-batches.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lockstep.algorithms.losses import LOSSES, LossInputs
from lockstep.config import DpoConfig, KtoConfig, RunConfig
from lockstep.train.dpo import prepare
from lockstep.types import Completion, Datum, Logprobs
from lockstep.verification.reduced import leave_reference
from lockstep.verification.reference import Learned, distributions_of, pick
from lockstep.verification.sample import REFERENCE, total_weight


class PlainPreference:
    """A policy and the model that it is compared with. Before the first batch, the policy leaves its reference."""

    def __init__(self, config: RunConfig, policy: nn.Module, kind: str, other: nn.Module | None = None) -> None:
        """`kind` as in algorithm.reference, never auto. `other` is the reference where the policy is not its origin."""
        assert isinstance(config.algorithm, (DpoConfig, KtoConfig))
        self._config, self._algorithm = config, config.algorithm
        self._policy = policy
        self._reference = None if kind == "none" else other or _copy_reference(policy, kind, config)
        self._has_begun = False
        if kind != "none":
            leave_reference(p.data for p in policy.parameters() if p.requires_grad)

    def learn(self, rows: Sequence[Datum]) -> Learned:
        if self._has_begun and self._algorithm.reference_sync_steps is not None:
            self._mix(self._algorithm.reference_mix)
        self._has_begun = True
        total_weight(rows)
        batch, loss = prepare(self._config, self._algorithm, cast(Any, self), rows, asks_backend=False)
        answers = [(datum, completion) for datum in batch for completion in datum.completions]
        every = [distributions_of(self._policy, *answer) for answer in answers]
        logprobs = torch.cat([_supervised(pick(d, c), c) for d, (_, c) in zip(every, answers)])
        rule = LOSSES[loss.kind]
        values = _side_values([c for _, c in answers])
        if self._reference is not None:
            values[REFERENCE] = torch.cat([_supervised(self._logprobs(self._reference, *a), a[1]) for a in answers])
        if rule.needs_collision(loss.options):
            collisions = [torch.logsumexp(2 * d.detach(), dim=-1) for d in every]
            values["collision_logprobs"] = torch.cat([_supervised(v, c) for v, (_, c) in zip(collisions, answers)])
        counts = torch.tensor([len(_places(c)) for _, c in answers])
        inputs = LossInputs(
            weights=torch.cat([_supervised(_column(c.weights), c) for _, c in answers]),
            scale=loss.scale,
            values=values,
            options=loss.options,
            completions=torch.arange(len(answers)).repeat_interleave(counts),
            num_completions=len(answers),
        )
        total, metrics = rule.fn(logprobs, inputs)
        total.backward()
        reference = values[REFERENCE].tolist() if self._reference is not None else []
        found = {name: float(value) for name, value in metrics.items()}
        return Learned(float(total.detach()), logprobs.detach().tolist(), reference, found)

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> list[Logprobs]:
        """What a loop asks of a backend, to estimate how far policy and reference are apart."""
        model = self._reference if reference else self._policy
        assert model is not None
        return [tuple(self._logprobs(model, datum, c).tolist() for c in datum.completions) for datum in batch]

    @torch.no_grad()
    def _logprobs(self, model: nn.Module, datum: Datum, completion: Completion) -> Tensor:
        return pick(distributions_of(model, datum, completion), completion)

    @torch.no_grad()
    def _mix(self, share: float) -> None:
        assert self._reference is not None
        followed = dict(self._policy.named_parameters())
        for name, parameter in self._reference.named_parameters():
            parameter.copy_(share * followed[name] + (1 - share) * parameter)


def _copy_reference(policy: nn.Module, kind: str, config: RunConfig) -> nn.Module:
    """A copy with all its adapters, or, where the reference is the model below them, with none."""
    reference: Any = copy.deepcopy(policy)
    if config.lora is None or kind == "copy":
        return reference
    return reference.unload()


def _places(completion: Completion) -> Tensor:
    return _column(completion.weights).nonzero()[:, 0]


def _supervised(values: Tensor, completion: Completion) -> Tensor:
    return values[_places(completion)]


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _side_values(completions: Sequence[Completion]) -> dict[str, Tensor]:
    """What rows bring with them, such as labels."""
    names = completions[0].values
    return {name: torch.cat([_supervised(_column(c.values[name]), c) for c in completions]) for name in names}
