"""A global batch becomes packed tensors: every weighted token is a target once, at the token that predicts it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.backend.batching import Document, MicroBatch, RankBatch, documents_of, plan_micro_batches, to_micro_batch
from lockstep.backend.loss_step import flag_nonfinite
from lockstep.types import Completion, Datum, LossSpec

GAPS = Datum([10, 11, 12], [Completion([20, 21, 22, 23], [0.0, 1.0, 0.0, 0.5])], "a:1")
PAIR = Datum([30], [Completion([40, 41], [1.0, 1.0]), Completion([50, 51, 52], [2.0, 0.0, 1.0])], "a:2")
NOTHING = Datum([60, 61], [Completion([62], [0.0])], "a:3")
BATCH = [GAPS, PAIR, NOTHING]


def pack(documents: tuple[Document, ...], batch: list[Datum], scale: float = 1.0, multiple_of: int = 1) -> MicroBatch:
    loss = LossSpec(scale=scale, options={"beta": 0.1})
    return to_micro_batch(documents, batch, loss, torch.device("cpu"), torch.float64, multiple_of)


def laid_out(document: Document) -> tuple[list[int], list[int], list[int]]:
    tokens, positions, predictors = document.lay_out()
    return tokens.tolist(), positions.tolist(), predictors.tolist()


def test_a_completion_is_a_document_with_its_prompt_in_front():
    documents = documents_of(BATCH)
    assert [(d.datum, d.branches[0].completion, laid_out(d)[0]) for d in documents] == [
        (0, 0, [10, 11, 12, 20, 21, 22, 23]),
        (1, 0, [30, 40, 41]),
        (1, 1, [30, 50, 51, 52]),
        (2, 0, [60, 61, 62]),
    ]


def test_the_token_before_each_target_predicts_it_and_no_other():
    documents = documents_of(BATCH)
    assert [laid_out(d)[2] for d in documents] == [[3, 5], [0, 1], [0, 2], []]
    assert [d.branches[0].weights.tolist() for d in documents] == [[1.0, 0.5], [1.0, 1.0], [2.0, 1.0], []]
    # The first token of a completion is predicted by the last of its prompt, also if it alone has a weight.
    (first,) = documents_of([Datum([7, 8], [Completion([9, 9], [1.0, 0.0])])])
    assert laid_out(first)[2] == [1]


def test_completions_share_a_prompt_where_they_fit_together():
    _, pair, _ = documents_of(BATCH, max_shared_tokens=6)
    tokens, positions, predictors = laid_out(pair)
    assert tokens == [30, 40, 41, 50, 51, 52]
    assert positions == [0, 1, 2, 1, 2, 3]
    assert predictors == [0, 1, 0, 4]  # both begin after the prompt
    assert pair.segments == [3, 3]
    assert (pair.num_tokens, pair.num_targets) == (6, 4)
    assert len(documents_of(BATCH, max_shared_tokens=5)) == 4


def test_a_group_too_large_for_one_micro_batch_is_cut_and_repeats_its_prompt():
    group = Datum([1, 2], [Completion([i] * 3, [1.0] * 3) for i in range(5)])
    documents = documents_of([group], max_shared_tokens=8)
    assert [[b.completion for b in d.branches] for d in documents] == [[0, 1], [2, 3], [4]]
    assert [[b.offset for b in d.branches] for d in documents] == [[0, 3], [6, 9], [12]]


def test_a_packed_row_says_which_prompt_an_answer_follows():
    documents = tuple(documents_of([GAPS, PAIR, NOTHING], max_shared_tokens=100))
    found = pack(documents, BATCH, multiple_of=4)
    assert found.packed.lengths == (7, 3, 3, 3)
    assert found.packed.shared == ((0, 0), (0, 0), (7, 1), (0, 0))
    assert found.packed.predictors.tolist() == [3, 5, 7, 8, 7, 11]
    assert found.packed.targets.tolist() == [21, 23, 40, 41, 50, 52]
    assert found.inputs.completions.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.inputs.num_completions == 4
    assert pack(tuple(documents_of([GAPS])), BATCH).packed.shared == ()


def test_offsets_number_the_targets_of_the_global_batch():
    assert [d.branches[0].offset for d in documents_of(BATCH)] == [0, 2, 4, 6]


def test_numpy_arrays_and_lists_give_the_same_documents():
    arrays = Datum(np.array([10, 11, 12]), [Completion(np.array([20, 21]), np.array([0.0, 1.0], np.float32))])
    lists = Datum([10, 11, 12], [Completion([20, 21], [0.0, 1.0])])
    (one,), (other,) = documents_of([arrays]), documents_of([lists])
    assert laid_out(one) == laid_out(other)
    assert one.branches[0].weights.dtype == other.branches[0].weights.dtype == np.float64


def test_documents_are_laid_end_to_end_and_positions_start_again():
    documents = tuple(documents_of(BATCH))
    found = pack(documents, BATCH, scale=0.25)
    packed = found.packed
    assert packed.tokens.tolist() == [10, 11, 12, 20, 21, 22, 23, 30, 40, 41, 30, 50, 51, 52, 60, 61, 62]
    assert packed.positions.tolist() == [*range(7), *range(3), *range(4), *range(3)]
    assert packed.lengths == (7, 3, 4, 3)
    assert packed.predictors.tolist() == [3, 5, 7, 8, 10, 12]
    assert packed.targets.tolist() == [21, 23, 40, 41, 50, 52]
    assert packed.targets.tolist() == packed.tokens[packed.predictors + 1].tolist()
    assert found.inputs.weights.tolist() == [1.0, 0.5, 1.0, 1.0, 2.0, 1.0]
    assert found.inputs.scale == 0.25
    assert found.inputs.options == {"beta": 0.1}
    assert len(found.packed.tokens) == 17
    assert (
        packed.tokens.dtype == packed.positions.dtype == packed.predictors.dtype == packed.targets.dtype == torch.int64
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("budget", [7, 10, 100])
def test_the_shares_of_all_ranks_are_the_batch(num_ranks, budget):
    documents = documents_of(BATCH)
    plans = [plan_micro_batches(documents, rank=r, num_ranks=num_ranks, budget_tokens=budget) for r in range(num_ranks)]
    found = [d for plan in plans for part in plan.micro_batches for d in part]
    assert sorted((d.datum, d.branches[0].completion) for d in found) == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    assert all(sum(d.num_tokens for d in part) <= budget for plan in plans for part in plan.micro_batches)
    loads = [sum(d.num_tokens for part in plan.micro_batches for d in part) for plan in plans]
    for plan in plans:
        assert (plan.num_tokens, plan.num_targets, plan.max_rank_tokens) == (17, 6, max(loads))


@pytest.mark.parametrize(
    ("batch", "max_documents", "whole"),
    [([PAIR, GAPS], None, True), ([PAIR], None, False), ([PAIR, GAPS], 1, False)],
)
def test_every_rank_knows_whether_the_completions_of_each_row_are_in_one_place(batch, max_documents, whole):
    for rank in (0, 1):
        plan = plan_micro_batches(
            documents_of(batch), rank=rank, num_ranks=2, budget_tokens=100, max_documents=max_documents
        )
        assert plan.is_whole == whole


def test_a_share_can_be_limited_to_one_document_at_a_time():
    plan = plan_micro_batches(documents_of(BATCH), rank=0, num_ranks=1, budget_tokens=100, max_documents=1)
    assert [len(part) for part in plan.micro_batches] == [1, 1, 1, 1]


def test_an_empty_batch_has_an_empty_share():
    plan = plan_micro_batches([], rank=1, num_ranks=2, budget_tokens=100)
    assert plan.micro_batches == ()
    assert (plan.num_tokens, plan.num_targets, plan.max_rank_tokens) == (0, 0, 0)


def test_an_empty_micro_batch_runs_the_same_passes_with_a_weight_of_zero():
    batch = [Datum([1], [Completion([2], [1.0], {"advantages": [3.0]})])]
    plan = plan_micro_batches(documents_of(batch), rank=1, num_ranks=2, budget_tokens=100)
    assert plan.micro_batches == ((),)
    found = pack((), batch)
    assert found.packed.lengths == (2,)
    assert found.packed.predictors.tolist() == [0]
    assert found.inputs.weights.tolist() == [0.0]
    assert found.inputs.values["advantages"].tolist() == [0.0]
    assert found.rows.tolist() == [-1]
    assert found.inputs.num_completions == 0


@pytest.mark.parametrize("multiple_of", [1, 4, 8, 128])
def test_padding_reaches_a_multiple_and_has_no_targets(multiple_of):
    documents = tuple(documents_of(BATCH))
    plain, filled = pack(documents, BATCH), pack(documents, BATCH, multiple_of=multiple_of)
    num_filling = -17 % multiple_of
    assert len(filled.packed.tokens) == sum(filled.packed.lengths) == 17 + num_filling
    assert filled.packed.lengths == (*plain.packed.lengths, *([num_filling] if num_filling else []))
    assert filled.packed.tokens[:17].tolist() == plain.packed.tokens.tolist()
    assert filled.packed.positions[17:].tolist() == [0] * num_filling
    assert filled.packed.predictors.tolist() == plain.packed.predictors.tolist()
    assert filled.packed.targets.tolist() == plain.packed.targets.tolist()
    assert filled.inputs.weights.tolist() == plain.inputs.weights.tolist()
    assert sum(plain.packed.lengths) == 17


def test_the_filling_of_a_single_document_is_its_tail():
    (document,) = documents_of([GAPS])
    filled = pack((document,), [GAPS], multiple_of=4)
    assert filled.packed.lengths == (8,)
    num_filling = 8 - document.num_tokens
    assert filled.packed.positions.tolist() == [*range(8 - num_filling), *([0] * num_filling)]
    assert filled.packed.predictors.tolist() == [3, 5]


def test_side_values_follow_the_weighted_tokens_of_their_completion():
    values = {"advantages": [1.0, 2.0, 3.0, 4.0], "behaviour": [5.0, 6.0, 7.0, 8.0]}
    first = Datum([1, 2], [Completion([3, 4, 5, 6], [0.0, 1.0, 0.0, 1.0], values)])
    halves = {"advantages": [0.5], "behaviour": [0.25]}
    second = Datum([1], [Completion([2], [1.0], halves), Completion([3], [1.0], halves)])
    batch = [first, second]
    documents = documents_of(batch)
    found = pack((documents[2], documents[0]), batch)  # in the order of the micro-batch
    assert found.packed.targets.tolist() == [3, 4, 6]
    assert {k: v.tolist() for k, v in found.inputs.values.items()} == {
        "advantages": [0.5, 2.0, 4.0],
        "behaviour": [0.25, 6.0, 8.0],
    }


def test_a_row_that_lacks_a_side_value_of_the_others_is_named():
    batch = [Datum([1], [Completion([2], [1.0], {"advantages": [1.0]})], "a:1"), Datum([1], PAIR.completions, "a:2")]
    with pytest.raises(ValueError, match=r"a:2 has no 'advantages', which other rows of the batch have"):
        pack(tuple(documents_of(batch)), batch)


def test_a_micro_batch_without_rows_names_none_that_is_not_finite() -> None:
    batch = [Datum([1], [Completion([2, 3], [1.0, 1.0])], f"row {i}") for i in range(3)]
    documents = documents_of(batch)
    plan = plan_micro_batches(documents, rank=0, num_ranks=1, budget_tokens=64)
    parts = [plan.micro_batches[0], ()]
    micro_batches = [to_micro_batch(part, batch, LossSpec(), torch.device("cpu"), torch.float32) for part in parts]
    rank_batch = RankBatch(batch, documents, plan, micro_batches)
    found = [torch.zeros(len(m.rows)) for m in micro_batches]
    found[1][:] = torch.nan
    assert flag_nonfinite(rank_batch, found, torch.device("cpu")).tolist() == [0.0, 0.0, 0.0]
    found[0][0] = torch.inf  # the first target of the first row
    assert flag_nonfinite(rank_batch, found, torch.device("cpu")).tolist() == [1.0, 0.0, 0.0]
