"""Rotary positions that depend on the length of a text: every text as plain transformers computes it alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from equivalence.plain import TINY, keep_float64, logprobs_of, make_batch, scale_of

from lockstep.backend.batching import documents_of, to_micro_batch
from lockstep.backend.torch_backend import TorchBackend
from lockstep.evaluation.likelihood import measure_losses
from lockstep.model.rotary import LengthRule, RotaryByLength
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Completion, Datum, LossSpec

LIMIT = 17
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [2.0, 3.0, 5.0, 7.0],
    "original_max_position_embeddings": LIMIT,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
GEMMA3 = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
GEMMA3_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
FAMILIES = {
    "phi3-longrope": lambda: transformers.Phi3Config(
        **TINY, original_max_position_embeddings=LIMIT, rope_parameters=dict(LONGROPE)
    ),
    "llama-longrope": lambda: transformers.LlamaConfig(**TINY, rope_parameters=dict(LONGROPE)),
    "llama-dynamic": lambda: transformers.LlamaConfig(
        **{**TINY, "max_position_embeddings": LIMIT}, rope_parameters=dict(DYNAMIC)
    ),
    # Two kinds of layers with a rule of their own each, one of which does not depend on length.
    "gemma3-dynamic": lambda: transformers.Gemma3TextConfig(
        **{**TINY, "max_position_embeddings": LIMIT},
        **GEMMA3_LAYERS,
        head_dim=8,
        rope_parameters=copy.deepcopy(GEMMA3),
    ),
}
ONE = ProcessGroup(0, 1, torch.device("cpu"))


def build(family: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float64)
    return keep_float64(model.eval())


def batch_around_the_limit() -> list[Datum]:
    """Texts of 4 to 41 tokens, some of exactly the limit and one more; answers to one prompt on both sides of it."""
    draw = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 97, (count,), generator=draw).tolist()

    lengths = [[LIMIT - 6], [LIMIT - 5], [LIMIT - 9, LIMIT + 4, LIMIT - 6, LIMIT + 9], [3, 4], [LIMIT + 2, LIMIT + 2]]
    rows = [
        Datum(tokens(6), [Completion(tokens(n), [1.0] * n) for n in counts], f"limit {row}")
        for row, counts in enumerate(lengths)
    ]
    return [*make_batch(rows=6), *rows]


def alone(family: str, batch: list[Datum]) -> tuple[list[list[list[float]]], dict[str, torch.Tensor]]:
    """Log-probs and gradients, each text on a model that has seen no other."""
    values, gradients, scale = [], {}, scale_of(batch)
    for datum in batch:
        values.append([])
        for completion in datum.completions:
            model = build(family)
            logprobs = logprobs_of(model, datum, completion)
            (-(torch.tensor(completion.weights, dtype=torch.float64) * scale * logprobs).sum()).backward()
            values[-1].append(logprobs.tolist())
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradients[name] = gradients.get(name, 0) + parameter.grad
    return values, gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_every_text_has_the_frequencies_of_its_own_length(family: str) -> None:
    batch = batch_around_the_limit()
    expected, gradients = alone(family, batch)
    backend = TorchBackend(build(family), precision="fp64", micro_batch_tokens=256, group=ONE)
    assert backend.policy.packs
    assert backend.policy.shares_prompts
    for _ in range(2):  # again, after longer texts
        found = backend.forward(batch)
        for datum, rows, plain in zip(batch, found, expected, strict=True):
            for completion, ours, own in zip(datum.completions, rows, plain, strict=True):
                weighed = [(a, b) for a, b, w in zip(ours, own, completion.weights, strict=True) if w]
                assert all(a == pytest.approx(b, abs=1e-10) for a, b in weighed), datum.origin
    backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
    for name, parameter in backend.parameters().items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-11)


def test_without_it_a_short_text_beside_a_long_one_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(RotaryByLength, "of", classmethod(lambda cls, model: cls()))
    with pytest.raises(AssertionError):
        test_every_text_has_the_frequencies_of_its_own_length("phi3-longrope")


def test_an_evaluation_gives_every_text_its_own_frequencies() -> None:
    batch = batch_around_the_limit()
    expected, _ = alone("phi3-longrope", batch)
    found = measure_losses(build("phi3-longrope"), batch, budget_tokens=256)
    for datum, losses, plain in zip(batch, found, expected, strict=True):
        for completion, loss, own in zip(datum.completions, losses, plain, strict=True):
            total = -sum(w * value for w, value in zip(completion.weights, own, strict=True))
            assert loss.total == pytest.approx(total, abs=1e-8), datum.origin


def test_padding_does_not_make_a_text_longer() -> None:
    """Beside others it is a segment of its own, behind a single text its tail."""
    for count in (1, 2):
        row = Datum([5] * 9, [Completion([6] * 8, [1.0] * 8)], "row")
        documents = tuple(documents_of([row] * count))
        micro_batch = to_micro_batch(documents, [row] * count, LossSpec(), torch.device("cpu"), torch.float64, 64)
        assert len(micro_batch.packed.tokens) == 64
        assert micro_batch.packed.text_lengths[:count] == [17] * count


def test_answers_share_a_prompt_only_where_it_is_the_same() -> None:
    rotary = RotaryByLength.of(build("phi3-longrope"))
    assert rotary.rules == (LengthRule("longrope", LIMIT),)
    batch = batch_around_the_limit()[-3:]
    documents = documents_of(batch, max_shared_tokens=512, group_of=rotary.group)
    assert [len(d.branches) for d in documents] == [1, 1, 1, 1, 2, 2]
    dynamic = RotaryByLength.of(build("llama-dynamic"))
    documents = documents_of(batch, max_shared_tokens=512, group_of=dynamic.group)
    assert [len(d.branches) for d in documents] == [1, 1, 1, 1, 2, 2]
    assert [len(d.branches) for d in documents_of(batch, max_shared_tokens=512)] == [4, 2, 2]


def test_a_model_whose_positions_do_not_depend_on_length_is_left_alone() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    rotary = RotaryByLength.of(model)
    assert rotary.rules == ()
    assert not any("forward" in vars(module) for module in model.modules())
    assert rotary.group(5) == rotary.group(500)
    assert rotary.steps_in_group(5) is None


def test_outside_of_its_passes_the_model_is_transformers_own() -> None:
    own, wrapped = build("llama-dynamic"), build("llama-dynamic")
    backend = TorchBackend(wrapped, precision="fp64", group=ONE)
    backend.forward(batch_around_the_limit())
    backend.close()
    for length in (30, 20, 10):  # dynamic NTK keeps the frequencies of the longest so far
        tokens = torch.arange(length)[None]
        with torch.no_grad():
            torch.testing.assert_close(wrapped.eval()(tokens).logits, own(tokens).logits)


def test_how_many_lengths_have_the_same_frequencies() -> None:
    rotary = RotaryByLength()
    rotary.rules = (LengthRule("longrope", 8),)
    assert [rotary.steps_in_group(length) for length in (1, 8, 9)] == [8, 1, None]
    assert rotary.group(9) == rotary.group(90) != rotary.group(8)
    rotary.rules = (LengthRule("dynamic", 8),)
    assert [rotary.steps_in_group(length) for length in (7, 9)] == [2, 1]
    assert len({rotary.group(length) for length in (3, 8, 9, 10)}) == 3
