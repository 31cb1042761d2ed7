"""Checks, before the first step, that the fast path computes the same function as the model. All ranks.

Small forward passes find logits that are changed after the head in an unknown way, and packed documents that attend to
each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from lockstep.backend.images import BatchImages
from lockstep.model.attention import PackedLayout
from lockstep.model.load import DTYPES
from lockstep.model.policy import PackedTokens, Policy, UnknownHeadError, causal_lm
from lockstep.model.stages import Stage, head_alone

_UNKNOWN_HEAD = (
    "{name} changes its logits after the output head in a way Lockstep does not know "
    "(log-probs differ by {difference:.3g}): this model cannot be trained yet"
)
# Largest difference of log-probs that rounding explains, by what the model computes in.
_ROUNDING = {"fp64": 1e-6, "fp32": 1e-3, "fp16": 0.1, "bf16": 0.3}
_MODEL_ERRORS = (TypeError, ValueError, AttributeError, LookupError, AssertionError, NotImplementedError)
_PART_ROUNDING = {"fp64": 1e-6, "fp32": 1e-4, "fp16": 0.02, "bf16": 0.05}  # of one part, relative to its largest value


def check_policy(
    policy: Policy, evaluation: AbstractContextManager[None], device: torch.device, precision: str
) -> list[str]:
    """Raises if the fast path computes something else; returns what is slower than it could be, and what that costs."""
    name = type(causal_lm(policy.model)).__name__
    rounding = _ROUNDING[precision]
    with evaluation, policy.probing():
        probe = _pack([_tokens(policy, 7, 12)], device)
        plain = _plain_logprobs(policy, probe)
        if not bool(torch.isfinite(plain).all()):
            raise ValueError(f"{name} gives log-probs that are not numbers: its weights hold nan or inf, or overflow")
        _settle_packing(policy, probe, plain, device, precision)
        _refuse_later_tokens(policy, probe, rounding)
        if policy.shares_prompts and not _follows_shared_prompts(policy, device, rounding):
            policy.shares_prompts = False
        return list(_describe(policy, device))


def _plain_logprobs(policy: Policy, probe: PackedTokens) -> Tensor:
    try:
        return policy(probe, plain=True)
    except UnknownHeadError:
        raise
    except (*_MODEL_ERRORS, RuntimeError) as error:  # of the model's own code: it wants more
        if isinstance(error, torch.OutOfMemoryError) or torch.distributed.is_initialized():
            raise
        name = type(causal_lm(policy.model)).__name__
        raise ValueError(f"{name} cannot be called with the tokens of a text alone: {error}") from error


def _describe(policy: Policy, device: torch.device | None = None) -> Iterator[str]:
    """`device`: where a pass over the whole model can be timed."""
    name = type(causal_lm(policy.model)).__name__
    cost = "" if device is None else _measure_cost(policy, device)
    if not policy.packs:
        yield (
            f"{policy.why_not_packed}: documents are computed one by one, each in a pass of its own, and a prompt "
            f"again for each of its answers. Slower, the more so the shorter they are{cost}"
        )
        return
    if policy.mixers.parts:
        together = "one after another" if policy.mixers.loops else "those of similar lengths as one batch"
        yield (
            f"{', '.join(policy.mixers.names)} of {name} compute each document of a packed row by itself, {together}; "
            f"all else computes them together; nothing is compiled. Slower, the more so the shorter they are{cost}"
        )
    if not policy.shares_prompts:
        yield f"{name} does not let answers share a prompt: it is computed once per answer, slower"


def _measure_cost(policy: Policy, device: torch.device) -> str:
    """Of many short documents instead of one long one, which has as many tokens."""
    count, size = 8, 12
    if policy.packs and not policy.mixers.parts:
        return ""
    if policy.max_positions is not None and policy.max_positions < count * size:
        return ""
    short = [_pack([_tokens(policy, 1 + i, size)], device) for i in range(count)]
    if policy.packs:
        short = [_pack([_tokens(policy, 1 + i, size) for i in range(count)], device)]
    ratio = _seconds(policy, short, device) / _seconds(
        policy, [_pack([_tokens(policy, 1, count * size)], device)], device
    )
    return f": {count} of {size} tokens take {ratio:.1f} times as long as one of {count * size}"


def _seconds(policy: Policy, passes: list[PackedTokens], device: torch.device) -> float:
    """Of the fastest of three times."""
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        for packed in passes:
            policy(packed)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return min(taken)


def _settle_packing(policy: Policy, probe: PackedTokens, plain: Tensor, device: torch.device, precision: str) -> None:
    """The fastest way that keeps the documents of a row apart.

    Everything packed; or some parts of the model in a loop over documents, with packed attention or the model's own;
    or each document in a pass of its own.
    """
    rounding = _ROUNDING[precision]

    def run(lengths: tuple[int, int], number: int) -> None:
        policy(_pack([_tokens(policy, 1 + number + 3 * i, length) for i, length in enumerate(lengths)], device))

    def works(*, loops: bool) -> bool:
        try:
            if loops:
                policy.loop_over_documents(run, _PART_ROUNDING[precision])
            return _isolates(policy, device, rounding)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # models raise whatever they like when they are called in a way they do not know
            policy.why_not_packed = f"{type(causal_lm(policy.model)).__name__} does not take packed documents ({error})"
            return False

    while policy.packs:
        if not _difference(policy, probe, plain, rounding) and (works(loops=False) or works(loops=True)):
            return
        policy.attend_more_plainly()
    if difference := _difference(policy, probe, plain, rounding):
        raise ValueError(difference)


def _difference(policy: Policy, probe: PackedTokens, plain: Tensor, rounding: float) -> str:
    """Why one document does not have the log-probs of the model's own forward. Empty: it has, in the way to call the
    model that was found here: positions are given or the model counts them, layers and head are called or the model."""
    name, why = type(causal_lm(policy.model)).__name__, ""
    for policy.enters_head, policy.gives_positions in product((False, True), (True, False)):
        try:
            difference = float((policy(probe).double() - plain).abs().max())
        except (*_MODEL_ERRORS, RuntimeError) as error:
            if isinstance(error, RuntimeError) and (not policy.packs or isinstance(error, torch.OutOfMemoryError)):
                raise  # no other way is left to call the model
            why = why or f"{name} cannot be called without its head: {error}"
            continue
        if difference <= rounding:
            return ""
        why = why or _UNKNOWN_HEAD.format(name=name, difference=difference)
    policy.enters_head, policy.gives_positions = False, True
    return why


def _refuse_later_tokens(policy: Policy, probe: PackedTokens, rounding: float) -> None:
    """An encoder, or a model that was not set up as a decoder, sees what it is to predict."""
    tokens = probe.tokens.clone()
    tokens[-1] = tokens[0]
    seen = [policy(p).double()[:-1] for p in (probe, replace(probe, tokens=tokens))]
    if not bool((seen[0] - seen[1]).abs().max() <= rounding):
        raise ValueError(
            f"{type(causal_lm(policy.model)).__name__} is not causal: its tokens see those that follow them. An "
            "encoder cannot be trained as a language model; some are decoders with is_decoder: true in config.json"
        )


def check_images(
    policy: Policy, images: BatchImages, evaluation: AbstractContextManager[None], device: torch.device, precision: str
) -> None:
    """Two documents with an image each must have the log-probs that the model's own forward gives either alone.

    Finds out whether the tokens of an image see those of it that follow. Raises if neither way is the model's.
    """
    name = type(causal_lm(policy.model)).__name__
    assert policy.image_forward is not None
    with evaluation, policy.probing():
        alone = [images.pack_examples([number], device) for number in (0, 1)]
        try:
            plain = torch.cat([policy(packed, plain=True) for packed in alone])
        except (*_MODEL_ERRORS, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or torch.distributed.is_initialized():
                raise
            raise ValueError(f"{name} cannot be called with an image: {error}") from error
        together = [images.pack_examples([0, 1], device)] if policy.packs else alone
        difference = torch.inf
        for policy.image_forward.sees_whole_images in (False, True):
            fast = torch.cat([policy(packed) for packed in together]).double()
            difference = min(difference, float((fast - plain).abs().max()))
            if difference <= _ROUNDING[precision]:
                return
    raise ValueError(
        f"{name} computes texts with images in a way Lockstep does not know (log-probs differ by {difference:.3g}): it "
        "cannot be trained with images yet"
    )


def check_stages(
    policy: Policy,
    stages: Iterable[Stage],
    evaluation: AbstractContextManager[None],
    device: torch.device,
    precision: str,
) -> list[str]:
    """The same checks of each stage of this rank on its own, with synthetic hidden states."""
    rounding = _ROUNDING[precision]
    size = causal_lm(policy.model).config.get_text_config().hidden_size
    dtype = DTYPES[precision]
    wave = torch.arange(19 * size, device=device, dtype=torch.float64).view(1, 19, size)

    def finish(number: int, hidden: Tensor) -> Tensor:
        _check_head(policy, packs[number], hidden, rounding)
        return hidden[None]

    packs = [_pack([_tokens(policy, start, 10), _tokens(policy, 3, 9)], device) for start in (1, 5)]

    def run(lengths: tuple[int, int], number: int) -> None:
        documents = [_tokens(policy, 1 + number + 3 * i, length) for i, length in enumerate(lengths)]
        packed = _pack(documents, device)
        hidden = torch.sin(wave[:, :1] * (torch.arange(sum(lengths), device=device)[:, None] + 0.7 + number)).to(dtype)
        for stage in stages:
            stage.micro_batches, stage.finish = [packed], lambda _, hidden: hidden[None]
            stage(hidden, torch.tensor(0))

    def mixes() -> bool:
        for stage in stages:
            stage.micro_batches, stage.finish = packs, finish
            seen = []
            for number in (0, 1):
                first, second = torch.sin(wave[:, :10] * (number + 0.7)), torch.sin(wave[:, 10:] * 1.3)
                hidden = torch.cat([first, second], dim=1).to(dtype)
                seen.append(stage(hidden, torch.tensor(number))[0, 10:].double())
            if not bool((seen[0] - seen[1]).abs().max() <= rounding / 100):
                return True
        return False

    def works(why: list[str]) -> bool:
        try:
            if policy.attends_packed and not mixes():
                return True
            policy.loop_over_documents(run, _PART_ROUNDING[precision])
            return not mixes()
        except (torch.OutOfMemoryError, UnknownHeadError):
            raise
        except Exception as error:  # models raise whatever they like when they are called in a way they do not know
            why.append(f" ({error})")
            return False

    with evaluation, policy.probing():
        why: list[str] = []
        while not works(why):
            if not policy.attends_packed:
                name, reason = type(causal_lm(policy.model)).__name__, "".join(why[-1:])
                raise ValueError(f"{name} does not keep packed documents apart{reason}: set parallel.pipeline to 1")
            policy.attend_more_plainly()
    return list(_describe(policy))


def _check_head(policy: Policy, packed: PackedTokens, hidden: Tensor, rounding: float) -> None:
    """Our head against the model's own, both from the last hidden states."""
    fast = policy.apply_head(hidden, packed, None).double()
    logits = head_alone(policy)(
        inputs_embeds=hidden[None], use_cache=False, packed_layout=PackedLayout(packed.lengths)
    ).logits
    policy.check_width(logits)
    every = torch.log_softmax(logits[0, packed.predictors].double(), dim=-1)
    difference = float((fast - every.gather(1, packed.targets[:, None])[:, 0]).abs().max())
    if not difference <= rounding:
        name = type(causal_lm(policy.model)).__name__
        raise UnknownHeadError(_UNKNOWN_HEAD.format(name=name, difference=difference))


def _isolates(policy: Policy, device: torch.device, rounding: float) -> bool:
    """The second document's log-probs must not depend on the first document.

    With two first documents of one length the arithmetic is the same, so almost nothing may change; alone, rounding
    may differ.
    """
    second = _tokens(policy, 3, 9)
    seen = [policy(_pack([_tokens(policy, start, 10), second], device))[9:].double() for start in (1, 5)]
    alone = policy(_pack([second], device)).double()
    return bool((seen[0] - seen[1]).abs().max() <= rounding / 100 and (seen[0] - alone).abs().max() <= rounding)


def _follows_shared_prompts(policy: Policy, device: torch.device, rounding: float) -> bool:
    """Two answers behind one prompt have the log-probs that each has behind a prompt of its own."""
    # Texts of 11 and 14 tokens; of one length where the model's positions would otherwise not be the same in both.
    size = 8 if policy.rotary.group(11) == policy.rotary.group(14) else 5
    prompt, first, second = _tokens(policy, 7, 6), _tokens(policy, 3, 5), _tokens(policy, 1, size)
    tokens = torch.cat([prompt, first, second]).to(device)
    positions = torch.cat([torch.arange(11), 6 + torch.arange(size)]).to(device)
    predictors = torch.cat([torch.arange(10), torch.tensor([5]), 11 + torch.arange(size - 1)]).to(device)
    targets = torch.cat([tokens[1:11], tokens[11:]])
    together = policy(PackedTokens(tokens, positions, (11, size), predictors, targets, ((0, 0), (0, 6)))).double()
    alone = [policy(_pack([torch.cat([prompt, answer])], device)).double() for answer in (first, second)]
    return bool((together - torch.cat([alone[0], alone[1][5:]])).abs().max() <= rounding)


def _tokens(policy: Policy, start: int, count: int) -> Tensor:
    """With a padding token among them: some models do not count it as a position."""
    config = causal_lm(policy.model).config.get_text_config()
    size = min(config.vocab_size, policy.num_tokens or config.vocab_size)
    tokens = (start + 11 * torch.arange(count)) % size
    padding = getattr(config, "pad_token_id", None)
    if padding is not None and 0 <= padding < size:
        tokens[2] = padding
    return tokens


def _pack(documents: list[Tensor], device: torch.device) -> PackedTokens:
    lengths = tuple(len(d) for d in documents)
    tokens = torch.cat(documents).to(device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    predictors = torch.cat([torch.arange(n - 1) + s for n, s in zip(lengths, starts, strict=True)]).to(device)
    return PackedTokens(tokens, positions, lengths, predictors, tokens[predictors + 1])
