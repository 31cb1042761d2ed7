"""Attention of one new token, and drawing the next, against float64, for every shape that decoding meets: on a GPU, or
interpreted, see kernel_device.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_device import DEVICE, INTERPRETED, dtypes, here, runs_kernels
from torch import Tensor

from lockstep.inference.kv_cache import decode_attention, prompt_tiles
from lockstep.inference.token_sampling import Truncation, random_streams, sample_tokens, uniforms

pytestmark = [pytest.mark.gpu, runs_kernels]

# rows, heads, heads of keys, dim, capacity, window
SHAPES = here(
    {
        "grouped": (64, 16, 8, 128, 512, 0),
        "a head of its own for each": (7, 4, 4, 64, 384, 0),
        "odd sizes": (3, 6, 2, 80, 333, 0),
        "a window": (16, 8, 2, 64, 1024, 100),
        "many share one head": (5, 48, 2, 96, 640, 0),
        "one row, split": (1, 16, 8, 128, 8192, 0),
        "few rows, split, with a window": (2, 8, 2, 256, 4096, 1500),
        "one token of room": (2, 2, 1, 16, 1, 0),
        "eight query heads of each": (27, 16, 2, 64, 700, 0),
        "many rows": (256, 16, 8, 128, 256, 0),
    },
    {
        "grouped": (22, 2, 1, 16, 160, 0),
        "a head of its own for each": (5, 2, 2, 64, 140, 0),
        "odd sizes": (3, 3, 1, 80, 333, 0),
        "a window": (4, 2, 1, 16, 200, 50),
        "many share one head": (3, 24, 1, 16, 140, 0),
        "one row, split": (1, 2, 1, 128, 1024, 0),
        "few rows, split, with a window": (2, 4, 1, 16, 1024, 300),
        "one token of room": (2, 2, 1, 16, 1, 0),
        "eight query heads of each": (12, 8, 1, 16, 170, 0),
    },
)
CASES = [
    *((name, dtype) for name in SHAPES for dtype in dtypes(torch.float32, torch.bfloat16)),
    *([] if INTERPRETED else [("grouped", torch.float16)]),
]
GROUP_SIZES = (2, 1, 9, 8, 3, 17)  # of rows with the same prompt


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    sources: Tensor,
    shared: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    rows, tokens = (torch.arange(n, device=positions.device) for n in (len(positions), keys.shape[2]))
    keys[rows, :, positions], values[rows, :, positions] = key, value
    distance = positions[:, None] - tokens
    seen = (distance >= 0) & (distance < (window or keys.shape[2]))
    slots = torch.where(tokens < shared[:, None], sources[:, None], rows[:, None])  # [rows, tokens]
    q = query.double().unflatten(1, (keys.shape[1], -1))
    k, v = (cache[slots, :, tokens].transpose(1, 2).double() for cache in (keys, values))
    scores = q @ k.transpose(2, 3) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf).flatten(1, 2)
    beside = (
        torch.full_like(scores[..., :1], -torch.inf) if sinks is None else sinks.double()[:, None].expand(len(q), -1, 1)
    )
    weights = torch.cat([scores, beside], dim=-1).softmax(-1)[..., :-1].unflatten(1, q.shape[1:3])
    return (weights @ v).reshape(query.shape)


def share_prompts(positions: list[int]) -> dict[int, tuple[int, int]]:
    """Neighbours have as many tokens in common as the shortest has; some have fewer, and some none."""
    source_of, first = {}, 0
    for size in itertools.cycle(GROUP_SIZES):
        rows = range(first, min(first + size, len(positions)))
        if not rows:
            return source_of
        length = min(positions[row] for row in rows)
        source_of |= dict.fromkeys(rows[1:], (first, length))
        if len(rows) == 9:
            source_of[first + 4] = (first, length // 2)
        first += size
    raise AssertionError


@pytest.mark.parametrize("kind", ["plain", "caps and sinks"])
@pytest.mark.parametrize("sharing", ["alone", "with prompts in common", "in tiles"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_each_row_attends_to_its_own_tokens(
    name: str, dtype: torch.dtype, sharing: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.inference import decode_kernel

    shape, shares, tiled = SHAPES[name], sharing != "alone", sharing == "in tiles"
    monkeypatch.setattr(decode_kernel, "_MIN_TILED", 0 if tiled else 1 << 60)
    monkeypatch.setattr(decode_kernel, "_MIN_TILE_TOKENS", 64)
    num_rows, num_heads, kv_heads, dim, capacity, window = shape
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device=DEVICE, generator=generator).to(dtype)

    # As layers give them: heads and dimensions of one product, and a transposed view.
    joined = draw(num_rows, (num_heads + 2 * kv_heads) * dim)
    query, key, value = (
        part.unflatten(1, (-1, dim)) for part in joined.split([num_heads * dim, kv_heads * dim, kv_heads * dim], 1)
    )
    keys, values = draw(num_rows + 2, kv_heads, capacity, dim), draw(num_rows + 2, kv_heads, capacity, dim)
    positions = torch.randint(capacity, (num_rows,), device=DEVICE, generator=generator)
    positions[0], positions[-1] = capacity - 1 if shares else 0, capacity - 1
    source_of = share_prompts(positions.tolist()) if shares else {}
    table, tiles = (t.to(DEVICE) for t in prompt_tiles(source_of, num_rows, max(num_rows // 2, 1)))
    sources, shared, covered = table.unbind(0)
    if tiled and num_rows > 11:
        assert (tiles[:, 1] > 0).any()
    # What lies beyond a row's tokens must not be read, and neither its own place for those that it shares.
    tokens = torch.arange(capacity, device=DEVICE)
    unread = (tokens > positions[:, None]) | (tokens < shared[:, None])
    keys[:num_rows].masked_fill_(unread[:, None, :, None], float("nan"))
    values[:num_rows].masked_fill_(unread[:, None, :, None], float("nan"))
    known = [cache.nan_to_num() for cache in (keys, values)]
    how = (dim**-0.5, window, 0.0, None) if kind == "plain" else (dim**-0.5, window, 1.5, 3 * draw(num_heads))
    wanted = exact(query, key, value, *known, positions, sources, shared, *how)
    places = (positions, sources, shared, covered, tiles)
    found = decode_attention(query, key, value, keys, values, *places, *how)
    error = float((found.double() - wanted).norm() / wanted.norm())
    assert error < {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}[dtype]
    for cache, expected in zip((keys, values), known, strict=True):
        assert torch.equal(cache.nan_to_num(), expected)


def test_splitting_a_row_changes_rounding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.inference import decode_kernel

    monkeypatch.setattr(decode_kernel, "_MIN_TILED", 0)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 64, device=DEVICE) for heads in (8, 2, 2))
    capacity = here(4096, 400)
    keys, values = torch.randn(2, 2, 2, capacity, 64, device=DEVICE).unbind(0)
    for positions in ([5, capacity - 1], [300, 0], [256, 257]):
        found = []
        for splits in here((1, 2, 16, 64), (1, 2, 16)):
            monkeypatch.setattr(decode_kernel, "num_splits", lambda *_, splits=splits: splits)
            for source_of in ({}, {0: (1, min(positions))}):
                table, tiles = (t.to(DEVICE) for t in prompt_tiles(source_of, 2, 1))
                if source_of:
                    keys[0, :, : min(positions)] = keys[1, :, : min(positions)]
                    values[0, :, : min(positions)] = values[1, :, : min(positions)]
                places = (torch.tensor(positions, device=DEVICE), *table, tiles)
                found.append(decode_kernel.attend(query, key, value, keys.clone(), values.clone(), *places, 0.125, 0))
        for other in found[2:]:
            torch.testing.assert_close(other, found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", dtypes(torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("vocabulary", here([100, 4096, 49152, 151936], [100, 4096, 9000]))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_are_drawn_as_in_float64(vocabulary: int, dtype: torch.dtype, temperature: float) -> None:
    from lockstep.inference import draw_kernel

    torch.manual_seed(0)
    logits = (3 * torch.randn(64, vocabulary, device=DEVICE)).to(dtype)
    logits[1, : vocabulary // 2] = logits[2, vocabulary // 2 :] = float("-inf")
    logits[3, vocabulary // 4 : vocabulary // 2] = logits[4, 1:] = float("-inf")
    streams, positions = random_streams(5, list(range(64)), [0] * 64).to(DEVICE), 13 * torch.arange(64, device=DEVICE)
    tokens, logprobs = draw_kernel.draw(logits, streams, positions, 1 / temperature)
    random = uniforms(streams, positions + 1)
    expected = sample_tokens(logits.double(), Truncation(temperature), random)
    # A number that falls between two tokens, to within float32's rounding, may give either.
    assert (tokens != expected[0]).sum() <= 1
    exact_logprobs = (logits.double() / temperature).log_softmax(1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact_logprobs, rtol=1e-6, atol=2e-5)
    assert logprobs.isfinite().all()
    for rows in (slice(0, 1), slice(5, 12)):  # in any batch the same
        again = draw_kernel.draw(logits[rows], streams[rows], positions[rows], 1 / temperature)
        assert torch.equal(again[0], tokens[rows])
        assert torch.equal(again[1], logprobs[rows])
    logits[0], logits[5, 7] = float("nan"), float("nan")
    tokens, logprobs = draw_kernel.draw(logits, streams, positions, 1 / temperature)
    assert logprobs[[0, 5]].isnan().all()
    assert bool(((tokens >= 0) & (tokens < vocabulary)).all())


def test_tokens_come_as_often_as_they_are_likely() -> None:
    """By the kernel's own random numbers. Nine tokens are possible, on both sides of the end of a chunk of 4096."""
    from lockstep.inference import draw_kernel

    possible = torch.tensor([0, 3, 17, 4000, 4095, 4096, 4097, 4500, 4999], device=DEVICE)
    weights = torch.tensor([0.1, 0.02, 0.2, 0.08, 0.1, 0.15, 0.05, 0.1, 0.2], device=DEVICE, dtype=torch.float64)
    logits = torch.full((5000,), -torch.inf, device=DEVICE)
    logits[possible] = (weights.log() + 300).float()
    num_rows = here(20_000, 200)
    streams = random_streams(3, list(range(num_rows)), [1] * num_rows).to(DEVICE)
    positions = torch.arange(num_rows, device=DEVICE) % 7
    tokens, logprobs = draw_kernel.draw(logits.expand(num_rows, -1), streams, positions, 1.0)
    counts = tokens.bincount(minlength=5000)[possible]
    assert int(counts.sum()) == num_rows, "a token that is not possible was drawn"
    expected = num_rows * weights
    chi_squared = float(((counts - expected).square() / expected).sum())
    assert (
        chi_squared < 26.1
    )  # of nine kinds a larger one comes once in a thousand times; the draws are always the same
    place = torch.searchsorted(possible, tokens)
    torch.testing.assert_close(logprobs.double(), weights.log()[place], rtol=0, atol=1e-4)


def test_a_row_in_which_nothing_is_possible_says_so() -> None:
    from lockstep.inference import draw_kernel

    logits = torch.zeros(3, 5000, device=DEVICE)
    logits[1], logits[2, 4321] = -torch.inf, torch.inf
    zeros = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    tokens, logprobs = draw_kernel.draw(logits, zeros, zeros, 1.0)
    assert logprobs.isnan().tolist() == [False, True, True]
    assert bool(((tokens >= 0) & (tokens < 5000)).all())


@pytest.mark.parametrize("size", [1e-4, 1e2])
def test_scores_of_any_size_are_attended_to(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to some ten thousands: then one token takes all of the attention."""
    from lockstep.inference import decode_kernel

    monkeypatch.setattr(decode_kernel, "_MIN_TILED", 0)
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, heads, 16, device=DEVICE) for heads in (4, 2, 2))
    keys, values = torch.randn(2, 3, 2, 300, 16, device=DEVICE).unbind(0)
    query, keys = size * query, size * keys
    positions = torch.tensor([299, 290, 5], device=DEVICE)
    table, tiles = (t.to(DEVICE) for t in prompt_tiles({1: (0, 280)}, 3, 2))
    how = (1.0, 0, 0.0, None)
    wanted = exact(query, key, value, keys.clone(), values.clone(), positions, table[0], table[1], *how)
    found = decode_attention(query, key, value, keys, values, positions, *table, tiles, *how)
    assert float((found.double() - wanted).norm() / wanted.norm()) < (1e-6 if size < 1 else 1e-2)
