"""Which experts each token chose, as bytes that travel with the tokens, and the same choice made again elsewhere.

A row has the experts of one token, router after router in the order of the model: one byte each, or two where there are
too many experts for that. A row of ones means that the router is to choose by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.model.policy import causal_lm
from lockstep.model.routing import Routers, chosen_experts, find_routers

OWN_CHOICE = b"\xff"


class RoutingRows:
    """How the choices of a model's routers are written."""

    def __init__(self, model: nn.Module) -> None:
        found = list(find_routers(model))
        name, sizes = type(causal_lm(model)).__name__, {int(router.top_k) for _, router, _ in found}
        if len(sizes) != 1:
            why = "has no routers that tell which experts they choose" if not sizes else "chooses differently by layer"
            raise ValueError(f"{name} {why}: set algorithm.router_replay to false")
        (self.top_k,) = sizes
        self.num_routers, self.num_experts = len(found), max(int(router.num_experts) for _, router, _ in found)
        self.dtype = torch.uint8 if self.num_experts < 255 else torch.int16

    @property
    def num_bytes(self) -> int:
        return self.num_routers * self.top_k * self.dtype.itemsize

    def read(self, rows: Tensor) -> Tensor:
        """[T, routers, K], -1 for a router's own choice, of bytes [T, num_bytes]."""
        numbers = rows.view(self.dtype).unflatten(1, (self.num_routers, self.top_k))
        return numbers.to(torch.int16).masked_fill(numbers == 255, -1) if self.dtype == torch.uint8 else numbers


class RoutingRecorder:
    """The choices of all routers of a model while it is `recording`, pass by pass."""

    def __init__(self, model: nn.Module) -> None:
        self.rows = RoutingRows(model)
        self._is_recording = False
        self._chosen: dict[int, Tensor] = {}
        for place, (_, router, logits_at) in enumerate(find_routers(model)):
            router.register_forward_hook(self._hook(place, logits_at))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self._chosen.clear()
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def take(self) -> Tensor:
        """[T, bytes] of the last pass."""
        chosen = [self._chosen[place] for place in range(self.rows.num_routers)]
        self._chosen.clear()
        return torch.cat(chosen, dim=1).view(torch.uint8)

    def _hook(self, place: int, logits_at: int) -> Callable[..., None]:
        def record(_module: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> None:
            if self._is_recording:
                chosen = chosen_experts(output, output[logits_at].flatten(0, -2), self.rows.top_k)
                self._chosen[place] = chosen.to(self.rows.dtype)

        return record


def replay_choices(model: nn.Module, routers: Routers) -> RoutingRows:
    """From here on routers choose what `routers.replayed` says. Weights and probabilities stay their own, with their
    gradients. Not compiled: what is given differs from pass to pass."""
    for place, (name, router, _) in enumerate(find_routers(model)):
        router.forward = torch.compiler.disable(_replaying(name, router, routers, place))
    return RoutingRows(model)


def _replaying(name: str, module: Any, routers: Routers, place: int) -> Callable[..., Any]:
    own, num_experts = module.forward, int(module.num_experts)

    def forward(*arguments: object, **options: object) -> Any:
        if routers.replayed is None:
            return own(*arguments, **options)
        with _GivenChoice(routers.replayed[:, place], num_experts) as choice:
            output = own(*arguments, **options)
        if not choice.was_made:
            raise ValueError(
                f"{name} ({type(module).__name__}) does not choose the experts of each token with torch.topk, so its "
                "choice cannot be given: set algorithm.router_replay to false"
            )
        return output

    return forward


class _GivenChoice(TorchFunctionMode):
    """Of `num_experts` scores of each token the given ones are the largest: `chosen` [T, K], -1 where none is given."""

    def __init__(self, chosen: Tensor, num_experts: int) -> None:
        super().__init__()
        self._chosen, self._shape = chosen.to(torch.int64), (len(chosen), num_experts)
        self.was_made = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or result.indices.shape != self._chosen.shape:
            return result
        scores = args[0]
        if scores.shape != self._shape:  # of groups of experts
            return result
        self.was_made = True
        indices = torch.where(self._chosen < 0, result.indices, self._chosen)
        return torch.return_types.topk((scores.gather(-1, indices), indices))
