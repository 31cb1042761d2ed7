"""What `lockstep plan --simulate` shows: what ranks would send and hold, and where they would wait for each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.cli.display import LITERAL, borderless_table, make_console, quieten_libraries
from lockstep.cli.options import echo_json, settle_layout
from lockstep.config import ConfigError

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.verification.simulation import SimulatedRank, Simulation

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def simulate_and_show(
    config: RunConfig, num_ranks: int, *, only: str | None = None, expert_imbalance: float = 1.0, as_json: bool
) -> int:
    """The exit code: 0 if the ranks agree, otherwise 1. `only`: which ranks, as they are written."""
    chosen = None if only is None else parse_ranks(only, num_ranks)
    config = settle_layout(config, num_ranks)
    errors = make_console(stderr=True)
    with errors.status("loading") as status:
        from lockstep.verification.simulation import simulate

        quieten_libraries()

        def show(done: int, total: int) -> None:
            text = f"{done} of {total} simulated ranks"
            status.update(text)
            if not errors.is_terminal:
                errors.print(text, highlight=False)

        simulation = simulate(config, num_ranks, ranks=chosen, expert_imbalance=expert_imbalance, on_progress=show)
    if as_json:
        echo_json(json.dumps(as_plain(simulation)))
    _show(make_console(stderr=as_json), simulation)
    return 0 if simulation.passed else 1


def parse_ranks(text: str, num_ranks: int) -> list[int]:
    """Of `all`, or of numbers and ranges: 0,17,300-310."""
    if text.strip() == "all":
        return list(range(num_ranks))
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ConfigError(f"--simulate-ranks {text}: {part.strip()!r} is no rank: write all, or 0,17,300-310")
        wanted = range(int(first), int(last or first) + 1)
        if not wanted or wanted[-1] >= num_ranks:
            raise ConfigError(
                f"--simulate-ranks {text}: {part.strip()} is not among the {num_ranks:,} ranks, which are 0 to "
                f"{num_ranks - 1:,}"
            )
        found += wanted
    return found


def as_plain(simulation: Simulation) -> dict[str, Any]:
    return {
        "model": simulation.model,
        "layout": {axis: size for axis, size in simulation.degrees._asdict().items() if size > 1},
        "num_ranks": simulation.degrees.num_ranks,
        "precision": simulation.precision,
        "rows": simulation.num_rows,
        "tokens": simulation.num_tokens,
        "seconds": round(simulation.seconds, 1),
        "ranks": [_rank_as_plain(one) for one in simulation.ranks],
        "mismatches": [
            {"rank": m.rank, "other": m.other, "axis": m.group.axis, "call": m.call, "problem": str(m)}
            for m in simulation.mismatches
        ],
        "notes": simulation.notes,
    }


def _rank_as_plain(one: SimulatedRank) -> dict[str, Any]:
    traffic = [
        {"axis": axis, "kind": kind, "calls": calls, "sent_bytes": sent, "largest_bytes": largest}
        | ({"expected_bytes": one.expected[axis, kind]} if (axis, kind) in one.expected else {})
        for (axis, kind), (calls, sent, largest) in sorted(one.record.traffic().items())
    ]
    peak = {"peak_bytes": sum(one.peak_bytes.values()), "peak_by_kind": one.peak_bytes}
    return {"rank": one.rank, "place": one.place, "traffic": traffic, **peak, "seconds": round(one.seconds, 1)}


def _show(console: Console, simulation: Simulation) -> None:
    degrees = simulation.degrees
    console.print(
        f"{simulation.model} in {simulation.precision} on {degrees.num_ranks:,} ranks ({degrees.name}): a step of "
        f"{simulation.num_rows:,} rows, {simulation.num_tokens:,} tokens",
        **LITERAL,
    )
    console.print(traffic_table(simulation))
    console.print(memory_table(simulation))
    for mismatch in simulation.mismatches:
        console.print(Text.assemble(("MISMATCH ", "bold red"), str(mismatch)), **LITERAL)
    for note in simulation.notes:
        console.print(Text(f"· {note}", "dim"), **LITERAL)
    compared = f"{len(simulation.ranks)} of {degrees.num_ranks:,} ranks simulated in {simulation.seconds:.0f} s"
    if simulation.passed:
        console.print(f"{compared}: every call of one has its counterpart on the others", **LITERAL)
    else:
        console.print(f"{compared}: {len(simulation.mismatches)} calls would wait forever or mix up", **LITERAL)


def traffic_table(simulation: Simulation) -> Table:
    """By axis and kind, of the rank that sends most there; the range where ranks differ."""
    table = borderless_table()
    table.add_column("axis", no_wrap=True)
    table.add_column("call", no_wrap=True)
    for name in ("calls", "sent by a rank", "largest call"):
        table.add_column(name, justify="right", no_wrap=True)
    found: dict[tuple[str, str], list[tuple[int, float, int]]] = {}
    for one in simulation.ranks:
        for flow, numbers in one.record.traffic().items():
            if flow[1] not in ("recv", "barrier"):
                found.setdefault(flow, []).append(numbers)
    for (axis, kind), flows in sorted(found.items(), key=lambda item: -max(flow[1] for flow in item[1])):
        calls, sent, largest = zip(*flows, strict=True)
        counts = f"{min(calls):,} to {max(calls):,}" if len(set(calls)) > 1 else f"{calls[0]:,}"
        volume = format_bytes(max(sent))
        if format_bytes(min(sent)) != volume:
            volume = f"{format_bytes(min(sent))} to {volume}"
        table.add_row(axis, kind, counts, volume, format_bytes(max(largest)))
    return table


def memory_table(simulation: Simulation) -> Table:
    """At the peak of each rank that was simulated."""
    kinds = sorted({kind for one in simulation.ranks for kind in one.peak_bytes})
    table = borderless_table()
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("place", no_wrap=True)
    for name in ("peak", *kinds):
        table.add_column(name, justify="right", no_wrap=True)
    for one in simulation.ranks:
        sizes = [sum(one.peak_bytes.values()), *(one.peak_bytes.get(kind, 0) for kind in kinds)]
        table.add_row(str(one.rank), " ".join(_place(one)) or "first", *map(format_bytes, sizes))
    return table


def _place(one: SimulatedRank) -> Iterator[str]:
    for axis, index in one.place.items():
        if index:
            yield f"{axis} {index}"


def format_bytes(size: float) -> str:
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} {_UNITS[-1]}"
