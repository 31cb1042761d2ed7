"""What `lockstep scale` does: the same work at several sizes, and what each size made of it.

Starts real short trainings and reads what they wrote. Computes nothing that a run does not measure itself.
"""

from __future__ import annotations

import shutil
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, RunConfig
from lockstep.launch.start import train
from lockstep.rundir import RunDir, write_atomically

COUNTED, LEAST = "traffic/", "traffic_least/"  # how metrics name bytes: these, then axis/kind


@dataclass(frozen=True)
class Flow:
    """Bytes that rank 0 sends in a step on one axis by one kind of collective; the least there could be, if known."""

    axis: str
    kind: str
    sent_bytes: float
    least_bytes: float | None


@dataclass(frozen=True)
class Size:
    """One run, per step: means over its steps but the first, which warms up."""

    procs: int
    layout: str
    tokens_per_s: float
    step_time_s: float
    efficiency: float
    """Speed over that of the smallest size, over the ratio of sizes."""
    wait_s: float | None
    """In collectives, mean over ranks; None where it is not measured (CUDA, or one rank)."""
    memory_gib: float
    balance: float | None
    """Tokens of the fullest rank, over the mean."""
    straggler: int | None
    flows: tuple[Flow, ...]

    @property
    def sent_bytes(self) -> float:
        return sum(flow.sent_bytes for flow in self.flows)


def parse_sizes(text: str) -> list[int]:
    """From "1,2,4" to numbers, smallest first."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--procs {text}: give numbers with commas, such as 1,2,4") from None
    if sizes[0] < 1:
        raise ValueError(f"--procs {text}: a run has at least one process")
    return sizes


def measure(settings: RunConfig, sizes: Sequence[int], steps: int, out: Path) -> list[Size]:
    """Run all sizes, one after the other, each in a folder of its own under `out`."""
    for procs in sizes:
        try:
            settings.parallel.degrees(procs)
        except ConfigError as error:
            raise ConfigError(f"--procs {procs} does not go with this configuration: {error}") from None
    found: list[Size] = []
    for procs in sizes:
        folder = out / f"procs-{procs}"
        if folder.exists():
            raise ValueError(f"{folder} already exists: name another folder with --out")
        train(short_run(settings, procs, steps), run_dir=folder)
        run = RunDir(folder)
        shutil.rmtree(run.path / "checkpoints", ignore_errors=True)  # every run leaves one at its end
        found.append(read_size(procs, layout_of(settings, procs), run.metrics(), found[0] if found else None))
    return found


def short_run(settings: RunConfig, procs: int, steps: int) -> RunConfig:
    """The same work without what is not a step: evaluation, checkpoints, export."""
    changes: dict[str, dict[str, Any]] = {
        "launch": {"procs": procs},
        # As many epochs as steps are enough, whatever the batch.
        "optim": {"max_steps": steps + 1, "epochs": float(steps + 1)},
        "data": {"validation": (), "validation_fraction": 0.0},
        "evaluation": {"every_steps": 0, "at_start": False, "metrics": (), "patience": None},
        "checkpoint": {"every_steps": 0, "export": "none"},
        "logging": {"every_steps": 1, "tensorboard": False},
    }
    parts = {name: getattr(settings, name).model_copy(update=values) for name, values in changes.items()}
    return settings.model_copy(update={"name": f"{settings.name}-{procs}", **parts})


def layout_of(settings: RunConfig, procs: int) -> str:
    degrees = settings.parallel.degrees(procs)
    return " x ".join(f"{axis} {size}" for axis, size in degrees._asdict().items() if size > 1) or "one rank"


def read_size(procs: int, layout: str, metrics: Sequence[Mapping[str, Any]], smallest: Size | None) -> Size:
    """From a run's records; the first step is left out unless it is the only one."""
    records = [record for record in metrics if record.get("split") == "train"]
    records = records[1:] or records
    if not records:
        raise ValueError(f"the run with {procs} processes has no metrics: it made no step")
    tokens_per_s = sum(r["tokens"] for r in records) / sum(r["step_time_s"] for r in records)
    base = (tokens_per_s, procs) if smallest is None else (smallest.tokens_per_s, smallest.procs)
    return Size(
        procs,
        layout,
        tokens_per_s,
        statistics.fmean(r["step_time_s"] for r in records),
        tokens_per_s / base[0] * base[1] / procs,
        _mean(records, "wait_s"),
        max(r.get("memory_gib_max", r["memory_gib"]) for r in records),
        _mean(records, "token_balance"),
        find_straggler(records),
        read_flows(records),
    )


def read_flows(records: Sequence[Mapping[str, Any]]) -> tuple[Flow, ...]:
    names = sorted({key.removeprefix(COUNTED) for record in records for key in record if key.startswith(COUNTED)})
    flows = []
    for name in names:
        axis, _, kind = name.partition("/")
        sent = sum(record.get(COUNTED + name, 0.0) for record in records) / len(records)
        flows.append(Flow(axis, kind, sent, _mean(records, LEAST + name)))
    return tuple(flows)


def find_straggler(records: Sequence[Mapping[str, Any]]) -> int | None:
    """The rank that was the slow one in more than half of the steps: one slow step is a hiccup."""
    named = Counter(int(record["straggler"]) for record in records if "straggler" in record)
    if not named:
        return None
    rank, times = named.most_common(1)[0]
    return rank if 2 * times > len(records) else None


def as_json(sizes: Sequence[Size]) -> list[dict[str, Any]]:
    return [{**asdict(size), "sent_bytes": size.sent_bytes} for size in sizes]


def write_report(sizes: Sequence[Size], title: str, out: Path) -> list[Path]:
    """scaling.png and scaling.html; returns their paths."""
    from lockstep.reports.scaling import draw, report_page

    picture, document = out / "scaling.png", out / "scaling.html"
    try:
        svgs = draw(sizes, picture)
        write_atomically(document, report_page(title, sizes, svgs))
    except OSError as error:
        raise ValueError(f"cannot write into {out}: {error.strerror or error}") from error
    return [picture, document]


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [float(record[key]) for record in records if key in record]
    return statistics.fmean(values) if values else None
