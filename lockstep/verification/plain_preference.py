"""Plain forward-backward for preference losses: every answer alone behind its own prompt, a second model as reference.

Shares with training only how a loop weights a batch and the formula of the loss, applied once to the whole batch.
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
from lockstep.types import Completion, Datum, Logprobs, LossSpec
from lockstep.verification.plain_loop import PassValues, target_logprobs, token_distributions
from lockstep.verification.reduced import leave_reference
from lockstep.verification.sample import REFERENCE, total_weight


class PlainPreference:
    """A policy and its reference, from which the policy is moved away before the first batch."""

    def __init__(self, config: RunConfig, policy: nn.Module, kind: str, other: nn.Module | None = None) -> None:
        """`kind` as in algorithm.reference, never auto. `other` is algorithm.reference_model, if there is one."""
        assert isinstance(config.algorithm, (DpoConfig, KtoConfig))
        self._config, self._algorithm = config, config.algorithm
        self._policy = policy
        self._reference = None if kind == "none" else other or copy_reference(policy, kind, config)
        self._has_stepped = False
        if kind != "none":
            leave_reference(p.data for p in policy.parameters() if p.requires_grad)

    def forward_backward(self, rows: Sequence[Datum]) -> PassValues:
        if self._has_stepped and self._algorithm.reference_sync_steps is not None:
            assert self._reference is not None
            mix_into(self._reference, self._policy, self._algorithm.reference_mix)
        self._has_stepped = True
        total_weight(rows)
        batch, loss = prepare(self._config, cast(Any, self), rows)
        answers = [(datum, completion) for datum in batch for completion in datum.completions]
        every = [token_distributions(self._policy, *answer) for answer in answers]
        completions = [completion for _, completion in answers]
        logprobs = torch.cat([supervised(target_logprobs(d, c), c) for d, c in zip(every, completions, strict=True)])
        rule = LOSSES[loss.kind]
        values = side_values(completions)
        if self._reference is not None:
            values[REFERENCE] = torch.cat([supervised(self._logprobs(self._reference, *a), a[1]) for a in answers])
        if rule.needs_log_sum_sq_probs(loss.options):
            log_sum_sq_probs = [torch.logsumexp(2 * d.detach(), dim=-1) for d in every]
            collided = [supervised(value, c) for value, c in zip(log_sum_sq_probs, completions, strict=True)]
            values["log_sum_sq_probs"] = torch.cat(collided)
        inputs = whole_inputs(completions, loss, values)
        total, metrics = rule.fn(logprobs, inputs)
        total.backward()
        reference = values[REFERENCE].tolist() if self._reference is not None else []
        sums = {name: float(value) for name, value in metrics.items()}
        return PassValues(float(total.detach()), logprobs.detach().tolist(), reference, sums)

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> list[Logprobs]:
        """What a loop asks of a backend, to estimate how far policy and reference are apart."""
        model = self._reference if reference else self._policy
        assert model is not None
        return [tuple(self._logprobs(model, datum, c).tolist() for c in datum.completions) for datum in batch]

    @torch.no_grad()
    def _logprobs(self, model: nn.Module, datum: Datum, completion: Completion) -> Tensor:
        return target_logprobs(token_distributions(model, datum, completion), completion)


@torch.no_grad()
def mix_into(reference: nn.Module, policy: nn.Module, share: float) -> None:
    """reference = share * policy + (1 - share) * reference."""
    followed = dict(policy.named_parameters())
    for name, parameter in reference.named_parameters():
        parameter.copy_(share * followed[name] + (1 - share) * parameter)


def copy_reference(policy: nn.Module, kind: str, config: RunConfig) -> nn.Module:
    """A copy with all its adapters, or, where the reference is the model below them, with none."""
    reference: Any = copy.deepcopy(policy)
    if config.lora is None or kind == "copy":
        return reference
    return reference.unload()


def supervised(values: Tensor, completion: Completion) -> Tensor:
    """Those of the tokens that have a weight."""
    return values[column(completion.weights).nonzero()[:, 0]]


def column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def side_values(completions: Sequence[Completion]) -> dict[str, Tensor]:
    """What rows bring with them, such as labels."""
    names = completions[0].values
    return {name: torch.cat([supervised(column(c.values[name]), c) for c in completions]) for name in names}


def whole_inputs(completions: Sequence[Completion], loss: LossSpec, values: dict[str, Tensor]) -> LossInputs:
    weights = [supervised(column(c.weights), c) for c in completions]
    return LossInputs(
        weights=torch.cat(weights),
        scale=loss.scale,
        values=values,
        options=loss.options,
        completions=torch.arange(len(weights)).repeat_interleave(torch.tensor([len(w) for w in weights])),
        num_completions=len(weights),
    )
