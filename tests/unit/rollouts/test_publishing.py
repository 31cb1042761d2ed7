"""Weights arrive whole and verified or not at all, whatever happens to their bytes and their order on the way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import build_model
from torch import Tensor

from lockstep.model.load import apply_weights
from lockstep.rollouts.engines.publishing import Manifest, Publication, WeightReceiver, WeightsRejected

Send = Callable[["Model", Publication], None]


class Model:
    """Stands for an engine: what it has been given, and the receiver before it."""

    def __init__(self) -> None:
        self.applied: list[tuple[int, dict[str, Tensor]]] = []
        self.receiver = WeightReceiver(lambda tensors, version: self.applied.append((version, tensors)))


def make_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Of every kind: odd sizes, empty, without dimensions, not contiguous, larger than a bucket."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "large": draw(30, 17),
        "bytes": torch.arange(7, dtype=torch.uint8) + seed,
        "half": draw(5).to(torch.bfloat16),
        "empty": draw(0, 4),
        "number": draw(1)[0].double(),
        "turned": draw(6, 4).T,
        "flags": draw(5) > 0,
    }


def begin(model: Model, publication: Publication) -> None:
    """As it travels: the manifest becomes JSON."""
    model.receiver.begin(Manifest.from_json(json.loads(json.dumps(publication.manifest.to_json()))))


def take(model: Model, publication: Publication, *numbers: int) -> None:
    for number in numbers:
        model.receiver.receive(publication.version, number, publication.buckets[number].clone())


def send(model: Model, publication: Publication) -> None:
    begin(model, publication)
    take(model, publication, *range(len(publication.buckets)))
    model.receiver.commit(publication.version)


def assert_has(model: Model, version: int, tensors: dict[str, Tensor]) -> None:
    found_version, found = model.applied[-1]
    assert (found_version, model.receiver.version) == (version, version)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("bucket_bytes", [1, 7, 64, 1000, 1 << 20])
def test_what_is_sent_is_what_arrives(bucket_bytes: int) -> None:
    model, tensors = Model(), make_tensors()
    publication = Publication.of(3, tensors, bucket_bytes)
    assert all(len(bucket) == bucket_bytes for bucket in publication.buckets[:-1])
    assert sum(len(bucket) for bucket in publication.buckets) == publication.manifest.num_bytes
    send(model, publication)
    assert_has(model, 3, tensors)


def test_a_publication_is_a_copy() -> None:
    model, tensors = Model(), make_tensors()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    publication = Publication.of(0, tensors, 100)
    for tensor in tensors.values():
        tensor.zero_()
    send(model, publication)
    assert_has(model, 0, expected)


def test_only_what_lies_in_several_buckets_is_copied() -> None:
    model = Model()
    tensors = {name: torch.randn(50) for name in ("one", "two", "three")}
    publication = Publication.of(0, tensors, 300)  # the second is cut in two
    begin(model, publication)
    contents = [bucket.clone() for bucket in publication.buckets]
    for number, content in enumerate(contents):
        model.receiver.receive(0, number, content)
    model.receiver.commit(0)
    assert_has(model, 0, tensors)
    _, found = model.applied[-1]
    memory = {content.untyped_storage().data_ptr() for content in contents}
    assert {name: found[name].untyped_storage().data_ptr() in memory for name in found} == {
        "one": True, "two": False, "three": True,
    }  # fmt: skip


def test_kinds_that_cannot_travel_are_named() -> None:
    with pytest.raises(ValueError, match=r"waves is torch\.complex64"):
        Publication.of(0, {"waves": torch.zeros(2, dtype=torch.complex64)})


# --- what goes wrong on the way -------------------------------------------------------------------------------------


def last_bucket_missing(model: Model, publication: Publication) -> None:
    begin(model, publication)
    take(model, publication, *range(len(publication.buckets) - 1))
    model.receiver.commit(publication.version)


def bucket_left_out(model: Model, publication: Publication) -> None:
    begin(model, publication)
    take(model, publication, 0, 1, 3)


def bucket_twice(model: Model, publication: Publication) -> None:
    begin(model, publication)
    take(model, publication, 0, 1, 1)


def bucket_too_many(model: Model, publication: Publication) -> None:
    begin(model, publication)
    take(model, publication, *range(len(publication.buckets)))
    model.receiver.receive(publication.version, len(publication.buckets), torch.zeros(1, dtype=torch.uint8))


def bucket_cut(model: Model, publication: Publication) -> None:
    begin(model, publication)
    for number, bucket in enumerate(publication.buckets):
        model.receiver.receive(publication.version, number, bucket[:-1] if number == 2 else bucket)
    model.receiver.commit(publication.version)


def bucket_longer(model: Model, publication: Publication) -> None:
    begin(model, publication)
    for number, bucket in enumerate(publication.buckets):
        longer = torch.cat([bucket, bucket])
        model.receiver.receive(
            publication.version, number, longer if number == len(publication.buckets) - 1 else bucket
        )


def bucket_of_floats(model: Model, publication: Publication) -> None:
    begin(model, publication)
    model.receiver.receive(publication.version, 0, torch.zeros(100))


def bucket_of_another_version(model: Model, publication: Publication) -> None:
    begin(model, publication)
    model.receiver.receive(publication.version + 1, 0, publication.buckets[0])


def commit_of_another_version(model: Model, publication: Publication) -> None:
    begin(model, publication)
    take(model, publication, *range(len(publication.buckets)))
    model.receiver.commit(publication.version + 1)


def bucket_without_begin(model: Model, publication: Publication) -> None:
    take(model, publication, 0)


def commit_without_begin(model: Model, publication: Publication) -> None:
    model.receiver.commit(publication.version)


def commit_twice(model: Model, publication: Publication) -> None:
    """The second is of nothing; what the first brought stays."""
    begin(model, publication)
    with pytest.raises(WeightsRejected):
        model.receiver.commit(publication.version)
    model.receiver.commit(publication.version)


def older_version(model: Model, publication: Publication) -> None:
    begin(model, Publication.of(1, make_tensors(1)))


def same_version_with_other_weights(model: Model, publication: Publication) -> None:
    begin(model, Publication.of(2, make_tensors(1)))


def name_twice(model: Model, publication: Publication) -> None:
    entries = publication.manifest.entries
    begin(model, replace(publication, manifest=replace(publication.manifest, entries=(*entries, entries[0]))))


def unknown_dtype(model: Model, publication: Publication) -> None:
    first, *rest = publication.manifest.entries
    entries = (replace(first, dtype="float7"), *rest)
    model.receiver.begin(Manifest.from_json({"version": 5, "entries": [vars(entry) for entry in entries]}))


WRONG: list[tuple[Send, str]] = [
    (last_bucket_missing, r"version 5 has 2,1\d\d bytes, and 2,100 arrived"),
    (bucket_left_out, "bucket 3 of version 5 arrived where 2 was expected"),
    (bucket_twice, "bucket 1 of version 5 arrived where 2 was expected"),
    (bucket_too_many, "has 1 values of torch.uint8, and 0 bytes are still expected"),
    (bucket_cut, r"version 5 has 2,1\d\d bytes, and 2,1\d\d arrived"),
    (bucket_longer, "bytes are still expected"),
    (bucket_of_floats, "has 100 values of torch.float32"),
    (bucket_of_another_version, "version 5 is being received, not version 6"),
    (commit_of_another_version, "version 5 is being received, not version 6"),
    (bucket_without_begin, "version 5 has no open transaction"),
    (commit_without_begin, "version 5 has no open transaction"),
    (commit_twice, "version 5 has no open transaction"),
    (older_version, "version 1 is older than 2, which is served"),
    (same_version_with_other_weights, "version 2 is served already, with other weights"),
    (name_twice, "a name is announced twice"),
    (unknown_dtype, "large is announced as float7"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[wrong.__name__ for wrong, _ in WRONG])
def test_a_transaction_that_goes_wrong_changes_nothing_and_the_next_one_works(wrong: Send, message: str) -> None:
    model, old, new = Model(), make_tensors(0), make_tensors(3)
    send(model, Publication.of(2, old, 100))
    publication = Publication.of(5, new, 100)
    with pytest.raises(WeightsRejected, match=message):
        wrong(model, publication)
    assert len(model.applied) == 1
    assert_has(model, 2, old)
    send(model, publication)
    assert_has(model, 5, new)


@given(st.integers(0, 2**31), st.integers(1, 255), st.sampled_from([50, 333, 1 << 20]))
@settings(deadline=None)
def test_any_changed_byte_is_found_and_its_tensor_named(place: int, change: int, bucket_bytes: int) -> None:
    model, tensors = Model(), make_tensors()
    publication = Publication.of(1, tensors, bucket_bytes)
    place %= publication.manifest.num_bytes
    publication.buckets[place // bucket_bytes][place % bucket_bytes] ^= change
    start = 0
    for entry in publication.manifest.entries:
        if start <= place < start + entry.num_bytes:
            break
        start += entry.num_bytes
    with pytest.raises(WeightsRejected, match=f"{entry.name} of version 1 has the digest .* with {entry.digest}"):
        send(model, publication)
    assert not model.applied
    assert model.receiver.version is None


def test_a_new_begin_throws_the_old_away() -> None:
    model, old, new = Model(), make_tensors(0), make_tensors(1)
    given_up = Publication.of(1, old, 100)
    begin(model, given_up)
    take(model, given_up, 0, 1)
    send(model, Publication.of(2, new, 100))
    assert_has(model, 2, new)
    with pytest.raises(WeightsRejected, match="has no open transaction"):
        take(model, given_up, 2)


def test_the_same_version_may_be_sent_again() -> None:
    """As happens when only the answer to its commit was lost."""
    model, tensors = Model(), make_tensors()
    for _ in range(2):
        send(model, Publication.of(4, tensors, 100))
        assert_has(model, 4, tensors)


def test_what_the_model_refuses_is_not_served() -> None:
    model = build_model()
    receiver = WeightReceiver(lambda tensors, version: apply_weights(model, tensors))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def publish(version: int, tensors: dict[str, Any]) -> None:
        publication = Publication.of(version, tensors, 5000)
        receiver.begin(publication.manifest)
        for number, bucket in enumerate(publication.buckets):
            receiver.receive(version, number, bucket)
        receiver.commit(version)

    other = build_model(seed=1).state_dict()
    with pytest.raises(ValueError, match="are missing"):
        publish(1, dict(list(other.items())[1:]))
    with pytest.raises(ValueError, match="are missing"):
        publish(1, {})
    assert receiver.version is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    publish(1, other)
    assert receiver.version == 1
    assert all(torch.equal(tensor, other[name]) for name, tensor in model.state_dict().items())


@given(st.integers(0, 2**31))
@settings(deadline=None, max_examples=60)
def test_only_whole_verified_versions_are_ever_served_and_they_never_go_back(seed: int) -> None:
    """Messages of several versions, some spoiled, in any order: what is applied is one of them, bit for bit."""
    draw, model, newest = random.Random(seed), Model(), -1
    publications = [Publication.of(version, make_tensors(version), 700) for version in range(4)]
    for _ in range(60):
        publication = draw.choice(publications)
        number = draw.randrange(len(publication.buckets))
        try:
            if draw.random() < 0.3:
                send(model, publication)
            elif draw.random() < 0.3:
                begin(model, publication)
            elif draw.random() < 0.5:
                content = publication.buckets[number].clone()
                content[draw.randrange(len(content))] ^= draw.choice([0, 0, 1])
                model.receiver.receive(publication.version, number, content)
            else:
                model.receiver.commit(publication.version)
        except WeightsRejected:
            continue
        if model.applied:
            version = model.applied[-1][0]
            assert version >= newest
            newest = version
            assert_has(model, version, make_tensors(version))
