"""What a run would learn from: counts, lengths, warnings, and single rows token by token, as plain values."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from lockstep.config import RunConfig
from lockstep.data.dataset import CompiledData
from lockstep.data.images import decode_image, read_image_bytes
from lockstep.data.order import Batches
from lockstep.data.packing import partition
from lockstep.data.report import FileReport
from lockstep.types import Datum, ImageRef, Tokenizer

Lengths = npt.NDArray[np.int64]
_MAX_BARS = 14
# Tokens before the one in question that are decoded with it: enough for any tokenizer to get its spaces right.
_WINDOW = 6
_MAX_TOKENS_PER_CHARACTER = 4
_MAX_SHOWN_PIXELS = 320  # width and height of an image on a page


@dataclass(frozen=True)
class ShownToken:
    """A token as text. Several tokens share one entry where only together they make a character."""

    text: str
    learned: bool
    special: bool
    ids: tuple[int, ...]


@dataclass(frozen=True)
class ShownImage:
    """`data_url`: the image itself, small enough for a page."""

    name: str
    width: int
    height: int
    num_tokens: int
    data_url: str


@dataclass(frozen=True)
class ShownRow:
    """One row as it is learned. Each of `versions` is a whole text: two for a preference pair, otherwise one."""

    origin: str
    why: str
    num_tokens: int
    num_learned: int
    names: tuple[str, ...]
    versions: tuple[tuple[ShownToken, ...], ...]
    images: tuple[ShownImage, ...] = ()


@dataclass(frozen=True)
class HistogramBar:
    first: int
    last: int
    rows: int


@dataclass(frozen=True)
class RowSelection:
    """Which rows to show: by name, and how many of each kind."""

    rows: tuple[str, ...] = ()
    longest: int = 1
    shortest: int = 1
    random: int = 2
    seed: int = 0


@dataclass(frozen=True)
class DataSummary:
    """`batch_*`, `micro_batches` and `packing_efficiency` are those of the first step."""

    kind: str
    train_rows: int
    validation_rows: int
    test_rows: int
    train_tokens: int
    supervised_share: float
    max_length: int
    truncate: str
    prompts_cut: int
    answers_cut: int
    dropped: int
    skipped: int
    duplicates: int
    leaks: int
    steps_per_epoch: int
    batch_rows: int
    batch_tokens: int
    micro_batches: int
    packing_efficiency: float
    padding_would_cost: float
    digest: str


@dataclass(frozen=True)
class DataSheet:
    name: str
    summary: DataSummary
    files: tuple[FileReport, ...]
    lengths: dict[str, int]
    histogram: list[HistogramBar]
    warnings: list[str]
    examples: list[ShownRow]

    def as_json(self) -> dict[str, object]:
        """Without the images themselves."""
        sheet = asdict(self)
        for row in sheet["examples"]:
            row["images"] = [{k: v for k, v in image.items() if k != "data_url"} for image in row["images"]]
        return sheet

    def facts(self) -> dict[str, str]:
        """The summary in words."""
        s = self.summary
        held_out = [
            f"{count:,} {name}" for name, count in (("validation", s.validation_rows), ("test", s.test_rows)) if count
        ]
        return {
            "rows": f"{s.train_rows:,}" + (f"; held out: {', '.join(held_out)}" if held_out else ""),
            "tokens": f"{s.train_tokens:,}, of which {s.supervised_share:.1%} are learned",
            "row length": ", ".join(f"{name} {value:,}" for name, value in self.lengths.items()),
            "too long": f"truncate {s.truncate} at {s.max_length:,}: {s.prompts_cut:,} prompts cut, "
            f"{s.answers_cut:,} answers cut, {s.dropped:,} rows dropped",
            "bad rows": f"{s.skipped:,} skipped",
            "repeated": f"{s.duplicates:,} rows repeat another; {s.leaks:,} held-out prompts are also trained on",
            "a step": f"{s.batch_rows:,} rows, {s.batch_tokens:,} tokens in {s.micro_batches} micro-batches "
            f"({s.packing_efficiency:.0%} full; padding would compute {s.padding_would_cost:.1f} times as much)",
            "an epoch": f"{s.steps_per_epoch:,} steps",
        }


def inspect_data(config: RunConfig, data: CompiledData, tokenizer: Tokenizer, selection: RowSelection) -> DataSheet:
    lengths = np.asarray(data.train.lengths)
    return DataSheet(
        name=config.name,
        summary=_summarise(config, data, lengths),
        files=data.report.files,
        lengths=_quantiles(lengths),
        histogram=_histogram(lengths),
        warnings=data.report.warnings(),
        examples=[_show(datum, why, tokenizer) for datum, why in _select(data, lengths, selection)],
    )


def _summarise(config: RunConfig, data: CompiledData, lengths: Lengths) -> DataSummary:
    batches = Batches(data.train, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    batch, _ = batches.batch_at(0)
    batch_lengths = [datum.num_tokens for datum in batch]
    steps = partition(batch_lengths, num_ranks=config.launch.procs, budget_tokens=config.batch.micro_batch_tokens)
    num_micro_batches = len(steps) * config.launch.procs
    totals = data.report.totals
    return DataSummary(
        kind=data.kind,
        train_rows=len(data.train),
        validation_rows=len(data.validation),
        test_rows=len(data.test),
        train_tokens=int(lengths.sum()),
        supervised_share=totals.num_supervised / max(totals.num_tokens, 1),
        max_length=config.data.max_length,
        truncate=config.data.truncate,
        prompts_cut=totals.prompts_cut,
        answers_cut=totals.answers_cut,
        dropped=totals.dropped,
        skipped=totals.skipped,
        duplicates=data.report.duplicates,
        leaks=data.report.leaks,
        steps_per_epoch=batches.num_steps(1.0),
        batch_rows=len(batch),
        batch_tokens=sum(batch_lengths),
        micro_batches=num_micro_batches,
        packing_efficiency=sum(batch_lengths) / (num_micro_batches * config.batch.micro_batch_tokens),
        padding_would_cost=len(batch_lengths) * max(batch_lengths) / sum(batch_lengths),
        digest=data.digest,
    )


def _quantiles(lengths: Lengths) -> dict[str, int]:
    quantiles = {"shortest": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}
    return {name: int(np.quantile(lengths, q, method="nearest")) for name, q in quantiles.items()}


def _histogram(lengths: Lengths) -> list[HistogramBar]:
    """Bars of equal, round width."""
    longest = int(lengths.max())
    width = next(w for w in _round_widths() if -(-longest // w) <= _MAX_BARS)
    counts = np.bincount((lengths - 1) // width)
    return [HistogramBar(i * width + 1, (i + 1) * width, int(count)) for i, count in enumerate(counts)]


def _round_widths() -> Iterator[int]:
    size = 1
    while True:
        yield from (size, 2 * size, 5 * size)
        size *= 10


def _select(data: CompiledData, lengths: Lengths, selection: RowSelection) -> list[tuple[Datum, str]]:
    by_length = np.argsort(lengths, kind="stable")
    drawn = np.random.default_rng(selection.seed).permutation(len(lengths))[: selection.random]
    named = [(_find_row(data, name), "chosen") for name in selection.rows]
    numbers = [(i, "longest") for i in by_length[::-1][: selection.longest]]
    numbers += [(i, "shortest") for i in by_length[: selection.shortest]]
    numbers += [(i, "random") for i in drawn]
    return named + [(data.train[int(i)], why) for i, why in numbers]


def _find_row(data: CompiledData, name: str) -> Datum:
    """By the end of its origin ("train.jsonl:17"), or by its number among the training rows, from 1."""
    if name.isdecimal():
        if not 1 <= int(name) <= len(data.train):
            raise ValueError(f"--row {name}: there are {len(data.train)} training rows")
        return data.train[int(name) - 1]
    for rows in (data.train, data.validation, data.test):
        for datum in rows:
            if datum.origin == name or datum.origin.endswith("/" + name):
                return datum
    raise ValueError(f"--row {name}: no row came from there; origins look like {data.train[0].origin}")


def _show(datum: Datum, why: str, tokenizer: Tokenizer) -> ShownRow:
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
    if datum.images:
        versions = tuple(tuple(_join_repeated(tokens)) for tokens in versions)
    names = ("chosen", "rejected") if len(versions) == 2 else ("",) * len(versions)
    label = datum.completions[0].values.get("label")
    if label is not None:
        names = ("liked" if label[0] else "not liked",)
    images = tuple(_show_image(image, datum.origin) for image in datum.images)
    return ShownRow(datum.origin, why, datum.num_tokens, datum.num_supervised, names, versions, images)


def _show_image(image: ImageRef, origin: str) -> ShownImage:
    decoded = decode_image(read_image_bytes(image, origin), origin)
    width, height = decoded.size
    decoded.thumbnail((_MAX_SHOWN_PIXELS, _MAX_SHOWN_PIXELS))
    stream = io.BytesIO()
    decoded.save(stream, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
    return ShownImage(image.name or "in the row", width, height, image.num_tokens, url)


def _join_repeated(tokens: Iterable[ShownToken]) -> Iterator[ShownToken]:
    """An image has hundreds of the same token."""
    for _, group in groupby(tokens, key=lambda token: (token.ids, token.special)):
        first, *others = group
        if not others or not first.special:
            yield from (first, *others)
        else:
            yield replace(first, text=f"{first.text} x {1 + len(others)} ")


def split_tokens(ids: Sequence[int], learned: Sequence[bool], tokenizer: Tokenizer) -> list[ShownToken]:
    """Each token's own text in the context of the whole; bytes of one character are put together."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    tokens: list[ShownToken] = []
    start = 0  # of the tokens that are not yet text
    for i in range(len(ids)):
        before = max(start - _WINDOW, 0)
        text = _decode(ids[before : i + 1], tokenizer)[len(_decode(ids[before:start], tokenizer)) :]
        may_continue = i + 1 < len(ids) and learned[i] == learned[i + 1] and i - start < _MAX_TOKENS_PER_CHARACTER
        if not (text.endswith("\ufffd") and may_continue):
            tokens.append(ShownToken(text, learned[i], ids[i] in special, tuple(ids[start : i + 1])))
            start = i + 1
    return tokens


def _decode(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
