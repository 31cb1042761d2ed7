"""How a model is called in a pass: with whose attention, and with which cache."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.inference import kv_cache
from lockstep.inference.kv_cache import AttentionPass
from lockstep.inference.slot_cache import SlotCache
from lockstep.model.attention import AttentionSwitch
from lockstep.model.policy import CausalLM, causal_lm, headless


class ModelCall:
    """`attends`: attention is ours, and keeps keys and values itself. `cache`: for all else that layers keep.

    `whole`: the model's own logits take the place of hidden states, where something lies between layers and head.
    """

    def __init__(self, model: CausalLM, *, attends: bool, cache: SlotCache | None = None, whole: bool = False) -> None:
        self.model, self.causal = model, causal_lm(model)
        self.attends, self.cache, self.whole = attends, cache, whole
        self._attention = AttentionSwitch(self.causal)
        self.body: nn.Module = self.causal if whole else headless(self.causal)
        self._head_dtype: torch.dtype | None = getattr(
            getattr(self.causal.get_output_embeddings(), "weight", None), "dtype", None
        )
        self._time_steps = _LimitedTimeSteps(self.body)
        taken = inspect.signature(self.body.forward).parameters
        self._takes_positions = "position_ids" in taken or cache is None
        self._cache_name = "past_key_values" if "past_key_values" in taken else "cache_params"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The model evaluates, with the attention of its passes; afterwards it is as it was."""
        own, training = self.causal.config._attn_implementation, self.model.training
        if training:
            self.model.eval()
        if self.attends:
            self._attention.set(kv_cache.CACHED)
        try:
            yield
        finally:
            if self.attends:
                self._attention.set(own)
            if training:
                self.model.train()

    def logits(self, tokens: Tensor, attention: AttentionPass) -> Tensor:
        """[rows, tokens, V] from the model itself."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.causal(input_ids=tokens, **self._arguments(positions, attention, None)).logits

    def hidden(self, tokens: Tensor, positions: Tensor, attention: AttentionPass, mask: Tensor | None = None) -> Tensor:
        """[rows, tokens, hidden]. `mask` [rows, tokens so far]: which a row of the cache has."""
        with self._time_steps.applied():
            found = self.body(input_ids=tokens, **self._arguments(positions, attention, mask))
        # Some models hold what goes from layer to layer in float32.
        return found.logits if self.whole else found.last_hidden_state.to(self._head_dtype)

    def _arguments(self, positions: Tensor, attention: AttentionPass, mask: Tensor | None) -> dict[str, object]:
        found: dict[str, Any] = {"use_cache": self.cache is not None}
        if self._takes_positions:
            found["position_ids"] = positions
        if self.attends:
            found["cached_pass"] = attention
        elif mask is not None and self.cache is not None and self.cache.bytes_per_token:
            found["attention_mask"] = mask
        if self.cache is not None:
            found[self._cache_name] = self.cache
        return found


def possible_calls(model: CausalLM, *, attends: bool) -> Iterator[ModelCall]:
    """The fastest first.

    With attention of ours, which takes every row at its own length; then beside a cache for what other layers keep;
    then with the model's own attention, as if rows were padded on the left; and then with its own logits.
    """
    if attends:
        yield ModelCall(model, attends=True)
        yield ModelCall(model, attends=True, cache=SlotCache(keeps_keys=False))
    yield ModelCall(model, attends=False, cache=SlotCache(keeps_keys=True))
    yield ModelCall(model, attends=False, cache=SlotCache(keeps_keys=True), whole=True)


_STATE_UPDATE = "mamba2_selective_state_update"  # in modules of transformers


class _LimitedTimeSteps:
    """Mamba 2's time steps have limits. transformers 5.22 keeps them in a pass over many tokens, but not in its update
    of a state by one token: sampling would not compute what is trained. Goes once that update takes a `dt_limit`."""

    def __init__(self, body: nn.Module) -> None:
        mixers: Iterator[Any] = (part for part in body.modules() if hasattr(part, "time_step_limit"))
        limits = {type(mixer).__module__: mixer.time_step_limit for mixer in mixers}
        self._updates = {
            sys.modules[name]: functools.partial(_update_state, getattr(sys.modules[name], _STATE_UPDATE), found)
            for name, found in limits.items()
            if tuple(found) != (0.0, torch.inf) and hasattr(sys.modules[name], _STATE_UPDATE)
        }

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        try:
            for module, limited in self._updates.items():
                setattr(module, _STATE_UPDATE, limited)
            yield
        finally:
            for module, limited in self._updates.items():
                setattr(module, _STATE_UPDATE, limited.args[0])


def _update_state(
    update: Callable[..., Tensor],
    limits: tuple[float, float],
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    *args: object,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **kwargs: object,
) -> Tensor:
    """In transformers' order: bias, softplus, limits."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(min=limits[0], max=limits[1])
    return update(state, hidden_states, dt, *args, **kwargs)
