"""`lockstep data`: the facts, the rows as they are learned, on a terminal, as JSON and as a page."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tiny
from rich.console import Console
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.cli.data import print_sheet
from lockstep.config import load_config
from lockstep.data import compile_data
from lockstep.data.inspect import DataSheet, RowSelection, inspect_data, split_tokens
from lockstep.reports.data import data_page


def make_sheet(folder: Path, model: Path, selection: RowSelection = RowSelection(), **data: Any) -> DataSheet:  # noqa: B008
    config = load_config(tiny.write_config(folder, model, data=data))
    tokenizer = tiny.build_tokenizer()
    return inspect_data(config, compile_data(config.data, tokenizer, seed=0), tokenizer, selection)


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def printed(sheet: DataSheet, *, colours: bool) -> str:
    console = Console(
        file=io.StringIO(), force_terminal=colours, width=200, color_system="truecolor" if colours else None
    )
    print_sheet(console, sheet)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_facts_are_those_of_the_data(tmp_path: Path, tiny_model: Path) -> None:
    sheet = make_sheet(tmp_path, tiny_model, validation_fraction=0.25)
    facts = sheet.summary
    assert (facts.train_rows, facts.validation_rows, facts.test_rows) == (36, 12, 0)
    assert facts.steps_per_epoch == 9
    assert sum(bar.rows for bar in sheet.histogram) == 36
    assert sheet.lengths["shortest"] <= sheet.lengths["median"] <= sheet.lengths["longest"]
    assert sheet.histogram[-1].first <= sheet.lengths["longest"] <= sheet.histogram[-1].last
    assert 0 < facts.supervised_share < 1
    assert 0 < facts.packing_efficiency <= 1 <= facts.padding_would_cost
    assert json.loads(json.dumps(sheet.as_json()))["summary"] == asdict(facts)


def test_rows_are_shown_as_they_are_learned(tmp_path: Path, tiny_model: Path) -> None:
    train = write(
        tmp_path / "rows.jsonl",
        {"prompt": "one?", "completion": "été 日本"},
        {"prompt": "a longer question?", "completion": "a longer answer"},
    )
    sheet = make_sheet(tmp_path, tiny_model, RowSelection(rows=("rows.jsonl:1",), random=0), train=train)
    chosen, longest, shortest = sheet.examples
    assert [e.why for e in sheet.examples] == ["chosen", "longest", "shortest"]
    assert longest.origin.endswith("rows.jsonl:2")
    assert chosen == shortest.__class__(**{**shortest.__dict__, "why": "chosen"})
    (tokens,) = chosen.versions
    assert (
        "".join(t.text for t in tokens) == "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\nété 日本<|im_end|>"
    )
    assert "".join(t.text for t in tokens if t.learned) == "été 日本<|im_end|>"
    assert [t.text for t in tokens if t.special] == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]
    assert sum(len(t.ids) for t in tokens) == chosen.num_tokens
    assert sum(len(t.ids) for t in tokens if t.learned) == chosen.num_learned
    plain = printed(sheet, colours=False)
    assert "⟦été 日本<|im_end|>⟧" in plain
    assert plain.count("⟦") == 3
    coloured = printed(sheet, colours=True)
    assert "⟦" not in coloured
    assert "\x1b[32mé" in coloured


def test_a_pair_shows_both_answers(tmp_path: Path, tiny_model: Path) -> None:
    train = write(tmp_path / "p.jsonl", {"prompt": "q", "chosen": "good", "rejected": "bad"})
    (example,) = make_sheet(tmp_path, tiny_model, RowSelection(longest=1, shortest=0, random=0), train=train).examples
    assert example.names == ("chosen", "rejected")
    learned = ["".join(t.text for t in version if t.learned) for version in example.versions]
    assert learned == ["good<|im_end|>", "bad<|im_end|>"]


def test_a_label_is_shown(tmp_path: Path, tiny_model: Path) -> None:
    train = write(tmp_path / "k.jsonl", {"prompt": "q", "completion": "bad", "label": False})
    (example,) = make_sheet(tmp_path, tiny_model, RowSelection(longest=1, shortest=0, random=0), train=train).examples
    assert example.names == ("not liked",)


def test_the_page_escapes_and_needs_nothing_else(tmp_path: Path, tiny_model: Path) -> None:
    train = write(tmp_path / "r.jsonl", {"prompt": "<script>x</script>", "completion": "a & b"})
    page = data_page(make_sheet(tmp_path, tiny_model, train=train))
    assert "<script" not in page
    assert "src=" not in page
    assert 'class="l"' in page
    assert "&amp;" in page


def test_a_row_that_is_not_there(tmp_path: Path, tiny_model: Path) -> None:
    for name, message in (("99", "there are 48 training rows"), ("other.jsonl:1", "no row came from there")):
        with pytest.raises(ValueError, match=message):
            make_sheet(tmp_path, tiny_model, RowSelection(rows=(name,)))


def test_tokens_of_half_a_character_are_put_together() -> None:
    tokenizer = tiny.build_tokenizer()
    ids = tokenizer("日x")["input_ids"]
    assert [(t.text, len(t.ids)) for t in split_tokens(ids, [True] * len(ids), tokenizer)] == [("日", 3), ("x", 1)]
    # Where learning starts inside a character, the halves stay apart, and nothing is lost.
    apart = split_tokens(ids, [False, True, True, True], tokenizer)
    assert [t.learned for t in apart][:2] == [False, True]
    assert sum(len(t.ids) for t in apart) == len(ids)


def test_the_command(tmp_path: Path, tiny_model: Path) -> None:
    config = tiny.write_config(tmp_path, tiny_model)
    page = tmp_path / "data.html"
    result = CliRunner().invoke(app, ["data", str(config), "--html", str(page), "--random", "1"])
    assert result.exit_code == 0, result.stderr
    assert "an epoch" in result.stdout
    assert page.read_text().startswith("<!doctype html>")
    result = CliRunner().invoke(app, ["data", str(config), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["summary"]["train_rows"] == 48
    # A row twice is a warning; --strict makes it an error.
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join([*lines, lines[0]]))
    assert CliRunner().invoke(app, ["data", str(config)]).exit_code == 0
    result = CliRunner().invoke(app, ["data", str(config), "--strict"])
    assert result.exit_code == 1
    assert "--strict" in result.stderr
    assert "repeat" in result.stdout
