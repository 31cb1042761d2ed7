"""What only a GPU computes, against float64: both packed attentions, a whole step in bf16."""

from __future__ import annotations

import math
import time
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lockstep.backend.step_clock import StepClock
from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.model.attention import PackedLayout, packed_attention
from lockstep.model.lora import add_lora
from lockstep.types import Completion, Datum, LossSpec, OptimStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

CUDA = torch.device("cuda")


def distance(found: Tensor, exact: Tensor) -> float:
    """Relative, in the 2-norm."""
    return float((found.double() - exact).norm() / exact.norm())


# --- attention ------------------------------------------------------------------------------------------------------

CASES = {
    "of many lengths": ((700, 37, 250, 5, 1, 31), None),
    "of many lengths, with a window": ((700, 37, 250, 5, 1, 31), 64),
    "of one length": ((256, 256, 256, 256), None),
    "of one length, with a window": ((256, 256, 256, 256), 64),
    "alone": ((1024,), None),
}


def fused_arguments(lengths: tuple[int, ...]) -> dict[str, Any]:
    """As Policy passes them: boundaries rounded up by documents of no length."""
    total = sum(lengths)
    bounds = torch.tensor([0, *lengths], device=CUDA).cumsum(0).to(torch.int32)
    bounds = torch.nn.functional.pad(bounds, (0, 64 - len(lengths)), value=total)
    equal = {"packed_equal_length": lengths[0]} if len(set(lengths)) == 1 else {}
    return {"packed_boundaries": bounds, "packed_max_length": -(-max(lengths) // 128) * 128, **equal}


def attend(dtype: torch.dtype, heads: tuple[int, int], total: int, **arguments: Any) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    generator = torch.Generator(CUDA).manual_seed(0)
    shapes = [(1, h, total, 64) for h in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(s, device=CUDA, generator=generator, dtype=torch.float64).to(torch.bfloat16) for s in shapes]
    leaves = [t.to(dtype).requires_grad_() for t in inputs]
    output, _ = packed_attention(nn.Identity(), *leaves, None, scaling=0.2, **arguments)
    above = torch.randn(output.shape, device=CUDA, generator=generator, dtype=torch.float64).to(dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, above)]


@pytest.mark.parametrize(("lengths", "window"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["all heads", "grouped heads"])
def test_fused_attention_over_documents_is_as_exact_as_one_document_at_a_time(lengths, window, heads):
    shared = {"heads": heads, "total": sum(lengths), "sliding_window": window}
    exact = attend(torch.float64, packed_layout=PackedLayout(lengths), **shared)
    plain = attend(torch.bfloat16, packed_layout=PackedLayout(lengths), **shared)
    fused = attend(torch.bfloat16, **fused_arguments(lengths), **shared)
    for name, ours, theirs, wanted in zip(("output", "query", "key", "value"), fused, plain, exact, strict=True):
        assert ours.shape == wanted.shape
        assert distance(ours, wanted) < 1.5 * distance(theirs, wanted) + 1e-3, name


@pytest.mark.parametrize(("lengths", "window"), CASES.values(), ids=CASES)
def test_fused_attention_does_not_look_at_other_documents(lengths, window):
    if len(lengths) == 1:
        pytest.skip("there is no other document")
    generator = torch.Generator(CUDA).manual_seed(0)
    tensors = [
        torch.randn(1, 4, sum(lengths), 64, device=CUDA, generator=generator).to(torch.bfloat16) for _ in range(3)
    ]
    found = []
    for change in (0.0, 10.0):
        changed = [t.clone() for t in tensors]
        for t in changed:
            t[:, :, : lengths[0]] += change
        output, _ = packed_attention(
            nn.Identity(), *changed, None, scaling=0.2, sliding_window=window, **fused_arguments(lengths)
        )
        found.append(output)
    assert not torch.equal(found[0][:, : lengths[0]], found[1][:, : lengths[0]])
    assert torch.equal(found[0][:, lengths[0] :], found[1][:, lengths[0] :])


def test_variable_length_attention_refuses_dropout():
    q = torch.randn(1, 4, 42, 64, device=CUDA, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="attention dropout is not available"):
        packed_attention(nn.Identity(), q, q, q, None, dropout=0.1, **fused_arguments((37, 5)))


# --- a whole step ---------------------------------------------------------------------------------------------------

SHAPE = {
    "vocab_size": 5000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}


def make_model(dtype: torch.dtype, tied: bool, attention: str | None = None) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SHAPE, tie_word_embeddings=tied)
    options = {"attn_implementation": attention} if attention else {}
    # In float32 first, so that every dtype begins with the same weights.
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).to(CUDA, dtype)


def make_batch(lengths: tuple[int, ...]) -> list[Datum]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(5000, (n,), generator=generator).tolist() for n in lengths]
    return [
        Datum(r[:2], [Completion(r[2:], [float(i % 3 != 0) for i in range(len(r) - 2)])], f"row {n}")
        for n, r in enumerate(rows)
    ]


def plain_gradients(model: nn.Module, batch: list[Datum], scale: float) -> tuple[float, dict[str, Tensor]]:
    """One document at a time, the model's own forward, full logits."""
    total = 0.0
    for datum in batch:
        (completion,) = datum.completions
        tokens = torch.tensor([*datum.prompt, *completion.tokens], device=CUDA)
        logits = model(tokens[None], use_cache=False).logits[0, len(datum.prompt) - 1 : -1].double()
        every = torch.log_softmax(logits, dim=-1).gather(1, tokens[len(datum.prompt) :, None])[:, 0]
        loss = -(torch.tensor(completion.weights, device=CUDA).double() * every).sum() * scale
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def total_distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    above = sum(float((found[name].double() - g).square().sum()) for name, g in exact.items())
    return math.sqrt(above / sum(float(g.square().sum()) for g in exact.values()))


@pytest.mark.parametrize("lengths", [(700, 37, 250, 6), (512, 512), (300,)], ids=["mixed", "equal", "one"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_in_bf16_is_as_near_to_float64_as_the_plain_model_in_bf16(lengths, tied, compiled):
    batch = make_batch(lengths)
    scale = 1 / sum(d.total_weight for d in batch)
    loss, exact = plain_gradients(make_model(torch.float64, tied, "sdpa"), batch, scale)
    _, plain = plain_gradients(make_model(torch.bfloat16, tied, "eager"), batch, scale)
    backend = TorchBackend(
        make_model(torch.float32, tied), micro_batch_tokens=1024, precision="bf16", device="cuda", compile=compiled
    )
    assert backend.warnings == []
    assert backend.policy.variable_length
    result = backend.forward_backward(batch, LossSpec(scale=scale))
    ours = {name: p.grad for name, p in backend.parameters().items()}
    assert result.deferred
    assert result.loss == pytest.approx(loss, rel=5e-3)
    assert {g.dtype for g in ours.values() if g is not None} == {torch.float32}
    assert total_distance(ours, exact) < 1.2 * total_distance(plain, exact)
    norm = math.sqrt(sum(float(g.square().sum()) for g in exact.values()))
    assert backend.optim_step(OptimStep(1e-3)).grad_norm == pytest.approx(norm, rel=2e-2)


def test_a_short_batch_is_computed_by_the_code_of_a_long_one():
    backend = TorchBackend(
        make_model(torch.float32, True), micro_batch_tokens=32768, precision="bf16", device="cuda", compile=True
    )
    lengths = torch.randint(200, 900, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    known = []
    for batch in (make_batch(tuple(lengths)), make_batch((300, 37))):
        assert math.isfinite(backend.forward_backward(batch, LossSpec(scale=1e-4)).loss)
        known.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < known[0] == known[1]


def test_steps_end_when_the_device_says_so():
    clock, matrix = StepClock(), torch.randn(4096, 4096, device=CUDA)
    before = time.perf_counter()
    moments = []
    for _ in range(3):
        for _ in range(20):
            matrix @ matrix
        moments.append(clock.mark())
    launched = time.perf_counter()
    torch.cuda.synchronize()
    after = time.perf_counter()
    time.sleep(0.2)  # they are read late, and ended then all the same
    first, second, third = (moment() for moment in moments)
    assert before < first < second < third < after + 0.005
    assert third > launched
    assert second - first == pytest.approx(third - second, rel=0.3)


def test_micro_batches_on_the_gpu_do_not_change_the_gradient():
    batch = make_batch((300, 37, 250, 6, 120))
    found = []
    for budget in (4096, 320):
        backend = TorchBackend(
            make_model(torch.float32, True), micro_batch_tokens=budget, precision="bf16", device="cuda", compile=False
        )
        backend.forward_backward(batch, LossSpec(scale=0.01))
        found.append({name: p.grad.double() for name, p in backend.parameters().items() if p.grad is not None})
    assert total_distance(found[1], found[0]) < 1e-2


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_gradient_that_is_not_finite_is_left_out_on_the_device(lora):
    model = make_model(torch.float32, False)
    if lora:
        model = add_lora(model.to(torch.bfloat16), LoraConfig(rank=4))
    backend = TorchBackend(model, precision="bf16", device="cuda", compile=False)
    batch = make_batch((40, 60))
    scale = 1 / sum(d.total_weight for d in batch)
    backend.forward_backward(batch, LossSpec(scale=scale))
    assert backend.optim_step(OptimStep(1e-3)).applied
    before = {name: p.detach().clone() for name, p in backend.parameters().items()}
    backend.forward_backward(batch, LossSpec(scale=scale))
    next(p for p in backend.parameters().values() if p.grad is not None).grad.fill_(math.inf)
    refused = backend.optim_step(OptimStep(1e-3))
    assert not refused.applied
    assert all(torch.equal(p, before[name]) for name, p in backend.parameters().items())
    backend.forward_backward(batch, LossSpec(scale=scale))
    assert backend.optim_step(OptimStep(1e-3)).applied
    assert any(not torch.equal(p, before[name]) for name, p in backend.parameters().items())


def test_a_saved_step_comes_back_bit_for_bit(tmp_path):
    batch = make_batch((200, 37, 90))
    weights = []
    for resumes in (False, True):
        backend = TorchBackend(make_model(torch.float32, True), precision="bf16", device="cuda", compile=False)
        if resumes:
            backend.load_state(tmp_path)
        else:
            backend.forward_backward(batch, LossSpec(scale=0.01))
            backend.optim_step(OptimStep(1e-3))
            backend.save_state(tmp_path).result(timeout=60)
        weights.append({name: p.detach().clone() for name, p in backend.parameters().items()})
        found = backend.forward(batch)
        assert all(math.isfinite(x) for rows in found for row in rows for x in row)
    assert all(torch.equal(weights[0][name], p) for name, p in weights[1].items())
