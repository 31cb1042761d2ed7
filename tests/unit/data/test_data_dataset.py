"""Compiling files: parts, splits, mixing, report and digest; errors carry their place through the whole path."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_tokenizers import CHATML, build_tokenizer

from lockstep.config import DataConfig
from lockstep.data import CompiledData, DataError, compile_data, mix_rows, split_rows
from lockstep.data import compile as compiling


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def exchanges(num: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(start, start + num)]


def compiled(seed: int = 0, **settings: Any) -> CompiledData:
    return compile_data(DataConfig(**settings), build_tokenizer(CHATML), seed=seed)


def origins(data: Any) -> list[str]:
    return [datum.origin.rsplit("/", 1)[-1] for datum in data]


def test_files_keep_their_order_and_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "CHUNK_ROWS", 2)  # chunks must not show
    a = write_lines(tmp_path / "a.jsonl", exchanges(5))
    b = write_lines(tmp_path / "b.jsonl", [{"text": "plain text here", "id": 1}, {"text": "two", "source": "web"}])
    c = write_lines(tmp_path / "c.jsonl", [{"instruction": "i", "output": "o"}])
    data = compiled(train=[a, b], validation=[c])
    assert origins(data.train) == [f"a.jsonl:{i}" for i in range(1, 6)] + ["b.jsonl:1", "b.jsonl:2"]
    assert origins(data.validation) == ["c.jsonl:1"]
    files = data.report.files
    assert [(f.split, f.format, f.num_rows) for f in files] == [
        ("train", "prompt_completion", 5),
        ("train", "text", 2),
        ("validation", "alpaca", 1),
    ]
    assert files[1].ignored_keys == ["id", "source"]
    both = [*data.train, *data.validation]
    assert data.report.totals.num_tokens == sum(d.num_tokens for d in both)
    assert data.report.totals.num_supervised == sum(d.num_supervised for d in both)
    assert (data.report.num_train, data.report.num_validation) == (7, 1)
    assert data.report.totals.longest_row == max(d.num_tokens for d in both)
    json.dumps(dataclasses.asdict(data.report))


def test_cuts_are_counted_and_told(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "completion": "a"},
        {"prompt": "one two three " * 20, "completion": "a"},
        {"prompt": "q", "completion": "one two three " * 20},
    ]
    report = compiled(train=write_lines(tmp_path / "a.jsonl", rows), max_length=30).report
    assert (report.totals.prompts_cut, report.totals.answers_cut) == (2, 1)
    assert report.totals.longest_row > 30
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


# --- splits and mixing ----------------------------------------------------------------------------------------------


def test_split_is_pure_and_keeps_order() -> None:
    for num_rows, validation, test in ((2, 0.5, 0), (10, 0.01, 0.01), (10, 0.99, 0), (101, 0.2, 0.3), (4, 0.5, 0.49)):
        fractions = {"validation": validation, "test": test}
        parts = split_rows(num_rows, fractions, seed=3)
        assert sorted(np.concatenate(parts).tolist()) == list(range(num_rows))
        assert all(part.tolist() == sorted(part) for part in parts)
        assert len(parts[0]) >= 1
        assert len(parts[1]) == min(max(round(num_rows * validation), 1), num_rows - 1 - (test > 0))
        assert (len(parts[2]) >= 1) == (test > 0)
        assert [p.tolist() for p in split_rows(num_rows, fractions, seed=3)] == [p.tolist() for p in parts]
    both = {"validation": 0.2, "test": 0.3}
    assert split_rows(101, both, seed=3)[1].tolist() == split_rows(101, {"validation": 0.2}, seed=3)[1].tolist()
    assert split_rows(101, both, seed=3)[1].tolist() != split_rows(101, both, seed=4)[1].tolist()
    assert len(split_rows(101, both, seed=3)[2]) == 30
    with pytest.raises(DataError, match=r"data\.validation_fraction 0\.5 cannot split 1 row:"):
        split_rows(1, {"validation": 0.5}, seed=0)
    with pytest.raises(DataError, match=r"validation_fraction 0\.2 and data\.test_fraction 0\.3 cannot split 2 rows:"):
        split_rows(2, both, seed=0)


def test_held_out_rows_are_pinned() -> None:
    """A resumed run relies on these numbers: they may never change."""
    assert split_rows(20, {"validation": 0.25}, seed=1)[1].tolist() == [2, 6, 9, 14, 19]


def test_split_parts(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", exchanges(20))
    data = compiled(train=path, validation_fraction=0.25, test_fraction=0.1, seed=1)
    assert (len(data.train), len(data.validation), len(data.test)) == (13, 5, 2)
    parts = split_rows(20, {"validation": 0.25, "test": 0.1}, seed=1)
    for found, rows in zip((data.train, data.validation, data.test), parts):
        assert origins(found) == [f"a.jsonl:{i + 1}" for i in rows]
    report = data.report
    assert (report.num_train, report.num_validation, report.num_test) == (13, 5, 2)


def test_a_test_file_is_a_part_of_its_own(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", exchanges(10))
    b = write_lines(tmp_path / "b.jsonl", exchanges(3, start=50))
    data = compiled(train=a, test=b, validation_fraction=0.2)
    assert (len(data.train), len(data.validation), origins(data.test)) == (
        8,
        2,
        ["b.jsonl:1", "b.jsonl:2", "b.jsonl:3"],
    )
    assert data.digest == compiled(train=a, validation_fraction=0.2).digest  # a run never looks at its test rows


def test_mixing_repeats_and_chooses() -> None:
    sources = np.array([0] * 10 + [1] * 4)
    assert mix_rows(sources, [1.0, 1.0], seed=0) is None
    mixed = mix_rows(sources, [0.5, 2.5], seed=0)
    assert mixed is not None
    chosen, copies = mixed[:5].tolist(), mixed[5:].tolist()
    assert chosen == sorted(set(chosen))
    assert set(chosen) < set(range(10))
    assert copies[:8] == [10, 11, 12, 13] * 2
    assert copies[8:] == sorted(set(copies[8:]))
    assert len(copies) == 10
    again, other = mix_rows(sources, [0.5, 2.5], seed=0), mix_rows(sources, [0.5, 2.5], seed=1)
    assert again is not None
    assert other is not None
    assert again.tolist() == mixed.tolist()
    assert other.tolist() != mixed.tolist()
    few = mix_rows(sources, [0.01, 1.0], seed=0)
    assert few is not None
    assert len(few) == 1 + 4  # a source with rows keeps one


def test_sources_of_one_length_give_different_rows() -> None:
    mixed = mix_rows(np.array([0] * 100 + [1] * 100), [0.5, 0.5], seed=0)
    assert mixed is not None
    assert mixed[:50].tolist() != (mixed[50:] - 100).tolist()


def test_weights_mix_the_training_rows_alone(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", exchanges(10))
    b = write_lines(tmp_path / "b.jsonl", exchanges(10, start=50))
    sources = [{"path": a, "weight": 2}, {"path": b, "weight": 0.5}]
    data = compiled(train=sources, validation_fraction=0.2)
    held_out = origins(data.validation)
    from_a, from_b = ([o for o in origins(data.train) if o.startswith(name)] for name in "ab")
    assert len(held_out) == len(set(held_out)) == 4
    assert from_a == [f"a.jsonl:{i}" for i in range(1, 11) if f"a.jsonl:{i}" not in held_out] * 2
    assert len(from_b) == len(set(from_b)) == round(0.5 * (10 - sum(o.startswith("b") for o in held_out)))
    assert not set(held_out) & {*from_a, *from_b}
    report = data.report
    assert (report.num_train, report.duplicates, report.leaks) == (len(data.train), 0, 0)
    assert [(f.weight, f.num_rows) for f in report.files] == [(2, 10), (0.5, 10)]
    assert compiled(train=sources, validation_fraction=0.2, seed=1).digest != data.digest


# --- the report -----------------------------------------------------------------------------------------------------


def test_repeated_rows_and_leaks_are_found(tmp_path: Path) -> None:
    rows = [*exchanges(4), *exchanges(2), {"prompt": "question 1", "completion": "another answer"}]
    a = write_lines(tmp_path / "a.jsonl", rows)
    held_out = [{"prompt": f"question {i}", "completion": "unheard of"} for i in range(8)] + exchanges(1, start=90)
    b = write_lines(tmp_path / "b.jsonl", held_out)
    report = compiled(train=a, validation=b, test=write_lines(tmp_path / "c.jsonl", exchanges(1, start=70))).report
    assert report.duplicates == 2
    assert report.leaks == 4
    (leak,) = report.leaked
    assert (leak.split, leak.num_rows) == ("validation", 4)
    assert [origin.rsplit("/", 1)[-1] for origin in leak.origins] == [f"b.jsonl:{i}" for i in range(1, 5)]
    repeated, leaked = report.warnings()
    assert repeated == "2 of 7 training rows repeat an earlier row: remove them"
    assert leaked.startswith("4 validation rows have a prompt that is also trained on")
    json.dumps(dataclasses.asdict(report))


def test_rows_left_out_are_counted_by_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "convert_for_test.py").write_text(
        "def keep(row):\n    return None if row['completion'] == 'answer 1' else row\n"
    )
    monkeypatch.chdir(tmp_path)
    long, empty = {"prompt": "long " * 60, "completion": "x"}, {"prompt": "q", "completion": ""}
    rows = [*exchanges(2), long, empty, *exchanges(1, start=2)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    data = compiled(train=path, max_length=40, truncate="drop", on_bad_row="skip", converter="convert_for_test:keep")
    assert origins(data.train) == ["a.jsonl:1", "a.jsonl:5"]
    (file,) = data.report.files
    assert (file.num_rows, file.dropped, file.skipped, file.left_out) == (2, 1, 1, 1)
    assert (data.report.totals.dropped, data.report.totals.skipped) == (1, 1)
    (skipped,) = [json.loads(line) for line in Path(data.report.skipped_files[0]).read_text().splitlines()]
    assert skipped["origin"] == f"{path}:4"
    assert skipped["reason"].startswith(f"{path}:4: ")
    assert json.loads(skipped["row"]) == rows[3]
    warnings = data.report.warnings()
    assert any("1 rows were left out because they are longer than data.max_length" in w for w in warnings)
    assert any("1 rows cannot be used" in w for w in warnings)
    assert any(data.report.skipped_files[0] in w for w in warnings)


def test_no_row_left_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "long " * 60, "completion": "x"}] * 3)
    with pytest.raises(DataError, match=r"a\.jsonl: no row is left \(3 dropped\)"):
        compiled(train=path, max_length=20, truncate="drop")


def test_all_files_must_give_the_same_kind(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", exchanges(3))
    b = write_lines(tmp_path / "b.jsonl", [{"prompt": "q", "chosen": "yes", "rejected": "no"}])
    with pytest.raises(DataError, match=r"a\.jsonl holds answers, .*b\.jsonl holds pairs"):
        compiled(train=[a, b])
    with pytest.raises(DataError, match=r"data\.train holds answers, data\.validation holds pairs"):
        compiled(train=a, validation=b)
    assert compiled(train=b).kind == "pairs"


def test_pairs_and_labels_come_through(tmp_path: Path) -> None:
    pair = compiled(
        train=write_lines(tmp_path / "a.jsonl", [{"prompt": "q", "chosen": "yes or so", "rejected": "no"}])
    ).train[0]
    assert len(pair.completions) == 2
    assert pair.num_tokens == compiled(train=str(tmp_path / "a.jsonl")).train.lengths[0]
    rows = [{"prompt": "q", "completion": "a", "label": True}, {"prompt": "q", "completion": "b", "label": False}]
    labelled = compiled(train=write_lines(tmp_path / "b.jsonl", rows))
    assert labelled.kind == "labelled"
    assert [set(d.completions[0].values["label"]) for d in labelled.train] == [{1.0}, {0.0}]


def test_rows_that_share_a_line_have_their_own_origins(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(exchanges(3)))
    found = origins(compiled(train=str(path)).train)
    assert len(set(found)) == 3
    assert found[2].startswith("a.json:1")
    path.write_text(json.dumps([*exchanges(2), {"prompt": "q", "completion": ""}]))
    with pytest.raises(DataError) as caught:
        compiled(train=str(path))
    assert f"/{found[2]}: " in str(caught.value)  # rows and errors name a place alike


# --- the digest -----------------------------------------------------------------------------------------------------


def test_digest_follows_tokens_and_nothing_else(tmp_path: Path) -> None:
    same = compiled(train=write_lines(tmp_path / "a.jsonl", exchanges(4))).digest
    assert compiled(train=write_lines(tmp_path / "b.jsonl", exchanges(4))).digest == same
    assert compiled(train=str(tmp_path / "a.jsonl"), validation=str(tmp_path / "b.jsonl")).digest != same
    assert compiled(train=write_lines(tmp_path / "c.jsonl", exchanges(4)[::-1])).digest != same
    assert compiled(train=write_lines(tmp_path / "d.jsonl", exchanges(5))).digest != same


def test_digest_sees_splits_and_their_seed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", exchanges(40))
    variants = [
        compiled(train=path, validation_fraction=fraction, seed=seed).digest
        for fraction, seed in ((0, 0), (0.2, 0), (0.3, 0), (0.2, 1))
    ]
    assert len(set(variants)) == 4
