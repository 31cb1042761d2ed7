"""Whether the decoder's passes compute what the model itself does: a few tokens, both ways.

Support is measured, not known by name: a family that keeps something unforeseen from token to token shows here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lockstep.inference.cuda_graphs import first_line
from lockstep.inference.kv_cache import AttentionPass, LayerShape, Scores, UnsupportedModelError
from lockstep.inference.model_call import ModelCall
from lockstep.model.attention import PackedLayout, packed_attention
from lockstep.model.policy import CausalLM, causal_lm

# Of the differences that a model's own rounding makes, so many are allowed; never more than the second, which is less
# than a token more or less of context makes.
_OWN_ROUNDINGS, _MOST_ROUNDING = 8, 2e-3


class WrongLogitsError(UnsupportedModelError):
    """The model can be called, and computes something else than its own forward pass."""


class ShapePass:
    """One sequence without a cache: records the shapes that the layers would cache."""

    def __init__(self, length: int) -> None:
        self.shapes: dict[nn.Module, LayerShape] = {}
        self._layout = PackedLayout((length,))

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
        scores: Scores,
    ) -> Tensor:
        if module in self.shapes:
            raise UnsupportedModelError(f"{type(module).__name__} is used twice for one token")
        kinds = (scores.are_plain, scores.sinks is not None)
        self.shapes[module] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], key.dtype, *kinds)
        changed: dict[str, Any] = {"softcap": scores.softcap, "s_aux": scores.sinks}
        return packed_attention(
            module,
            query,
            key,
            value,
            None,
            scaling=scaling,
            sliding_window=window,
            packed_layout=self._layout,
            **changed,
        )[0]


class MutePass:
    """Attention that gives nothing: what still goes from one token to the next is no key and no value."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
        scores: Scores,
    ) -> Tensor:
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


class ModelCheck:
    """The model's own logits for two short texts, with its own attention. `announce` is called before every pass.

    `exact`: the same in float32, of a model in a narrow precision. What is allowed there is what the model's own
    rounding explains; without it, as far as it shows.
    """

    def __init__(self, model: CausalLM, announce: Callable[[], object], exact: ModelCheck | None = None) -> None:
        self._model, self._causal, self._announce = model, causal_lm(model), announce
        size = self._causal.config.get_text_config().vocab_size
        texts = [[number % size for number in numbers] for numbers in (range(1, 7), (9, 4, 11, 6, 2, 8))]
        self.own = list(self._own_logits(texts))
        self.texts = [texts[0], texts[1][:4]]  # of two lengths; what follows is not seen
        self.is_wide = is_wide(self.own[0])
        self._rounding = {torch.float64: 1e-6, torch.float32: 1e-4}.get(self.own[0].dtype, 0.1)
        if self.is_wide:
            self._rounding = max(self._rounding, min(_OWN_ROUNDINGS * self._own_rounding(texts), _MOST_ROUNDING))
        self._is_measured = exact is not None
        if exact is not None:
            rounded = max(logits_distance(a, b) for a, b in zip(self.own, exact.own, strict=True))
            self._rounding, self.own = max(0.01, 4 * rounded), exact.own

    @classmethod
    def widened(cls, model: CausalLM, announce: Callable[[], object]) -> ModelCheck | None:
        """In float32, of a model in a narrow precision. None: parts of it cannot be computed so."""
        try:
            with FloatsStayWide():
                check = cls(model, announce)
        except torch.OutOfMemoryError:
            return None
        except UnsupportedModelError:
            return None
        return check if check.is_wide else None

    @property
    def name(self) -> str:
        return type(self._causal).__name__

    @contextlib.contextmanager
    def refusing(self, why: str) -> Iterator[None]:
        """Around code of the model: whatever it raises is a reason."""
        try:
            yield
        except (torch.OutOfMemoryError, UnsupportedModelError):
            raise
        except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
            raise UnsupportedModelError(f"{self.name} {why}: {first_line(error)}") from error

    def _own_logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """[texts, tokens, V]."""
        training = self._model.training
        self._model.eval()
        self._announce()
        try:
            with torch.inference_mode(), self.refusing("wants more"):
                return self._causal(input_ids=self._rows(texts), use_cache=False).logits
        finally:
            self._model.train(training)

    def _own_rounding(self, texts: Sequence[Sequence[int]]) -> float:
        """How far the model is off itself when it computes a text alone: some models amplify the last digit a lot."""
        alone = (self._own_logits([text])[0] for text in texts)
        return max(logits_distance(logits, own) for logits, own in zip(alone, self.own, strict=True))

    def find_shapes(self, call: ModelCall) -> dict[nn.Module, LayerShape]:
        """Of what attention of ours keeps; what a cache keeps is noted there.

        One pass over all tokens of a text, which must give the model's own logits.
        """
        text, whole = self.texts[0], ShapePass(len(self.texts[0]))
        together = self._logits(call, text, whole)
        compare_logits(together, self.own[0], self._rounding)
        if not self.is_wide and not self._is_measured:
            # How far this model's rounding goes in a narrow precision; a token more or less of context goes further.
            self._rounding = min(max(0.03, 4 * logits_distance(together, self.own[0])), 0.1)
        return whole.shapes

    def refuse_other_state(self, call: ModelCall) -> None:
        """Without attention, no token may depend on another one. In any precision: both passes round in one way."""
        text = self.texts[0]
        other = [*reversed(text[:-1]), text[-1]]
        first, second = (self._logits(call, tokens, MutePass())[-1] for tokens in (text, other))
        if not logits_distance(first, second) < (1e-5 if is_wide(first) else 0.01):
            raise UnsupportedModelError(f"{self.name} carries more than keys and values from one token to the next")

    def compare(self, logits: Tensor, positions: Sequence[int]) -> None:
        """[texts, V] after the tokens at these positions."""
        for row, own, position in zip(logits, self.own, positions, strict=True):
            compare_logits(row, own[position], self._rounding)

    def _logits(self, call: ModelCall, text: Sequence[int], attention: AttentionPass) -> Tensor:
        """[tokens, V]."""
        self._announce()
        with self.refusing("cannot be called for it"):
            return call.logits(self._rows([text]), attention)[0]

    def _rows(self, texts: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(texts, device=self._causal.device)


class FloatsStayWide(TorchFunctionMode):
    """A model in bf16 or fp16 computes in float32: weights are widened where they are used, and casts back do nothing.

    One weight at a time, so that a large model needs little more memory.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: dict[str, Any] | None = None
    ) -> object:
        options = options or {}
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):  # of attributes
            return function(*arguments, **options)
        if name in ("bfloat16", "half"):
            function = Tensor.float
        target = arguments[0] if arguments else None
        changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in options
        if changes and isinstance(target, Tensor) and target.dtype in _NARROW:
            raise TypeError(f"{name} changes a tensor of {target.dtype} in place")
        return function(*tree_map(_widen, arguments), **tree_map(_widen, options))


_NARROW = (torch.bfloat16, torch.float16)


def _widen(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.to(torch.float32) if value.dtype in _NARROW else value
    return torch.float32 if value in _NARROW else value


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
        raise WrongLogitsError(
            f"its logits token by token are {distance:.2%} off its own: it keeps more than its cache shows"
        )
