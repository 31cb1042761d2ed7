"""How evenly a batch is spread over experts: measured, and where configured trained for.

All numbers are of the global batch. The load-balancing loss is E * sum(f * P), f the tokens per expert and P the mean
probabilities, both over all layers, micro-batches and ranks. f has no gradient: once it is known, the loss is linear in
each token's probabilities, and every layer adds its own tokens' part in backward, in whatever pass and on which rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.config import ModelConfig
from lockstep.model.policy import Policy, causal_lm
from lockstep.model.routing import BIAS, RouterCounts, balancing_problem, own_coefficient, router_biases
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Metrics

DEAD = "dead_expert/"  # prefix of a metric for each expert that no token chooses: dead_expert/layer/expert
DEAD_AFTER_TOKENS = 100.0  # that would have come to it, were all experts alike


@dataclass(frozen=True)
class RouterLosses:
    """The keys of the model section. `aux_loss` auto: with the model's own coefficient."""

    aux_loss: float | Literal["off", "auto"] = "off"
    z_loss: float = 0.0
    bias_rate: float = 0.0

    @classmethod
    def of(cls, config: ModelConfig) -> RouterLosses:
        return cls(config.router_aux_loss, config.router_z_loss, config.router_bias_rate)


NO_LOSSES = RouterLosses()


class RouterBalance:
    """Of one backend. All ranks make the same calls; without routers they do nothing."""

    def __init__(
        self,
        policy: Policy,
        losses: RouterLosses,
        group: ProcessGroup,
        reference: str = "none",
        *,
        compiled: bool = False,
    ) -> None:
        """`compiled`: layers stay whole, and are not watched unless a loss or biases need it."""
        self._routers, self._group = policy.routers, group
        causal = causal_lm(policy.model)
        self.aux_coefficient = _aux_coefficient(causal, policy, losses)
        self._z, self._bias_rate = losses.z_loss, losses.bias_rate
        if losses.z_loss and not self._routers:
            raise ValueError(f"model.router_z_loss: {balancing_problem(causal, self._routers)}: set it to 0")
        self._biases = router_biases(policy.model, self._routers) if losses.bias_rate else {}
        if losses.bias_rate:
            _check_biases(causal, policy, reference)
        self._watches = bool(self._routers) and (not compiled or losses != NO_LOSSES)
        self.warnings = list(_describe(causal, losses))
        self._counts: RouterCounts | None = None
        self._is_settled = False
        self._scale = 1.0
        self.load: Tensor | None = None  # [layers, experts], since the last optimizer step
        self._idle: Tensor | None = None  # [layers, experts]: tokens that would have come since one last came

    @property
    def has_loss(self) -> bool:
        return bool(self.aux_coefficient or self._z)

    @contextlib.contextmanager
    def counting_pass(self) -> Iterator[None]:
        """For a pass without gradient over the whole batch, where f must be known before the first backward."""
        self._begin()
        with self._routers.counting(self._counts):
            yield
        self._settle()

    @contextlib.contextmanager
    def training_passes(self, scale: float) -> Iterator[None]:
        """They count, unless a pass before did. `scale`: of all gradients."""
        self._scale = scale
        was_counted = self._is_settled
        if was_counted:
            self._set_slopes()
        else:
            self._begin()
        counts = None if was_counted else self._counts
        with self._routers.counting(counts), self._routers.attached(when=self.has_loss):
            yield
        if not self._is_settled:
            self._settle()

    def before_backward(self) -> None:
        """Between the forward and the backward pass of a batch's only micro-batch: all is counted by then."""
        if self.has_loss and not self._is_settled:
            self._settle()

    def take(self) -> Tensor:
        """The counts of this batch, over all ranks, flat. Ends the batch."""
        self._is_settled = False
        counts, self._counts = self._counts, None
        if counts is None:
            return torch.zeros(0, dtype=torch.float64, device=self._group.device)
        self.load = counts.chosen.clone() if self.load is None else self.load + counts.chosen
        return counts.flatten()

    def forget(self) -> None:
        """A batch that failed on its way: nothing of it counts."""
        self._is_settled, self._counts = False, None

    def metrics(self, numbers: Sequence[float]) -> Metrics:
        """From what `take` returned, on the host. Once for each batch, in order."""
        if not numbers:
            return {}
        flat = torch.tensor(numbers, dtype=torch.float64)
        counts = RouterCounts.unpack(flat, len(self._routers.names), self._routers.num_experts)
        shares = counts.chosen / counts.chosen.sum(1, keepdim=True).clamp(min=1.0)
        entropy = -(shares * shares.clamp(min=1e-30).log()).sum(1).mean() / math.log(max(self._routers.num_experts, 2))
        found = {
            "expert_share_max": float(shares.max()),
            "expert_share_min": float(shares.min()),
            "expert_entropy": float(entropy),
            "router_aux_loss": self._aux_loss(counts),
        }
        if self._z:
            found["router_z_loss"] = float(counts.log_sums.sum() / counts.tokens.sum())
        return found | self._find_dead(counts)

    def end_step(self, norm: Tensor) -> None:
        """After an optimizer step: biases move against the load since the last one, unless that step was skipped."""
        load, self.load = self.load, None
        if load is None or not self._biases:
            return
        applied = torch.isfinite(norm)
        for place, bias in self._biases.items():
            direction = torch.sign(load[place].mean() - load[place])[: len(bias)] * applied
            bias.add_(self._bias_rate * direction.to(bias.dtype))

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the parameters, by the model's own names."""
        return {f"{self._routers.names[place]}.{BIAS}": bias for place, bias in self._biases.items()}

    def _begin(self) -> None:
        self._counts = self._routers.empty_counts(self._group.device) if self._watches else None
        self._is_settled = False

    def _settle(self) -> None:
        if self._counts is not None:
            mine = self._counts.flatten() * (self._group.place("tensor") == 0)
            shape = (len(self._routers.names), self._routers.num_experts)
            self._counts = RouterCounts.unpack(self._group.sum(mine), *shape)
            self._set_slopes()
        self._is_settled = True

    def _set_slopes(self) -> None:
        """The derivatives of the losses by a token's probabilities, and by its squared log-sum-exp."""
        assert self._counts is not None
        rows = self._counts.tokens.sum()
        factor = self.aux_coefficient * self._routers.num_experts * self._scale / rows
        self._routers.slopes = factor * self._counts.likeliest.sum(0) / rows
        self._routers.log_sum_slope = self._z * self._scale / rows

    def _aux_loss(self, counts: RouterCounts) -> float:
        """As the model defines it, without its coefficient: 1 x top_k where all experts are alike."""
        rows = counts.tokens.sum()
        product = (counts.likeliest.sum(0) / rows) * (counts.probabilities.sum(0) / rows)
        return float(product.sum() * self._routers.num_experts)

    def _find_dead(self, counts: RouterCounts) -> Metrics:
        expected = counts.chosen.sum(1, keepdim=True) / self._routers.num_experts
        idle = expected.expand_as(counts.chosen) if self._idle is None else self._idle + expected
        self._idle = torch.where(counts.chosen > 0, 0.0, idle)
        dead = (self._idle >= DEAD_AFTER_TOKENS).nonzero().tolist()
        layers = self._routers.layers
        return {f"{DEAD}{layers[place]}/{expert}": float(self._idle[place, expert]) for place, expert in dead}


def _aux_coefficient(causal: Any, policy: Policy, losses: RouterLosses) -> float:
    if losses.aux_loss == "off" or losses.aux_loss == 0:
        return 0.0
    problem = balancing_problem(causal, policy.routers)
    if problem:
        raise ValueError(f"model.router_aux_loss {losses.aux_loss}: {problem}: set it to off")
    if losses.aux_loss != "auto":
        return float(losses.aux_loss)
    own = own_coefficient(causal.config.get_text_config())
    if not own:
        raise ValueError(
            f"model.router_aux_loss auto: the configuration of {type(causal).__name__} has no router_aux_loss_coef: "
            "give a number"
        )
    return own


def _check_biases(causal: object, policy: Policy, reference: str) -> None:
    name = type(causal).__name__
    if reference == "copy":
        raise ValueError(
            "model.router_bias_rate would change the reference too, a copy of the parameters: set it to 0, or "
            "algorithm.reference to precomputed"
        )
    if hasattr(policy.model, "peft_config"):
        raise ValueError(
            "model.router_bias_rate changes the base model, which an adapter does not hold: set it to 0, or remove lora"
        )
    if not policy.routers.have_bias:
        raise ValueError(f"model.router_bias_rate: routers of {name} have no {BIAS}: set it to 0")


def _describe(causal: Any, losses: RouterLosses) -> Iterator[str]:
    config = causal.config.get_text_config()
    own = own_coefficient(config)
    if losses.aux_loss == "off" and getattr(config, "output_router_logits", False) and own:
        yield (
            f"the configuration of {type(causal).__name__} asks for its load-balancing loss (output_router_logits, "
            f"router_aux_loss_coef {own:g}), which is not computed: set model.router_aux_loss to auto"
        )
