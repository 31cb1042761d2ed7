"""What a step must send, worked out by hand; who is slow."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from lockstep.config.parallel import Degrees
from lockstep.parallel.expected_traffic import RankWork, Sizes, Unit, least_traffic
from lockstep.parallel.group import ProcessGroup
from lockstep.parallel.traffic import AsyncCalls, Traffic, find_straggler, sent_share

# Two layers of 1000 parameters, of which 100 are trained, and 500 (50) outside of them.
SIZES = Sizes((Unit(1000, 100), Unit(1000, 100)), Unit(500, 50), hidden=8, compute_bytes=2, gradient_bytes=4)
WORK = RankWork(tokens=60, targets=20, micro_batches=3)


def test_a_ring_sends_its_share():
    assert sent_share("all_reduce", 4) == 1.5
    assert sent_share("all_gather", 4) == sent_share("reduce_scatter", 4) == sent_share("all_to_all", 4) == 0.75
    assert sent_share("send", 4) == 1.0
    assert sent_share("all_reduce", 1) == sent_share("all_gather", 1) == 0.0


def test_replicas_sum_what_is_trained_once_a_step():
    assert least_traffic(SIZES, Degrees(replicate=4), WORK) == {("replicate", "all_reduce"): 1.5 * 250 * 4}


def test_shards_gather_twice_and_scatter_once_in_every_micro_batch():
    found = least_traffic(SIZES, Degrees(shard=4), WORK)
    assert found == {
        ("shard", "all_gather"): 0.75 * 3 * (500 + 2 * 2000) * 2,
        ("shard", "reduce_scatter"): 0.75 * 3 * 250 * 4,
    }


def test_shards_that_keep_parameters_gather_once():
    found = least_traffic(SIZES, Degrees(shard=4), WORK, keep_parameters=True)
    assert found["shard", "all_gather"] == 0.75 * 3 * 2500 * 2


def test_ranks_that_split_tokens_are_shards_and_trade_heads():
    sizes = Sizes(SIZES.layers, SIZES.rest, 8, split_queries=16, split_keys=4, compute_bytes=2)
    found = least_traffic(sizes, Degrees(shard=2, context=2), WORK)
    assert found.keys() == {
        ("shard_context", "all_gather"),
        ("shard_context", "reduce_scatter"),
        ("context", "all_to_all"),
    }
    # In each of two layers: queries and what they attended to, keys and values; forward and backward.
    assert found["context", "all_to_all"] == 0.5 * 60 * 2 * 2 * (2 * 16 + 2 * 4) * 2


def test_replicas_of_shards_sum_their_own_shard():
    found = least_traffic(SIZES, Degrees(replicate=2, shard=2), WORK)
    assert found["replicate", "all_reduce"] == 1.0 * 3 * 125 * 4
    assert found["shard", "reduce_scatter"] == 0.5 * 3 * 250 * 4


def test_tensor_ranks_sum_hidden_states():
    sizes = Sizes(
        (), Unit(0, 0), 8, forward_sums=24, backward_sums=16, head_sums=11, summed_parameters=5, compute_bytes=2
    )
    found = least_traffic(sizes, Degrees(tensor=2), WORK)
    assert found == {("tensor", "all_reduce"): 1.0 * (60 * 40 + 20 * 11 + 3 * 5) * 2}


def test_tensor_ranks_gather_what_each_computed_of_some_tokens():
    sizes = Sizes((), Unit(0, 0), 8, forward_sums=24, gathers=32, compute_bytes=2)
    found = least_traffic(sizes, Degrees(tensor=4), WORK)
    assert found == {("tensor", "all_reduce"): 1.5 * 60 * 24 * 2, ("tensor", "all_gather"): 0.75 * 60 * 32 * 2}


def test_stages_send_hidden_states_to_their_neighbours():
    found = least_traffic(SIZES, Degrees(pipeline=2), RankWork(60, 20, 3, stage_sends=1))
    assert found == {("pipeline", "send"): 60 * 8 * 2}


def test_one_rank_sends_nothing():
    assert least_traffic(SIZES, Degrees(), WORK) == {}


# --- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "rank"),
    [
        ([1.0, 1.0], None),
        ([1.0, 1.19], None),
        ([1.0, 1.21], 1),
        ([3.0, 1.0, 1.1, 0.9], 0),
        ([1.0, 1.1, 0.9, 1.05], None),
        ([1.0, 1.0, 0.1], None),
        ([5.0], None),
        ([0.0, 0.0], None),
    ],
)
def test_the_slow_rank_is_named_if_it_is_clearly_slow(seconds, rank):
    assert find_straggler(seconds) == rank


class FakeFuture:
    def add_done_callback(self, callback: Any) -> None:
        self.finish = callback


class FakeWork:
    def __init__(self) -> None:
        self.future = FakeFuture()

    def get_future(self) -> FakeFuture:
        return self.future


def test_waiting_for_async_calls_counts_from_the_last_start_to_the_last_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    calls, works = AsyncCalls(), [FakeWork(), FakeWork(), FakeWork()]
    for now[0], work in zip((1.0, 2.0, 2.5), works, strict=True):
        calls.start(work)
    for now[0], work in zip((3.0, 4.0, 9.0), works, strict=True):
        work.future.finish(None)
    calls.forget(works[2])  # Python code waits for this one
    assert calls.end() == 1.5
    assert calls.end() == 0.0


def test_one_rank_counts_nothing_and_says_nothing():
    traffic = Traffic(ProcessGroup(0, 1, torch.device("cpu")))
    with traffic.counting():
        assert traffic.facts().numel() == 0
    assert traffic.read_facts([]) == {}
    assert traffic.end_step().as_metrics() == {}


def test_everybodys_facts_are_read_from_their_sum():
    traffic = Traffic(ProcessGroup(0, 3, torch.device("cpu")))
    found = traffic.read_facts([1.0, 0.5, 2.0, 1.1, 0.1, 4.0, 2.0, 0.0, 3.0])
    assert found == {
        "memory_gib_max": 4.0,
        "compute_s": 1.1,
        "wait_s": pytest.approx(0.2),
        "busy_s/0/0": 1.0,
        "busy_s/0/1": 1.1,
        "busy_s/0/2": 2.0,
        "straggler": 2,
        "straggler_compute_s": 2.0,
    }


def test_a_dear_stage_is_no_straggler():
    traffic = Traffic(ProcessGroup(0, 4, torch.device("cpu"), Degrees(shard=2, pipeline=2)))

    def read(*compute_s: float) -> dict[str, float]:
        return traffic.read_facts([fact for seconds in compute_s for fact in (seconds, 0.0, 1.0)])

    found = read(1.0, 1.1, 3.0, 3.1)
    assert "straggler" not in found
    assert [name for name in found if name.startswith("busy_s/")] == [
        "busy_s/0/0",
        "busy_s/0/1",
        "busy_s/1/2",
        "busy_s/1/3",
    ]
    assert read(1.0, 1.1, 4.0, 3.0)["straggler"] == 2
    assert read(2.0, 1.1, 4.0, 3.0)["straggler"] == 2
    assert read(9.0, 1.1, 4.0, 3.0)["straggler"] == 0
