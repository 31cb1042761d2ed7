"""The copy of the parameters that serves as reference: apart from them, exchanged for a while, following by a share."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.backend.reference import ParameterCopy


def make(value: float) -> tuple[nn.Parameter, ParameterCopy]:
    parameter = nn.Parameter(torch.full((3,), value))
    return parameter, ParameterCopy({"weight": parameter})


def test_it_stays_while_the_policy_moves_and_both_are_in_their_places_afterwards() -> None:
    policy, reference = make(1.0)
    policy.data += 4.0  # in place, as an optimizer does
    with reference.in_place():
        assert policy.tolist() == [1.0] * 3
    assert policy.tolist() == [5.0] * 3
    with reference.in_place():
        assert policy.tolist() == [1.0] * 3


def test_a_share_is_that_of_the_policy() -> None:
    policy, reference = make(1.0)
    policy.data += 4.0
    reference.mix(0.25)
    with reference.in_place():
        assert policy.tolist() == [2.0] * 3
    reference.mix(1.0)
    with reference.in_place():
        assert policy.tolist() == [5.0] * 3
