"""New weights as a transaction: a manifest with digests, the bytes in buckets, then a commit that verifies them all.

Nothing changes until every digest agrees. Buckets are sent over a connection; of weights on a GPU that an engine shares
with the trainer, only the addresses (`device_memory`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

BUCKET_BYTES = 64 << 20
_WORD_BYTES = 4
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip


class WeightsRejected(ValueError):
    """What arrived is not what was announced, or cannot be loaded now. The receiver is unchanged."""


@dataclass(frozen=True)
class TensorEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    """sha256:HEX, or sum64:HEX for what never leaves the GPU."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """Of one version. The bytes of its tensors are concatenated in this order and split into buckets."""

    version: int
    entries: tuple[TensorEntry, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def is_on_device(self) -> bool:
        return all(entry.digest.startswith("sum64:") for entry in self.entries)

    def to_json(self) -> dict[str, object]:
        return {"version": self.version, "entries": [asdict(entry) for entry in self.entries]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Manifest:
        entries = tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in values["entries"])
        for entry in entries:
            if entry.dtype not in _DTYPES:
                raise WeightsRejected(f"{entry.name} is announced as {entry.dtype}, which is not a known dtype")
        if len({entry.name for entry in entries}) < len(entries):
            raise WeightsRejected("a name is announced twice")
        return cls(int(values["version"]), entries)


@dataclass(frozen=True)
class Publication:
    """A version ready to be sent to every engine: a copy, so that training can continue.

    `device_id`: of the GPU that has it, each tensor as one bucket; empty where the host has it.
    """

    manifest: Manifest
    buckets: tuple[Tensor, ...]
    device_id: str = ""

    @property
    def version(self) -> int:
        return self.manifest.version

    @cached_property
    def on_host(self) -> Publication:
        """The same for engines that cannot read this device's memory."""
        if not self.device_id:
            return self
        entries = self.manifest.entries
        parts = zip(entries, self.buckets, strict=True)
        return Publication.of(self.version, {entry.name: _as_tensor(part, entry) for entry, part in parts})

    @classmethod
    def of(cls, version: int, tensors: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> Publication:
        flat = [_bytes_of(tensor.cpu()) for tensor in tensors.values()]
        return cls(_describe(version, tensors, _sha256(flat)), tuple(_cut(flat, bucket_bytes)))

    @classmethod
    def of_device(cls, version: int, tensors: Mapping[str, Tensor], device_id: str) -> Publication:
        """Of tensors that are all on this GPU: they are not copied, and must never change."""
        flat = [_bytes_of(tensor) for tensor in tensors.values()]
        return cls(_describe(version, tensors, weighted_sums(flat)), tuple(flat), device_id)


def _describe(version: int, tensors: Mapping[str, Tensor], digests: Iterable[str]) -> Manifest:
    entries = []
    for (name, tensor), digest in zip(tensors.items(), digests, strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}: weights of this kind cannot be published")
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), digest))
    return Manifest(version, tuple(entries))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _cut(parts: Iterable[Tensor], bucket_bytes: int) -> Iterable[Tensor]:
    """The parts concatenated, as new tensors of equal size; the last may be shorter."""
    parts = list(parts)
    left = sum(len(part) for part in parts)
    bucket, filled = torch.empty(min(bucket_bytes, left), dtype=torch.uint8), 0
    for part in parts:
        while len(part):
            count = min(len(part), len(bucket) - filled)
            bucket[filled : filled + count] = part[:count]
            part, filled, left = part[count:], filled + count, left - count
            if filled == len(bucket):
                yield bucket
                bucket, filled = torch.empty(min(bucket_bytes, left), dtype=torch.uint8), 0


def _sha256(parts: Sequence[Tensor]) -> list[str]:
    with ThreadPoolExecutor(max(1, min(4, torch.get_num_threads()))) as threads:  # hashing releases the GIL
        return list(threads.map(lambda part: f"sha256:{hashlib.sha256(part.numpy()).hexdigest()}", parts))


def weighted_sums(parts: Sequence[Tensor], words_at_once: int = 4 << 20) -> list[str]:
    """Words times their places, summed modulo 2^64: a GPU computes it as fast as it reads, and the same words in
    another order give another sum. The host waits once."""
    if not parts:
        return []
    totals = torch.stack([_weighted_sum(part, words_at_once) for part in parts])
    return [f"sum64:{total % 2**64:016x}" for total in totals.tolist()]


def _weighted_sum(part: Tensor, words_at_once: int) -> Tensor:
    if part.storage_offset() % _WORD_BYTES:
        part = part.clone()
    num_words = len(part) // _WORD_BYTES
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    pieces = [(part[: num_words * _WORD_BYTES].view(torch.int32), 0), (part[num_words * _WORD_BYTES :], num_words)]
    for words, first in pieces:
        for begin in range(0, len(words), words_at_once):
            block = words[begin : begin + words_at_once].to(torch.int64)
            places = torch.arange(first + begin, first + begin + len(block), device=part.device)
            total += (block * (2 * places + 1)).sum()  # odd, so that no bit of a word is multiplied away
    return total


class WeightReceiver:
    """`apply` loads tensors into a model, or raises and leaves it unchanged. `version`: the last one applied."""

    def __init__(self, apply: Callable[[dict[str, Tensor], int], None]) -> None:
        self._apply = apply
        self.version: int | None = None
        self._served: Manifest | None = None
        self._manifest: Manifest | None = None
        self._buckets: list[Tensor] = []

    def begin(self, manifest: Manifest) -> None:
        """Discards what was received of a version that was not committed."""
        self._drop()
        if self.version is not None and manifest.version < self.version:
            raise WeightsRejected(f"version {manifest.version} is older than {self.version}, which is served")
        if self._served is not None and manifest.version == self.version and manifest != self._served:
            raise WeightsRejected(f"version {manifest.version} is served already, with other weights")
        self._manifest = manifest

    def receive(self, version: int, number: int, content: Tensor) -> None:
        """The next bucket; the receiver owns `content` from now on. A bucket out of order ends the transaction."""
        manifest = self._expect(version)
        due = len(self._buckets)
        if number != due:
            self._drop()
            raise WeightsRejected(f"bucket {number} of version {version} arrived where {due} was expected")
        num_left = manifest.num_bytes - sum(map(len, self._buckets))
        if content.dtype != torch.uint8 or content.dim() != 1 or len(content) > num_left:
            self._drop()
            raise WeightsRejected(
                f"bucket {number} of version {version} has {content.numel():,} values of {content.dtype}, and "
                f"{num_left:,} bytes are still expected"
            )
        self._buckets.append(content)

    def commit(self, version: int) -> None:
        """Verifies everything, then applies it."""
        manifest, buckets = self._expect(version), self._buckets
        num_received = sum(map(len, buckets))
        self._drop()
        if num_received != manifest.num_bytes:
            raise WeightsRejected(f"version {version} has {manifest.num_bytes:,} bytes, and {num_received:,} arrived")
        tensors = _verified(manifest, buckets)
        self._apply(tensors, version)
        self.version, self._served = version, manifest

    def _expect(self, version: int) -> Manifest:
        if self._manifest is None:
            raise WeightsRejected(f"version {version} has no open transaction")
        if self._manifest.version != version:
            raise WeightsRejected(f"version {self._manifest.version} is being received, not version {version}")
        return self._manifest

    def _drop(self) -> None:
        self._manifest, self._buckets = None, []


def _verified(manifest: Manifest, buckets: list[Tensor]) -> dict[str, Tensor]:
    parts = _parts(buckets, [entry.num_bytes for entry in manifest.entries])
    digests = weighted_sums(parts) if manifest.is_on_device else _sha256(parts)
    tensors = {}
    for entry, part, digest in zip(manifest.entries, parts, digests, strict=True):
        if digest != entry.digest:
            raise WeightsRejected(
                f"{entry.name} of version {manifest.version} has the digest {digest} and was announced with "
                f"{entry.digest}: it was corrupted on the way"
            )
        # A view needs aligned bytes.
        aligned = part if part.storage_offset() % _DTYPES[entry.dtype].itemsize == 0 else part.clone()
        tensors[entry.name] = _as_tensor(aligned, entry)
    return tensors


def _parts(buckets: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """The bytes of the buckets in parts of these sizes. Only a part that spans several buckets is copied."""
    end = torch.empty(0, dtype=torch.uint8, device=buckets[-1].device if buckets else None)
    left, parts = [*buckets, end], []
    left.reverse()
    for size in sizes:
        pieces: list[Tensor] = []
        while size > len(left[-1]):
            pieces.append(left.pop())
            size -= len(pieces[-1])
        pieces.append(left[-1][:size])
        left[-1] = left[-1][size:]
        pieces = [piece for piece in pieces if len(piece)] or pieces[:1]
        parts.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
    return parts


def _as_tensor(content: Tensor, entry: TensorEntry) -> Tensor:
    return content.view(_DTYPES[entry.dtype]).reshape(entry.shape)
