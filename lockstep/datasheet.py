"""What a run will learn from, before it does: `lockstep data`. Gathers the facts and shows them on a terminal.

The same facts become JSON, and a page in datapage.py. Reads compiled data; never trains, never changes a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.cli.display import format_count, print_facts
from lockstep.config import RunConfig

if TYPE_CHECKING:
    from lockstep.data import CompiledData
    from lockstep.types import Datum

Lengths = npt.NDArray[np.int64]
MAX_BARS = 14
# Tokens before the one in question that are decoded with it: enough for any tokenizer to know about spaces.
_WINDOW = 6


@dataclass(frozen=True)
class Token:
    """A token as a reader sees it. Several share one entry where only together they make a character."""

    text: str
    learned: bool
    special: bool
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """One row as it is learned. Each of `versions` is a whole text: two for a preference pair, otherwise one."""

    origin: str
    why: str
    num_tokens: int
    num_learned: int
    names: tuple[str, ...]
    versions: tuple[tuple[Token, ...], ...]


@dataclass(frozen=True)
class Bar:
    first: int
    last: int
    rows: int


@dataclass(frozen=True)
class Choice:
    """Which rows to show."""

    rows: tuple[str, ...] = ()
    longest: int = 1
    shortest: int = 1
    random: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Sheet:
    name: str
    summary: dict[str, Any]
    files: list[dict[str, Any]]
    lengths: dict[str, int]
    histogram: list[Bar]
    warnings: list[str]
    examples: list[Example]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def gather(config: RunConfig, data: CompiledData, tokenizer: Any, choice: Choice) -> Sheet:
    lengths = np.asarray(data.train.lengths)
    return Sheet(
        name=config.name,
        summary=_summary(config, data, lengths),
        files=[asdict(file) for file in data.report.files],
        lengths=_quantiles(lengths),
        histogram=_histogram(lengths),
        warnings=data.report.warnings(),
        examples=[_show(datum, why, tokenizer) for datum, why in _choose(data, lengths, choice)],
    )


def _summary(config: RunConfig, data: CompiledData, lengths: Lengths) -> dict[str, Any]:
    from lockstep.data.order import Batches
    from lockstep.data.packing import partition

    batches = Batches(data.train, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    batch, _ = batches.batch_at(0)
    in_batch = [datum.num_tokens for datum in batch]
    steps = partition(in_batch, num_ranks=config.launch.procs, budget_tokens=config.batch.micro_batch_tokens)
    num_micro_batches = len(steps) * config.launch.procs
    report = data.report
    return {
        "kind": data.kind,
        "train_rows": len(data.train),
        "validation_rows": len(data.validation),
        "test_rows": len(data.test),
        "train_tokens": int(lengths.sum()),
        "supervised_share": report.num_supervised / max(report.num_tokens, 1),
        "max_length": config.data.max_length,
        "truncate": config.data.truncate,
        "prompts_cut": report.prompts_cut,
        "answers_cut": report.answers_cut,
        "dropped": report.dropped,
        "skipped": report.skipped,
        "duplicates": report.duplicates,
        "leaks": report.leaks,
        "steps_per_epoch": batches.num_steps(1.0),
        "batch_rows": len(batch),
        "batch_tokens": sum(in_batch),
        "micro_batches": num_micro_batches,
        "packing_efficiency": sum(in_batch) / (num_micro_batches * config.batch.micro_batch_tokens),
        "padding_would_cost": len(in_batch) * max(in_batch) / sum(in_batch),
        "digest": data.digest,
    }


def _quantiles(lengths: Lengths) -> dict[str, int]:
    places = {"shortest": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}
    return {name: int(np.quantile(lengths, place, method="nearest")) for name, place in places.items()}


def _histogram(lengths: Lengths) -> list[Bar]:
    """Bars of equal, round width."""
    longest = int(lengths.max())
    width = next(w for w in _round_widths() if -(-longest // w) <= MAX_BARS)
    counts = np.bincount((lengths - 1) // width)
    return [Bar(i * width + 1, (i + 1) * width, int(count)) for i, count in enumerate(counts)]


def _round_widths() -> Iterator[int]:
    size = 1
    while True:
        yield from (size, 2 * size, 5 * size)
        size *= 10


def _choose(data: CompiledData, lengths: Lengths, choice: Choice) -> list[tuple[Datum, str]]:
    by_length = np.argsort(lengths, kind="stable")
    drawn = np.random.default_rng(choice.seed).permutation(len(lengths))[: choice.random]
    wanted = [(_find_row(data, name), "chosen") for name in choice.rows]
    numbers = [(i, "longest") for i in by_length[::-1][: choice.longest]]
    numbers += [(i, "shortest") for i in by_length[: choice.shortest]]
    numbers += [(i, "random") for i in drawn]
    return wanted + [(data.train[int(i)], why) for i, why in numbers]


def _find_row(data: CompiledData, name: str) -> Datum:
    """By the end of its origin ("train.jsonl:17"), or by its number among the training rows, from 1."""
    if name.isdecimal():
        if not 1 <= int(name) <= len(data.train):
            raise ValueError(f"--row {name}: there are {len(data.train)} training rows")
        return data.train[int(name) - 1]
    for part in (data.train, data.validation, data.test):
        for datum in part:
            if datum.origin == name or datum.origin.endswith("/" + name):
                return datum
    raise ValueError(f"--row {name}: no row came from there; origins look like {data.train[0].origin}")


def _show(datum: Datum, why: str, tokenizer: Any) -> Example:
    prompt = [int(i) for i in datum.prompt]
    versions = tuple(
        tuple(
            split_tokens(
                [*prompt, *map(int, completion.tokens)],
                [*([False] * len(prompt)), *(bool(w) for w in completion.weights)],
                tokenizer,
            )
        )
        for completion in datum.completions
    )
    names = ("chosen", "rejected") if len(versions) == 2 else ("",) * len(versions)
    label = datum.completions[0].values.get("label")
    if label is not None:
        names = ("liked" if label[0] else "not liked",)
    return Example(datum.origin, why, datum.num_tokens, datum.num_supervised, names, versions)


def split_tokens(ids: Sequence[int], learned: Sequence[bool], tokenizer: Any) -> list[Token]:
    """Each token's own text, as it stands in the whole; bytes of one character are put together."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    tokens: list[Token] = []
    start = 0  # of the tokens that are not yet text
    for i in range(len(ids)):
        before = max(start - _WINDOW, 0)
        text = _decode(ids[before : i + 1], tokenizer)[len(_decode(ids[before:start], tokenizer)) :]
        unfinished = text.endswith("\ufffd") and i + 1 < len(ids) and learned[i] == learned[i + 1] and i - start < 4
        if not unfinished:
            tokens.append(Token(text, learned[i], ids[i] in special, tuple(ids[start : i + 1])))
            start = i + 1
    return tokens


def _decode(ids: Sequence[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


# --- the terminal ---------------------------------------------------------------------------------------------------


def print_sheet(console: Console, sheet: Sheet) -> None:
    console.print("[bold]data[/]", highlight=False)
    console.print(_files_table(sheet.files))
    console.print("\n[bold]training rows[/]", highlight=False)
    print_facts(console, describe(sheet))
    console.print("\n[bold]length in tokens[/]", highlight=False)
    for bar in sheet.histogram:
        console.print(_bar(bar, max(b.rows for b in sheet.histogram)))
    for example in sheet.examples:
        _print_example(console, example)
    if sheet.warnings:
        console.print("\n[bold yellow]warnings[/]", highlight=False)
        for warning in sheet.warnings:
            console.print(Text.assemble(("  ! ", "yellow"), warning), highlight=False, soft_wrap=True)


def _files_table(files: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 2), pad_edge=False)
    table.add_column("file", overflow="fold")
    table.add_column("part")
    table.add_column("format", no_wrap=True)
    for name in ("rows", "tokens", "learned", "cut", "dropped", "skipped"):
        table.add_column(name, justify="right", no_wrap=True)
    for file in files:
        table.add_row(
            Text("  " + str(file["path"])),
            file["part"],
            file["format"],
            str(file["num_rows"]),
            format_count(file["num_tokens"]),
            f"{file['num_supervised'] / max(file['num_tokens'], 1):.0%}",
            str(file["prompts_cut"] + file["answers_cut"]),
            str(file["dropped"]),
            str(file["skipped"]),
        )
    return table


def describe(sheet: Sheet) -> dict[str, str]:
    """The summary in words."""
    s = sheet.summary
    held_out = [
        f"{s[key]:,} {name}" for name, key in (("validation", "validation_rows"), ("test", "test_rows")) if s[key]
    ]
    return {
        "rows": f"{s['train_rows']:,}" + (f"; held out: {', '.join(held_out)}" if held_out else ""),
        "tokens": f"{s['train_tokens']:,}, of which {s['supervised_share']:.1%} are learned",
        "row length": ", ".join(f"{name} {value:,}" for name, value in sheet.lengths.items()),
        "too long": f"truncate {s['truncate']} at {s['max_length']:,}: {s['prompts_cut']:,} prompts cut, "
        f"{s['answers_cut']:,} answers cut, {s['dropped']:,} rows dropped",
        "bad rows": f"{s['skipped']:,} skipped",
        "repeated": f"{s['duplicates']:,} rows repeat another; {s['leaks']:,} held-out prompts are also trained on",
        "a step": f"{s['batch_rows']:,} rows, {s['batch_tokens']:,} tokens in {s['micro_batches']} micro-batches "
        f"({s['packing_efficiency']:.0%} full; padding would compute {s['padding_would_cost']:.1f} times as much)",
        "an epoch": f"{s['steps_per_epoch']:,} steps",
    }


def _bar(bar: Bar, most: int) -> Text:
    width = round(40 * bar.rows / most) if bar.rows else 0
    return Text.assemble(
        (f"  {bar.first:>7,} - {bar.last:<7,} ", "dim"), ("█" * max(width, int(bar.rows > 0)), "cyan"), f" {bar.rows:,}"
    )


def _print_example(console: Console, example: Example) -> None:
    facts = f"{example.num_tokens:,} tokens, {example.num_learned:,} learned"
    console.print(Text.assemble("\n", (example.why, "bold"), f"  {example.origin}  ", (facts, "dim")), soft_wrap=True)
    for name, tokens in zip(example.names, example.versions):
        if name:
            console.print(Text(f"[{name}]", style="bold"))
        console.print(_coloured(tokens) if console.is_terminal else Text(_bracketed(tokens)), soft_wrap=True)


def _coloured(tokens: Sequence[Token]) -> Text:
    text = Text()
    for token in tokens:
        text.append(token.text, style=_style(token))
    return text


def _bracketed(tokens: Sequence[Token]) -> str:
    """Where there are no colours, brackets stand around what is learned."""
    text, learned = "", False
    for token in tokens:
        if token.learned != learned:
            text += "⟧" if learned else "⟦"
        text, learned = text + token.text, token.learned
    return text + ("⟧" if learned else "")


def _style(token: Token) -> str:
    if token.learned:
        return "bold black on green" if token.special else "green"
    return "dim cyan" if token.special else "dim"
