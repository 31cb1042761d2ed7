"""Columns on disk: what was written comes back, views choose without copying, digests see everything trained on."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.columns import COLUMNS, Columns, Rows, Writer, pack_block
from lockstep.data.sources.rows import SourceFile
from lockstep.types import Completion, Datum

FILES = [SourceFile("a.jsonl", Path("a.jsonl"), "jsonl"), SourceFile("b.parquet", Path("b.parquet"), "parquet")]


def datum(prompt: list[int], *completions: tuple[list[int], list[int]], label: int | None = None) -> Datum:
    return Datum(
        prompt,
        tuple(
            Completion(tokens, [float(w) for w in learned], {} if label is None else {"label": [label] * len(tokens)})
            for tokens, learned in completions
        ),
    )


def store(folder: Path, data: list[Datum], *, block_rows: int = 3, file: int = 0) -> Rows:
    folder.mkdir(exist_ok=True)
    writer = Writer(folder)
    for start in range(0, len(data), block_rows):
        rows = data[start : start + block_rows]
        numbers = range(start + 1, start + 1 + len(rows))
        keys = [10 * n for n in numbers]
        writer.append(pack_block(rows, list(numbers), [None] * len(rows), keys, [2**64 - n for n in numbers]), file)
    made = writer.finish()
    return Rows(Columns(folder, made, FILES))


def plain(data: Any) -> list[Any]:
    return [
        (
            list(d.prompt),
            [(list(c.tokens), list(c.weights), {k: list(v) for k, v in c.values.items()}) for c in d.completions],
        )
        for d in data
    ]


@st.composite
def data_of_one_kind(draw: st.DrawFn) -> list[Datum]:
    num_completions = draw(st.integers(1, 3))
    tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)

    def completion(drawn: list[int]) -> st.SearchStrategy[tuple[list[int], list[int]]]:
        return st.tuples(st.just(drawn), st.lists(st.integers(0, 1), min_size=len(drawn), max_size=len(drawn)))

    rows = draw(
        st.lists(
            st.tuples(
                tokens,
                st.lists(tokens.flatmap(completion), min_size=num_completions, max_size=num_completions),
                st.sampled_from([None, 0, 1]),
            ),
            min_size=1,
            max_size=8,
        )
    )
    return [datum(prompt, *completions, label=label) for prompt, completions, label in rows]


@settings(max_examples=60, deadline=None)
@given(data=data_of_one_kind(), block_rows=st.integers(1, 9))
def test_what_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, data: list[Datum], block_rows: int
) -> None:
    rows = store(tmp_path_factory.mktemp("rows"), data, block_rows=block_rows)
    assert plain(rows) == plain(data)
    copy = pickle.loads(pickle.dumps(rows))
    assert plain(copy) == plain(data)
    assert (copy.digest, copy.origin(0)) == (rows.digest, rows.origin(0))
    assert rows.lengths.tolist() == [d.num_tokens for d in data]
    assert [d.origin for d in rows] == [f"a.jsonl:{n}" for n in range(1, len(data) + 1)]
    assert rows.column("row_keys").tolist() == [2**64 - n for n in range(1, len(data) + 1)]
    assert store(tmp_path_factory.mktemp("again"), data, block_rows=2).digest == rows.digest


TEN = [datum([n], ([n + 1, n + 2], [1, n % 2])) for n in range(10)]


def test_arrays_are_of_the_map_and_have_their_types(tmp_path: Path) -> None:
    first = store(tmp_path, TEN)[0]
    assert isinstance(first.prompt, np.ndarray)
    assert first.prompt.dtype == np.int32
    assert first.prompt.base is not None
    assert not first.prompt.flags.writeable
    assert first.completions[0].weights.dtype == np.float32


def test_views_choose_repeat_and_nest(tmp_path: Path) -> None:
    rows = store(tmp_path, TEN)
    view = rows.select(np.array([7, 1, 1, 4]))
    assert plain(view) == plain([TEN[7], TEN[1], TEN[1], TEN[4]])
    assert view.lengths.tolist() == [3] * 4
    assert [d.origin for d in view] == ["a.jsonl:8", "a.jsonl:2", "a.jsonl:2", "a.jsonl:5"]
    assert view.origin(3) == "a.jsonl:5"
    assert view.column("numbers").tolist() == [8, 2, 2, 5]
    assert plain(view[1:][::-1]) == plain([TEN[4], TEN[1], TEN[1]])
    assert plain([view[-1]]) == plain([TEN[4]])
    assert isinstance(rows[2:5], Rows)
    assert len(rows[20:]) == 0
    for place in (10, -11):
        with pytest.raises(IndexError, match="of 10"):
            rows[place]


def test_a_pickled_view_is_small(tmp_path: Path) -> None:
    data = [datum(list(range(500)), ([1], [1]))] * 200
    view = store(tmp_path, data).select(np.arange(5))
    assert len(pickle.dumps(view)) < 2000


def test_origins_say_file_and_row(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.append(pack_block(TEN[:2], [1, 1], [None, 2], [0, 0], [0, 0]), 0)
    writer.append(pack_block(TEN[:1], [9], [None], [0], [0]), 1)
    made = writer.finish()
    rows = Rows(Columns(tmp_path, made, FILES))
    assert [d.origin for d in rows] == ["a.jsonl:1", "a.jsonl:1, row 2", "b.parquet:row 9"]


def test_the_digest_sees_all_that_is_trained_on_and_nothing_else(tmp_path: Path) -> None:
    variants = [
        [datum([1], ([2, 3], [1, 1]))],
        [datum([4], ([2, 3], [1, 1]))],  # another prompt
        [datum([1], ([2, 4], [1, 1]))],  # another answer
        [datum([1], ([2, 3], [0, 1]))],  # less of it learned
        [datum([1, 2], ([3], [1]))],  # the same tokens, cut elsewhere
        [datum([1], ([2, 3], [1, 1]), label=0)],
        [datum([1], ([2, 3], [1, 1]), label=1)],
        [datum([1], ([2], [1]), ([3], [1]))],
        [datum([1], ([2, 3], [1, 1]))] * 2,
    ]
    stored = [store(tmp_path / str(i), variant) for i, variant in enumerate(variants)]
    assert len({rows.digest for rows in stored}) == len(variants)
    assert store(tmp_path / "moved", variants[0], file=1).digest == stored[0].digest


def test_the_digest_of_a_view_follows_its_order(tmp_path: Path) -> None:
    rows = store(tmp_path / "a", TEN)
    orders = [[0, 1], [1, 0], [0, 1, 1], [0], []]
    digests = [rows.select(np.array(order, dtype=np.int64)).digest for order in orders]
    assert len({*digests, rows.digest}) == 6
    assert rows.select(np.array([0, 1])).digest == digests[0]
    other = store(tmp_path / "b", TEN[::-1])
    assert other.select(np.array([0, 1])).digest != digests[0]
    assert other[:0].digest == digests[-1]


def test_weights_are_0_or_1(tmp_path: Path) -> None:
    half = Datum([1], (Completion([2], [0.5]),))
    with pytest.raises(AssertionError, match="0 or 1"):
        pack_block([half], [1], [None], [0], [0])


def test_no_rows_can_be_opened(tmp_path: Path) -> None:
    made = Writer(tmp_path).finish()
    rows = Rows(Columns(tmp_path, made, FILES))
    assert list(rows) == []
    assert rows.lengths.tolist() == []
    assert {path.stem for path in tmp_path.iterdir()} == set(COLUMNS)
