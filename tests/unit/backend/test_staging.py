"""Memory that checkpoints of a GPU run are copied to: how it is divided. tests/gpu copies into it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.backend import staging
from lockstep.backend.staging import PinnedBlocks, copy_now, free_host_bytes, plan_blocks


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
