"""Compiling files: parts, split, report and digest; every error carries its place through the whole path."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_tokenizers import CHATML, build_tokenizer

from lockstep.config import DataConfig
from lockstep.data import Compiled, DataError, compile_data, dataset, digest_data, split_rows
from lockstep.types import Completion, Datum


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def exchanges(num: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(start, start + num)]


def compiled(seed: int = 0, **settings: Any) -> Compiled:
    return compile_data(DataConfig(**settings), build_tokenizer(CHATML), seed=seed)


def origins(data: Any) -> list[str]:
    return [datum.origin.rsplit("/", 1)[-1] for datum in data]


def test_files_keep_their_order_and_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "_ROWS_AT_ONCE", 2)  # chunks must not show
    a = write_lines(tmp_path / "a.jsonl", exchanges(5))
    b = write_lines(tmp_path / "b.jsonl", [{"text": "plain text here", "id": 1}, {"text": "two", "source": "web"}])
    c = write_lines(tmp_path / "c.jsonl", [{"instruction": "i", "output": "o"}])
    data = compiled(train=[a, b], validation=[c])
    assert origins(data.train) == [f"a.jsonl:{i}" for i in range(1, 6)] + ["b.jsonl:1", "b.jsonl:2"]
    assert origins(data.validation) == ["c.jsonl:1"]
    files = data.report.files
    assert [(f.part, f.format, f.num_rows) for f in files] == [
        ("train", "prompt_completion", 5),
        ("train", "text", 2),
        ("validation", "alpaca", 1),
    ]
    assert files[1].ignored_keys == ["id", "source"]
    both = [*data.train, *data.validation]
    assert data.report.num_tokens == sum(d.num_tokens for d in both)
    assert data.report.num_supervised == sum(d.num_supervised for d in both)
    assert (data.report.num_train, data.report.num_validation) == (7, 1)
    assert data.report.longest_row == max(d.num_tokens for d in both)
    json.dumps(dataclasses.asdict(data.report))


def test_cuts_are_counted_and_told(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "completion": "a"},
        {"prompt": "one two three " * 20, "completion": "a"},
        {"prompt": "q", "completion": "one two three " * 20},
    ]
    report = compiled(train=write_lines(tmp_path / "a.jsonl", rows), max_length=30).report
    assert (report.prompts_cut, report.answers_cut) == (2, 1)
    assert report.longest_row > 30
    assert report.files[0].longest_origin.startswith(str(tmp_path / "a.jsonl:"))
    answers, prompts = report.warnings()
    assert answers.startswith(f"{tmp_path / 'a.jsonl'}: 1 answers do not fit and lose their end: raise data.max_length")
    assert "2 prompts were cut from the left" in prompts


def test_nothing_to_warn_about(tmp_path: Path) -> None:
    assert compiled(train=write_lines(tmp_path / "a.jsonl", exchanges(3))).report.warnings() == []


@pytest.mark.parametrize(
    ("bad", "settings", "words"),
    [
        ("{not json", {}, "not valid JSON"),
        ('{"text": "x y"}', {}, 'expected the keys "prompt", "completion", found "text"'),
        ('{"prompt": "q", "completion": ""}', {}, "nothing to learn"),
        ('{"prompt": [], "completion": "a"}', {"chat_template": "none"}, "messages need a chat template"),
        ('{"prompt": [{"role": "user"}], "completion": "a"}', {}, "its content is missing"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, bad: str, settings: dict[str, Any], words: str) -> None:
    path = Path(write_lines(tmp_path / "train.jsonl", exchanges(1742)))
    with path.open("a") as file:
        file.write(bad + "\n")
    with pytest.raises(DataError) as caught:
        compiled(train=str(path), **settings)
    assert str(caught.value).startswith(f"{path}:1743: ")
    assert words in str(caught.value)


def test_a_named_format_must_fit(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", exchanges(2))
    with pytest.raises(DataError, match=r"a\.jsonl:1: not a row of format alpaca"):
        compiled(train=path, format="alpaca")


def test_split_is_pure_and_keeps_order() -> None:
    for num_rows, fraction in ((2, 0.5), (10, 0.01), (10, 0.99), (101, 0.2)):
        train, held_out = split_rows(num_rows, fraction, seed=3)
        assert sorted([*train, *held_out]) == list(range(num_rows))
        assert list(train) == sorted(train)
        assert list(held_out) == sorted(held_out)
        assert len(held_out) == min(max(round(num_rows * fraction), 1), num_rows - 1)
        assert list(split_rows(num_rows, fraction, seed=3)[1]) == list(held_out)
    assert list(split_rows(101, 0.2, seed=3)[1]) != list(split_rows(101, 0.2, seed=4)[1])
    with pytest.raises(DataError, match="cannot split 1 row"):
        split_rows(1, 0.5, seed=0)


def test_split_parts(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", exchanges(20))
    data = compiled(train=path, validation_fraction=0.25, seed=1)
    assert (len(data.train), len(data.validation)) == (15, 5)
    kept, held_out = split_rows(20, 0.25, seed=1)
    assert origins(data.train) == [f"a.jsonl:{i + 1}" for i in kept]
    assert origins(data.validation) == [f"a.jsonl:{i + 1}" for i in held_out]


def test_digest_follows_tokens_and_nothing_else(tmp_path: Path) -> None:
    same = compiled(train=write_lines(tmp_path / "a.jsonl", exchanges(4))).digest
    assert compiled(train=write_lines(tmp_path / "b.jsonl", exchanges(4))).digest == same
    assert compiled(train=str(tmp_path / "a.jsonl"), validation=str(tmp_path / "b.jsonl")).digest != same
    assert compiled(train=write_lines(tmp_path / "c.jsonl", exchanges(4)[::-1])).digest != same
    assert compiled(train=write_lines(tmp_path / "d.jsonl", exchanges(5))).digest != same


def test_digest_sees_weights_and_edges() -> None:
    def datum(prompt: list[int], tokens: list[int], weights: list[float]) -> Datum:
        return Datum(prompt, (Completion(tokens, weights),))

    variants = [
        [datum([1], [2, 3], [1.0, 1.0])],
        [datum([1], [2, 3], [0.0, 1.0])],
        [datum([1, 2], [3], [1.0])],
        [datum([1], [2, 3], [1.0, 1.0])] * 2,
        # The same bytes in a row, cut elsewhere: 4 as a token, and as the bits of a weight.
        [datum([1, 2, 3], [4], [1.0])],
        [datum([1], [2, 3], [float(np.int32(4).view(np.float32)), 1.0])],
    ]
    digests = {digest_data(v) for v in variants} | {digest_data(variants[0], variants[0]), digest_data(variants[0], [])}
    assert len(digests) == 8
