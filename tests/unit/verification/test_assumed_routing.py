"""Choices of experts that nobody computed: the formula counts what tokens choose, and no token chooses one twice."""

from __future__ import annotations

import pytest
import torch
from equivalence.mixtures import build_mixture

from lockstep.config import ConfigError
from lockstep.config.parallel import Degrees
from lockstep.parallel.expected_traffic import assumed_counts, count_trips
from lockstep.verification.assumed_routing import assume_choices, assumed_choices, sharing_experts


@pytest.mark.parametrize("imbalance", [1.0, 1.25, 2.0])
@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(0, 2, 4), (1, 2, 8), (37, 3, 8), (64, 1, 2)])
def test_choices_are_counted(num_tokens: int, top_k: int, num_experts: int, imbalance: float) -> None:
    chosen = assumed_choices(num_tokens, top_k, num_experts, imbalance)
    counts = torch.bincount(chosen.flatten(), minlength=num_experts).tolist()
    assert counts == assumed_counts(num_tokens, top_k, num_experts, imbalance)
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    if imbalance == 1.0:
        assert max(counts) - min(counts) <= 1


def test_the_busiest_expert_gets_as_much_as_was_said() -> None:
    assert assumed_counts(6400, 2, 16, 3.0)[0] == pytest.approx(3 * 6400 * 2 / 16, rel=0.01)
    assert sum(assumed_counts(6400, 2, 16, 3.0)) == 6400 * 2


def test_routers_choose_so_and_weigh_as_they_would() -> None:
    model = build_mixture("qwen3_moe")
    router = next(m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter")
    hidden = torch.randn(10, 32, dtype=torch.float64)
    assume_choices(model)
    logits, weights, chosen = router(hidden)
    assert torch.equal(chosen, assumed_choices(10, 2, 4))
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, chosen)
    torch.testing.assert_close(weights.float(), probabilities)


def test_more_than_every_token_cannot_choose_an_expert() -> None:
    with pytest.raises(ConfigError, match=r"none gets more than 2 times its share of tokens, and not 2\.5 times"):
        assume_choices(build_mixture("qwen3_moe"), 2.5)


def test_rows_that_ranks_send_are_those_that_arrive() -> None:
    """Two by two ranks, other numbers of tokens on each, which do not divide."""
    degrees, tokens = Degrees(shard=2, tensor=2, expert=2), [(7, 12), (5, 2)]
    trips = [
        count_trips(tokens, place, column, degrees, (8, 3), num_layers=1) for place in range(2) for column in range(2)
    ]
    assert sum(t.rows for t in trips) == 2 * 3 * (7 + 12 + 5 + 2)  # each chosen row once there and once back
    assert {t.numbers for t in trips} == {2 * 8 // 2}


def test_neighbours_share_experts() -> None:
    assert list(sharing_experts(5, Degrees(replicate=2, shard=4, expert=2))) == [4, 5]
