"""What the ranks of one layout are told, and the files in which they answer: JSON and safetensors in one folder.

Must not know what is computed.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.config import ParallelConfig, RunConfig
from lockstep.rundir import write_atomically
from lockstep.types import OptimStep
from lockstep.verification.layouts import Layout
from lockstep.verification.plain_loop import StepValues
from lockstep.verification.reduced import Reduction

_JOB, _FOUND = "job.json", "found.json"


@dataclass(frozen=True)
class LayoutJob:
    """`tokens` are the user's tokens by their new numbers; `micro_batch_tokens` has a number for each batch.

    `reference` as in algorithm.reference, never auto; `other` is of algorithm.reference_model, where there is one.
    """

    config: RunConfig
    layout: Layout
    reduction: Reduction
    tokens: list[int]
    micro_batch_tokens: list[int]
    step: OptimStep
    timeout_s: float
    reference: str = "none"
    other: Reduction | None = None

    def write(self, folder: Path) -> None:
        text = {
            "config": self.config.model_dump(mode="json"),
            "parallel": self.layout.parallel.model_dump(mode="json"),
            "reduction": asdict(self.reduction),
            "tokens": self.tokens,
            "micro_batch_tokens": self.micro_batch_tokens,
            "step": asdict(self.step),
            "timeout_s": self.timeout_s,
            "reference": self.reference,
            "other": self.other and asdict(self.other),
        }
        (folder / _JOB).write_text(json.dumps(text), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> LayoutJob:
        text = json.loads((folder / _JOB).read_text(encoding="utf-8"))
        return cls(
            RunConfig.model_validate(text["config"]),
            Layout(ParallelConfig.model_validate(text["parallel"])),
            Reduction(**text["reduction"]),
            text["tokens"],
            text["micro_batch_tokens"],
            OptimStep(**text["step"]),
            text["timeout_s"],
            text["reference"],
            text["other"] and Reduction(**text["other"]),
        )


@dataclass(frozen=True)
class LayoutResult:
    """What the ranks of one layout computed, put together. `disagreements` are sentences about ranks that differ."""

    steps: list[StepValues]
    disagreements: list[str]
    warnings: list[str]
    packs: bool


def write_tensors(folder: Path, rank: int, tensors: dict[str, Tensor]) -> None:
    """This rank's part of them."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / f"rank-{rank}.safetensors")


def write_result(folder: Path, facts: dict[str, Any]) -> None:
    """By rank 0, when every rank's tensors are written."""
    write_atomically(folder / _FOUND, json.dumps(facts))


def read_result(folder: Path) -> LayoutResult:
    facts = json.loads((folder / _FOUND).read_text(encoding="utf-8"))
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("rank-*.safetensors")):
        tensors |= load_file(path)
    steps = []
    for number, values in enumerate(facts["steps"]):
        gradients, weights = (_part(tensors, tensor_name(number, kind, "")) for kind in ("gradients", "weights"))
        steps.append(StepValues(**{**values, "names": tuple(values["names"])}, gradients=gradients, weights=weights))
    return LayoutResult(steps, facts["disagreements"], facts["warnings"], facts["packs"])


def tensor_name(step: int, kind: str, name: str) -> str:
    return f"{step}.{kind}.{name}"


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def record_failure(folder: Path, rank: int, message: str, *, refused: bool = False) -> None:
    """`refused`: not a fault, but a layout that the model cannot have."""
    facts = {"rank": rank, "message": message, "time": time.time(), "refused": refused}
    write_atomically(folder / f"failure-{rank}.json", json.dumps(facts))


def read_failures(folder: Path) -> list[dict[str, Any]]:
    """The first one first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("failure-*.json")]
    return sorted(found, key=lambda failure: failure["time"])


def agreed_refusal(folder: Path, num_ranks: int) -> str:
    """Why this layout cannot be, if every rank says the same about it; otherwise nothing."""
    found = read_failures(folder)
    messages = {failure["message"] for failure in found if failure["refused"]}
    return messages.pop() if len(found) == num_ranks and len(messages) == 1 else ""


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))
