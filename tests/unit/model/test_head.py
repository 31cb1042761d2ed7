"""Log-probs and their gradients from hidden states, against full logits and plain autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.model.head import HeadOptions, LogitTransform, target_logprobs, token_facts, weighted_logprob_sum

ROWS, HIDDEN, VOCABULARY = 13, 6, 11
TRANSFORMS = {
    "plain": LogitTransform(),
    "scaled": LogitTransform(scale=0.25),
    "capped": LogitTransform(softcap=1.5),
    "scaled and capped": LogitTransform(scale=3.0, softcap=2.0),
}
# Which of (weight, bias) there is, and which of them is trained.
HEADS = {
    "frozen": (False, None),
    "trained": (True, None),
    "frozen with bias": (False, False),
    "trained with bias": (True, True),
    "trained bias alone": (False, True),
    "frozen bias": (True, False),
}

every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
every_head = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
every_chunk = pytest.mark.parametrize("chunk", [1, 4, ROWS, 100])


@dataclass
class Inputs:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    grad_logprobs: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None and t.requires_grad]


def make_inputs(head: tuple[bool, bool | None], dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    train_weight, train_bias = head
    hidden, weight, bias = draw(ROWS, HIDDEN), draw(VOCABULARY, HIDDEN), draw(VOCABULARY)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    hidden.requires_grad_()
    weight.requires_grad_(train_weight)
    bias.requires_grad_(bool(train_bias))
    return Inputs(hidden, weight, None if train_bias is None else bias, targets, draw(ROWS))


def plain_distributions(inputs: Inputs, transform: LogitTransform) -> Tensor:
    logits = F.linear(inputs.hidden, inputs.weight, inputs.bias) * transform.scale
    if transform.softcap is not None:
        logits = torch.tanh(logits / transform.softcap) * transform.softcap
    return torch.log_softmax(logits, dim=1)


def plain_logprobs(inputs: Inputs, transform: LogitTransform) -> Tensor:
    return plain_distributions(inputs, transform)[torch.arange(len(inputs.targets)), inputs.targets]


def arguments_of(inputs: Inputs) -> tuple[Any, ...]:
    return inputs.hidden, inputs.weight, inputs.bias, inputs.targets


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_same_gradients(found: Tensor, expected: Tensor, inputs: Inputs) -> None:
    ours = torch.autograd.grad(found, inputs.leaves)
    plain = torch.autograd.grad(expected, inputs.leaves)
    for one, other in zip(ours, plain, strict=True):
        assert_close(one, other)


@every_transform
@every_head
@every_chunk
def test_the_weighted_sum_and_its_gradients_are_those_of_full_logits(transform, head, chunk):
    inputs = make_inputs(head)
    total, logprobs = weighted_logprob_sum(*arguments_of(inputs), inputs.grad_logprobs, HeadOptions(transform, chunk))
    plain = plain_logprobs(inputs, transform)
    assert_close(logprobs, plain.detach())
    assert not logprobs.requires_grad
    assert_close(total.detach(), (inputs.grad_logprobs * plain).sum().detach())
    # Three times, because what comes from above must be passed on.
    assert_same_gradients(3 * total, 3 * (inputs.grad_logprobs * plain).sum(), inputs)


@every_transform
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_temperature_divides_what_the_model_makes_of_its_logits(transform, temperature):
    """After the cap: that is what a sampler divides."""
    inputs = make_inputs(HEADS["trained with bias"])
    options = HeadOptions(transform.at(temperature), chunk_tokens=4)
    every = torch.log_softmax(plain_distributions(inputs, transform) / temperature, dim=1)
    plain, entropies = every[torch.arange(ROWS), inputs.targets], -(every.exp() * every).sum(dim=1)

    total, logprobs = weighted_logprob_sum(*arguments_of(inputs), inputs.grad_logprobs, options)
    facts = token_facts(*arguments_of(inputs), options)
    assert_close(logprobs, plain.detach())
    assert_close(facts.entropies.detach(), entropies.detach())
    assert_close(facts.log_sum_sq_probs, (2 * every.detach()).logsumexp(dim=1))
    found = total + (facts.logprobs * inputs.grad_logprobs + facts.entropies.square()).sum()
    assert_same_gradients(found, (2 * plain * inputs.grad_logprobs + entropies.square()).sum(), inputs)


@every_transform
def test_a_temperature_of_one_changes_nothing(transform):
    assert transform.at(1.0) == transform


def square(logprobs: Tensor, grad_logprobs: Tensor) -> Tensor:
    return (grad_logprobs * logprobs.square()).sum()


def ratio(logprobs: Tensor, grad_logprobs: Tensor) -> Tensor:
    """Clipped importance weights: some tokens have no gradient, others one that depends on all of them."""
    ratios = torch.exp(logprobs - logprobs.detach().mean())
    return torch.minimum(ratios * grad_logprobs, ratios.clamp(0.8, 1.2) * grad_logprobs).sum() + logprobs.mean() ** 3


@every_transform
@every_head
@every_chunk
@pytest.mark.parametrize("loss", [square, ratio])
def test_log_probs_carry_the_gradient_of_any_loss(transform, head, chunk, loss: Callable[[Tensor, Tensor], Tensor]):
    inputs = make_inputs(head)
    found = target_logprobs(*arguments_of(inputs), HeadOptions(transform, chunk))
    plain = plain_logprobs(inputs, transform)
    assert_close(found.detach(), plain.detach())
    assert_same_gradients(loss(found, inputs.grad_logprobs), loss(plain, inputs.grad_logprobs), inputs)


@every_transform
@every_head
@every_chunk
@pytest.mark.parametrize("kept_bytes", [0, 1 << 20], ids=["computed again", "kept"])
def test_entropies_carry_a_gradient_of_their_own_and_log_sum_sq_probs_none(transform, head, chunk, kept_bytes):
    inputs = make_inputs(head)
    found = token_facts(*arguments_of(inputs), HeadOptions(transform, chunk, kept_bytes=kept_bytes))
    every = plain_distributions(inputs, transform)
    entropies = -(every.exp() * every).sum(dim=1)
    chosen = plain_logprobs(inputs, transform)
    assert_close(found.logprobs.detach(), chosen.detach())
    assert_close(found.entropies.detach(), entropies.detach())
    assert_close(found.log_sum_sq_probs, (every.detach().exp() ** 2).sum(dim=1).log())
    assert not found.log_sum_sq_probs.requires_grad
    weights = inputs.grad_logprobs.flip(0)
    ours = ratio(found.logprobs, inputs.grad_logprobs) + (weights * found.entropies.square()).sum()
    plain = ratio(chosen, inputs.grad_logprobs) + (weights * entropies.square()).sum()
    assert_same_gradients(ours, plain, inputs)
    with torch.no_grad():
        again = token_facts(*arguments_of(inputs), HeadOptions(transform, chunk))
    for one, other in zip(again, found, strict=True):
        assert_close(one, other.detach())


@every_head
@pytest.mark.parametrize("kept_bytes", [ROWS * VOCABULARY * 8, ROWS * VOCABULARY * 8 - 1], ids=["fits", "does not fit"])
def test_logits_that_are_kept_give_the_gradients_of_those_computed_again(head, kept_bytes):
    inputs = make_inputs(head)
    with CountedProducts() as products:
        found = target_logprobs(*arguments_of(inputs), HeadOptions(chunk_tokens=4, kept_bytes=kept_bytes))
        before = products.count
        gradients = torch.autograd.grad(square(found, inputs.grad_logprobs), inputs.leaves)
    frozen = not any(head)
    fits = kept_bytes >= ROWS * VOCABULARY * 8
    for one, other in zip(
        gradients,
        torch.autograd.grad(square(plain_logprobs(inputs, TRANSFORMS["plain"]), inputs.grad_logprobs), inputs.leaves),
    ):
        assert_close(one, other)
    # In the backward pass: nothing for a frozen head; otherwise 4 chunks of gradients, and of logits if not kept.
    per_chunk = 0 if frozen else 1 + bool(head[0]) + (not fits)
    assert products.count - before == 4 * per_chunk


class CountedProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default,
                               torch.ops.aten.mm.out)  # fmt: skip
        return func(*args, **(kwargs or {}))


@every_transform
@every_chunk
def test_without_gradients_the_log_probs_are_the_same(transform, chunk):
    inputs = make_inputs(HEADS["trained with bias"])
    with torch.no_grad():
        found = target_logprobs(*arguments_of(inputs), HeadOptions(transform, chunk))
    assert_close(found, plain_logprobs(inputs, transform).detach())
    assert not found.requires_grad


def test_hidden_states_that_are_not_trained_get_no_gradient():
    inputs = make_inputs(HEADS["trained"])
    inputs.hidden.requires_grad_(False)
    total, _ = weighted_logprob_sum(*arguments_of(inputs), inputs.grad_logprobs, HeadOptions(chunk_tokens=4))
    assert_same_gradients(total, (inputs.grad_logprobs * plain_logprobs(inputs, LogitTransform())).sum(), inputs)
    assert inputs.hidden.grad is None


def test_the_chunk_size_does_not_change_the_gradient_of_a_trained_head():
    found = []
    for chunk in (1, 5, 13):
        inputs = make_inputs(HEADS["trained with bias"])
        total, _ = weighted_logprob_sum(*arguments_of(inputs), inputs.grad_logprobs, HeadOptions(chunk_tokens=chunk))
        found.append(torch.autograd.grad(total, inputs.leaves))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_log_probs_of_narrow_hidden_states_are_float32_and_gradients_keep_their_dtype(dtype):
    with torch.backends.mkldnn.flags(enabled=False):  # CPUs that show AMX but forbid it die in its bf16 products
        inputs = make_inputs(HEADS["trained with bias"], dtype)
        grad_logprobs = inputs.grad_logprobs.float()
        total, logprobs = weighted_logprob_sum(*arguments_of(inputs), grad_logprobs, HeadOptions(chunk_tokens=4))
        gradients = torch.autograd.grad(total, inputs.leaves)
        again = target_logprobs(*arguments_of(inputs), HeadOptions(chunk_tokens=4))
        general = torch.autograd.grad((grad_logprobs * again).sum(), inputs.leaves)
    assert total.dtype == logprobs.dtype == again.dtype == torch.float32
    assert [g.dtype for g in (*gradients, *general)] == [dtype] * 6
    wide = Inputs(*(t.detach().double() for t in arguments_of(inputs)[:3]), inputs.targets, grad_logprobs.double())
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    assert_close(logprobs.double(), plain_logprobs(wide, LogitTransform()), tolerance)


def test_large_logits_do_not_overflow():
    inputs = make_inputs(HEADS["trained"], torch.float32)
    inputs.hidden.data *= 1e4
    total, logprobs = weighted_logprob_sum(*arguments_of(inputs), inputs.grad_logprobs, HeadOptions())
    gradients = torch.autograd.grad(total, inputs.leaves)
    assert all(bool(torch.isfinite(t).all()) for t in (logprobs, *gradients))


def test_no_tokens_at_all_give_a_sum_of_zero_and_no_gradient():
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    hidden, targets, none = torch.empty(0, HIDDEN), torch.empty(0, dtype=torch.int64), torch.empty(0)
    total, logprobs = weighted_logprob_sum(hidden, weight, None, targets, none, HeadOptions())
    total.backward()
    assert total.item() == 0.0
    assert len(logprobs) == 0
    assert weight.grad is not None
    assert not weight.grad.any()


# --- memory ---------------------------------------------------------------------------------------------------------

LONG, CHUNK, WIDE = 64, 8, 300  # a chunk of logits is larger than the weight, and full logits eight times as large


class Sizes(TorchDispatchMode):
    """The number of elements of every tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


def by_grad_logprobs(arguments: tuple[Any, ...], options: HeadOptions) -> Tensor:
    return weighted_logprob_sum(*arguments, torch.ones(LONG), options)[0]


def by_log_probs(arguments: tuple[Any, ...], options: HeadOptions) -> Tensor:
    return target_logprobs(*arguments, options).square().sum()


def by_full_logits(arguments: tuple[Any, ...], options: HeadOptions) -> Tensor:
    hidden, weight, _, targets = arguments
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")


def measure(path: Callable[..., Tensor], *, trained: bool) -> tuple[int, int]:
    """(largest tensor of forward and backward, elements saved between them)."""
    hidden = torch.randn(LONG, 4, requires_grad=True)
    weight = torch.randn(WIDE, 4, requires_grad=trained)
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    options = HeadOptions(LogitTransform(scale=0.5, softcap=20.0), CHUNK)
    with Sizes() as sizes, torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        total = path((hidden, weight, None, torch.randint(WIDE, (LONG,))), options)
        total.backward()
    assert hidden.grad is not None
    return sizes.largest, sum(saved.values())


@pytest.mark.parametrize("path", [by_grad_logprobs, by_log_probs])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_no_tensor_is_larger_than_one_chunk_of_logits(path, trained):
    largest, saved = measure(path, trained=trained)
    assert largest == CHUNK * WIDE
    assert saved <= LONG * 4 + WIDE * 4 + 4 * LONG  # hidden or its gradient, the weight or its, and a few columns


def test_the_measure_sees_full_logits_where_they_exist():
    largest, saved = measure(by_full_logits, trained=True)
    assert largest == LONG * WIDE
    assert saved >= LONG * WIDE


@pytest.mark.parametrize(("rows", "chunk"), [(1, 8), (64, 64), (65, 64), (7, 3), (100, 1)])
def test_chunks_are_of_nearly_equal_size_and_cover_every_row_once(rows, chunk):
    from lockstep.model.head import split_chunks

    parts = split_chunks(rows, chunk)
    assert [i for part in parts for i in range(rows)[part]] == list(range(rows))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) <= chunk
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == -(-rows // chunk)


def test_nothing_asked_is_no_log_probs() -> None:
    hidden, weight = torch.zeros(0, HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    with torch.no_grad():
        found = target_logprobs(hidden, weight, None, torch.zeros(0, dtype=torch.long), HeadOptions())
    assert found.shape == (0,)
