"""Packed attention beside a plain softmax over an explicit mask: windows at their edges, and behind shared prompts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.model.attention import PackedLayout, segment_by_segment

HEADS, KEY_HEADS, DIM = 4, 2, 8


def plain(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """[heads, tokens, dim] of one text, from its first token on."""
    places = torch.arange(query.shape[1])
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (window or len(places)))
    copies = HEADS // KEY_HEADS
    scores = query @ key.repeat_interleave(copies, 0).transpose(1, 2) / DIM**0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(copies, 0)


def draw(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    sizes = ((1, heads, num_tokens, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    query, key, value = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return query, key, value


def attend(tensors: tuple[Tensor, Tensor, Tensor], window: int | None, layout: PackedLayout) -> Tensor:
    """[heads, tokens, dim]."""
    return segment_by_segment(*tensors, None, 0.0, window, layout)[0].transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 4])
def test_texts_shorter_as_long_as_and_longer_than_the_window(window: int | None) -> None:
    lengths = (3, 4, 5, 6, 1, 9)
    tensors = draw(sum(lengths))
    found = attend(tensors, window, PackedLayout(lengths)).split(lengths, dim=1)
    pieces = [tensor[0].split(lengths, dim=1) for tensor in tensors]
    for own, *text in zip(found, *pieces, strict=True):
        torch.testing.assert_close(own, plain(*text, window), rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 2, 4, 7])
def test_a_window_reaches_back_into_a_shared_prompt(window: int | None) -> None:
    """A text; a prompt of five with an answer of three; another answer of six behind the same prompt."""
    tensors = draw(2 + 8 + 6)
    layout = PackedLayout((2, 8, 6), ((0, 0), (0, 0), (2, 5)))
    found = attend(tensors, window, layout)
    first = plain(*(tensor[0, :, 2:10] for tensor in tensors), window)
    torch.testing.assert_close(found[:, 2:10], first, rtol=0, atol=1e-12)
    second = plain(*(torch.cat([t[0, :, 2:7], t[0, :, 10:]], dim=1) for t in tensors), window)
    torch.testing.assert_close(found[:, 10:], second[:, 5:], rtol=0, atol=1e-12)
