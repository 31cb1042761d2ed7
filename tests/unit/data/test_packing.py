"""Which documents are computed together: properties that hold for any lengths."""

from __future__ import annotations

import random

import pytest

from lockstep.data.packing import Cost, measure_balance, partition

Steps = list[list[list[int]]]
BUDGET = 100


def draw_lengths(seed: int) -> list[int]:
    draw = random.Random(seed)
    longest = draw.choice([5, 40, BUDGET])
    return [draw.randint(1, longest) for _ in range(draw.randint(1, 120))]


def loads_of(steps: Steps, lengths: list[int]) -> list[list[int]]:
    """Tokens as [micro_step][rank]."""
    return [[sum(lengths[i] for i in part) for part in step] for step in steps]


every_draw = pytest.mark.parametrize("seed", range(12))
every_size = pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])


@every_draw
@every_size
def test_every_document_comes_exactly_once_within_the_budget_and_ranks_step_together(seed, num_ranks):
    lengths = draw_lengths(seed)
    steps = partition(lengths, num_ranks=num_ranks, budget_tokens=BUDGET)
    assert sorted(i for step in steps for part in step for i in part) == list(range(len(lengths)))
    assert all(len(step) == num_ranks for step in steps)
    assert all(load <= BUDGET for step in loads_of(steps, lengths) for load in step)


@every_draw
@every_size
def test_ranks_have_like_work_in_every_micro_step_and_in_all(seed, num_ranks):
    lengths = draw_lengths(seed)
    loads = loads_of(partition(lengths, num_ranks=num_ranks, budget_tokens=BUDGET), lengths)
    # Filled longest first into the emptiest, no two micro-batches differ by more than the longest document.
    every = [load for step in loads for load in step]
    assert max(every) - min(every) <= max(lengths)
    totals = [sum(step[rank] for step in loads) for rank in range(num_ranks)]
    assert max(totals) - min(totals) <= max(lengths)
    # Those of one micro-step are neighbours in size.
    assert sum(max(step) - min(step) for step in loads) <= max(every) - min(every)


def test_many_short_documents_are_level_to_a_few_tokens():
    draw = random.Random(1)
    lengths = [draw.randint(1, 30) for _ in range(500)]
    (loads,) = loads_of(partition(lengths, num_ranks=4, budget_tokens=10_000), lengths)
    assert max(loads) - min(loads) <= 1


@every_draw
@every_size
def test_the_micro_steps_are_few(seed, num_ranks):
    lengths = draw_lengths(seed)
    steps = partition(lengths, num_ranks=num_ranks, budget_tokens=BUDGET)
    fewest = -(-sum(lengths) // (num_ranks * BUDGET))
    # Longest first is never worse than twice the tokens, rounded up.
    assert fewest <= len(steps) <= max(1, 2 * fewest)


@every_draw
@pytest.mark.parametrize("max_documents", [1, 3])
def test_a_micro_batch_holds_at_most_so_many_documents(seed, max_documents):
    lengths = draw_lengths(seed)
    steps = partition(lengths, num_ranks=2, budget_tokens=BUDGET, max_documents=max_documents)
    assert sorted(i for step in steps for part in step for i in part) == list(range(len(lengths)))
    assert all(len(part) <= max_documents for step in steps for part in step)
    assert all(load <= BUDGET for step in loads_of(steps, lengths) for load in step)


def test_one_document_at_a_time_needs_no_more_micro_steps_than_documents():
    steps = partition([5, 6, 7, 8, 9], num_ranks=2, budget_tokens=BUDGET, max_documents=1)
    assert [[len(part) for part in step] for step in steps] == [[1, 1], [1, 1], [1, 0]]


def test_a_document_of_exactly_the_budget_fits_and_a_longer_one_is_an_error():
    assert partition([BUDGET, 3], num_ranks=1, budget_tokens=BUDGET) == [[[0]], [[1]]]
    with pytest.raises(ValueError, match="a document of 101 tokens does not fit into a micro-batch of 100"):
        partition([3, BUDGET + 1], num_ranks=1, budget_tokens=BUDGET)


def test_ranks_without_a_document_still_have_their_micro_step():
    assert partition([7], num_ranks=4, budget_tokens=BUDGET) == [[[0], [], [], []]]


def test_no_documents_need_no_micro_step():
    assert partition([], num_ranks=2, budget_tokens=BUDGET) == []


@every_draw
def test_the_answer_depends_on_the_lengths_alone(seed):
    lengths = draw_lengths(seed)
    first = partition(lengths, num_ranks=3, budget_tokens=BUDGET)
    assert partition(tuple(lengths), num_ranks=3, budget_tokens=BUDGET) == first
    assert all(part == sorted(part) for step in first for part in step)


# --- cost -----------------------------------------------------------------------------------------------------------

QUADRATIC = Cost(1.0, 0.1)


def costs_of(steps: Steps, lengths: list[int], cost: Cost) -> list[list[float]]:
    return [[sum(cost.of(lengths[i]) for i in part) for part in step] for step in steps]


def test_cost_grows_with_the_square_and_the_hidden_size_says_how_soon():
    assert Cost(2.0, 0.5).of(10) == 10 * (2.0 + 0.5 * 10)
    # At twelve times the hidden size attention costs as much as all matrices.
    cost = Cost.from_hidden_size(64)
    assert cost.of(12 * 64) == pytest.approx(2 * cost.per_token * 12 * 64)


def test_one_long_document_is_level_with_more_tokens_of_short_ones():
    lengths = [100, *[10] * 30]
    by_tokens = partition(lengths, num_ranks=2, budget_tokens=400)
    by_cost = partition(lengths, num_ranks=2, budget_tokens=400, cost=QUADRATIC)
    assert [sum(loads) for loads in zip(*loads_of(by_tokens, lengths), strict=True)] == [200, 200]
    # 100 tokens cost 1100, ten cost 20: the long one stands alone against all the others.
    assert sorted(loads_of(by_cost, lengths)[0]) == [100, 300]
    before, after = (measure_balance(steps, lengths, QUADRATIC) for steps in (by_tokens, by_cost))
    assert after.cost < before.cost
    assert before.tokens == 1.0
    assert after.tokens == 1.5


@every_draw
@every_size
def test_cost_keeps_to_the_budget_and_needs_no_more_micro_steps(seed, num_ranks):
    lengths = draw_lengths(seed)
    by_tokens = partition(lengths, num_ranks=num_ranks, budget_tokens=BUDGET)
    steps = partition(lengths, num_ranks=num_ranks, budget_tokens=BUDGET, cost=QUADRATIC)
    assert sorted(i for step in steps for part in step for i in part) == list(range(len(lengths)))
    assert all(load <= BUDGET for step in loads_of(steps, lengths) for load in step)
    assert len(steps) <= len(by_tokens)
    assert all(len(step) == num_ranks for step in steps)


def test_over_many_draws_ranks_that_wait_for_each_other_lose_less_time():
    def lost(cost: Cost) -> float:
        drawn = [draw_lengths(seed) for seed in range(12)]
        parts = [partition(lengths, num_ranks=4, budget_tokens=4 * BUDGET, cost=cost) for lengths in drawn]
        return sum(
            measure_balance(steps, lengths, QUADRATIC).cost - 1 for steps, lengths in zip(parts, drawn, strict=True)
        )

    assert lost(QUADRATIC) < lost(Cost())


@every_draw
@every_size
def test_nobody_always_has_the_dearest_part(seed, num_ranks):
    lengths = draw_lengths(seed)
    costs = costs_of(partition(lengths, num_ranks=num_ranks, budget_tokens=BUDGET), lengths, Cost())
    totals = [sum(step[rank] for step in costs) for rank in range(num_ranks)]
    # Dealt as it comes, the first rank would be ahead by the difference of every micro-step together.
    assert max(totals) - min(totals) <= max(max(step) - min(step) for step in costs)


def test_balance_is_of_tokens_and_of_cost_as_ranks_that_wait_feel_it():
    found = measure_balance([[[0], [1]], [[2], []]], [30, 10, 20], Cost())
    assert found.tokens_per_rank == (50, 10)
    assert found.tokens == pytest.approx(50 / 30)
    assert found.cost == pytest.approx((30 + 20) / (20 + 10))
    assert measure_balance([], []).cost == 1.0


def test_where_level_cost_does_not_fit_level_tokens_save_a_micro_step():
    lengths = [50, 30, 30, 30, 20, 20, 20]
    steps = partition(lengths, num_ranks=2, budget_tokens=BUDGET, cost=QUADRATIC)
    assert loads_of(steps, lengths) == [[100, 100]]
