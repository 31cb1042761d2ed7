"""Which experts tokens choose where nothing is computed: all equally often, or some more often, as it is said.

What the ranks of an expert axis tell each other about it is known here too: every rank knows how many tokens the others
have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.config import ConfigError
from lockstep.config.parallel import Degrees
from lockstep.model.experts import expert_parameters, is_divided
from lockstep.model.policy import Policy
from lockstep.model.routing import find_routers
from lockstep.parallel.collectives import Members
from lockstep.parallel.expected_traffic import ExpertTrips, assumed_counts, count_trips, favouring_tokens
from lockstep.parallel.group import ProcessGroup


def assumed_choices(num_tokens: int, top_k: int, num_experts: int, imbalance: float = 1.0) -> Tensor:
    """[T, K]: the tokens that favour the first experts come first, all others take turns. Counted: `assumed_counts`."""
    favouring = favouring_tokens(num_tokens, top_k, num_experts, imbalance)
    in_turn = torch.arange((num_tokens - favouring) * top_k).view(-1, top_k) % num_experts
    return torch.cat([torch.arange(top_k).expand(favouring, top_k), in_turn])


def assume_choices(model: nn.Module, imbalance: float = 1.0) -> None:
    """From here on routers choose so; weights and probabilities stay their own. In place."""
    for name, router, _ in find_routers(model):
        top_k, num_experts = int(router.top_k), int(router.num_experts)
        if imbalance * top_k > num_experts:
            raise ConfigError(
                f"a token chooses {top_k} of the {num_experts} experts of {name}, so none gets more than "
                f"{num_experts / top_k:g} times its share of tokens, and not {imbalance:g} times"
            )
        router.forward = _choosing(router.forward, top_k, num_experts, imbalance)


def _choosing(own: Callable[..., Any], top_k: int, num_experts: int, imbalance: float) -> Callable[..., Any]:
    def forward(*arguments: object, **options: object) -> Any:
        with _AssumedChoice(top_k, num_experts, imbalance):
            return own(*arguments, **options)

    return forward


class _AssumedChoice(TorchFunctionMode):
    """Of the scores of each token's experts, [T, experts], others are the largest."""

    def __init__(self, top_k: int, num_experts: int, imbalance: float) -> None:
        super().__init__()
        self._top_k, self._num_experts, self._imbalance = top_k, num_experts, imbalance

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or result.indices.shape[1:] != (self._top_k,):
            return result
        scores = args[0]
        if scores.shape[1:] != (self._num_experts,):  # of groups of experts
            return result
        indices = assumed_choices(len(scores), self._top_k, self._num_experts, self._imbalance)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


class AssumedTrades:
    """What the ranks that share experts send each other under the same assumption."""

    def __init__(self, policy: Policy, group: ProcessGroup, imbalance: float) -> None:
        self._routers, self._group, self._imbalance = policy.routers, group, imbalance
        divided = [module for module in policy.modules() if expert_parameters(module) and is_divided(module)]
        self._num_layers = len(divided)
        self.weight_bytes: int | None = None
        for experts in divided:
            experts.register_forward_pre_hook(self._read_weights)
        self._passes: list[Tensor | None] = []
        self._num_tokens: list[Sequence[int]] = []

    def _read_weights(self, _experts: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Routers give them in whatever dtype they like."""
        self.weight_bytes = arguments[2].itemsize

    def prepare(self, passes: Sequence[Tensor | None], num_tokens: Sequence[Sequence[int]]) -> None:
        """Of each micro-batch: what routers read of its tokens, and how many each rank that shares the experts has."""
        self._passes, self._num_tokens = list(passes), list(num_tokens)

    def answer(self, members: Members, arriving: Tensor) -> None:
        """`arriving` [ranks, experts of this rank]: how many rows come from each rank for each expert."""
        num_ranks, count = arriving.shape
        tensor = self._group.degrees.tensor
        first = (self._place * tensor + self._group.place("tensor")) * count
        (number,) = (i for i, read in enumerate(self._passes) if read is self._routers.tokens)
        for row, num_tokens in enumerate(self._num_tokens[number]):
            chosen = assumed_counts(num_tokens, self._routers.top_k, num_ranks * tensor * count, self._imbalance)
            arriving[row] = torch.tensor(chosen[first : first + count])

    def count(self) -> ExpertTrips | None:
        """What the formula needs to know of the passes that were prepared."""
        degrees = self._group.degrees
        if degrees.expert == 1:
            return None
        experts, column = (self._routers.num_experts, self._routers.top_k), self._group.place("tensor")
        return count_trips(self._num_tokens, self._place, column, degrees, experts, self._num_layers, self._imbalance)

    @property
    def _place(self) -> int:
        """Among the ranks that share the experts."""
        return sharing_experts(self._group.data_rank, self._group.degrees).index(self._group.data_rank)


def sharing_experts(data_rank: int, degrees: Degrees) -> range:
    """The data ranks that divide the experts of this one among themselves: neighbours."""
    first = data_rank - data_rank % degrees.expert
    return range(first, first + degrees.expert)
