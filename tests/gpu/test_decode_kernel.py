"""Attention of one new token on a GPU, against float64, for every shape that decoding meets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SHAPES = {
    "grouped": (64, 16, 8, 128, 512, 0),
    "a head of its own for each": (7, 4, 4, 64, 384, 0),
    "odd sizes": (3, 6, 2, 80, 333, 0),
    "a window": (16, 8, 2, 64, 1024, 100),
    "many share one head": (5, 48, 2, 96, 640, 0),
    "one row, split": (1, 16, 8, 128, 8192, 0),
    "few rows, split, with a window": (2, 8, 2, 256, 4096, 1500),
    "one token of room": (2, 2, 1, 16, 1, 0),
}


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
) -> Tensor:
    rows, tokens = (torch.arange(n, device=positions.device) for n in (len(positions), keys.shape[2]))
    keys[rows, :, positions], values[rows, :, positions] = key, value
    distance = positions[:, None] - tokens
    seen = (distance >= 0) & (distance < (window or keys.shape[2]))
    slots = torch.where(tokens < shared[:, None], sources[:, None], rows[:, None])  # [rows, tokens]
    q = query.double().unflatten(1, (keys.shape[1], -1))
    k, v = (cache[slots, :, tokens].transpose(1, 2).double() for cache in (keys, values))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None], scale=scale)
    return attended.reshape(query.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("sharing", [False, True], ids=["alone", "with a prompt in common"])
def test_each_row_attends_to_its_own_tokens(shape: tuple[int, ...], dtype: torch.dtype, sharing: bool) -> None:
    pytest.importorskip("triton")
    from lockstep.inference.kv_cache import decode_attention

    num_rows, num_heads, kv_heads, dim, capacity, window = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator).to(dtype)

    # As layers give them: heads and dimensions of one product, and a transposed view.
    joined = draw(num_rows, (num_heads + 2 * kv_heads) * dim)
    query, key, value = (
        part.unflatten(1, (-1, dim)) for part in joined.split([num_heads * dim, kv_heads * dim, kv_heads * dim], 1)
    )
    keys, values = draw(num_rows + 2, kv_heads, capacity, dim), draw(num_rows + 2, kv_heads, capacity, dim)
    positions = torch.randint(capacity, (num_rows,), device="cuda", generator=generator)
    positions[0], positions[-1] = 0, capacity - 1
    shared = torch.minimum(positions, torch.randint(capacity, (num_rows,), device="cuda", generator=generator))
    shared *= sharing
    sources = torch.full_like(shared, num_rows + 1)  # a slot of no row
    # What lies beyond a row's tokens must not be read, and neither its own place for those that it shares.
    tokens = torch.arange(capacity, device="cuda")
    unread = (tokens > positions[:, None]) | (tokens < shared[:, None])
    keys[:num_rows].masked_fill_(unread[:, None, :, None], float("nan"))
    values[:num_rows].masked_fill_(unread[:, None, :, None], float("nan"))
    known = [cache.nan_to_num() for cache in (keys, values)]
    places = (positions, sources, shared)
    wanted = exact(query, key, value, *known, *places, dim**-0.5, window)
    found = decode_attention(query, key, value, keys, values, *places, dim**-0.5, window)
    error = float((found.double() - wanted).norm() / wanted.norm())
    assert error < {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}[dtype]
    for cache, expected in zip((keys, values), known, strict=True):
        assert torch.equal(cache.nan_to_num(), expected)


def test_splitting_a_row_changes_rounding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from lockstep.inference import decode_kernel

    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 64, device="cuda") for heads in (8, 2, 2))
    keys, values = torch.randn(2, 2, 2, 4096, 64, device="cuda").unbind(0)
    for positions in ([5, 4095], [700, 0], [256, 257]):
        found = []
        for splits in (1, 2, 16, 64):
            monkeypatch.setattr(decode_kernel, "num_splits", lambda *_, splits=splits: splits)
            places = torch.tensor([positions, [1, 1], [0, min(positions[1], 99)]], device="cuda")
            found.append(decode_kernel.attend(query, key, value, keys.clone(), values.clone(), *places, 0.125, 0))
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)
