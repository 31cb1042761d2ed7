"""Tensors held block by block as places in a table of values: NF4 for frozen weights, 8 bits for optimizer states.

Values, packing and double quantisation are those of bitsandbytes (Dettmers et al., 8-bit Optimizers via Block-wise
Quantization, 2021; QLoRA, 2023), so that its checkpoints and ours mean the same.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

NF4_BLOCK = 64  # weights with one largest value
SCALE_BLOCK = 256  # such values with one largest value of their own
# Quantiles of the normal distribution, with an exact zero (QLoRA, appendix E).
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class Blocks(NamedTuple):
    """Values as uint8 places in a table, [N]; the largest magnitude of each block, float32."""

    codes: Tensor
    largest: Tensor


class Nf4(NamedTuple):
    """A tensor of N weights. Its blocks' largest magnitudes are places in the eight-bit table, less their mean."""

    codes: Tensor
    """uint8 [N / 2], two weights in each, the first in the upper half."""
    block_codes: Tensor
    """uint8 [N / 64]."""
    block_scales: Tensor
    """float32 [N / 64 / 256]."""
    block_mean: Tensor
    """float32 [1]."""


def quantise_nf4(weight: Tensor) -> Nf4:
    """On the weight's own device, with the same result on all."""
    blocks = quantise_blocks(weight, nf4_table(weight.device), NF4_BLOCK)
    codes = blocks.codes
    if len(codes) % 2:
        codes = torch.cat([codes, codes.new_zeros(1)])
    packed = (codes[::2] << 4) | codes[1::2]
    largest = blocks.largest.cpu()  # their mean is a sum, whose order differs between devices
    mean = largest.mean()
    scales = quantise_blocks(largest - mean, dynamic_table(torch.device("cpu")), SCALE_BLOCK)
    return Nf4(packed, *(part.to(weight.device) for part in (scales.codes, scales.largest, mean.reshape(1))))


def dequantise_nf4(stored: Nf4, num_values: int) -> Tensor:
    """float32 [num_values]."""
    largest = largest_of_nf4(stored)
    values = nf4_pairs(stored.codes.device).index_select(0, stored.codes.int()).flatten()
    whole = len(values) // NF4_BLOCK * NF4_BLOCK
    values[:whole].view(-1, NF4_BLOCK).mul_(largest[: whole // NF4_BLOCK, None])
    values[whole:].mul_(largest[-1])
    return values[:num_values]


def largest_of_nf4(stored: Nf4) -> Tensor:
    """float32 [N / 64]: the largest magnitude of each block."""
    blocks = Blocks(stored.block_codes, stored.block_scales)
    return dequantise_blocks(blocks, dynamic_table(stored.codes.device), SCALE_BLOCK).add_(stored.block_mean)


def quantise_blocks(values: Tensor, table: Tensor, size: int) -> Blocks:
    """To the nearest of the table, which is sorted and ends at 1."""
    flat = values.detach().reshape(-1).float()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)
    largest = padded.abs().amax(dim=1)
    scaled = padded / torch.where(largest > 0, largest, 1.0)[:, None]
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8)
    return Blocks(codes.flatten()[: len(flat)], largest)


def dequantise_blocks(blocks: Blocks, table: Tensor, size: int) -> Tensor:
    """float32 [N]."""
    values = table.index_select(0, blocks.codes.flatten().int())
    whole = len(values) // size * size
    values[:whole].view(-1, size).mul_(blocks.largest[: whole // size, None])
    if whole < len(values):
        values[whole:].mul_(blocks.largest[-1])
    return values


@functools.cache
def nf4_table(device: torch.device) -> Tensor:
    return torch.tensor(NF4_VALUES, device=device)


@functools.cache
def nf4_pairs(device: torch.device) -> Tensor:
    """[256, 2]: the two weights of every byte."""
    table = nf4_table(device)
    return torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)


@functools.cache
def dynamic_table(device: torch.device, *, signed: bool = True) -> Tensor:
    """[256] sorted values: seven decades, each more finely divided than the one below it."""
    values = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        means = ((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += [*means, *(-value for value in means if signed)]
    return torch.tensor(sorted(values), device=device)
