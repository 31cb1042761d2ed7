"""Batches, losses and steps as messages: what arrives is what was sent, and what does not fit is named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep import Completion, Datum, LossResult, LossSpec, OptimResult, OptimStep
from lockstep.backend.remote import wire
from lockstep.processes.frames import pack_message, read_tensors, unpack
from lockstep.types import LossValues

TOKENS = st.integers(0, 2**40)
REAL = st.floats(allow_nan=False)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = draw(st.lists(TOKENS, max_size=6))
    numbers = st.lists(REAL, min_size=len(tokens), max_size=len(tokens))
    return Completion(tokens, draw(numbers), draw(st.dictionaries(st.sampled_from("abc"), numbers)))


DATA = st.builds(Datum, st.lists(TOKENS, min_size=1, max_size=5), st.lists(completions(), min_size=1), st.text())


def travelled(body: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    frame = unpack(b"".join(pack_message({"body": body}, tensors)))
    return frame.header["body"], read_tensors(frame)


@given(batch=st.lists(DATA, max_size=4))
def test_a_batch_arrives_as_it_was(batch: list[Datum]) -> None:
    assert wire.decode_batch(*travelled(*wire.encode_batch(batch))) == batch


def test_arrays_and_tensors_arrive_as_lists_of_the_same_numbers() -> None:
    third = float(np.float32(1 / 3))
    sent = [
        Datum(
            np.array([1, 2], np.uint16), [Completion((3,), np.array([1 / 3], np.float32), {"a": torch.tensor([2.0])})]
        )
    ]
    expected = [Datum([1, 2], [Completion([3], [third], {"a": [2.0]})])]
    assert wire.decode_batch(*travelled(*wire.encode_batch(sent))) == expected


@pytest.mark.parametrize(
    ("datum", "words"),
    [
        (
            Datum([1.5], [Completion([1], [1.0])], "train.jsonl:17"),
            r"row 1 of the batch \(train.jsonl:17\): prompt are not",
        ),
        (Datum([1], [Completion([True], [1.0])]), "row 1 of the batch: tokens are not whole numbers: bool"),
        (Datum([1], [Completion([2**64], [1.0])]), "row 1 of the batch: tokens"),
        (Datum([1], [Completion([1], ["x"])]), "row 1 of the batch: weights are not numbers"),
        (Datum([1], [Completion([1], [1.0], {"adv": [None]})]), r"row 1 of the batch: values\['adv'\] are not numbers"),
        (Datum([[1, 2]], [Completion([1], [1.0])]), "prompt is not a list of numbers: it has 2 dimensions"),
        ("a row", "row 1 of the batch is a str, not a Datum"),
    ],
)
def test_a_row_that_does_not_fit_is_named(datum: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wire.encode_batch([Datum([1], [Completion([1], [1.0])]), datum])


def test_a_loss_arrives_as_it_was_and_options_that_are_not_json_are_named() -> None:
    loss = LossSpec("dpo", 1 / 3, {"beta": 0.1, "names": ["a", None, True], "deep": {"x": [1]}})
    assert wire.decode_loss(travelled(wire.encode_loss(loss), {})[0]) == loss
    assert wire.encode_loss(LossSpec(options={"pair": (1, 2)}))["options"] == {"pair": (1, 2)}  # JSON makes it a list
    for options, words in [
        ({"f": print}, "'f'"),
        ({"t": torch.ones(1)}, "'t'"),
        ({"d": {1: 2}}, "'d'"),
        ({"n": math.inf}, "'n'"),
        ({3: 1}, "3"),
    ]:
        with pytest.raises(ValueError, match=rf"loss.options\[{words}\] is not plain JSON"):
            wire.encode_loss(LossSpec(options=options))
    with pytest.raises(ValueError, match=r"loss\.scale is not a number"):
        wire.encode_loss(LossSpec(scale="1"))  # type: ignore[arg-type]


def test_a_step_arrives_as_it_was_and_mistakes_are_named() -> None:
    step = OptimStep(1 / 3, weight_decay=np.float64(0.1), max_grad_norm=None)
    assert wire.read_step(travelled(wire.encode_step(step), {})[0]) == step
    assert wire.read_step({"learning_rate": 1e-4}) == OptimStep(1e-4)
    with pytest.raises(ValueError, match="has no 'lr': it has learning_rate, beta1"):
        wire.read_step({"lr": 1e-4})
    with pytest.raises(ValueError, match="needs a learning_rate"):
        wire.read_step({"beta1": 0.5})
    with pytest.raises(ValueError, match=r"step\.learning_rate is not a number: 'fast'"):
        wire.encode_step(OptimStep("fast"))  # type: ignore[arg-type]


def test_results_arrive_as_they_were() -> None:
    values = LossValues(math.nan, {"margin": 1 / 3}, ("row 1",))
    found = wire.decode_loss_result(
        travelled(wire.encode_loss_result(LossResult(lambda: values, num_tokens=5, num_supervised=3)), {})[0]
    )
    assert math.isnan(found.loss)
    assert (found.metrics, found.nonfinite_origins) == ({"margin": 1 / 3}, ("row 1",))
    assert (found.num_tokens, found.num_supervised) == (5, 3)
    result = OptimResult(lambda: math.inf, peak_memory_gib=1.5, loss_scale=2.0)
    back = wire.decode_optim_result(travelled(wire.encode_optim_result(result), {})[0])
    assert (back.grad_norm, back.applied, back.overflowed, back.peak_memory_gib) == (math.inf, False, True, 1.5)


@given(found=st.lists(st.lists(st.lists(REAL, max_size=4), min_size=1, max_size=3), max_size=3))
def test_logprobs_arrive_as_they_were(found: list[list[list[float]]]) -> None:
    assert wire.decode_logprobs(*travelled(*wire.encode_logprobs(found))) == found
