"""Pairs that say nothing: answers that are the same in tokens, or become so when they are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_rows import read
from data_tokenizers import CHATML, build_tokenizer

from lockstep.config import DataConfig
from lockstep.data.chat_template import load_template
from lockstep.data.dataset import compile_data
from lockstep.data.encoder import Encoded, Encoder
from lockstep.data.formats.conversation import Pair
from lockstep.data.rendering import render
from lockstep.data.sources.rows import DataError


def encode(chosen: str, rejected: str, *, max_length: int = 100, truncate: str = "prompt_left") -> Encoded | DataError:
    tokenizer = build_tokenizer(CHATML)
    sides = [
        read({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": a}]})
        for a in (chosen, rejected)
    ]
    rendered = render(Pair("f.jsonl:7", *sides), load_template(tokenizer, "auto", {}))  # type: ignore[arg-type]
    (found,) = Encoder(tokenizer, max_length=max_length, truncate=truncate).encode([rendered])
    return found


def test_answers_that_differ_stay():
    found = encode("one two three", "one two four")
    assert isinstance(found, Encoded)
    assert found.datum is not None
    assert len(found.datum.completions) == 2


def test_answers_with_the_same_tokens_are_an_error_that_names_the_row():
    found = encode("one two", "one two")
    assert isinstance(found, DataError)
    assert str(found) == (
        "f.jsonl:7: nothing to prefer: 'chosen' and 'rejected' are the same in tokens: remove the row"
    )


@pytest.mark.parametrize("truncate", ["prompt_left", "right"])
def test_answers_that_differ_only_behind_the_cut_are_left_out(truncate):
    same, long = "one two three four five six seven eight ", 30
    whole = encode(same + "nine", same + "ten", max_length=200, truncate=truncate)
    assert isinstance(whole, Encoded)
    assert whole.datum is not None
    cut = encode(same * 4 + "nine", same * 4 + "ten", max_length=long, truncate=truncate)
    assert isinstance(cut, Encoded)
    assert cut.datum is None


def test_they_are_counted_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    same = "one two three four five six seven eight " * 4
    rows: list[dict[str, Any]] = [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": "q", "chosen": f"{same}nine", "rejected": f"{same}ten"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(tmp_path / "train.jsonl"), max_length=30)  # type: ignore[arg-type]
    data = compile_data(config, build_tokenizer(CHATML), seed=0)
    assert (len(data.train), data.report.totals.dropped) == (1, 1)
    assert any("1 rows were left out because they are longer than" in line for line in data.report.warnings())
