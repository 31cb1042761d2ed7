"""Weights that engines read where the trainer has them: verified like sent ones, and sent where that cannot be.

Threads stand for processes here, and the memory that they share anyway for a GPU's; `tests/gpu` has the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from thread_engines import Town, assert_alike, expected_of, weights_of
from torch import Tensor

from lockstep.rollouts.engines import device_memory, publishing
from lockstep.rollouts.engines.device_memory import Address, NotShared
from lockstep.rollouts.engines.publishing import Manifest, Publication, WeightReceiver, WeightsRejected, weighted_sums

GPU = "GPU-of-this-test"


class SharedMemory:
    """`opened`: whatever was read through an address."""

    def __init__(self) -> None:
        self.contents: list[Tensor] = []
        self.opened: list[Tensor] = []
        self.refusal = ""

    def share(self, content: Tensor) -> Address:
        self.contents.append(content)
        return [len(self.contents) - 1]

    def open_shared(self, address: Address, device: torch.device) -> Tensor:
        if self.refusal:
            raise NotShared(self.refusal)
        self.opened.append(self.contents[address[0]])
        return self.opened[-1]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    shared = SharedMemory()
    monkeypatch.setattr(device_memory, "device_id", lambda device: GPU)
    monkeypatch.setattr(device_memory, "share", shared.share)
    monkeypatch.setattr(device_memory, "open_shared", shared.open_shared)
    return shared


@pytest.fixture
def towns() -> Iterator[Callable[..., Town]]:
    made: list[Town] = []

    def make(*given: Any, **options: Any) -> Town:
        made.append(Town(*given, shares_gpu=True, **options))
        return made[-1]

    yield make
    for town in made:
        town.pool.close()


def test_engines_of_the_same_gpu_read_the_weights_where_they_are(
    memory: SharedMemory, towns: Callable[..., Town], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_cut", lambda *_: pytest.fail("weights were copied to the host"))
    town = towns(2)
    for version in (1, 2):
        town.publish(version)
        assert_alike(town.sample(version), expected_of(version))
    addresses = {content.data_ptr() for content in memory.opened}
    assert addresses == {tensor.data_ptr() for version in (1, 2) for tensor in weights_of(version).values()}
    assert not town.fields_of("engine_slow")


def test_an_engine_that_cannot_open_them_gets_a_copy_and_says_so_once(
    memory: SharedMemory, towns: Callable[..., Town]
) -> None:
    memory.refusal = "the driver does not map it"
    town = towns(1)
    for version in (1, 2):
        town.publish(version)
        assert_alike(town.sample(version), expected_of(version))
    (told,) = town.fields_of("engine_slow", 1)
    assert told["message"] == "new weights pass through the host's memory: the driver does not map it"
    assert not memory.opened
    assert not town.fields_of("engine_lost")


def test_a_trainer_that_cannot_share_sends_copies(
    memory: SharedMemory, towns: Callable[..., Town], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(content: Tensor) -> Address:
        raise NotShared("this allocator cannot")

    monkeypatch.setattr(device_memory, "share", refuse)
    town = towns(2)
    town.publish(1)
    assert_alike(town.sample(1), expected_of(1))
    assert {told["message"] for told in town.fields_of("engine_slow", 2)} == {
        "new weights pass through the host's memory: this allocator cannot"
    }


def test_engines_of_other_gpus_get_copies(memory: SharedMemory, towns: Callable[..., Town]) -> None:
    town = towns(2)
    town.publish(0)
    town.pool.supervisor.engines[1].device_id = "another GPU"
    num_opened = len(memory.opened)
    town.publish(1)
    assert len(memory.opened) == num_opened + len(weights_of(1)), "one of the two"
    for _ in range(2):
        assert_alike(town.sample(1), expected_of(1))
    assert not town.fields_of("engine_slow"), "no faster way was missed"


def test_a_gpu_without_room_for_a_copy_is_told_once(towns: Callable[..., Town]) -> None:
    town = towns(1)
    for version in (1, 2):
        town.publish(version)  # from the host, as a backend returns what it could not keep on its GPU
    (told,) = town.fields_of("engine_slow", 1)
    assert "their GPU has no room for a copy" in told["message"]


def test_an_address_with_other_content_is_rejected(memory: SharedMemory, towns: Callable[..., Town]) -> None:
    opened = memory.open_shared
    town = towns(1)
    town.publish(1)

    def open_another(address: Address, device: torch.device) -> Tensor:
        content = opened(address, device).clone()
        content[0] ^= 1
        device_memory.open_shared = memory.open_shared  # the second time it is right
        return content

    device_memory.open_shared = open_another  # given back by the fixture
    town.publish(2)
    (rejected,) = town.fields_of("bucket_rejected", 1)
    assert "corrupted on the way" in rejected["reason"]
    assert_alike(town.sample(2), expected_of(2))


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 4, 7, 64, 4099])
def test_a_sum_notices_any_bit_and_any_order(num_bytes: int) -> None:
    generator = torch.Generator().manual_seed(num_bytes)
    content = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    (whole,) = weighted_sums([content])
    assert weighted_sums([content], words_at_once=5) == [whole]
    words = [*content[: num_bytes // 4 * 4].view(torch.int32).tolist(), *content[num_bytes // 4 * 4 :].tolist()]
    assert whole == f"sum64:{sum(word * (2 * place + 1) for place, word in enumerate(words)) % 2**64:016x}"
    seen = {whole}
    for place in range(0, num_bytes, max(num_bytes // 50, 1)):
        for bit in range(8):
            changed = content.clone()
            changed[place] ^= 1 << bit
            seen.update(weighted_sums([changed]))
    if num_bytes > 8:
        seen.update(weighted_sums([content.roll(4), content.flip(0)]))
        assert len(seen) >= 3 + 8 * 50 * (num_bytes > 64)


def test_a_shared_version_can_be_sent_too() -> None:
    weights = {"a": torch.randn(3, 5), "b": torch.arange(7), "c": torch.randn(3).bfloat16(), "d": torch.empty(0)}
    shared = Publication.of_device(4, weights, GPU)
    assert shared.manifest.is_on_device
    assert [bucket.data_ptr() for bucket in shared.buckets] == [tensor.data_ptr() for tensor in weights.values()]
    sent = shared.on_host
    assert not sent.manifest.is_on_device
    assert sent.on_host is sent
    for publication in (shared, sent):
        loaded: dict[str, Tensor] = {}
        receiver = WeightReceiver(lambda tensors, version, loaded=loaded: loaded.update(tensors))
        receiver.begin(publication.manifest)
        for number, bucket in enumerate(publication.buckets):
            receiver.receive(4, number, bucket)
        receiver.commit(4)
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_digests_of_a_kind_nobody_knows_are_rejected() -> None:
    publication = Publication.of(1, {"a": torch.ones(3)})
    values = publication.manifest.to_json()
    values["entries"][0]["digest"] = "crc32:00000000"  # type: ignore[index]
    receiver = WeightReceiver(lambda tensors, version: pytest.fail("applied"))
    receiver.begin(Manifest.from_json(values))
    receiver.receive(1, 0, publication.buckets[0])
    with pytest.raises(WeightsRejected, match="announced with crc32"):
        receiver.commit(1)
