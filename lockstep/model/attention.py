"""Attention over packed documents: one row of tokens, many documents, none attends to another.

Several completions may follow one copy of a prompt. Registered with transformers under one name, for every model that
takes its attention from that interface.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKED = "lockstep_packed"
_FASTEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
# torch 2.11 detects grouped heads itself; later versions have an option for it.
_GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class AttentionSwitch:
    """transformers' `set_attn_implementation`, which looks at all modules each time: with adapters those are thousands,
    and every call of a sampler switches four times. What it did for a name is remembered."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._configs: list[Any] = []  # of the model and all models inside of it
        self._known: dict[str, list[Any]] = {}

    def set(self, implementation: str) -> None:
        if not self._configs or self._configs[0] is not self._model.config:
            self._configs, self._known = _all_configs(self._model), {}
        if (known := self._known.get(implementation)) is not None:
            for config, found in zip(self._configs, known, strict=True):
                config._attn_implementation_internal = found
            return
        self._model.set_attn_implementation(implementation)
        self._known[implementation] = [config._attn_implementation_internal for config in self._configs]


def _all_configs(model: PreTrainedModel) -> list[Any]:
    """Each once, the model's own first."""
    models: list[Any] = [module for module in model.modules() if hasattr(module, "set_attn_implementation")]
    waiting = [part.config for part in models]
    found: dict[int, Any] = {}
    while waiting:
        config = waiting.pop(0)
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return list(found.values())


@dataclass(frozen=True)
class PackedLayout:
    """Segments of a packed row. `shared`: start and length of the prompt that a segment continues, in another one.

    `blocks`: tokens [start, stop) of the row that all attend to each other, as those of an image in some models.
    """

    lengths: tuple[int, ...]
    shared: tuple[tuple[int, int], ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """How many tokens each segment attends to."""
        if not self.shared:
            return self.lengths
        return tuple(length + prompt for length, (_, prompt) in zip(self.lengths, self.shared, strict=True))

    def visible_keys(self) -> np.ndarray:
        """int32 [2, T]: token t attends to those of its segment from `first` to itself, and nobody from `end` on
        attends to it. [4, T] where prompts are shared: also to [prompt, prompt_end)."""
        lengths = np.array(self.lengths)
        ends = np.cumsum(lengths)
        if not self.shared:
            return np.repeat([ends - lengths, ends], lengths, axis=1).astype(np.int32)
        prompts, sizes = np.array(self.shared).T
        found = np.repeat([ends - lengths, ends, prompts, prompts + sizes], lengths, axis=1).astype(np.int32)
        for prompt, size, end in zip(prompts, sizes, ends, strict=True):
            last = found[1, prompt : prompt + size]
            np.maximum(last, end, out=last)
        return found


class SplitTokens(Protocol):
    """Tokens split over ranks: `gather` gives all tokens of some heads, `scatter` some tokens of all heads."""

    size: int
    place: int

    def gather(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def scatter(self, attended: Tensor) -> Tensor: ...


def register() -> None:
    """Idempotent."""
    # No mask is registered beside it, so that transformers builds none: document boundaries arrive as lengths. It would
    # first look for documents in the positions, for which the host waits until a GPU has done all that came before.
    AttentionInterface.register(PACKED, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, head_dim]
    key: Tensor,  # [1, kv_heads, tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_layout: PackedLayout | None = None,
    packed_boundaries: Tensor | None = None,
    packed_max_length: int | None = None,
    packed_equal_length: int | None = None,
    packed_visible: Tensor | None = None,
    packed_keys: Tensor | None = None,
    packed_key_boundaries: Tensor | None = None,
    packed_split: SplitTokens | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """transformers' attention signature; returns [1, tokens, heads, head_dim].

    `softcap`: scores are bounded by it; `s_aux`: of each head, the score of a sink that takes a part of the attention.
    `packed_visible`: as of `PackedLayout.visible_keys`. `packed_keys`: where prompts are shared, the tokens that each
    segment attends to, one segment after the other.
    `packed_split`: the tokens here are this rank's part of those in the layout.
    """
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{type(module).__name__} adds a bias to its scores, which packed attention does not have")
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} builds its own attention mask, which packed attention cannot honour")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} is not causal")
    if packed_split is not None:
        query, key, value = packed_split.gather(query, key, value)
        s_aux = None if s_aux is None else s_aux.unflatten(0, (packed_split.size, -1))[packed_split.place]
    if packed_layout is None and (softcap is not None or s_aux is not None):
        raise ValueError(f"{type(module).__name__} bounds its scores or has sinks, which no fused kernel computes")
    if packed_equal_length is not None and sliding_window is None:
        attended = _equal_length(query, key, value, scaling, dropout, packed_equal_length)
    elif packed_visible is not None and sliding_window is None:
        _refuse_dropout(dropout)
        attended = _in_tiles(query, key, value, scaling, packed_visible)
    elif packed_boundaries is not None and packed_max_length is not None:
        _refuse_dropout(dropout)
        keys = packed_boundaries if packed_key_boundaries is None else packed_key_boundaries
        if packed_keys is not None:
            key, value = key.index_select(2, packed_keys), value.index_select(2, packed_keys)
        attended = _variable_length(
            query, key, value, scaling, sliding_window, packed_boundaries, keys, packed_max_length
        )
    elif packed_layout is not None:
        attend = _attend if softcap is None and s_aux is None else functools.partial(_attend_plainly, softcap, s_aux)
        attended = segment_by_segment(query, key, value, scaling, dropout, sliding_window, packed_layout, attend)
    else:
        raise ValueError(f"{type(module).__name__} did not pass the document lengths to its attention")
    return attended if packed_split is None else packed_split.scatter(attended), None


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise ValueError("attention dropout is not available in variable-length attention: set it to 0")


class _Attend(Protocol):
    """`mask` [queries, keys], or None: causal."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, dropout: float
    ) -> Tensor: ...


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=_is_grouped(q, k),
    )


def _attend_plainly(
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """With scores in memory, for what no kernel computes."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = _causal_mask(q.shape[2], 0, None, q.device)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(-1, -1, q.shape[2], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return F.dropout(weights[..., : k.shape[2]], dropout) @ v


def segment_by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    layout: PackedLayout,
    attend: _Attend = _attend,
) -> Tensor:
    outputs, start = [], 0
    # split, not slicing: its backward is one concatenation instead of one zero-filled tensor for each document.
    keys, values = (_with_prompts(t, layout) for t in (key, value))
    for q, k, v in zip(query.split(layout.lengths, 2), keys, values, strict=True):
        length, before = q.shape[2], k.shape[2] - q.shape[2]
        mask = None
        blocks = tuple((a - start, b - start) for a, b in layout.blocks if start <= a < start + length)
        start += length
        if before or blocks or (sliding_window is not None and length > sliding_window):
            mask = _causal_mask(length, before, sliding_window, q.device, blocks)
        outputs.append(attend(q, k, v, mask, scaling, dropout).transpose(1, 2))
    return torch.cat(outputs, dim=1)


def _with_prompts(tensor: Tensor, layout: PackedLayout) -> list[Tensor]:
    """[1, heads, tokens, dim] -> for each segment the tokens that it attends to."""
    sizes, chosen = _pieces(layout)
    pieces = tensor.split(sizes, 2)
    return [pieces[c[0]] if len(c) == 1 else torch.cat([pieces[i] for i in c], dim=2) for c in chosen]


@functools.lru_cache(maxsize=8)  # every layer of a model calls it
def _pieces(layout: PackedLayout) -> tuple[list[int], list[tuple[int, ...]]]:
    """(sizes of the pieces to cut a row into, the pieces that each segment attends to).

    Cut between segments, and where a shared prompt begins and ends.
    """
    starts = list(itertools.accumulate(layout.lengths, initial=0))
    shared = layout.shared or ((0, 0),) * len(layout.lengths)
    cuts = sorted({*starts, *(cut for start, length in shared if length for cut in (start, start + length))})
    number = {cut: i for i, cut in enumerate(cuts)}
    chosen = []
    for (start, stop), (prompt, length) in zip(itertools.pairwise(starts), shared, strict=True):
        before = range(number[prompt], number[prompt + length]) if length else range(0)
        chosen.append((*before, *range(number[start], number[stop])))
    return [b - a for a, b in itertools.pairwise(cuts)], chosen


@functools.lru_cache(maxsize=64)
def _causal_mask(
    length: int,
    before: int,
    sliding_window: int | None,
    device: torch.device,
    blocks: tuple[tuple[int, int], ...] = (),
) -> Tensor:
    """[length, before + length]: causal, but for the tokens of a block among themselves; within the window."""
    distance = (before + torch.arange(length, device=device))[:, None] - torch.arange(before + length, device=device)
    mask = distance >= 0
    for start, stop in blocks:
        mask[start:stop, before + start : before + stop] = True
    return mask if sliding_window is None else mask & (distance < sliding_window)


def forget_masks() -> None:
    """Those that were made: tensors of a simulated rank have no contents."""
    _causal_mask.cache_clear()


def _is_grouped(query: Tensor, key: Tensor) -> bool:
    # A branch, because the compiler may hold sizes as symbols and the kernel wants a plain bool.
    if query.shape[1] == key.shape[1]:  # noqa: SIM103
        return False
    return True


def _equal_length(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, length: int
) -> Tensor:
    """Documents of one length are a plain batch, for which cuDNN's kernel is about twice as fast on Hopper."""
    q, k, v = (t[0].unflatten(1, (-1, length)).transpose(0, 1) for t in (query, key, value))
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True):
        attended = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=_is_grouped(query, key)
        )
    return attended.transpose(1, 2).flatten(0, 1)[None]


def _variable_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    boundaries: Tensor,
    key_boundaries: Tensor,
    max_length: int,
) -> Tensor:
    # A window of W tokens counts the token itself: W - 1 to the left.
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    attended = varlen_attn(
        q, k, v, boundaries, key_boundaries, max_length, max_length, scale=scaling, window_size=window, **_GROUPED_HEADS
    )
    assert isinstance(attended, Tensor)
    return attended[None]


def _in_tiles(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, visible: Tensor) -> Tensor:
    """[1, tokens, heads, head_dim], by the kernel of our own."""
    if query.shape[-1] != value.shape[-1]:
        raise ValueError(f"keys of {query.shape[-1]} and values of {value.shape[-1]} in one head")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return tile_attention(q, k, v, visible, scale)[0][None]


@torch.library.custom_op("lockstep::tile_attention", mutates_args=())
def tile_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(attended [T, heads, D]; of each row the log2 of its weights' sum [heads, T], for the backward pass)."""
    from lockstep.model import packed_kernel

    return packed_kernel.forward(query, key, value, visible, scale)


@tile_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    tokens, heads, _size = query.shape
    return query.new_empty(query.shape), query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("lockstep::tile_attention_backward", mutates_args=())
def tile_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    norms: Tensor,
    visible: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from lockstep.model import packed_kernel

    return packed_kernel.backward(grad, query, key, value, attended, norms, visible, scale)


@tile_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    scale: float


def _keep_for_backward(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, visible, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output, visible)
    ctx.set_materialize_grads(False)


def _attend_backward(ctx: _Context, grad: Tensor | None, _norms: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    return *tile_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


tile_attention.register_autograd(_attend_backward, setup_context=_keep_for_backward)

# Worth keeping where activations are recomputed.
KERNELS = (
    tile_attention._opoverload,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


def tiles_problem(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernel of our own cannot be used where the fused one can, or None. It is tried once, both ways."""
    if find_spec("triton") is None:
        return "needs Triton"
    if head_dim not in (16, 32, 64, 128):
        return f"needs heads of 16, 32, 64 or 128, not {head_dim}"
    try:
        visible = torch.from_numpy(PackedLayout((128,)).visible_keys()).to(device)
        query = torch.zeros(128, 4, head_dim, dtype=dtype, device=device, requires_grad=True)
        with torch.enable_grad():
            tile_attention(query, query[:, :2], query[:, :2], visible, 1.0)[0].sum().backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's have no class in common: a GPU too old or too small, no compiler
        return f"fails on this GPU ({type(error).__name__}: {str(error).strip().splitlines()[0][:100]})"
    return None


def variable_length_problem(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the fused variable-length kernel cannot be used here, or None."""
    if device.type != "cuda":
        return "it needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bf16 or fp16, not {dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"it needs a head size that is a multiple of 8 and at most 256, not {head_dim}"
    return None
