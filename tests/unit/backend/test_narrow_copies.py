"""Wide parameters that compute as narrow copies: what they compute, where gradients arrive, what is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.replicate import NarrowCopies

PAIRS = {"float32 in bf16": (torch.float32, torch.bfloat16), "float64 in float32": (torch.float64, torch.float32)}
every_pair = pytest.mark.parametrize("dtypes", PAIRS.values(), ids=PAIRS)


@pytest.fixture(autouse=True)
def safe_products() -> Iterator[None]:
    """CPUs that show AMX but forbid it die in oneDNN's bf16 products; torch's own are slow and safe."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.full((8,), 1.1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Tied(nn.Module):
    """Two layers between an embedding and a head that is the same parameter."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x).float().logsumexp(dim=-1).sum()


TOKENS = torch.tensor([1, 5, 5, 9, 2])


def make_model(dtype: torch.dtype, *, recompute: bool = False) -> Tied:
    torch.manual_seed(0)
    return Tied(recompute=recompute).to(dtype)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def narrow_gradients(dtypes: tuple[torch.dtype, torch.dtype]) -> dict[str, Tensor]:
    """What a model that is narrow throughout computes."""
    model = make_model(dtypes[0]).to(dtypes[1])
    model.head.weight = model.embedding.weight
    model(TOKENS).backward()
    return gradients_of(model)


@every_pair
@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_gradients_arrive_wide_on_the_parameters_and_are_those_of_a_narrow_model(dtypes, recompute):
    wide, narrow = dtypes
    model = make_model(wide, recompute=recompute)
    before = dict(model.named_parameters())
    copies = NarrowCopies(model, list(model.layers), narrow)
    with copies.in_place():
        assert {t.dtype for m in model.modules() for t in m._parameters.values() if t is not None} == {narrow}
        model(TOKENS).backward()
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    found, expected = gradients_of(model), narrow_gradients(dtypes)
    assert found.keys() == expected.keys() == before.keys()
    for name, gradient in found.items():
        assert gradient.dtype == wide
        torch.testing.assert_close(gradient, expected[name].to(wide), rtol=1e-6, atol=1e-6)


@every_pair
def test_a_tied_parameter_is_cast_once_and_hangs_at_both_places(dtypes):
    model = make_model(dtypes[0])
    with NarrowCopies(model, list(model.layers), dtypes[1]).in_place():
        assert model.head.weight is model.embedding.weight
        assert model.head.weight.dtype == dtypes[1]
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.head.weight, nn.Parameter)


def test_gradients_of_several_passes_add_up_in_the_wide_dtype():
    model = make_model(torch.float32)
    copies = NarrowCopies(model, list(model.layers), torch.bfloat16)
    for _ in range(3):
        with copies.in_place():
            model(TOKENS).backward()
    summed, once = gradients_of(model), narrow_gradients(PAIRS["float32 in bf16"])
    for name, gradient in summed.items():
        torch.testing.assert_close(gradient, 3 * once[name].float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backward", [False, True], ids=["before backward", "in backward"])
def test_parameters_come_back_when_something_is_raised_inside(backward):
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no gradient today")

    model = make_model(torch.float32)
    before = dict(model.named_parameters())
    copies = NarrowCopies(model, list(model.layers), torch.bfloat16)

    def compute() -> None:
        with copies.in_place():
            loss = model(TOKENS)
            if not backward:
                raise RuntimeError("no gradient today")
            Refuses.apply(loss).backward()

    with pytest.raises(RuntimeError, match="no gradient today"):
        compute()
    assert all(p is before[name] and p.dtype == torch.float32 for name, p in model.named_parameters())
    with copies.in_place():
        model(TOKENS).backward()
    assert gradients_of(model).keys() == before.keys()


def test_frozen_parameters_and_those_already_narrow_are_left_alone():
    model = make_model(torch.float32)
    model.layers[0].linear.weight.requires_grad_(False)
    model.layers[0].linear.bias.requires_grad_(False)
    model.layers[1].linear.to(torch.bfloat16)
    kept = [model.layers[0].linear.weight, model.layers[0].linear.bias, *model.layers[1].linear.parameters()]
    with NarrowCopies(model, list(model.layers), torch.bfloat16).in_place():
        linears = [model.layers[0].linear, model.layers[1].linear]
        assert [id(t) for m in linears for t in m._parameters.values()] == [id(t) for t in kept]
        assert model.layers[0].scale.dtype == torch.bfloat16


def test_a_step_of_the_optimizer_is_seen_by_the_next_copies():
    model = make_model(torch.float32)
    copies = NarrowCopies(model, list(model.layers), torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        with copies.in_place():
            loss = model(TOKENS)
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_without_gradients_the_narrow_copies_compute_too():
    model = make_model(torch.float32)
    with torch.no_grad(), NarrowCopies(model, list(model.layers), torch.bfloat16).in_place():
        found = model(TOKENS)
    narrow = make_model(torch.float32).to(torch.bfloat16)
    narrow.head.weight = narrow.embedding.weight
    assert found == narrow(TOKENS)
    assert not found.requires_grad


def test_a_parameter_tied_across_units_is_narrow_at_every_place() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    module = nn.ModuleList([first, second])
    with NarrowCopies(module, [first, second], torch.bfloat16).in_place():
        assert first.weight is second.weight
        assert second.weight.dtype == torch.bfloat16
    assert isinstance(second.weight, nn.Parameter)


def test_a_parameter_that_was_not_used_has_no_gradient() -> None:
    used, unused = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    module = nn.ModuleList([used, unused])
    with NarrowCopies(module, [], torch.bfloat16).in_place():
        used.weight.sum().backward()
    assert used.weight.grad is not None
    assert unused.weight.grad is None


def test_kept_copies_lie_in_the_same_memory_and_follow_the_parameters():
    model = make_model(torch.float64)
    copies = NarrowCopies(model, list(model.layers), torch.float32)
    with copies.in_place(kept=True):
        first = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    with copies.in_place(kept=True):
        for name, tensor in model.named_parameters():
            assert tensor.data_ptr() == first[name][0]
            assert torch.allclose(tensor, first[name][1] + 1)
            assert not tensor.requires_grad
