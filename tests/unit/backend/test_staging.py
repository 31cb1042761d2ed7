"""Memory that checkpoints of a GPU run are copied to: how it is divided. tests/gpu copies into it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.backend import staging
from lockstep.backend.staging import PinnedBlocks, StagingArea, copy_now, free_host_bytes, plan_blocks


@pytest.fixture(autouse=True)
def without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of these tests are plain memory: there is nothing to give back."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=lambda _address: 0))


def allocate(sizes: list[int]) -> PinnedBlocks:
    return PinnedBlocks([torch.zeros(size, dtype=torch.uint8) for size in plan_blocks(sizes)])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 5000), max_size=40))
def test_planned_blocks_hold_every_size_apart_and_aligned(sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_BLOCK_BYTES", 4096)
        blocks = allocate(sizes)
        parts = blocks.divide(sizes)
    assert parts is not None
    assert [part.numel() for part in parts] == sizes
    for number, part in enumerate(parts):
        assert part.storage_offset() % 64 == 0
        part.fill_(number + 1)
    assert all((part == number + 1).all() for number, part in enumerate(parts))  # none overlaps another
    assert all(size & (size - 1) == 0 for size in plan_blocks(sizes))


def test_more_than_was_planned_does_not_fit_and_less_does():
    blocks = allocate([1000, 2000, 3000])
    assert blocks.num_bytes == 8192
    assert blocks.divide([100, 2000]) is not None
    assert blocks.divide([1000, 2000, 3000, 4000]) is None


def test_large_tensors_share_blocks_with_those_after_them():
    mib = 1 << 20
    planned = plan_blocks([600 * mib, 300 * mib, 100 * mib, 20 * mib])
    assert planned == [1024 * mib]


def test_copies_stay_when_the_originals_change():
    values = {"a": torch.arange(4.0), "b": torch.tensor(2)}
    copy = copy_now(values)
    values["a"].zero_()
    copy.wait()
    assert copy.tensors["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    copy.release()


def test_every_page_is_written_to_before_it_is_pinned(monkeypatch):
    """Memory is pinned by the driver, with its address and all of its bytes; what cannot be is given back."""
    calls: list[tuple[str, int]] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append(("pinned", size))
            return 2 if sum(name == "pinned" for name, _ in calls) == 3 else 0

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(("given back", address))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    blocks = PinnedBlocks()
    for size in (4096, 10_001):
        block = staging.pin_block(size)
        assert block.nbytes == size
        assert not block.any()
        blocks.add(block)
    with pytest.raises(RuntimeError, match="memory was not pinned: CUDA error 2"):
        staging.pin_block(4096)
    blocks.free()
    assert [name for name, _ in calls] == ["pinned"] * 3 + ["given back"] * 2
    assert blocks.num_bytes == 0


def test_free_memory_is_some_of_what_there_is():
    assert 0 < free_host_bytes() < 1 << 50


@pytest.fixture
def area(monkeypatch: pytest.MonkeyPatch) -> StagingArea:
    """Without a device: its streams and events are stand-ins, and all tensors are the host's."""
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
    return StagingArea(torch.device("cuda", 0))


def test_a_checkpoint_that_has_to_wait_says_why(area: StagingArea, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a": torch.arange(3.0)}
    first = area.copy(values)
    second = area.copy(values)
    assert (first.problem, second.problem) == ("", "the one before it was still being written")
    second.release()
    assert area.copy(values).problem, "the first is still in use"
    first.release()
    third = area.copy(values)
    assert third.problem == ""
    third.release()
    monkeypatch.setattr(area, "_divide", lambda sizes: None)
    for _ in range(2):  # and not that another is being written
        assert area.copy(values).problem.startswith("this host lacks the memory")


def test_a_copy_that_fails_does_not_slow_down_those_after_it(area: StagingArea) -> None:
    class Broken:
        def __enter__(self) -> None:
            raise RuntimeError("no stream")

        def __exit__(self, *_: object) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "stream", lambda stream: Broken())
        with pytest.raises(RuntimeError, match="no stream"):
            area.copy({"a": torch.ones(1)})
    assert area.copy({"a": torch.ones(1)}).problem == ""


def test_memory_is_not_reserved_while_a_checkpoint_is_in_it(area: StagingArea, monkeypatch: pytest.MonkeyPatch) -> None:
    divided: list[list[int]] = []
    monkeypatch.setattr(area, "_divide", lambda sizes: divided.append(list(sizes)) or [])
    first = area.copy({"a": torch.ones(1)})
    area.reserve(lambda: [100])
    first.wait()
    second = area.copy({"a": torch.ones(1)})  # waits for the thread
    assert second.problem
    assert divided == [[]]
