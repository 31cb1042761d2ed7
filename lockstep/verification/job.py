"""The job of the ranks of one layout, and their results: JSON and safetensors in one folder."""

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

_JOB, _RESULT = "job.json", "result.json"


@dataclass(frozen=True)
class LayoutJob:
    """`tokens` are the user's token ids by their new ids; `micro_batch_tokens` has a number for each batch.

    `reference` as in algorithm.reference, never auto; `other` is the reduction of algorithm.reference_model, if any.
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
    """What the ranks of one layout computed. `disagreements` are sentences about values that differ between ranks."""

    steps: list[StepValues]
    disagreements: list[str]
    warnings: list[str]
    packs: bool


def write_tensors(folder: Path, rank: int, tensors: dict[str, Tensor]) -> None:
    """Those that this rank owns."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / f"rank-{rank}.safetensors")


def write_result(folder: Path, facts: dict[str, object]) -> None:
    """Rank 0 only, after every rank has written its tensors."""
    write_atomically(folder / _RESULT, json.dumps(facts))


def read_result(folder: Path) -> LayoutResult:
    facts = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
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
    """`refused`: the model does not support this layout, which is no fault."""
    facts = {"rank": rank, "message": message, "time": time.time(), "refused": refused}
    write_atomically(folder / f"failure-{rank}.json", json.dumps(facts))


def read_failures(folder: Path) -> list[dict[str, Any]]:
    """In the order of time."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("failure-*.json")]
    return sorted(records, key=lambda failure: failure["time"])


def agreed_refusal(folder: Path, num_ranks: int) -> str:
    """Why the model does not support this layout, if every rank gives the same reason; otherwise empty."""
    failures = read_failures(folder)
    messages = {failure["message"] for failure in failures if failure["refused"]}
    return messages.pop() if len(failures) == num_ranks and len(messages) == 1 else ""


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))
