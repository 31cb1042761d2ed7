"""Checks, before the first step, that the fast path computes the same function as the model. All ranks.

Small forward passes find logits that are changed after the head in an unknown way, and packed documents that attend to
each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lockstep.model.attention import PackedLayout
from lockstep.model.load import DTYPES
from lockstep.model.policy import PackedTokens, Policy, causal_lm
from lockstep.model.stages import Stage, head_alone

# Largest difference of log-probs that rounding explains, by what the model computes in.
_UNKNOWN_HEAD = (
    "{name} changes its logits after the output head in a way Lockstep does not know "
    "(log-probs differ by {difference:.3g}): this model cannot be trained yet"
)
_ROUNDING = {"fp64": 1e-6, "fp32": 1e-3, "fp16": 0.1, "bf16": 0.3}


def check_policy(
    policy: Policy, evaluation: AbstractContextManager[None], device: torch.device, precision: str
) -> list[str]:
    """Raises if the fast path computes something else; returns warnings. Leaves packing off where it leaks."""
    name = type(causal_lm(policy.model)).__name__
    warnings = []
    # Not compiled: these few shapes will not come again.
    with evaluation, torch.compiler.set_stance("force_eager"):
        if policy.packs and not _isolates(policy, device, _ROUNDING[precision]):
            policy.stop_packing(f"{name} does not keep packed documents apart")
        if not policy.packs:
            warnings.append(
                f"{policy.why_not_packed}: documents are computed one by one, each in a pass of its own, and a prompt "
                "again for each of its answers. That is slower, the more so the shorter they are"
            )
        if policy.shares_prompts and not _follows_shared_prompts(policy, device, _ROUNDING[precision]):
            policy.shares_prompts = False
            warnings.append(f"{name} does not let answers share a prompt: it is computed once per answer, slower")
        probe = _pack([_tokens(policy, 7, 12)], device)
        fast, plain = policy(probe).double(), policy(probe, own=True)
    if not bool(torch.isfinite(plain).all()):
        raise ValueError(f"{name} gives log-probs that are not numbers: its weights hold nan or inf, or overflow")
    difference = float((fast - plain).abs().max())
    if not difference <= _ROUNDING[precision]:
        raise ValueError(_UNKNOWN_HEAD.format(name=name, difference=difference))
    return warnings


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
    with evaluation, torch.compiler.set_stance("force_eager"):
        for stage in stages:
            stage.micro_batches, stage.finish = packs, finish
            seen = []
            for number in (0, 1):
                first, second = torch.sin(wave[:, :10] * (number + 0.7)), torch.sin(wave[:, 10:] * 1.3)
                hidden = torch.cat([first, second], dim=1).to(dtype)
                seen.append(stage(hidden, torch.tensor(number))[0, 10:].double())
            if not bool((seen[0] - seen[1]).abs().max() <= rounding / 100):
                name = type(causal_lm(policy.model)).__name__
                raise ValueError(f"{name} does not keep packed documents apart: set parallel.pipeline to 1")
    return []


def _check_head(policy: Policy, packed: PackedTokens, hidden: Tensor, rounding: float) -> None:
    """Our head against the model's own, both from the last hidden states."""
    fast = policy.apply_head(hidden, packed, None).double()
    logits = head_alone(policy)(
        inputs_embeds=hidden[None], use_cache=False, packed_layout=PackedLayout(packed.lengths)
    ).logits
    every = torch.log_softmax(logits[0, packed.predictors].double(), dim=-1)
    difference = float((fast - every.gather(1, packed.targets[:, None])[:, 0]).abs().max())
    if not difference <= rounding:
        name = type(causal_lm(policy.model)).__name__
        raise ValueError(_UNKNOWN_HEAD.format(name=name, difference=difference))


def _isolates(policy: Policy, device: torch.device, rounding: float) -> bool:
    """The second document's log-probs must not depend on the first document.

    With two first documents of one length the arithmetic is the same, so almost nothing may change; alone, rounding
    may differ.
    """
    second = _tokens(policy, 3, 9)
    try:
        seen = [policy(_pack([_tokens(policy, start, 10), second], device))[9:].double() for start in (1, 5)]
        alone = policy(_pack([second], device)).double()
    except (TypeError, ValueError):  # the model does not pass document lengths on to its attention
        return False
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
    vocabulary = causal_lm(policy.model).config.get_text_config().vocab_size
    return (start + 11 * torch.arange(count)) % vocabulary


def _pack(documents: list[Tensor], device: torch.device) -> PackedTokens:
    lengths = tuple(len(d) for d in documents)
    tokens = torch.cat(documents).to(device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    predictors = torch.cat([torch.arange(n - 1) + s for n, s in zip(lengths, starts, strict=True)]).to(device)
    return PackedTokens(tokens, positions, lengths, predictors, tokens[predictors + 1])
