"""The head's Triton kernels and both ways through the head, against float64. The kernels also run interpreted, see
kernel_device.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_device import DEVICE, INTERPRETED, dtypes, here, needs_cuda, runs_kernels
from torch import Tensor

from lockstep.model import head
from lockstep.model.head import HeadOptions, LogitTransform, pick_rows, target_logprobs, weighted_logprob_sum

pytestmark = [pytest.mark.gpu, runs_kernels]
TRANSFORMS = {
    "plain": LogitTransform(),
    "scaled": LogitTransform(scale=0.25),
    "capped": LogitTransform(softcap=5.0),
    "scaled and capped": LogitTransform(scale=3.0, softcap=8.0),
}
every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
VOCABULARIES = here([7, 4096, 4097, 50257, 151936], [7, 4096, 4097, 9000])
ROWS = here(33, 6)


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the head would not take them."""
    if INTERPRETED:
        monkeypatch.setattr(head, "_has_kernel", lambda tensor: tensor.dtype != torch.float64)


def distance(found: Tensor, exact: Tensor) -> float:
    """Relative, in the 2-norm."""
    return float((found.double() - exact).norm() / exact.norm())


def exact_logprobs(logits: Tensor, targets: Tensor, transform: LogitTransform) -> Tensor:
    wide = logits.double() * transform.scale
    if transform.softcap is not None:
        wide = transform.softcap * torch.tanh(wide / transform.softcap)
    return torch.log_softmax(wide, dim=1).gather(1, targets[:, None])[:, 0]


@every_transform
@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_kernel_gives_log_probs_and_their_gradient(transform, dtype, vocabulary):
    from lockstep.model.head_kernel import logprobs_and_gradient, measure

    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = (4 * torch.randn(ROWS, vocabulary, device=DEVICE, generator=generator)).to(dtype)
    targets = torch.randint(vocabulary, (ROWS,), device=DEVICE, generator=generator)
    targets[:2] = torch.tensor([0, vocabulary - 1])
    grad_logprobs = torch.randn(ROWS, device=DEVICE, generator=generator)
    grad_logprobs[5] = 0.0
    leaf = logits.double().requires_grad_()
    expected = exact_logprobs(leaf, targets, transform)
    (gradient,) = torch.autograd.grad((grad_logprobs.double() * expected).sum(), leaf)

    (alone,) = measure(logits, targets, transform.scale, transform.softcap, facts=False)
    written = logits.clone()
    both, found = logprobs_and_gradient(written, targets, grad_logprobs, transform.scale, transform.softcap)
    assert found.data_ptr() == written.data_ptr()
    assert alone.dtype == both.dtype == torch.float32
    assert found.dtype == dtype
    torch.testing.assert_close(alone.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(both, alone, rtol=1e-5, atol=1e-5)
    assert distance(found, gradient) < (5e-3 if dtype == torch.bfloat16 else 1e-4)
    assert not found[5].any()


@every_transform
@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("vocabulary", here([7, 4097, 151936], [7, 9000]))
def test_the_kernel_gives_entropies_sums_of_squares_and_the_gradient_of_both_kinds(transform, dtype, vocabulary):
    from lockstep.model.head_kernel import logprobs_and_gradient, measure

    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = (4 * torch.randn(ROWS, vocabulary, device=DEVICE, generator=generator)).to(dtype)
    logits[0, -1] += 10  # after all that was summed up before
    targets = torch.randint(vocabulary, (ROWS,), device=DEVICE, generator=generator)
    grad_logprobs, grad_entropies = (torch.randn(ROWS, device=DEVICE, generator=generator) for _ in range(2))
    leaf = logits.double().requires_grad_()
    wide = leaf * transform.scale
    if transform.softcap is not None:
        wide = transform.softcap * torch.tanh(wide / transform.softcap)
    every = torch.log_softmax(wide, dim=1)
    chosen, entropies = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(dim=1)
    (gradient,) = torch.autograd.grad((grad_logprobs * chosen + grad_entropies * entropies).sum(), leaf)

    found = measure(logits, targets, transform.scale, transform.softcap, facts=True)
    log_sum_sq_probs = (every.detach().exp() ** 2).sum(dim=1).log()
    for ours, exact in zip(found, (chosen.detach(), entropies.detach(), log_sum_sq_probs), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)
    entropy = (grad_entropies, found[1])
    _, written = logprobs_and_gradient(
        logits.clone(), targets, grad_logprobs, transform.scale, transform.softcap, entropy
    )
    assert distance(written, gradient) < (5e-3 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    ("num_tokens", "size"), here([(300, 1024), (41, 60), (9, 5000)], [(41, 60), (9, 5000), (1, 16)])
)
def test_rows_that_predict_add_up_in_a_fixed_order(dtype, num_tokens, size):
    """Some tokens predict once, some never, and the end of a shared prompt for each of its answers."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows = torch.randint(num_tokens, (num_tokens // 2,), device=DEVICE, generator=generator)
    rows = torch.cat([rows, rows.new_full((64,), num_tokens // 3), rows.new_tensor([num_tokens - 1])])
    hidden = torch.randn(num_tokens, size, device=DEVICE, generator=generator).to(dtype)
    grad = torch.randn(len(rows), size, device=DEVICE, generator=generator).to(dtype)
    exact = torch.zeros(num_tokens, size, device=DEVICE, dtype=torch.float64).index_add_(0, rows, grad.double())
    found = []
    for pick in (pick_rows, pick_rows, lambda hidden, rows: hidden.index_select(0, rows)):
        leaf = hidden.clone().requires_grad_()
        picked = pick(leaf, rows)
        assert torch.equal(picked, hidden[rows])
        picked.backward(grad)
        assert leaf.grad is not None
        found.append(leaf.grad)
    ours, again, plain = found
    assert torch.equal(ours, again)
    assert distance(ours, exact) <= distance(plain, exact) + 1e-7
    assert distance(ours, exact) < (4e-3 if dtype == torch.bfloat16 else 1e-6)
    nothing = pick_rows(leaf, rows[:0]).sum()
    assert not torch.autograd.grad(nothing, leaf)[0].any()


def test_the_kernel_stays_finite_where_logits_are_large():
    from lockstep.model.head_kernel import logprobs_and_gradient

    logits = torch.linspace(-3e4, 3e4, 5000, device=DEVICE)[None].repeat(2, 1)
    targets = torch.tensor([0, 4999], device=DEVICE)
    for transform in TRANSFORMS.values():
        found = logprobs_and_gradient(
            logits.clone(), targets, torch.ones(2, device=DEVICE), transform.scale, transform.softcap
        )
        assert all(bool(torch.isfinite(t).all()) for t in found), transform


def test_tokens_that_cannot_come_and_logits_that_are_no_numbers():
    """Nothing is possible in the first block of one row, nor in the last of another; a third is broken."""
    from lockstep.model.head_kernel import logprobs_and_gradient, measure

    torch.manual_seed(0)
    logits, targets = torch.randn(4, 9000, device=DEVICE), torch.tensor([5000, 17, 4100, 3], device=DEVICE)
    logits[0, :4200] = logits[1, 4096:] = -torch.inf
    logits[2, 8000] = torch.nan
    leaf = logits.double().requires_grad_()
    expected = exact_logprobs(leaf, targets, LogitTransform())
    (gradient,) = torch.autograd.grad(expected[[0, 1, 3]].sum(), leaf)
    (alone,) = measure(logits, targets, 1.0, None, facts=False)
    both, written = logprobs_and_gradient(logits.clone(), targets, torch.ones(4, device=DEVICE), 1.0, None)
    for found in (alone, both):
        torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert bool(both[2].isnan())
    rows = [0, 1, 3]
    torch.testing.assert_close(written[rows].double(), gradient[rows], rtol=1e-4, atol=1e-7)
    assert bool(written[2].isnan().all())


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_gradients_of_a_plain_sum_are_read(trained: bool) -> None:
    """Autograd gives them as one number that stands for all, behind which there is nothing to read."""
    torch.manual_seed(0)
    hidden = torch.randn(5, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(50, 16, device=DEVICE, requires_grad=trained)
    targets = torch.randint(50, (5, 2), device=DEVICE)[:, 0]  # every second of a row
    leaves = [hidden, weight] if trained else [hidden]
    found = torch.autograd.grad(target_logprobs(hidden, weight, None, targets, HeadOptions()).sum(), leaves)
    exact = exact_logprobs(hidden.double() @ weight.double().T, targets, LogitTransform())
    for ours, wanted in zip(found, torch.autograd.grad(exact.sum(), leaves), strict=True):
        assert distance(ours, wanted.double()) < 1e-5


@every_transform
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("chunk", here([100, 4096], [15]))
def test_both_ways_through_the_head_are_as_near_to_float64_as_full_logits_in_bf16(transform, trained, chunk):
    torch.manual_seed(0)
    count, narrow = here(500, 40), dtypes(torch.bfloat16)[0]
    wide_hidden = torch.randn(count, 64, device=DEVICE, dtype=torch.float64)
    wide_weight = torch.randn(3000, 64, device=DEVICE, dtype=torch.float64) / 4
    targets = torch.randint(3000, (count,), device=DEVICE)
    grad_logprobs = torch.randn(count, device=DEVICE)

    def gradients(dtype: torch.dtype, total: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        hidden = wide_hidden.to(dtype).requires_grad_()
        weight = wide_weight.to(dtype).requires_grad_(trained)
        return list(torch.autograd.grad(total(hidden, weight), [hidden, weight] if trained else [hidden]))

    def full(hidden: Tensor, weight: Tensor) -> Tensor:
        return (grad_logprobs.double() * exact_logprobs(hidden @ weight.T, targets, transform)).sum()

    options = HeadOptions(transform, chunk)
    ways = {
        "known gradient": lambda h, w: weighted_logprob_sum(h, w, None, targets, grad_logprobs, options)[0],
        "log-probs": lambda h, w: (grad_logprobs * target_logprobs(h, w, None, targets, options)).sum(),
    }
    exact = gradients(torch.float64, full)
    plain = gradients(narrow, full)
    for name, way in ways.items():
        for ours, theirs, wanted in zip(gradients(narrow, way), plain, exact, strict=True):
            assert distance(ours, wanted) < 1.5 * distance(theirs, wanted) + here(1e-3, 1e-6), name


@needs_cuda
def test_full_logits_are_never_in_memory():
    rows, vocabulary = 16384, 131072
    hidden = torch.randn(rows, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    total, _ = weighted_logprob_sum(
        hidden, weight, None, targets, torch.ones(rows, device=DEVICE), HeadOptions(chunk_tokens=512)
    )
    total.backward()
    full = rows * vocabulary * 2
    assert torch.cuda.max_memory_allocated() - before < full / 4
