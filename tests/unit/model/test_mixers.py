"""Parts that mix tokens compute each document of a row alone, and are found by what they do."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from equivalence.families import build, in_float64
from equivalence.plain import make_batch, plain_loss, scale_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.backend.torch_backend import TorchBackend
from lockstep.model.attention import PackedLayout
from lockstep.model.mixers import EachDocument, Leaf, Search, TokenMixers
from lockstep.parallel.group import ProcessGroup
from lockstep.types import LossSpec

ONE = ProcessGroup(0, 1, torch.device("cpu"))
TOKENS, PAIRS = Leaf((1,), structural=False), Leaf((0, 1), structural=True)


class RunningSum(nn.Module):
    """A state that goes from token to token."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.cumsum(1)


class Places(nn.Module):
    """Depends on the place in a row, and leaks nothing."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.arange(1.0, 1 + hidden.shape[1])[:, None]


class Masked(nn.Module):
    def forward(self, hidden: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = mask.to(hidden.dtype)
        return weights @ hidden, weights


class Sideways(nn.Module):
    """A state that goes from row to row of a batch."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.cumsum(1) + hidden.cumsum(0)


@pytest.mark.parametrize("batches", [False, True])
def test_each_document_starts_anew_and_continues_its_prompt(batches: bool) -> None:
    part, mixers = RunningSum(), TokenMixers()
    mixers.parts[part] = EachDocument(mixers, part, [TOKENS], [TOKENS], batches=batches)
    row = torch.ones(1, 9, 1)
    with mixers.documents(PackedLayout((4, 2, 3), ((0, 0), (0, 0), (0, 2)))):
        assert part(row)[0, :, 0].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 5]
    assert part(row)[0, :, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    mixers.clear()
    assert "forward" not in part.__dict__


class Told(nn.Module):
    """Adds what it is told about the row's attention."""

    def forward(self, hidden: Tensor, **told: Any) -> Tensor:
        return hidden.cumsum(1) + sum(value for name, value in told.items() if name.startswith("packed_"))


@pytest.mark.parametrize("batches", [False, True])
def test_what_attention_is_told_of_a_row_may_change_from_row_to_row(batches: bool) -> None:
    """As on a GPU, where rows whose prompts are shared are described by more tensors. A document alone is told its own;
    what makes batches attends to nothing."""
    part, mixers = Told(), TokenMixers()

    def tell(layout: PackedLayout) -> dict[str, float]:
        return {"packed_length": 0.5}

    mixers.parts[part] = EachDocument(mixers, part, [TOKENS], [TOKENS], tell, batches=batches)
    with mixers.documents(PackedLayout((2, 3))):
        for told in ({}, {"packed_visible": 7.0}, {"packed_visible": 7.0, "packed_keys": 9.0}):
            own = 0.5 if told and not batches else 0.0
            assert (part(torch.ones(1, 5, 1), **told)[0, :, 0] - own).tolist() == [1, 2, 1, 2, 3]


def test_a_mask_is_that_of_a_document_at_the_start_of_a_row() -> None:
    part, mixers = Masked(), TokenMixers()
    mixers.parts[part] = EachDocument(mixers, part, [TOKENS, PAIRS], [TOKENS, Leaf((0, 1), structural=False)])
    mask = torch.ones(5, 5).tril()
    with mixers.documents(PackedLayout((2, 3))):
        hidden, weights = part(torch.ones(1, 5, 1), mask=mask)
    assert hidden[0, :, 0].tolist() == [1, 2, 1, 2, 3]
    assert weights is None


@pytest.mark.parametrize(("kind", "is_found"), [(RunningSum, True), (Places, True), (nn.Tanh, False)])
def test_parts_are_found_by_what_they_do(kind: type[nn.Module], is_found: bool) -> None:
    part, mixers = kind(), TokenMixers()

    def run(lengths: tuple[int, int], number: int) -> None:
        part(torch.sin(torch.arange(float(sum(lengths)))[None, :, None] + number))

    Search(mixers, run, lambda layout: {}, 1e-6).find([part])
    assert (part in mixers.parts) == is_found


@pytest.mark.parametrize(("kind", "batches"), [(RunningSum, True), (Sideways, False)])
def test_only_parts_whose_rows_are_independent_get_batches(kind: type[nn.Module], batches: bool) -> None:
    part, mixers = kind(), TokenMixers()
    Search(mixers, lambda lengths, number: part(torch.rand(1, sum(lengths), 3)), lambda layout: {}, 1e-6).find([part])
    assert mixers.parts[part].batches == batches


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_batches_give_what_each_document_gives(data: st.DataObject) -> None:
    """Documents of any lengths, answers that share a prompt; calls are few, and little is computed twice."""
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=2, max_size=12))
    prompt = data.draw(st.integers(0, lengths[0]))
    shared = tuple((0, prompt) if prompt and data.draw(st.booleans()) and i else (0, 0) for i in range(len(lengths)))
    layout, row = PackedLayout(tuple(lengths), shared), torch.randn(1, sum(lengths), 2, dtype=torch.float64)
    found, sizes = [], []
    for batches in (False, True):
        part, mixers = RunningSum(), TokenMixers()
        mixers.parts[part] = EachDocument(mixers, part, [TOKENS], [TOKENS], batches=batches)
        own, x = mixers.parts[part].own, row.clone().requires_grad_()
        mixers.parts[part].own = lambda hidden, own=own: sizes.append(hidden.shape[:2].numel()) or own(hidden)
        with mixers.documents(layout):
            y = part(x)
        found.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
        if not batches:
            least, num_calls = sum(sizes), len(sizes)
            sizes.clear()
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    assert sum(sizes) <= 1.25 * least + 64 * len(lengths)
    assert len(sizes) <= num_calls


def backend_of(family: str, **settings: Any) -> TorchBackend:
    return TorchBackend(build(family), micro_batch_tokens=96, precision="fp64", group=ONE, **settings)


def gradients_of(backend: TorchBackend) -> Tensor:
    batch = make_batch(rows=5)
    backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
    return torch.cat([p.grad.flatten() for p in backend.parameters().values() if p.grad is not None])


@functools.cache
def plain_gradients(family: str) -> Tensor:
    model, batch = build(family), make_batch(rows=5)
    plain_loss(model, batch, scale_of(batch)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_a_hybrid_makes_the_plain_step() -> None:
    with in_float64():
        backend = backend_of("lfm2")
        assert backend.policy.mixers.names == ["Lfm2ShortConv"]
        torch.testing.assert_close(gradients_of(backend), plain_gradients("lfm2"), rtol=1e-10, atol=1e-12)


def test_layers_that_are_computed_again_know_their_documents() -> None:
    kept, again = (gradients_of(backend_of("lfm2", activation_checkpointing=mode)) for mode in ("none", "full"))
    torch.testing.assert_close(again, kept, rtol=1e-12, atol=1e-14)


def test_a_state_that_leaks_is_seen_and_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenMixers, "texts", None)  # the loop is left out
    with in_float64():
        backend = backend_of("lfm2")
        assert not backend.policy.packs
        assert "one by one" in backend.slow[0]
        torch.testing.assert_close(gradients_of(backend), plain_gradients("lfm2"), rtol=1e-10, atol=1e-12)
        monkeypatch.setattr("lockstep.backend.torch_backend.check_policy", lambda *arguments: [])
        wrong = gradients_of(backend_of("lfm2"))
    assert (wrong - plain_gradients("lfm2")).abs().max() > 1e-3


def test_parts_that_mix_do_not_go_with_split_tokens() -> None:
    from lockstep.backend.build import split_tokens

    with in_float64():
        backend = backend_of("lfm2")
    with pytest.raises(ValueError, match="Lfm2ShortConv of Lfm2ForCausalLM need all tokens of a document"):
        split_tokens(backend.policy, backend.group)


def test_a_row_is_remembered_only_for_parts_that_ask_for_it() -> None:
    """Without such parts the compiler must see a plain call of the layer."""
    mixers, seen = TokenMixers(), []

    def recompute(function: Any, *arguments: Any) -> Any:
        seen.append(function)
        return function(*arguments)

    def forward(x: int) -> int:
        return x + 1

    remember = mixers.remembering_row(forward, recompute)
    assert remember(1) == 2
    assert seen == [forward]
    mixers.parts[object()] = None  # type: ignore[index,assignment]
    seen.clear()
    assert remember(1) == 2
    assert seen != [forward]
