"""Whether the decoder's passes compute what the model itself does: a few tokens, both ways.

Support is measured, not known by name: a family that keeps something unforeseen from token to token shows here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lockstep.inference.cuda_graphs import first_line
from lockstep.inference.kv_cache import AttentionPass, LayerShape, UnsupportedModelError
from lockstep.model.attention import PackedLayout, packed_attention
from lockstep.model.policy import CausalLM, causal_lm


class ShapePass:
    """One sequence without a cache: records the shapes that the layers would cache."""

    def __init__(self, length: int) -> None:
        self.shapes: dict[nn.Module, LayerShape] = {}
        self._layout = PackedLayout((length,))

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        if module in self.shapes:
            raise UnsupportedModelError(f"{type(module).__name__} is used twice for one token")
        self.shapes[module] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], key.dtype)
        return packed_attention(
            module, query, key, value, None, scaling=scaling, sliding_window=window, packed_layout=self._layout
        )[0]


class MutePass:
    """Attention that gives nothing: what still goes from one token to the next is no key and no value."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


class ModelCheck:
    """The model's own logits for a few tokens, with its own attention. `announce` is called before every pass."""

    def __init__(self, model: CausalLM, announce: Callable[[], object]) -> None:
        self._model, self._causal, self._announce = model, causal_lm(model), announce
        self._device = self._causal.device
        size = self._causal.config.get_text_config().vocab_size
        self.tokens = [number % size for number in range(1, 7)]
        self.own = self._own_logits()
        self._rounding = 1e-3 if is_wide(self.own) else 0.1

    @property
    def name(self) -> str:
        return type(self._causal).__name__

    def _own_logits(self) -> Tensor:
        """[tokens, V]."""
        training = self._model.training
        self._model.eval()
        self._announce()
        try:
            with torch.inference_mode():
                tokens = torch.tensor([self.tokens], device=self._device)
                return self._causal(input_ids=tokens, use_cache=False).logits[0]
        except (TypeError, AttributeError, ValueError) as error:
            raise UnsupportedModelError(f"{self.name} wants more: {first_line(error)}") from error
        finally:
            self._model.train(training)

    def find_shapes(self) -> dict[nn.Module, LayerShape]:
        """Of the cache; with attention of ours in one pass over all tokens, which must give the model's own logits."""
        whole = ShapePass(len(self.tokens))
        together = self._call(self.tokens, whole)
        compare_logits(together, self.own, self._rounding)
        if not is_wide(self.own):
            # How far this model's rounding goes in a narrow precision; a token more or less of context goes further.
            self._rounding = min(max(0.03, 4 * logits_distance(together, self.own)), 0.1)
        return whole.shapes

    def refuse_other_state(self) -> None:
        """Without attention, no token may depend on another one. In any precision: both passes round in one way."""
        tokens = self.tokens
        first, second = (self._call(t, MutePass())[-1] for t in (tokens, [*reversed(tokens[:-1]), tokens[-1]]))
        if not logits_distance(first, second) < (1e-5 if is_wide(first) else 0.01):
            raise UnsupportedModelError(f"{self.name} carries more than keys and values from one token to the next")

    def compare(self, logits: Tensor, position: int) -> None:
        """[V] after the token at this position."""
        compare_logits(logits, self.own[position], self._rounding)

    def _call(self, tokens: Sequence[int], attention: AttentionPass) -> Tensor:
        """[tokens, V]."""
        self._announce()
        positions = torch.arange(len(tokens), device=self._device)[None]
        input_ids = torch.tensor([tokens], device=self._device)
        try:
            return self._causal(
                input_ids=input_ids, position_ids=positions, use_cache=False, cached_pass=attention
            ).logits[0]
        except (TypeError, AttributeError, ValueError) as error:
            raise UnsupportedModelError(f"{self.name} cannot be called for it: {first_line(error)}") from error


def is_wide(logits: Tensor) -> bool:
    return logits.dtype in (torch.float32, torch.float64)


def logits_distance(logits: Tensor, own: Tensor) -> float:
    """Relative; the same number added to all logits does not count."""
    logits, own = (values.double() - values.double().mean(-1, keepdim=True) for values in (logits, own))
    return float((logits - own).norm() / own.norm().clamp(min=1e-30))


def compare_logits(logits: Tensor, own: Tensor, rounding: float) -> None:
    if not own.isfinite().all():
        return  # sampling reports it
    distance = logits_distance(logits, own)
    if not distance < rounding:  # nan is not below either
        raise UnsupportedModelError(
            f"its logits token by token are {distance:.1%} off its own: it keeps more than keys and values"
        )
