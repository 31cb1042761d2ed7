"""A causal language model as one function: packed tokens in, log-probs of targets out.

Wraps any transformers causal LM (also inside PEFT) without changing its code; parallelism is applied from outside.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.model import attention
from lockstep.model.experts import noisy_routers
from lockstep.model.head import (
    HeadOptions,
    LogitTransform,
    Vocabulary,
    pick_rows,
    target_logprobs,
    token_facts,
    weighted_logprob_sum,
)
from lockstep.model.image_inputs import ImageForward, ImageInputs
from lockstep.model.mixers import Search, TokenMixers, adapted_mixers, candidates
from lockstep.model.output_head import head_matrices, head_problem
from lockstep.model.rotary import RotaryByLength, TextSpan
from lockstep.model.routing import Routers
from lockstep.model.vision import language_model, vision_modules

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class UnknownHeadError(ValueError):
    """A model does something to its logits that is not known here."""


CausalLM: TypeAlias = "PreTrainedModel | PeftModel"


@dataclass(frozen=True)
class PackedTokens:
    """Documents one after the other, and the targets to predict in them.

    A segment is a document, or a completion of a prompt that an earlier segment begins with. Where tokens are split
    over ranks, everything but `lengths` and `shared` is of this rank's part.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] within the document: a completion of a shared prompt continues its positions
    lengths: tuple[int, ...]  # of the segments, sum T over all parts
    predictors: Tensor  # [N] indices into T: the hidden state there predicts the target
    targets: Tensor  # [N] int64
    shared: tuple[tuple[int, int], ...] = ()  # of each segment's prompt (start, length), or (0, 0)
    padding: int = 0  # tokens at the end that are of no document
    counts: Tensor | None = None  # [T] in how many texts each token is: a shared prompt in several, padding in none
    images: ImageInputs | None = None  # positions are then [axes, T] where the model has several
    routing: Tensor | None = None  # [T, routers, K] experts that are given, see Routers.replayed

    @property
    def text_lengths(self) -> list[int]:
        """Of the text that each segment ends: with its prompt, without padding."""
        lengths = list(attention.PackedLayout(self.lengths, self.shared).key_lengths)
        lengths[-1] = max(lengths[-1] - self.padding, 1)
        return lengths


class Policy(nn.Module):
    """`model` keeps its own parameter names; checkpoints and exports are written in them."""

    def __init__(self, model: nn.Module, *, chunk_tokens: int = 1024, kept_bytes: int = 0) -> None:
        super().__init__()
        attention.register()
        self.model = model
        causal = causal_lm(model)
        head = causal.get_output_embeddings()
        if problem := head_problem(head):
            kind = f"{type(head).__module__}.{type(head).__name__}"
            raise ValueError(f"the output head of {type(causal).__name__} is a {kind}, {problem}")
        self.head_options = HeadOptions(logit_transform(causal), chunk_tokens, kept_bytes=kept_bytes)
        self.why_not_packed = attention_problem(causal)
        self.attends_packed = not self.why_not_packed  # otherwise with the model's own attention
        self.packs = True
        self.mixers = TokenMixers()
        self.variable_length = False  # whether the fused kernel is used, which takes boundaries as a tensor
        self.why_not_fused: str | None = None
        self.attends_in_tiles = False  # whether that is the kernel of our own, where a layer has no window
        self.why_not_tiles: str | None = None
        self.has_windows = has_windows(causal)
        self.shares_prompts = True
        self.split_tokens: attention.SplitTokens | None = None
        # Once packed tokens have needed it, all are described in the general way: each other way is compiled anew.
        self._met_unequal = self._met_shared = False
        self.gives_positions = True  # otherwise the model counts them itself
        self.enters_head = False  # whether something between the layers and the head changes hidden states
        self.noisy_routers = noisy_routers(model)
        self._adapted_mixers = tuple(adapted_mixers(model))
        self.routers = Routers(model)
        self.rotary = RotaryByLength.of(model)
        self.max_positions = max_positions(causal)
        self.num_tokens = num_tokens(causal)
        self._num_logits = num_logits(causal)
        self.image_forward: ImageForward | None = None  # of a model that is given images
        # Not as attributes of their own: they would be registered a second time.
        self._towers = tuple(vision_modules(causal).values())
        self._attending = (language_model(causal) if self._towers else causal,)  # towers attend in their own way
        self._attention = attention.AttentionSwitch(self._attending[0])
        self._own_attention = self._attending[0].config._attn_implementation
        if self._own_attention == attention.PACKED:  # a configuration that another policy's model was built with, too
            self._own_attention = "sdpa"
        if self.attends_packed:
            self._attend(attention.PACKED)

    def train(self, mode: bool = True) -> Policy:
        """Routers never add noise: the same batch must give the same step, and what is trained is what is sampled.
        Mixers with adapters never take a kernel that leaves them out."""
        set_training(self, mode)
        for part in (*self.noisy_routers, *self._adapted_mixers):
            part.training = False  # of its own alone: dropout inside of it stays
        return self

    def use_variable_length(self, device: torch.device, dtype: torch.dtype) -> None:
        """Switch to the fused kernel where it can run."""
        if self.attends_packed:
            size = head_dim(causal_lm(self.model))
            self.why_not_fused = attention.variable_length_problem(device, dtype, size)
            self.variable_length = self.why_not_fused is None
            self.why_not_tiles = attention.tiles_problem(device, dtype, size) if self.variable_length else None
            self.attends_in_tiles = self.variable_length and self.why_not_tiles is None

    @contextlib.contextmanager
    def probing(self) -> Iterator[None]:
        """Around passes over a few tokens that will not come again: nothing is compiled for them or remembered."""
        met = self._met_unequal, self._met_shared
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self._met_unequal, self._met_shared = met

    def split_vocabulary(self, vocabulary: Vocabulary) -> None:
        """The head's rows are split over ranks from now on."""
        self.head_options = replace(self.head_options, vocabulary=vocabulary)

    def use_temperature(self, temperature: float) -> None:
        """Log-probs, entropies and log_sum_sq_probs are those of sampling at this temperature from now on."""
        transform = logit_transform(causal_lm(self.model))
        self.head_options = replace(self.head_options, transform=transform.at(temperature))

    def stop_packing(self, why: str = "") -> None:
        """Restore the model's own attention; from now on it takes one document at a time."""
        self.why_not_packed = self.why_not_packed or why
        while self.packs:
            self.attend_more_plainly()

    def attend_more_plainly(self) -> None:
        """From our kernel to torch's, to attention one segment after another, to the model's own, to no packing."""
        self.mixers.clear()
        if self.attends_in_tiles:
            self.attends_in_tiles = False
            self.why_not_tiles = "did not keep the documents of this model apart"
        elif self.variable_length:
            self.variable_length = False
            self.why_not_fused = self.why_not_packed or "documents would not be kept apart"
        elif self.attends_packed:
            self.attends_packed = False
            self._attend(self._own_attention)
        else:
            self.packs = self.shares_prompts = False
            name = type(causal_lm(self.model)).__name__
            self.why_not_packed = self.why_not_packed or f"{name} does not keep packed documents apart"

    def loop_over_documents(self, run: Callable[[tuple[int, int], int], None], tolerance: float) -> None:
        """In those parts that mix the tokens of a row, see `Search`. All ranks."""
        self.mixers.clear()
        causal = causal_lm(self.model)
        device = next(causal.parameters()).device
        describe = functools.partial(self._attention_arguments, device=device)
        head = causal.get_output_embeddings()
        parts = [part for part in candidates(causal, decoder_layers(causal)) if head not in part.modules()]
        Search(self.mixers, run, describe, tolerance).find(parts)

    @contextlib.contextmanager
    def own_attention(self) -> Iterator[None]:
        """Temporarily, the model with the attention that it was loaded with."""
        if not self.attends_packed:
            yield
            return
        self._attend(self._own_attention)
        try:
            yield
        finally:
            self._attend(attention.PACKED)

    def _attend(self, implementation: str) -> None:
        self._attention.set(implementation)

    def forward(
        self, packed: PackedTokens, grad_logprobs: Tensor | None = None, *, plain: bool = False, facts: bool = False
    ) -> Any:
        """The result of `apply_head`. `plain`: see `_plain_logprobs`, for checking."""
        if plain:
            return self._plain_logprobs(packed)
        inputs = {"input_ids": packed.tokens[None], **self._image_inputs(packed)}
        if self.enters_head:
            hidden = self._run_to_head(packed, inputs)
        else:
            hidden = self.run_layers(headless(causal_lm(self.model)), packed, inputs)
        return self.apply_head(hidden[0], packed, grad_logprobs, facts=facts)

    def _image_inputs(self, packed: PackedTokens) -> dict[str, Tensor]:
        if packed.images is None:
            return {}
        assert self.image_forward is not None, "a model is given images only after it was told how"
        return self.image_forward.inputs(packed.images, packed.tokens.device, self.tower_dtype)

    @property
    def tower_dtype(self) -> torch.dtype:
        return next(self._towers[0].parameters()).dtype

    def _plain_logprobs(self, packed: PackedTokens) -> Tensor:
        """Of one document, from the model as anybody calls it: its own attention, and positions that it counts."""
        with self.own_attention(), self.rotary.texts(self._spans(packed)):
            seen = self._image_inputs(packed)
            if self.image_forward is not None and seen:
                seen |= self.image_forward.token_types(packed.tokens)
            logits = causal_lm(self.model)(input_ids=packed.tokens[None], use_cache=False, **seen).logits
        self.check_width(logits)
        logprobs = torch.log_softmax(logits[0, packed.predictors].double(), dim=-1)
        return logprobs.gather(1, packed.targets[:, None])[:, 0]

    def run_layers(self, body: nn.Module, packed: PackedTokens, inputs: dict[str, Tensor]) -> Tensor:
        """[1, T, H] hidden states of a model without its head."""
        with self._reading(packed):
            return body(**inputs, **self._arguments(packed)).last_hidden_state

    @contextlib.contextmanager
    def _reading(self, packed: PackedTokens) -> Iterator[None]:
        """Around a pass over these tokens: what parts of the model need to know of them."""
        self.routers.read(packed.counts)
        replayed = self.routers.replaying(packed.routing)
        with self.rotary.texts(self._spans(packed)), self.mixers.documents(self._layout(packed)), replayed:
            yield

    def _run_to_head(self, packed: PackedTokens, inputs: dict[str, Tensor]) -> Tensor:
        """[1, T, H]: what the model itself gives to its head, which returns it unchanged meanwhile."""
        causal = causal_lm(self.model)
        head = causal.get_output_embeddings()
        seen: list[Tensor] = []

        def pass_through(hidden: Tensor) -> Tensor:
            seen.append(hidden)
            return hidden

        own = head.__dict__.get("forward")
        head.forward = pass_through
        try:
            with self._reading(packed):
                causal(**inputs, **self._arguments(packed))
        finally:
            del head.forward
            if own is not None:
                head.forward = own
        return seen[-1]

    def apply_head(
        self, hidden: Tensor, packed: PackedTokens, grad_logprobs: Tensor | None = None, *, facts: bool = False
    ) -> Any:
        """[N] log-probs; with `grad_logprobs` (sum of grad_logprobs * log-probs, log-probs detached); with `facts`
        their TokenFacts."""
        weight, bias = head_matrices(causal_lm(self.model).get_output_embeddings())
        weight = self._without_padding(_local(weight))
        bias = None if bias is None else self._without_padding(_local(bias))
        hidden = pick_rows(hidden, packed.predictors)
        if grad_logprobs is not None:
            return weighted_logprob_sum(hidden, weight, bias, packed.targets, grad_logprobs, self.head_options)
        measure = token_facts if facts else target_logprobs
        return measure(hidden, weight, bias, packed.targets, self.head_options)

    def check_width(self, logits: Tensor) -> None:
        """Of the model's own forward: a logit for each row of the head that is a token, and no other. Rows too many
        could be less than rounding in a narrow precision."""
        causal = causal_lm(self.model)
        rows = len(head_matrices(causal.get_output_embeddings())[0])
        expected = min(rows, self._num_logits or rows)
        if logits.shape[-1] != expected:
            raise UnknownHeadError(
                f"{type(causal).__name__} gives {logits.shape[-1]:,} logits, and its head has {expected:,} rows of "
                "tokens: what it does to its logits is not known, so it cannot be trained yet"
            )

    def _without_padding(self, rows: Tensor) -> Tensor:
        """Of the head, on this rank: those that are tokens."""
        if self._num_logits is None:
            return rows
        vocabulary = self.head_options.vocabulary
        return rows[: max(self._num_logits - (0 if vocabulary is None else vocabulary.first), 0)]

    def _spans(self, packed: PackedTokens) -> list[TextSpan]:
        """The texts of this rank's tokens."""
        start, stop = 0, len(packed.tokens)
        if self.split_tokens is not None:
            start = self.split_tokens.place * stop
            stop += start
        ends = itertools.accumulate(packed.lengths)
        found = []
        for end, length, text_length in zip(ends, packed.lengths, packed.text_lengths, strict=True):
            here = min(end, stop) - max(end - length, start)
            if here > 0:
                found.append(TextSpan(here, text_length))
        return found

    def _layout(self, packed: PackedTokens) -> attention.PackedLayout:
        whole = self.image_forward is not None and self.image_forward.sees_whole_images
        blocks = packed.images.blocks if whole and packed.images is not None else ()
        return attention.PackedLayout(packed.lengths, packed.shared, blocks)

    def _arguments(self, packed: PackedTokens) -> dict[str, Any]:
        positions = packed.positions[None] if packed.positions.ndim == 1 else packed.positions[:, None]
        given = {"position_ids": positions} if self.gives_positions else {}
        return {**given, "use_cache": False, **self._attention_arguments(self._layout(packed), packed.tokens.device)}

    def _attention_arguments(self, layout: attention.PackedLayout, device: torch.device) -> dict[str, object]:
        assert self.packs or len(layout.lengths) == 1, "a model that does not pack takes one document at a time"
        if not self.attends_packed:
            # With a mask, transformers does not look for documents in the positions: parts that attend take one each.
            is_row = len(layout.lengths) > 1
            return (
                {"attention_mask": torch.ones(1, sum(layout.lengths), dtype=torch.int64, device=device)}
                if is_row
                else {}
            )
        split = {} if self.split_tokens is None else {"packed_split": self.split_tokens}
        if not self.variable_length or layout.blocks:
            return {"packed_layout": layout, **split}
        return {**self._fused_arguments(layout, device), **split}

    def _fused_arguments(self, layout: attention.PackedLayout, device: torch.device) -> dict[str, object]:
        self._met_shared |= bool(layout.shared)
        self._met_unequal |= self._met_shared or len(set(layout.lengths)) > 1
        arguments: dict[str, Any] = {} if self._met_unequal else {"packed_equal_length": layout.lengths[0]}
        if self.attends_in_tiles:
            arguments["packed_visible"] = to_device(layout.visible_keys(), device)
            if not self.has_windows:
                return arguments
        arguments["packed_boundaries"] = _boundaries(layout.lengths, device)
        # Rounded up, so that compiled layers see few different numbers.
        arguments["packed_max_length"] = -(-max(layout.key_lengths) // 128) * 128
        if self._met_shared:
            arguments["packed_keys"] = to_device(_keys_of(layout), device)
            arguments["packed_key_boundaries"] = _boundaries(layout.key_lengths, device)
        return arguments


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Without waiting for a GPU: a copy from memory that is not pinned waits until the GPU has come that far."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    tensor = tensor if dtype is None else tensor.to(dtype)
    if device.type == "cuda" and torch.cuda.is_available():  # a simulated GPU pins nothing
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _boundaries(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Where segments begin and end. Padded with empty segments, so that there are few shapes."""
    bounds = np.full(-(-len(lengths) // 64) * 64 + 1, sum(lengths), dtype=np.int32)
    bounds[: len(lengths) + 1] = np.cumsum([0, *lengths])
    return to_device(bounds, device)


def _keys_of(layout: attention.PackedLayout) -> np.ndarray:
    """The tokens that each segment attends to, one segment after the other."""
    if not layout.shared:
        return np.arange(sum(layout.lengths))
    starts = np.cumsum([0, *layout.lengths])
    parts = []
    for start, length, (prompt, prompt_length) in zip(starts, layout.lengths, layout.shared, strict=False):
        parts += [np.arange(prompt, prompt + prompt_length), np.arange(start, start + length)]
    return np.concatenate(parts)


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows of a split head."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def attention_problem(causal: PreTrainedModel) -> str:
    """Why attention of ours cannot be its attention, as far as the model's class and settings tell; empty: it may."""
    name = type(causal).__name__
    # Hybrids take it without saying so (transformers 5.22): whether it is right is measured in any case.
    takes = hasattr(sys.modules.get(type(causal).__module__), "ALL_ATTENTION_FUNCTIONS")
    if not takes and not getattr(causal, "_supports_attention_backend", False):
        return f"{name} does not take its attention from transformers' AttentionInterface"
    config = causal.config.get_text_config()
    if not hasattr(config, "num_hidden_layers"):
        return f"{name} has several stacks of layers, each with a configuration of its own"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return f"{name} attends within chunks that are counted from the start of a row"
    return ""


def has_windows(causal: PreTrainedModel) -> bool:
    """Whether some layers may attend to the nearest tokens alone."""
    config = causal.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any("full" not in kind for kind in kinds)
    return any(setting_by_layer(config, "sliding_window"))


def tensor_plan(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The model's own plan, which modules are split over ranks and how: name -> (module, style). Behind a style there
    may be a number of columns."""
    causal = causal_lm(model)
    plan: dict[str, str] = getattr(causal, "_tp_plan", None) or {}
    if not any(".*." in pattern for pattern in plan):
        raise ValueError(f"{type(causal).__name__} has no plan for tensor parallelism: set parallel.tensor to 1")
    modules, every = {}, dict(causal.named_modules())
    for name, module in every.items():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style == "mla_kv_a_proj":  # the part of a key that all heads share
            style += f" {getattr(every[name.rpartition('.')[0]], 'qk_rope_head_dim', '')}"
        if style not in (None, "moe_tp_experts"):  # experts are divided by whole matrices, not by parts of each
            modules[name] = (module, style)
    # Log-probs are computed from a head whose rows are split; the plans of some models leave it out (nemotron_h) or
    # split its columns (inkling2).
    head, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()
    ends = {head: "colwise_gather_output"}
    if getattr(head, "weight", None) is getattr(embedding, "weight", head):
        ends[embedding] = "embedding_rowwise"
    found = {name: (m, ends[m]) for name, m in causal.named_modules() if m in ends}
    return modules | {name: how for name, how in found.items() if name not in modules or how[0] is head}


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    unwrap: Any = getattr(model, "get_base_model", lambda: model)
    return unwrap()


def every_module(root: nn.Module) -> list[nn.Module]:
    """As `modules()`, in another order and a fifth of the time: that is a generator in a generator for each level."""
    found, waiting = {root: None}, [root]
    while waiting:
        children = [c for c in waiting.pop()._modules.values() if c is not None and c not in found]
        found.update(dict.fromkeys(children))
        waiting += children
    return list(found)


def set_training(root: nn.Module, mode: bool) -> None:
    """As `train(mode)`, in a quarter of the time: with adapters a model has thousands of modules, and each call of a
    sampler switches them twice."""
    from transformers import PreTrainedModel

    seen, waiting = {root}, [root]
    while waiting:
        module = waiting.pop()
        own = type(module).train
        plain = own is nn.Module.train or module is root
        if plain or (own is PreTrainedModel.train and not getattr(module, "use_kernels", False)):
            module.__dict__["training"] = mode
            children = [child for child in module._modules.values() if child is not None and child not in seen]
            seen.update(children)
            waiting += children
        else:  # it does more, and switches its own parts
            module.train(mode)


@contextlib.contextmanager
def generating(causal: PreTrainedModel) -> Iterator[None]:
    """With its cache in use, as it was before afterwards. Of a model that sees, the text has a configuration too."""
    generation, own = causal.generation_config, causal.config
    before = [(c, c.use_cache) for c in (own, own.get_text_config()) if hasattr(c, "use_cache")]
    try:
        for config, _ in before:
            config.use_cache = True
        yield
    finally:
        causal.generation_config = generation
        for config, used in before:
            config.use_cache = used


def max_positions(causal: PreTrainedModel) -> int | None:
    """The longest text of a model with a table of learned positions, such as GPT-2 and OPT; None: it has no table."""
    limit = getattr(causal.config.get_text_config(), "max_position_embeddings", None)
    tokens = set(causal.get_input_embeddings().modules())
    tables = (m for m in causal.modules() if isinstance(m, nn.Embedding) and m not in tokens)
    # Some models keep a few entries of the table for padding.
    has_table = limit is not None and any(limit <= table.num_embeddings <= limit + 8 for table in tables)
    return limit if has_table else None


def num_tokens(causal: PreTrainedModel) -> int | None:
    """How many the model has a vector and a logit for; None: its embedding is not of a known kind."""
    tables = [m.num_embeddings for m in causal.get_input_embeddings().modules() if isinstance(m, nn.Embedding)]
    return min(max(tables), num_logits(causal) or max(tables)) if tables else None


def headless(causal: PreTrainedModel) -> nn.Module:
    """The model without its head. Where its base has another name than its class says (Llama 4): what embeds."""
    base: nn.Module = causal.base_model
    if base is not causal:
        return base
    embedding = causal.get_input_embeddings()
    return next(part for part in causal.children() if part is not embedding and embedding in part.modules())


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks that compute text, found from the model's own list of modules that must not be split.

    Where it has no such list: its longest list of modules.
    """
    causal = causal_lm(model)
    names = set(getattr(causal, "_no_split_modules", None) or ())
    embedding = causal.get_input_embeddings()
    layers: list[nn.Module] = []
    for part in _around_embedding(causal):  # models that also see or hear have layers elsewhere
        found = [m for m in part.modules() if type(m).__name__ in names]
        layers = [m for m in found if embedding not in m.modules()]
        if layers:
            break
    inner = {id(child) for layer in layers for child in layer.modules() if child is not layer}
    layers = [layer for layer in layers if id(layer) not in inner] or _repeated_blocks(causal)
    if not layers:
        raise ValueError(f"{type(causal).__name__} does not say which of its modules are layers (_no_split_modules)")
    return layers


def _around_embedding(causal: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules that hold the embedding of tokens, the innermost first."""
    embedding = causal.get_input_embeddings()
    name = next((name for name, module in causal.named_modules() if module is embedding), "")
    while name:
        name = name.rpartition(".")[0]
        yield causal.get_submodule(name)


def _repeated_blocks(causal: nn.Module) -> list[nn.Module]:
    """None where several lists together are the layers, such as one of attentions and one of norms."""
    lists = {name: m for name, m in causal.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if not lists:
        return []
    name = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    beside = [other for other in lists if other.rpartition(".")[0] == name.rpartition(".")[0]]
    return list(lists[name]) if len(beside) == 1 else []


def logit_transform(causal: PreTrainedModel) -> LogitTransform:
    """What the configuration says happens to logits after the head; checked against the model's own forward."""
    config = causal.config.get_text_config()
    divisor, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    scale = (1.0 / divisor if divisor else 1.0) * (factor if factor else 1.0)
    caps = [
        getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    ]
    return LogitTransform(scale, next((cap for cap in caps if cap is not None), None))


def num_logits(causal: PreTrainedModel) -> int | None:
    """How many rows of a padded head are tokens: the model drops the logits of those that follow. None: all are."""
    return getattr(causal.config.get_text_config(), "unpadded_vocab_size", None)


def setting_by_layer(config: Any, name: str) -> list[Any]:
    """A setting of a model's configuration, layer by layer; once where no layer has settings of its own. None: it is
    not there."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return [getattr(layer, name, None) for layer in layers]


def head_dim(causal: PreTrainedModel) -> int:
    """The largest, where layers differ."""
    config = causal.config.get_text_config()
    if sizes := [size for size in setting_by_layer(config, "head_dim") if size]:
        return max(sizes)
    return config.hidden_size // min(setting_by_layer(config, "num_attention_heads"))
