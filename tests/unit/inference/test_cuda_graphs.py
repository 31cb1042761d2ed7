"""What a CPU can show of CUDA graphs: which memory pool each capture gets, and what happens when one fails."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.inference.cuda_graphs import StepGraphs, StepSpeed


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


@pytest.mark.parametrize("error", [RuntimeError("a kernel was not loaded"), torch.OutOfMemoryError("no room")])
def test_what_failed_in_a_capture_is_told_and_not_what_its_end_says(
    pools: list[Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def end() -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    graph = SimpleNamespace(capture_begin=lambda pool: pools.append(pool), capture_end=end)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)

    def step() -> tuple[torch.Tensor]:
        if pools:
            raise error
        return (torch.zeros(1),)

    graphs = StepGraphs(nn.Linear(2, 2))
    if isinstance(error, torch.OutOfMemoryError):  # training can make room
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            graphs.run("a", step, [])
        assert graphs.problem is None
    else:
        with pytest.raises(RuntimeError, match="not loaded"):  # the plain step fails, too
            graphs.run("a", step, [])
        assert graphs.problem == "a kernel was not loaded"


def test_an_end_of_a_capture_that_fails_is_a_failed_capture(pools: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        raise RuntimeError("the graph is empty")

    graph = SimpleNamespace(capture_begin=lambda pool: pools.append(pool), capture_end=end)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    graphs = StepGraphs(nn.Linear(2, 2))
    assert graphs.run("a", lambda: (torch.ones(1),), [])[0].item() == 1
    assert len(pools) == 2
    assert graphs.problem == "the graph is empty"
    assert not graphs.keys


def test_under_autocast_nothing_is_captured_and_that_is_no_problem_of_the_graphs(
    pools: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, enabled = StepGraphs(nn.Linear(2, 2)), [True]
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: enabled[0] and kind == "cuda")
    graphs.run("a", lambda: (torch.ones(1),), [])
    assert graphs.is_suspended
    assert not pools
    enabled[0] = False
    graphs.run("a", lambda: (torch.ones(1),), [])
    assert graphs.keys == {"a"}
    assert graphs.problem is None


def test_a_slow_step_is_reported_once_with_what_it_cost_before() -> None:
    said: list[str] = []
    speed = StepSpeed(said.append)
    speed.note(0.004, 8, None)
    speed.note(0.002, 8, None)
    assert not said
    for _ in range(2):
        speed.note(0.03, 8, "captures are out of order")
    speed.note(0.5, 64, "captures are out of order")
    assert said == [
        "decoding steps are not captured in CUDA graphs (captures are out of order): one of 8 rows takes 30.0 ms "
        "instead of 2.0"
    ]
