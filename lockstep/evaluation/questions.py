"""Rows of any source as questions with reference answers, and as content whose loss is measured.

Which rows are selected is a pure function of the data, the limit and the seed.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.config.data import SourceConfig
from lockstep.data.formats.conversation import SYSTEM_ROLES, Content, Conversation, Pair, Passage
from lockstep.data.formats.reader import RowReader, recognise_format
from lockstep.data.sources.files import find_files, parse_raw, read_raw
from lockstep.data.sources.rows import DataError, RawRow, Row, SourceFile


@dataclass(frozen=True, slots=True)
class ChosenRow:
    """One row to evaluate, parsed but not yet read: how it reads depends on whether a model has a chat template."""

    row: Row
    source: SourceConfig
    format: str


@dataclass(frozen=True, slots=True)
class Question:
    """`content` is a conversation to continue or plain text. `reference` is None where a row has nothing to ask."""

    origin: str
    content: list[dict[str, Any]] | str
    reference: str | None
    tools: list[Any] | None = None


@dataclass(frozen=True)
class RowChoice:
    """Which rows: all, the first `limit`, or `sample` of them drawn by `seed`; `origins` keeps only the rows named."""

    limit: int | None = None
    sample: int | None = None
    seed: int = 0
    origins: Collection[str] | None = None


def choose_rows(sources: Sequence[SourceConfig], selection: RowChoice) -> list[ChosenRow]:
    """In the order of the files. Rows that are not chosen are not parsed."""
    if selection.limit is not None and selection.sample is not None:
        raise ValueError("give either a limit or a sample, not both")
    places = _walk(sources, selection.origins)
    if selection.sample is not None:
        places = iter(_draw(places, selection.sample, selection.seed))
    formats: dict[tuple[str, str], str] = {}
    chosen: list[ChosenRow] = []
    for source, file, raw in places:
        if selection.limit is not None and len(chosen) >= selection.limit:
            break
        key = (source.path, file.name)
        if key not in formats:
            formats[key] = _format_of(file, source)
        chosen.append(ChosenRow(parse_raw(file, raw), source, formats[key]))
    if not chosen:
        raise DataError("no row to evaluate: none of the requested rows is in the data")
    return chosen


_Place = tuple[SourceConfig, SourceFile, RawRow]


def _walk(sources: Sequence[SourceConfig], origins: Collection[str] | None) -> Iterator[_Place]:
    for source in sources:
        for file in find_files(source):
            for raw in read_raw(file):
                if origins is None or file.origin(raw.number) in origins:
                    yield source, file, raw


def _draw(places: Iterable[_Place], count: int, seed: int) -> list[_Place]:
    """`count` of all places, each as likely as any other, in order; memory holds no more than these."""
    draw = random.Random(seed)
    kept: list[tuple[int, _Place]] = []
    for number, place in enumerate(places):
        if len(kept) < count:
            kept.append((number, place))
        elif (slot := draw.randrange(number + 1)) < count:
            kept[slot] = (number, place)
    return [place for _, place in sorted(kept, key=lambda entry: entry[0])]


def _format_of(file: SourceFile, source: SourceConfig) -> str:
    """From the first row of the file that a converter does not leave out, as in training."""
    for raw in read_raw(file):
        row_format = recognise_format(parse_raw(file, raw), source)
        if row_format is not None:
            return row_format
    raise DataError(f"{file.name}: the converter {source.converter} leaves every row out")


@dataclass
class RowContents:
    """Content per chosen row; None where one is left out: by the user's converter, or as an answer people disliked."""

    contents: list[Conversation | Passage | None] = field(default_factory=list)
    num_disliked: int = 0


def read_contents(
    chosen: Sequence[ChosenRow], *, train_on: str, has_template: bool, system: str | None = None
) -> RowContents:
    """Of a preference pair, the answer that was preferred."""
    readers: dict[tuple[int, str], RowReader] = {}
    contents = RowContents()
    for entry in chosen:
        key = (id(entry.source), entry.format)
        if key not in readers:
            readers[key] = RowReader(entry.source, entry.format, train_on=train_on, has_template=has_template)
        content = _good_answer(readers[key].read(entry.row))
        if content is not None and content.label is False:
            contents.num_disliked += 1
            content = None
        contents.contents.append(with_system(content, system) if content is not None and system else content)
    return contents


def read_pairs(chosen: Sequence[ChosenRow], *, has_template: bool, system: str | None = None) -> list[Pair]:
    """Both answers of every row that `read_contents` keeps; all rows must be preference pairs."""
    readers: dict[int, RowReader] = {}
    pairs = []
    for entry in chosen:
        if id(entry.source) not in readers:
            readers[id(entry.source)] = RowReader(
                entry.source, entry.format, train_on="last", has_template=has_template
            )
        pair = readers[id(entry.source)].read(entry.row)
        if isinstance(pair, Pair):
            pairs.append(_pair_with_system(pair, system) if system else pair)
    return pairs


def _pair_with_system(pair: Pair, system: str) -> Pair:
    return replace(pair, chosen=with_system(pair.chosen, system), rejected=with_system(pair.rejected, system))


def _good_answer(content: Content | None) -> Conversation | Passage | None:
    return content.chosen if isinstance(content, Pair) else content


def with_system(content: Conversation | Passage, system: str) -> Conversation | Passage:
    """The content with `system` as its system message, in place of one that the row has."""
    if isinstance(content, Passage):
        raise ValueError(f"{content.origin}: a system message needs a chat template, and there is none")
    first = {"role": "system", "content": system}
    if content.messages and content.messages[0]["role"] in SYSTEM_ROLES:
        return replace(content, messages=(first, *content.messages[1:]))
    return replace(content, messages=(first, *content.messages), learned=tuple(i + 1 for i in content.learned))


def make_question(content: Conversation | Passage) -> Question:
    """What comes before the last answer, and that answer."""
    if isinstance(content, Passage):
        return Question(content.origin, content.prompt, content.answer if content.prompt.strip() else None)
    place = content.learned[-1]
    before, answer = content.messages[:place], content.messages[place].get("content")
    reference = answer if before and isinstance(answer, str) and answer.strip() else None
    return Question(content.origin, [dict(message) for message in before], reference, content.tools)


def check_answerable(questions: Sequence[Question], metrics: Sequence[str]) -> None:
    """Metrics on answers need a question and a text to compare with."""
    for question in questions:
        if question.reference is None:
            raise DataError(
                f"{question.origin}: there is no prompt with a text as its answer, so {', '.join(metrics)} cannot be "
                "measured: use the metric loss, or rows with a prompt and an answer"
            )
