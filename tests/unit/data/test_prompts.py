"""Rows as prompts: which shapes are read, what a reward sees of them, and how an environment's words are laid out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from lockstep.config import DataConfig
from lockstep.data.prompts import PromptReader, Prompts
from lockstep.data.sources.rows import DataError, Row


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reader_of(
    path: Path, *, template: str | None = tiny.CHATML, max_tokens: int = 200, **settings: Any
) -> PromptReader:
    config = DataConfig.model_validate({"train": str(path), **settings})
    return PromptReader(config, tiny.build_tokenizer(template), max_tokens=max_tokens)


def read(path: Path, **settings: Any) -> Prompts:
    return reader_of(path, **settings).read("train", lambda source: None)


def text_of(tokens: Any) -> str:
    return tiny.build_tokenizer().decode(list(tokens), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": "2 + 2", "answer": "4", "level": 3}, "4"),
        ({"question": "2 + 2", "answer": 4}, 4),
        ({"messages": [{"role": "user", "content": "2 + 2"}], "answer": "4"}, "4"),
        ({"messages": [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]}, "4"),
        ({"prompt": [{"role": "user", "content": "2 + 2"}], "completion": "4"}, "4"),
        ({"prompt": "2 + 2"}, None),
    ],
)
def test_a_row_becomes_what_the_model_is_asked_and_what_a_reward_sees(tmp_path, row, answer):
    (found,) = read(write(tmp_path / "rows.jsonl", [row]))
    assert text_of(found.tokens) == "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n"
    assert found.fields["prompt"] == "2 + 2"
    assert found.fields.get("answer") == answer
    assert found.fields.get("level") == row.get("level")
    assert found.origin.endswith("rows.jsonl:1")


@pytest.mark.parametrize("key", ["images", "image"])
def test_images_are_refused_rather_than_left_out(tmp_path, key):
    assert len(read(write(tmp_path / "none.jsonl", [{"prompt": "what is this?", key: []}]))) == 1
    with pytest.raises(DataError, match=r"rows\.jsonl:1: its images cannot be learned from"):
        read(write(tmp_path / "rows.jsonl", [{"prompt": "what is this?", key: ["cat.png"]}]))


def test_a_system_message_comes_first(tmp_path):
    (found,) = read(write(tmp_path / "rows.jsonl", [{"system": "be brief", "prompt": "hi"}]))
    assert text_of(found.tokens).startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi")


def test_columns_and_converters_are_those_of_all_data(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", [{"q": "2 + 2", "a": "4"}, {"q": "skip", "a": ""}])
    found = read(path, columns={"prompt": "q", "answer": "a"})
    assert (len(found), found[0].fields["answer"]) == (2, "4")
    code = (
        "def to_row(row):\n    return None if row['q'] == 'skip' else {'prompt': row['q'] + '?', 'answer': row['a']}\n"
    )
    (tmp_path / "my_prompts.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = read(path, converter="my_prompts:to_row")
    assert found.fields["prompt"] == "2 + 2?"


def test_plain_text_without_a_template(tmp_path):
    (found,) = read(write(tmp_path / "rows.jsonl", [{"prompt": "2 + 2 ="}]), template=None)
    assert text_of(found.tokens) == "2 + 2 ="


def test_prompts_that_leave_no_room_are_left_out_and_counted_or_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "hi"}, {"prompt": "long " * 40}])
    found = read(path, max_tokens=60)
    assert (len(found), found.num_dropped) == (1, 1)
    with pytest.raises(DataError, match=r"rows.jsonl:2: a prompt of \d+ tokens leaves no room for an answer"):
        read(path, max_tokens=60, truncate="error")
    with pytest.raises(DataError, match="no prompt is left"):
        read(path, max_tokens=3)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "hello"}, 'a row needs "prompt" or "messages", this one has "text"'),
        ({"prompt": "  "}, "'prompt' must be a text that is not empty"),
        ({"messages": [{"role": "assistant", "content": "4"}]}, "'messages' holds only an answer"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, words):
    with pytest.raises(DataError) as caught:
        read(write(tmp_path / "rows.jsonl", [row]))
    assert str(caught.value).startswith(str(tmp_path / "rows.jsonl:1"))
    assert words in str(caught.value)


def test_the_digest_changes_with_everything_that_sampling_or_scoring_sees(tmp_path):
    rows = [{"prompt": "2 + 2", "answer": "4"}, {"prompt": "2 + 3", "answer": "5"}]
    changed = [[rows[0]], rows[::-1], [rows[0], {**rows[1], "answer": "6"}], [{**rows[0], "level": 1}, rows[1]]]
    digests = {read(write(tmp_path / "rows.jsonl", version)).digest for version in (rows, *changed)}
    assert len(digests) == 5
    assert read(write(tmp_path / "rows.jsonl", rows)).digest in digests


def test_rows_that_are_made_take_the_place_of_files(tmp_path):
    reader = reader_of(tmp_path / "nowhere")
    (found,) = reader.read("train", lambda source: [Row("task:1", {"prompt": "hi", "answer": "yes"})])
    assert (found.origin, found.fields["answer"]) == ("task:1", "yes")


def test_what_an_environment_says_is_laid_out_as_the_template_would(tmp_path):
    """A sampled turn and the words that follow it are the tokens of the conversation rendered as one."""
    tokenizer = tiny.build_tokenizer()
    reader = reader_of(write(tmp_path / "rows.jsonl", [{"prompt": "2 + 2"}]))
    (row,) = reader.read("train", lambda source: None)
    end = tokenizer.eos_token_id
    said = [*tokenizer("<calc>2+2</calc>", add_special_tokens=False)["input_ids"], end]
    turns = [("user", "2 + 2"), ("assistant", "<calc>2+2</calc>"), ("user", "4")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], add_generation_prompt=True, tokenize=False
    )
    assert text_of([*row.tokens, *said, *reader.follow_up("4", end)]) == whole
    # A turn that ended at a stop text has no end-of-turn token yet: the template's own is written.
    assert text_of([*row.tokens, *said[:-1], *reader.follow_up("4", said[-2])]) == whole


def test_without_a_template_an_environment_says_its_words_alone(tmp_path):
    reader = reader_of(write(tmp_path / "rows.jsonl", [{"prompt": "x"}]), template=None)
    assert text_of(reader.follow_up(" 4", 7)) == " 4"
