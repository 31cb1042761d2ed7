"""What the model in training is compared with: which way is the cheapest that is right, and log-probs made ahead.

Every rank runs this alike. Must not know models: their log-probs come from a backend, their files as a description.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import DpoConfig, GrpoConfig, KtoConfig, RunConfig, SftConfig
from lockstep.config.algorithm import ReferenceKind
from lockstep.train.judging import estimates_kl
from lockstep.train.reference_store import FORMAT, DamagedEntry, ReferenceLogprobs, ReferenceStore, WithReference
from lockstep.types import Datum, Logprobs

_ROWS_AT_ONCE = 256
Forward = Callable[[Sequence[Datum]], list[Logprobs]]


@dataclass(frozen=True)
class ReferenceChoice:
    """`why` is half a sentence for people."""

    kind: ReferenceKind
    why: str

    @property
    def asks_backend(self) -> bool:
        """Whether the backend computes it in every step."""
        return self.kind in ("adapter_off", "copy")

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}"


def choose_reference(config: RunConfig, *, num_rows: int, num_seen: int) -> ReferenceChoice:
    """`num_seen`: how many training rows the steps of the run take, each counted as often as it comes."""
    algorithm = config.algorithm
    if isinstance(algorithm, SftConfig):
        return ReferenceChoice("none", "sft has none")
    if isinstance(algorithm, GrpoConfig):
        return _choose_for_samples(config, algorithm)
    if not algorithm.needs_reference:
        return ReferenceChoice("none", f"loss {', '.join(algorithm.loss)} has none")
    if algorithm.reference_model is not None:
        return ReferenceChoice("precomputed", "another model is computed once, and not held beside the one in training")
    if algorithm.reference != "auto":
        return ReferenceChoice(algorithm.reference, "as configured")
    if algorithm.reference_sync_steps is not None:
        return ReferenceChoice("copy", "only a copy can follow the model in training")
    if config.lora is not None:
        return ReferenceChoice("adapter_off", "the model without its adapters is the reference, at no memory")
    return _choose_for_full(config, algorithm, num_rows, num_seen)


def _choose_for_samples(config: RunConfig, algorithm: GrpoConfig) -> ReferenceChoice:
    if not algorithm.needs_reference:
        return ReferenceChoice("none", "kl_coefficient is 0")
    if algorithm.reference != "auto":
        return ReferenceChoice(algorithm.reference, "as configured")
    if config.lora is not None and algorithm.reference_sync_steps is None:
        return ReferenceChoice("adapter_off", "the model without its adapters is the reference, at no memory")
    return ReferenceChoice("copy", "answers are new in every step, so nothing can be computed ahead")


def _choose_for_full(
    config: RunConfig, algorithm: DpoConfig | KtoConfig, num_rows: int, num_seen: int
) -> ReferenceChoice:
    if estimates_kl(algorithm):
        return ReferenceChoice("copy", "loss kto puts prompts and answers together anew in every batch")
    if num_seen < num_rows and config.parallel.backend == "torch":
        why = f"the run takes {num_seen:,} of {num_rows:,} training rows, so computing all of them first would be waste"
        return ReferenceChoice("copy", why)
    return ReferenceChoice("precomputed", "every row once and kept on disk, without a second copy of the weights")


@dataclass(frozen=True)
class Precomputing:
    """What making log-probs ahead needs of its surroundings.

    `model` describes the reference's weights, as plain JSON. `writes`: whether this process writes to its machine's
    disk. `agree`: every process's answer to a question. `tell` and `warn` are for people.
    """

    folder: Path
    model: Any
    precision: str
    writes: bool
    agree: Callable[[bool], Sequence[bool]]
    tell: Callable[[str], None]
    warn: Callable[[str], None]

    def identity(self, rows: Any) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "precision": self.precision,
            "rows": rows.digest,
            "dtype": "<f8" if self.precision == "fp64" else "<f4",
        }

    def find(self, rows: Any) -> ReferenceLogprobs | None:
        try:
            return ReferenceStore(self.folder).open(self.identity(rows), rows)
        except DamagedEntry as error:
            self.warn(f"kept log-probs of the reference cannot be used ({error}): they are computed again")
            return None


def has_all(ahead: Precomputing, parts: Sequence[Any]) -> bool:
    """Whether every process finds all of them on its disk. All ranks."""
    return all(ahead.agree(all(ahead.find(rows) is not None for rows in parts if len(rows))))


def add_reference(rows: Any, name: str, forward: Forward | None, ahead: Precomputing) -> Sequence[Datum]:
    """The rows with their reference's log-probs: those on disk, or computed now by all ranks together. All ranks."""
    if len(rows) == 0:
        return rows
    found = ahead.find(rows)
    if not all(ahead.agree(found is not None)):
        assert forward is not None, "nobody to compute what is not on disk"
        computed = _compute(rows, name, forward, ahead.tell)
        if ahead.writes:
            ReferenceStore(ahead.folder).write(ahead.identity(rows), rows, computed)
        else:
            for _ in computed:
                pass  # all ranks compute together, one of each machine keeps it
        ahead.agree(True)  # what is written can be opened from here on
        found = ahead.find(rows)
    if found is None:
        raise ValueError(
            f"the log-probs of the reference cannot be read from {ahead.folder}: set data.cache_dir to a folder that "
            "every process of this machine can read and write, or algorithm.reference to copy"
        )
    return WithReference(rows, found)


def _compute(rows: Any, name: str, forward: Forward, tell: Callable[[str], None]) -> Iterator[list[Logprobs]]:
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        tell(f"reference of {name}: {start:,} of {len(rows):,} rows")
        yield forward(rows[start : start + _ROWS_AT_ONCE])
