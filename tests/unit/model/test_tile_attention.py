"""The kernel of our own for packed documents: what it is told, and how it is called, with a plain CPU kernel in its
place; the kernel itself is compared with float64 on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from equivalence.families import build, in_float64
from equivalence.plain import make_model
from torch import Tensor, nn
from transformers import masking_utils

from lockstep.backend.build import recomputed
from lockstep.backend.torch_backend import TorchBackend
from lockstep.model import attention
from lockstep.model.attention import PackedLayout, packed_attention, tile_attention, tile_attention_backward
from lockstep.model.policy import Policy
from lockstep.types import Completion, Datum, LossSpec

LAYOUTS = {
    "many": PackedLayout((7, 1, 12, 4)),
    "one": PackedLayout((9,)),
    "pairs": PackedLayout((8, 5, 6, 7, 1), ((0, 0), (0, 3), (0, 0), (13, 6), (0, 0))),
    "prompts of one text": PackedLayout((9, 3, 4, 2), ((0, 0), (0, 3), (0, 7), (2, 5))),
    "a group": PackedLayout((2, 9, 4, 1, 5), ((0, 0), (0, 0), (2, 5), (2, 5), (2, 5))),
}


def visible_mask(visible: Tensor) -> Tensor:
    """[queries, keys] as the kernel reads it."""
    first, _, *prompts = visible[:, :, None]
    places = torch.arange(visible.shape[1])
    own = (places >= first) & (places <= places[:, None])
    return own | ((places >= prompts[0]) & (places < prompts[1])) if prompts else own


calls: list[str] = []


def plain_weights(query: Tensor, key: Tensor, visible: Tensor, scale: float) -> Tensor:
    """[heads, queries, keys]."""
    copies = query.shape[1] // key.shape[1]
    scores = scale * torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(copies, 1))
    return scores.masked_fill(~visible_mask(visible), -torch.inf)


@tile_attention.register_kernel("cpu")
def _(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    calls.append("tiles")
    scores = plain_weights(query, key, visible, scale)
    values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    norms = torch.logsumexp(scores, -1) / np.log(2.0)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).contiguous(), norms.float()


@tile_attention_backward.register_kernel("cpu")
def _(grad, query, key, value, attended, norms, visible, scale) -> tuple[Tensor, Tensor, Tensor]:
    calls.append("tiles backward")
    copies = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(copies, 1) for t in (key, value))
    weights = plain_weights(query, key, visible, scale).softmax(-1)
    d_weights = torch.einsum("qhd,khd->hqk", grad, values)
    d_scores = scale * weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
    d_keys, d_values = torch.einsum("hqk,qhd->khd", d_scores, query), torch.einsum("hqk,qhd->khd", weights, grad)
    d_key, d_value = (t.unflatten(1, (-1, copies)).sum(2) for t in (d_keys, d_values))
    return torch.einsum("hqk,khd->qhd", d_scores, keys).contiguous(), d_key, d_value


def draw(num_tokens: int, heads: tuple[int, int] = (4, 2)) -> list[Tensor]:
    torch.manual_seed(num_tokens)
    return [
        torch.randn(1, h, num_tokens, 8, dtype=torch.float64, requires_grad=True) for h in (heads[0], *[heads[1]] * 2)
    ]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_token_sees_its_own_text_up_to_itself(layout: PackedLayout) -> None:
    total = sum(layout.lengths)
    visible = torch.from_numpy(layout.visible_keys())
    assert visible.dtype == torch.int32
    expected = torch.zeros(total, total, dtype=torch.bool)
    start = 0
    for number, length in enumerate(layout.lengths):
        prompt, size = layout.shared[number] if layout.shared else (0, 0)
        for t in range(start, start + length):
            expected[t, prompt : prompt + size] = True
            expected[t, start : t + 1] = True
        start += length
    mask = visible_mask(visible)
    assert torch.equal(mask, expected)
    last = torch.where(mask, torch.arange(total)[:, None], -1).amax(0)
    assert bool((visible[1] > last).all())  # nobody that sees a key comes after this
    assert int(visible[1].max()) == total


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=["grouped", "all"])
def test_attention_and_gradients_are_those_of_one_segment_after_another(layout, heads) -> None:
    tensors = draw(sum(layout.lengths), heads)
    visible = torch.from_numpy(layout.visible_keys())
    for scaling in (None, 0.7):
        expected, _ = packed_attention(nn.Identity(), *tensors, None, scaling=scaling, packed_layout=layout)
        found, _ = packed_attention(nn.Identity(), *tensors, None, scaling=scaling, packed_visible=visible)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        above = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, tensors, above)
        for own, other in zip(torch.autograd.grad(found, tensors, above), wanted, strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=1e-10)


def test_dropout_is_refused_and_a_window_takes_the_other_kernel() -> None:
    layout, tensors = LAYOUTS["many"], draw(24)
    visible = torch.from_numpy(layout.visible_keys())
    with pytest.raises(ValueError, match="attention dropout is not available"):
        packed_attention(nn.Identity(), *tensors, None, dropout=0.1, packed_visible=visible)
    with pytest.raises(ValueError, match="did not pass the document lengths"):
        packed_attention(nn.Identity(), *tensors, None, sliding_window=3, packed_visible=visible)


def test_what_the_kernel_does_not_take_and_where_it_fails_is_named(monkeypatch) -> None:
    def problem(size: int) -> str | None:
        return attention.tiles_problem(torch.device("cpu"), torch.float64, size)

    monkeypatch.setattr(attention, "find_spec", lambda _name: object())
    assert problem(64) is None
    assert "needs heads of 16, 32, 64 or 128, not 80" in str(problem(80))
    monkeypatch.setattr(attention, "tile_attention", lambda *_: 1 / 0)
    assert problem(64) == "fails on this GPU (ZeroDivisionError: division by zero)"
    monkeypatch.setattr(attention, "find_spec", lambda _name: None)
    assert problem(64) == "needs Triton"


def test_values_of_another_size_than_keys_are_refused() -> None:
    query, key, value = draw(9)
    visible = torch.from_numpy(LAYOUTS["one"].visible_keys())
    with pytest.raises(ValueError, match="keys of 8 and values of 4"):
        packed_attention(nn.Identity(), query, key, value[..., :4], None, packed_visible=visible)


def test_attention_is_not_computed_again_where_products_are_kept(monkeypatch) -> None:
    layout = LAYOUTS["many"]
    visible = torch.from_numpy(layout.visible_keys())
    policy = Policy(make_model("llama", lora=False))

    def layer(*tensors: Tensor) -> Tensor:
        return packed_attention(nn.Identity(), *(t * 1.5 for t in tensors), None, packed_visible=visible)[0].sin()

    for selective, expected in ((True, 1), (False, 2)):
        calls.clear()
        output: Any = recomputed(layer, policy, selective=selective)(*draw(24))
        output.sum().backward()
        assert calls.count("tiles") == expected
        assert calls.count("tiles backward") == 1
    assert torch.ops.torch_attn._varlen_attn.default in attention.KERNELS


def test_transformers_does_not_look_for_documents_in_the_positions(monkeypatch) -> None:
    """The host would wait for the GPU in every step."""
    backend = TorchBackend(make_model("llama", lora=False), micro_batch_tokens=64, precision="fp64", device="cpu")

    def look(_positions: Tensor) -> None:
        raise AssertionError("looked")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", look)
    assert backend.forward_backward(rows(9, 4, 6), LossSpec()).loss > 0


# --- what is found out before the first step is not remembered ------------------------------------------------------


@pytest.fixture
def as_if_fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused ways on a CPU: which were taken, in order."""
    taken: list[str] = []

    def variable(q, k, v, scaling, window, boundaries, keys, _max_length):
        taken.append("variable" if torch.equal(boundaries, keys) else "shared")
        outputs = []
        for i, (a, b) in enumerate(itertools.pairwise(boundaries.tolist())):
            if b > a:
                own = [t[:, :, keys[i] : keys[i + 1]] for t in (k, v)]
                before = int(keys[i + 1] - keys[i]) - (b - a)
                mask = torch.ones(b - a, before + b - a, dtype=torch.bool).tril(before)
                attend = torch.nn.functional.scaled_dot_product_attention
                found = attend(q[:, :, a:b], *own, attn_mask=mask, scale=scaling, enable_gqa=True)
                outputs.append(found.transpose(1, 2))
        return torch.cat(outputs, dim=1)

    def equal_length(q, k, v, scaling, dropout, length):
        taken.append("equal")
        layout = PackedLayout((length,) * (q.shape[2] // length))
        return attention.segment_by_segment(q, k, v, scaling, dropout, None, layout)

    monkeypatch.setattr(attention, "variable_length_problem", lambda *_: None)
    monkeypatch.setattr(attention, "tiles_problem", lambda *_: "not here")
    monkeypatch.setattr(attention, "_variable_length", variable)
    monkeypatch.setattr(attention, "_equal_length", equal_length)
    return taken


def rows(*lengths: int) -> list[Datum]:
    return [Datum([5], [Completion([(7 * i) % 60 for i in range(n - 1)], [1.0] * (n - 1))]) for n in lengths]


def test_documents_of_one_length_take_the_fast_way_after_the_checks(as_if_fused: list[str]) -> None:
    backend = TorchBackend(make_model("llama", lora=False), micro_batch_tokens=64, precision="fp64", device="cpu")
    assert "shared" in as_if_fused  # the checks look at every way
    as_if_fused.clear()
    backend.forward_backward(rows(8, 8, 8), LossSpec())
    assert set(as_if_fused) == {"equal"}
    as_if_fused.clear()
    backend.forward_backward(rows(8, 8, 6), LossSpec())
    assert set(as_if_fused) == {"variable"}  # no keys are gathered where nothing is shared


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_hybrids_take_the_fast_way_around_what_keeps_a_state(family: str, as_if_fused: list[str]) -> None:
    """Rows are described differently from the checks on, and from row to row: loss and gradients stay those of single
    documents."""
    shared = Datum([5, 9, 4], [Completion([(n * i) % 60 for i in range(1, 8)], [1.0] * 7) for n in (7, 11)])
    batches = [rows(8, 8, 8), rows(8, 3, 6), [*rows(5), shared]]
    with in_float64():
        backend = TorchBackend(build(family), micro_batch_tokens=64, precision="fp64", device="cpu")
        assert backend.policy.attends_packed
        assert backend.policy.variable_length
        assert backend.policy.mixers.parts
        losses = [backend.forward_backward(batch, LossSpec()).loss for batch in batches]
        assert {"equal", "variable", "shared"} <= set(as_if_fused)
        plain = TorchBackend(build(family), micro_batch_tokens=64, precision="fp64", device="cpu")
        plain.policy.stop_packing()
        alone = [[Datum(d.prompt, [c]) for d in batch for c in d.completions] for batch in batches]
        expected = [sum(plain.forward_backward([datum], LossSpec()).loss for datum in batch) for batch in alone]
    assert losses == pytest.approx(expected, abs=1e-10)
    for name, parameter in backend.parameters().items():
        other = plain.parameters()[name].grad
        assert (parameter.grad is None) == (other is None)
        if parameter.grad is not None and other is not None:
            scale = float(other.abs().max()) + 1e-30
            assert float((parameter.grad - other).abs().max()) < 1e-9 * max(scale, 1.0), name
