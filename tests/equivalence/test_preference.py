"""Preference losses of a whole model: the packed step equals a padded pass with full logits, in every gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from equivalence.plain import FAMILIES, logprobs_of, make_model
from equivalence.preference_plain import (
    Answer,
    full_logprobs,
    gradients_of,
    make_pairs,
    padded_answers,
    plain_kto,
    plain_loss_of_pairs,
    plain_preference,
)
from torch import Tensor, nn

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config.algorithm import PREFERENCE_LOSSES
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Completion, Datum, LossSpec

SEVERAL: dict[str, Any] = {
    "losses": {"sigmoid": 1.0, "ipo": 0.01, "sft": 0.2, "orpo": 0.5, "aot": 0.7},
    "label_smoothing": 0.1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"losses": {name: 1.0}} for name in PREFERENCE_LOSSES if name != "exo_pair"},
    "exo_pair": {"losses": {"exo_pair": 1.0}, "label_smoothing": 0.01},
    "smoothed": {"losses": {"sigmoid": 1.0}, "label_smoothing": 0.2, "beta": 0.5},
    "forward_kl": {"losses": {"sigmoid": 1.0}, "divergence": "forward_kl"},
    "js": {"losses": {"hinge": 1.0}, "divergence": "js", "beta": 0.4},
    "alpha": {"losses": {"sigmoid_norm": 1.0}, "divergence": "alpha", "divergence_alpha": 0.4},
    "wpo": {"losses": {"sigmoid": 1.0, "sft": 0.1}, "wpo": True},
    "bco_shift": {"losses": {"bco_pair": 1.0}, "bco_shift": True},
    "wpo over the batch": {"losses": {"sigmoid": 1.0, "bco_pair": 0.5}, "wpo": True, "bco_shift": True},
    "several": SEVERAL,
}


# Their attention takes its softmax in float32 whatever the model is in.
ROUNDED = {"bloom": 1e-6, "gemma2": 1e-6}
TOLERANCE = 1e-10


def reference_of(family: str) -> nn.Module:
    return make_model(family, lora=False)


def policy_of(family: str, *, lora: bool = False) -> nn.Module:
    """Some way from the reference."""
    model = make_model(family, lora=lora)
    if not lora:
        disturb(model.parameters())
    return model


def disturb(parameters: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in parameters:
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def with_reference(batch: Sequence[Datum], reference: nn.Module) -> list[Datum]:
    """The reference's log-probs among the values of every completion, as when they were precomputed."""

    def fill(datum: Datum, completion: Completion) -> Completion:
        with torch.no_grad():
            values = {**completion.values, "reference_logprobs": logprobs_of(reference, datum, completion).tolist()}
        return dataclasses.replace(completion, values=values)

    return [dataclasses.replace(d, completions=[fill(d, c) for c in d.completions]) for d in batch]


def with_tokens(options: dict[str, Any], batch: Sequence[Datum]) -> dict[str, Any]:
    return {**options, "num_chosen_tokens": sum(sum(w != 0 for w in d.completions[0].weights) for d in batch)}


def backend_of(model: nn.Module, *, micro_batch_tokens: int = 4096, reference: str = "none") -> TorchBackend:
    return TorchBackend(
        model,
        micro_batch_tokens=micro_batch_tokens,
        precision="fp64",
        reference=reference,
        group=ProcessGroup(0, 1, torch.device("cpu")),
    )


def assert_same_step(
    backend: TorchBackend, batch: Sequence[Datum], loss: LossSpec, expected: Any, tolerance: float = TOLERANCE
) -> None:
    plain, gradients = expected
    found = backend.forward_backward(batch, loss)
    assert found.loss == pytest.approx(plain.item(), rel=tolerance)
    parameters = backend.parameters()
    assert parameters.keys() == gradients.keys()
    assert any(gradient.abs().max() > 1e-6 for gradient in gradients.values())
    for name, parameter in parameters.items():
        mine = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        assert_same_gradient(name, mine, gradients[name], tolerance)


def assert_same_gradient(name: str, mine: Tensor, expected: Tensor, tolerance: float) -> None:
    difference, size = (mine - expected).abs().max().item(), expected.abs().max().item()
    assert difference <= tolerance * size, f"gradient of {name}: off by {difference:.2g}, and no bigger than {size:.2g}"


def unpadded_pairs(model: nn.Module, reference: nn.Module, batch: Sequence[Datum]) -> list[tuple[Answer, Answer]]:
    """Each completion in a pass of its own."""

    def answer(datum: Datum, completion: Completion) -> Answer:
        weights = torch.tensor(completion.weights, dtype=torch.float64)
        asked = weights.nonzero()[:, 0]
        tokens = torch.tensor([[*datum.prompt, *completion.tokens]])
        with torch.no_grad():
            every = full_logprobs(model, tokens, torch.ones_like(tokens))[0, len(datum.prompt) - 1 + asked]
            known = logprobs_of(reference, datum, completion)[asked]
        mine = logprobs_of(model, datum, completion)[asked]
        return Answer(mine, known, weights[asked], torch.log((torch.exp(every) ** 2).sum(-1)))

    return [tuple(answer(d, c) for c in d.completions) for d in batch]  # type: ignore[misc]


# Padding on the left leaves tokens that may look at nothing: a softmax in float32 makes them NaN.
SIDES = [(family, side) for family in FAMILIES for side in ("right", "left")[: 1 if family in ROUNDED else 2]]


@pytest.mark.parametrize(("family", "side"), SIDES)
def test_padding_does_not_change_the_plain_step(family, side):
    model, reference, batch = policy_of(family), reference_of(family), make_pairs()
    options = {"losses": {"sigmoid": 1.0, "sft": 0.3, "simpo": 1.0}, "wpo": True}
    alone = plain_loss_of_pairs(unpadded_pairs(model, reference, batch), options)
    padded, gradients = plain_preference(model, batch, reference, options, side=side)
    tolerance = ROUNDED.get(family, TOLERANCE)
    assert padded.item() == pytest.approx(alone.item(), rel=tolerance)
    for name, gradient in gradients_of(model, alone).items():
        assert_same_gradient(name, gradients[name], gradient, tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_that_do_not_round_are_the_same_norms(family):
    tokens = torch.arange(20)[None]
    exact = make_model(family, lora=False)
    rounded = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float64)
    rounded.load_state_dict(exact.state_dict())
    found, expected = (full_logprobs(model, tokens, torch.ones_like(tokens)) for model in (exact, rounded))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("micro_batch_tokens", [4096, 40, 20], ids=["whole", "packed", "cut"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_loss_gives_the_plain_gradients(name, micro_batch_tokens):
    """Whole: one micro-batch. Packed: several. Cut: some pairs do not fit into one, others do."""
    model, reference, batch = policy_of("llama"), reference_of("llama"), make_pairs()
    sizes = [len(d.prompt) + sum(len(c.tokens) for c in d.completions) for d in batch]
    assert min(sizes) < 20 < max(sizes) < 40 < sum(sizes)
    options = with_tokens(VARIANTS[name], batch)
    expected = plain_preference(model, batch, reference, options)
    backend = backend_of(model, micro_batch_tokens=micro_batch_tokens)
    loss = LossSpec("preference", 1 / len(batch), options)
    assert_same_step(backend, with_reference(batch, reference), loss, expected)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_every_family_gives_the_plain_gradients(family):
    model, reference, batch = policy_of(family), reference_of(family), make_pairs()
    options = with_tokens(SEVERAL, batch)
    expected = plain_preference(model, batch, reference, options)
    loss, tolerance = LossSpec("preference", 1 / len(batch), options), ROUNDED.get(family, TOLERANCE)
    backend = backend_of(model, micro_batch_tokens=64)
    assert_same_step(backend, with_reference(batch, reference), loss, expected, tolerance)


@pytest.mark.parametrize("name", ["sigmoid", "wpo", "several"])
def test_a_frozen_copy_is_the_model_as_it_was(name):
    model, reference, batch = reference_of("llama"), reference_of("llama"), make_pairs()
    options = with_tokens(VARIANTS[name], batch)
    backend = backend_of(model, micro_batch_tokens=64, reference="copy")
    disturb(backend.parameters().values())
    expected = plain_preference(policy_of("llama"), batch, reference, options)
    assert_same_step(backend, batch, LossSpec("preference", 1 / len(batch), options), expected)


@pytest.mark.parametrize("name", ["sigmoid", "wpo", "several"])
def test_a_model_without_its_adapters_is_the_reference(name):
    batch = make_pairs()
    options = with_tokens(VARIANTS[name], batch)
    expected = plain_preference(policy_of("llama", lora=True), batch, reference_of("llama"), options)
    backend = backend_of(policy_of("llama", lora=True), micro_batch_tokens=64, reference="adapter_off")
    assert_same_step(backend, batch, LossSpec("preference", 1 / len(batch), options), expected)


@pytest.mark.parametrize("options", [{"kl": 0.2}, {"loss": "apo_zero_unpaired", "undesirable_weight": 0.5}], ids=str)
def test_kto_gives_the_plain_gradients(options):
    model, reference = policy_of("llama"), reference_of("llama")
    wanted = [True, False, True, True, False]
    batch = []
    for datum, good in zip(make_pairs(), wanted, strict=True):
        completion = datum.completions[0]
        labelled = dataclasses.replace(completion, values={"label": [float(good)] * len(completion.tokens)})
        batch.append(dataclasses.replace(datum, completions=[labelled]))
    plain = plain_kto(padded_answers(model, reference, batch, "left"), wanted, options)
    expected = plain.detach(), gradients_of(model, plain)
    loss = LossSpec("kto", 1 / len(batch), options)
    assert_same_step(backend_of(model, micro_batch_tokens=40), with_reference(batch, reference), loss, expected)
