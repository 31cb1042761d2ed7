"""What a CPU can show of CUDA graphs: which memory pool each capture gets, and what happens when one fails."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.inference.cuda_graphs import StepGraphs


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pool of every capture, with CUDA replaced by stand-ins."""
    used: list[Any] = []

    def graph() -> Any:
        return SimpleNamespace(
            capture_begin=lambda pool: used.append(pool), capture_end=lambda: None, replay=lambda: None
        )

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return used


def test_graphs_share_a_pool_and_a_cleared_one_is_not_used_again(pools: list[Any]) -> None:
    graphs, counter = StepGraphs(nn.Linear(2, 2)), torch.zeros(1)

    def step() -> tuple[torch.Tensor]:
        return (counter.add_(1).clone(),)

    for key in ("a", "b", "a"):
        graphs.run(key, step, [counter])
    assert graphs.keys == {"a", "b"}
    assert len(pools) == 2
    assert pools[0] is pools[1]
    graphs.clear()
    assert not graphs.keys
    graphs.run("a", step, [counter])
    assert pools[2] is not pools[0], "CUDA's allocator refuses a capture into a pool whose graphs are gone"


def test_the_run_before_a_capture_leaves_the_state_as_it_was(pools: list[Any]) -> None:
    state, seen = torch.zeros(1), []

    def step() -> tuple[torch.Tensor]:
        seen.append(float(state))
        return (state.add_(1).clone(),)

    StepGraphs(nn.Linear(2, 2)).run("a", step, [state])
    assert seen == [0.0, 0.0]  # the warm-up, then the capture


def test_memory_that_training_keeps_is_freed_only_where_a_capture_needs_it(
    pools: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied, left, state = [], [1, 1, 0], torch.zeros(1)  # failures of the captures to come
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(pools)))

    def step() -> tuple[torch.Tensor]:
        if len(pools) and left[len(pools) - 1]:
            raise torch.OutOfMemoryError("no room")
        return (state.add_(1).clone(),)

    graphs = StepGraphs(nn.Linear(2, 2))
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run("a", step, [state])
    assert emptied == [1]
    left[:2] = [0, 0]
    graphs.run("a", step, [state])
    assert emptied == [1]
    assert graphs.keys == {"a"}


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_capture_that_fails_is_tried_once_more(pools: list[Any], num_failures: int) -> None:
    state, calls = torch.zeros(1), [0]

    def step() -> tuple[torch.Tensor]:
        calls[0] += 1
        if 1 < calls[0] <= 1 + num_failures:  # after the warm-up, in captures
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED\nmore")
        return (state.add_(1).clone(),)

    graphs = StepGraphs(nn.Linear(2, 2))
    graphs.run("a", step, [state])
    assert len(pools) == 2
    assert pools[0] is not pools[1], "the pool of a failed capture is not used again"
    if num_failures == 1:
        assert graphs.keys == {"a"}
        assert graphs.problem is None
    else:
        assert not graphs.keys
        assert graphs.problem == "use_count > 0 INTERNAL ASSERT FAILED"
        graphs.run("b", step, [state])
        assert len(pools) == 2, "no third capture"
