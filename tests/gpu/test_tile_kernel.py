"""The Triton kernel for packed documents against float64, beside torch's own variable-length kernel; and that a step
does not make the host wait. The kernel also runs interpreted, see kernel_device.py."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import transformers
from kernel_device import DEVICE, INTERPRETED, dtypes, here, needs_cuda, runs_kernels
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from lockstep.backend.torch_backend import TorchBackend
from lockstep.model.attention import PackedLayout, segment_by_segment, tile_attention
from lockstep.types import Completion, Datum, LossSpec, OptimStep

pytestmark = [pytest.mark.gpu, runs_kernels]

LAYOUTS = here(
    {
        "many": PackedLayout((700, 37, 250, 5, 1, 31)),
        "one": PackedLayout((1024,)),
        "odd": PackedLayout((333,)),
        "tiny": PackedLayout((1,) * 40 + (2,) * 44),
        "a token": PackedLayout((1,)),
        "pairs": PackedLayout((300, 130, 205, 7, 128, 64), ((0, 0), (0, 170), (0, 0), (430, 5), (0, 0), (642, 64))),
        "a group": PackedLayout((20, 190, *[128] * 6, 77), ((0, 0), (0, 0), *[(20, 62)] * 7)),
    },
    # Tiles are of 64 rows and 32 or 64 keys: documents cross them, end with them and begin in them.
    {
        "many": PackedLayout((70, 33, 5, 1, 31)),
        "one": PackedLayout((128,)),
        "tiny": PackedLayout((1,) * 16 + (2,) * 17),
        "a token": PackedLayout((1,)),
        "pairs": PackedLayout((70, 30, 45, 7, 32), ((0, 0), (0, 65), (0, 0), (100, 5), (0, 0))),
        "a group": PackedLayout((20, 50, *[33] * 2, 7), ((0, 0), (0, 0), *[(20, 42)] * 3)),
    },
)
SHAPES = {
    "8 of 8": (8, 8, 64), "16 of 8": (16, 8, 128), "6 of 2": (6, 2, 32), "14 of 2": (14, 2, 64), "4 of 1": (4, 1, 16),
} if not INTERPRETED else {
    "1 of 1": (1, 1, 64), "2 of 1": (2, 1, 128), "4 of 2": (4, 2, 32), "3 of 1": (3, 1, 16), "8 of 1": (8, 1, 16),
}  # fmt: skip
GROUPED = here("16 of 8", "2 of 1")
NARROW = dtypes(torch.bfloat16)[0]
# Weights that are almost 1, as behind a single token, leave gradients that are differences of near numbers.
MOST = here({"few": 1e-2, "many": 5e-3}, {"few": 1e-5, "many": 2e-6})


def distance(found: Tensor, exact: Tensor) -> float:
    """Relative; of what should be nothing, absolute."""
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1.0))


def draw(layout: PackedLayout, shape: tuple[int, int, int], dtype: torch.dtype = NARROW) -> list[Tensor]:
    """Query, key, value and the gradient of the result, [T, heads, D]; laid out as the layers of a model lay them."""
    heads, key_heads, size = shape
    generator = torch.Generator(DEVICE).manual_seed(sum(layout.lengths) + heads)
    total = sum(layout.lengths)
    query, key, value, grad = (
        torch.randn(n, total, size, device=DEVICE, generator=generator).to(dtype).transpose(0, 1)
        for n in (heads, key_heads, key_heads, heads)
    )
    return [query, key.contiguous(), value, grad]


def exact_results(tensors: list[Tensor], layout: PackedLayout, scale: float) -> list[Tensor]:
    *inputs, grad = (t.double().transpose(0, 1)[None].contiguous() for t in tensors)
    leaves = [t.requires_grad_() for t in inputs]
    output = segment_by_segment(*leaves, scale, 0.0, None, layout)
    gradients = torch.autograd.grad(output, leaves, grad.transpose(1, 2))
    return [output[0].detach(), *(g[0].transpose(0, 1) for g in gradients)]


def tile_results(tensors: list[Tensor], layout: PackedLayout, scale: float) -> list[Tensor]:
    *inputs, grad = tensors
    leaves = [t.detach().requires_grad_() for t in inputs]
    visible = torch.from_numpy(layout.visible_keys()).to(DEVICE)
    output, _ = tile_attention(*leaves, visible, scale)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def library_results(tensors: list[Tensor], layout: PackedLayout, scale: float) -> list[Tensor]:
    *inputs, grad = tensors
    leaves = [t.detach().requires_grad_() for t in inputs]
    bounds = torch.tensor([0, *itertools.accumulate(layout.lengths)], dtype=torch.int32, device="cuda")
    longest = max(layout.lengths)
    output: Any = varlen_attn(*leaves, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0))
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_is_as_near_to_float64_as_bf16_allows(layout, shape) -> None:
    tensors = draw(layout, shape)
    for name, found, exact in zip(
        ("attended", "query", "key", "value"),
        tile_results(tensors, layout, 0.2),
        exact_results(tensors, layout, 0.2),
        strict=True,
    ):
        assert found.shape == exact.shape
        assert distance(found, exact) < MOST["few" if max(layout.lengths) < 3 else "many"], name


def random_layout(seed: int) -> PackedLayout:
    """Some prompts with several answers among other documents, of lengths on both sides of a tile's."""
    draw = random.Random(seed)
    lengths: list[int] = []
    shared: list[tuple[int, int]] = []
    prompt = (0, 0)
    for _ in range(draw.randint(2, 9)):
        start, length = sum(lengths), draw.choice([1, 2, 31, 32, 33, 63, 64, 65, draw.randint(3, 100)])
        if prompt[1] and draw.random() < 0.6:
            shared.append(prompt)
        else:
            shared.append((0, 0))
            prompt = (start, draw.randint(1, length))
        lengths.append(length)
    return PackedLayout(tuple(lengths), tuple(shared))


@pytest.mark.parametrize("seed", range(here(40, 5)))
def test_layouts_of_any_kind(seed: int) -> None:
    layout, shape = random_layout(seed), list(SHAPES.values())[seed % len(SHAPES)]
    tensors = draw(layout, shape)
    for found, exact in zip(tile_results(tensors, layout, 0.2), exact_results(tensors, layout, 0.2), strict=True):
        assert distance(found, exact) < 2 * MOST["few"], layout


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_no_further_from_float64_than_the_one_of_torch(dtype) -> None:
    layout = LAYOUTS["many"]
    tensors = draw(layout, SHAPES[GROUPED], dtype)
    results = (f(tensors, layout, 0.09) for f in (tile_results, library_results, exact_results))
    for found, library, exact in zip(*results, strict=True):
        assert distance(found, exact) < 1.05 * distance(library, exact)


def test_scores_of_any_size_stay_finite_and_the_same_inputs_give_the_same_bits() -> None:
    layout = LAYOUTS["pairs"]
    tensors = [t * 30 for t in draw(layout, SHAPES[GROUPED])]  # scores of some ten thousands
    first, second = (tile_results(tensors, layout, 1.0) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert bool(torch.isfinite(a).all())
        assert torch.equal(a, b)
    exact = exact_results(tensors, layout, 1.0)
    for place in (0, 3):  # gradients of query and key are differences of numbers that are almost the same
        assert distance(first[place], exact[place]) < here(2e-2, 2e-3)


@pytest.mark.parametrize("layout", [LAYOUTS["many"], LAYOUTS["a group"]], ids=["many", "a group"])
def test_no_text_sees_another(layout) -> None:
    tensors = draw(layout, SHAPES[GROUPED])
    before = tile_results(tensors, layout, 0.2)
    start = layout.lengths[0]
    changed = [torch.cat([t[:start] + 3, t[start:]]) for t in tensors]
    after = tile_results(changed, layout, 0.2)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[start:], b[start:])
        assert not torch.equal(a[:start], b[:start])


def test_segments_without_tokens_change_nothing() -> None:
    some = PackedLayout((40, 0, 33, 0), ((0, 0), (0, 9), (0, 9), (0, 0)))
    others = PackedLayout((40, 33), ((0, 0), (0, 9)))
    tensors = draw(others, SHAPES[GROUPED])
    for found, wanted in zip(tile_results(tensors, some, 0.2), tile_results(tensors, others, 0.2), strict=True):
        assert torch.equal(found, wanted)


def test_gradients_of_any_layout_are_read() -> None:
    layout = LAYOUTS["many"]
    query, key, value, _ = draw(layout, SHAPES[GROUPED])
    expanded = torch.ones((), dtype=query.dtype, device=DEVICE).expand(query.shape)
    found = tile_results([query, key, value, expanded], layout, 0.2)
    for own, other in zip(found, tile_results([query, key, value, expanded.contiguous()], layout, 0.2), strict=True):
        assert torch.equal(own, other)


# --- a step ---------------------------------------------------------------------------------------------------------


def make_backend() -> TorchBackend:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=5000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip
    return TorchBackend(
        transformers.AutoModelForCausalLM.from_config(config), precision="bf16", micro_batch_tokens=2048
    )


def rows(*lengths: int) -> list[Datum]:
    return [Datum([5], [Completion([(7 * i) % 999 for i in range(n - 1)], [1.0] * (n - 1))]) for n in lengths]


@needs_cuda
def test_the_host_never_waits_inside_a_step_and_new_lengths_compile_nothing() -> None:
    backend = make_backend()
    assert backend.policy.attends_in_tiles
    step = OptimStep(1e-4, max_grad_norm=1.0)
    backend.forward_backward(rows(700, 37, 250), LossSpec(scale=1e-3))
    backend.optim_step(step)
    backend.forward_backward(rows(600, 300, 20, 90), LossSpec(scale=1e-3))
    backend.optim_step(step)
    torch.cuda.synchronize()
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for lengths in ((650, 250, 100), (31,) * 30, (900, 20, 400)):
            result = backend.forward_backward(rows(*lengths), LossSpec(scale=1e-3))
            backend.optim_step(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    assert 0 < result.loss < 100
