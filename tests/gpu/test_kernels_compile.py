"""Every kernel compiled for real GPUs on a machine that has none: in bf16, which no interpreter computes, down to
machine code, with the shared memory of such a GPU. Where there is one, the other tests of this folder show as much."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_device import INTERPRETED

from lockstep.model.attention import PackedLayout
from lockstep.model.codebooks import quantise_nf4
from lockstep.model.quantised import quantise_stack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("triton") is None or INTERPRETED or torch.cuda.is_available(), reason="needs Triton and no GPU"
    ),
]
# Compute capability, and bytes of shared memory that one program may have there.
GPUS = {"A100": (80, 166_912), "H200": (90, 232_448), "RTX 5090": (120, 101_376)}
BF16 = torch.bfloat16


class Compiled(dict[str, list[Any]]):
    """By name, what each kernel was compiled to."""

    capability: int


@pytest.fixture(params=GPUS)
def compiled(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """Kernels are compiled for that GPU instead of being run; shared memory is checked at the end."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    capability, most_shared = GPUS[request.param]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found, run = Compiled(), JITFunction.run
    found.capability = capability

    def compile_only(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(function, *arguments, grid=grid, warmup=True, **options)
        found.setdefault(function.__name__, []).append(kernel)
        return kernel

    monkeypatch.setattr(JITFunction, "run", compile_only)
    target = GPUTarget("cuda", capability, 32)
    driver.set_active(
        SimpleNamespace(
            # Kernels are remembered by device.
            get_current_device=lambda: capability,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: target,
        )
    )
    yield found  # without a GPU there is no driver to put back
    assert found
    for name, kernels in found.items():
        for kernel in kernels:
            assert kernel.asm["cubin"], name
            assert kernel.metadata.shared <= most_shared, name


@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 2, 128), (7, 1, 16)])
def test_packed_attention(compiled: Compiled, heads: int, key_heads: int, dim: int) -> None:
    from lockstep.model import packed_kernel

    query, key = torch.zeros(100, heads, dim, dtype=BF16), torch.zeros(100, key_heads, dim, dtype=BF16)
    for layout in (PackedLayout((70, 30)), PackedLayout((70, 30), ((0, 0), (0, 20)))):
        visible = torch.from_numpy(layout.visible_keys())
        attended, norms = packed_kernel.forward(query, key, key, visible, 0.1)
        packed_kernel.backward(query, query, key, key, attended, norms, visible, 0.1)
    assert {name: len(kernels) for name, kernels in compiled.items()} == {"_forward": 2, "_d_query": 2, "_d_key": 2}


def test_the_head_experts_and_quantised_weights(compiled: Compiled) -> None:
    from lockstep.model import expert_kernel, fp8_kernel, head_kernel, nf4_kernel

    logits, targets, values = torch.zeros(4, 5000, dtype=BF16), torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    head_kernel.measure(logits, targets, 1.0, None, facts=True)
    head_kernel.logprobs_and_gradient(logits, targets, values, 0.5, 5.0, (values, values))
    rows, ends = torch.zeros(4, 64, dtype=BF16), torch.tensor([1, 4], dtype=torch.int32)
    head_kernel.add_rows(rows, targets, 3)
    expert_kernel.take_rows(rows, targets, 1)
    expert_kernel.sum_rows(rows, targets, 2)
    for rank in (8, 128):
        narrow, matrices = torch.zeros(4, rank, dtype=BF16), torch.zeros(2, rank, 64, dtype=BF16)
        expert_kernel.add_narrow_product(rows, narrow, matrices, ends)
    nf4_kernel.dequantise(quantise_nf4(torch.randn(5, 30)), 5, 30, BF16)
    nf4_kernel.dequantise_stack(quantise_stack(torch.randn(2, 5, 30)), ends, BF16)
    fp8_kernel.turn(torch.zeros(70, 20, dtype=torch.uint8))
    names = {"_logprob_kernel", "_add_rows_kernel", "_take", "_sum", "_add_narrow", "_dequantise", "_dequantise_used"}
    if compiled.capability >= 89:  # where products of FP8 are
        fp8_kernel.quantise_rows(logits, torch.zeros(5000))
        names.add("_quantise")
    assert set(compiled) == names | {"_turn"}


def test_a_decoding_step(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.inference import decode_kernel, draw_kernel

    places, tiles = torch.zeros(4, dtype=torch.int64), torch.zeros(2, 10, dtype=torch.int64)
    draw_kernel.draw(torch.zeros(4, 5000, dtype=BF16), places, places, 1.0)
    cases = [(16, 8, 128, 0, False), (16, 8, 128, 0, True), (8, 2, 256, 100, False)]
    for heads, key_heads, dim, window, tiled in cases:
        monkeypatch.setattr(decode_kernel, "_MIN_TILED", 0 if tiled else 1 << 60)
        query, key = torch.zeros(4, heads, dim, dtype=BF16), torch.zeros(4, key_heads, dim, dtype=BF16)
        keys, values = torch.zeros(2, 4, key_heads, 512, dim, dtype=BF16)
        bounds = (2.0, torch.zeros(heads)) if window else (0.0, None)
        decode_kernel.attend(query, key, key, keys, values, *[places] * 4, tiles, 0.1, window, *bounds)
    assert set(compiled) == {"_sum_chunks", "_pick", "_attend", "_combine"}
