"""Row formats: recognised from keys, read under every name, every field checked, every error with its place."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.data import SourceConfig
from lockstep.data.formats.conversation import Content, Conversation, Pair, Passage
from lockstep.data.formats.reader import KINDS, RowReader, recognise_format
from lockstep.data.sources.rows import DataError, Row

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
EXCHANGE = Conversation("f.jsonl:7", (USER, ASSISTANT), (1,))
SHARED_DATA = Path(__file__).resolve().parents[4] / "shared" / "data"


def recognise(fields: dict[str, Any], **source: Any) -> str | None:
    return recognise_format(Row("f.jsonl:7", fields), SourceConfig(path="f.jsonl", **source))


def make_reader(format: str, *, has_template: bool = True, train_on: str = "assistant", **source: Any) -> RowReader:
    return RowReader(SourceConfig(path="f", **source), format, train_on=train_on, has_template=has_template)


def read(fields: dict[str, Any], *, has_template: bool = True, train_on: str = "assistant", **source: Any) -> Any:
    format = recognise(fields, **source)
    assert format is not None
    reader = make_reader(format, has_template=has_template, train_on=train_on, **source)
    return reader.read(Row("f.jsonl:7", fields))


# --- recognition ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "format"),
    [
        ({"messages": [], "prompt": ""}, "messages"),
        ({"messages": [USER]}, "messages"),
        ({"messages": [HUMAN]}, "sharegpt"),
        ({"conversations": [USER]}, "messages"),
        ({"conversation": [USER]}, "messages"),
        ({"conversations": [HUMAN]}, "sharegpt"),
        ({"conversation": [HUMAN]}, "sharegpt"),
        ({"conversations": []}, "sharegpt"),
        ({"prompt": "", "completion": "", "text": ""}, "prompt_completion"),
        ({"prompt": "", "completion": "", "response": ""}, "prompt_completion"),
        ({"question": "", "answer": "", "id": 1}, "prompt_completion"),
        ({"query": "", "response": "", "original_question": ""}, "prompt_completion"),
        ({"prompt": "", "response": ""}, "prompt_completion"),
        ({"input": "", "output": ""}, "prompt_completion"),
        ({"instruction": "", "context": "", "response": "", "category": ""}, "prompt_completion"),
        ({"instruction": "", "input": "", "response": ""}, "prompt_completion"),
        ({"instruction": "", "input": "", "output": "", "text": ""}, "alpaca"),
        ({"instruction": "", "output": ""}, "alpaca"),
        ({"text": "", "id": 1}, "text"),
        ({"chosen": "", "rejected": "", "prompt": ""}, "preference"),
        ({"chosen": [], "rejected": [], "messages": []}, "preference"),
        ({"messages": [USER], "label": True}, "unpaired"),
        ({"conversations": [HUMAN], "kto_tag": False}, "unpaired"),
        ({"prompt": "", "completion": "", "label": 0}, "unpaired"),
        ({"instruction": "", "output": "", "label": "True"}, "unpaired"),
        ({"question": "", "answer": "", "label": 1.0}, "unpaired"),
        ({"prompt": "", "completion": "", "label": 2}, "prompt_completion"),
        ({"prompt": "", "completion": "", "label": "sports"}, "prompt_completion"),
        ({"prompt": "", "completion": "", "label": None}, "prompt_completion"),
        ({"text": "", "label": 1}, "text"),
    ],
)
def test_recognised_from_keys(fields: dict[str, Any], format: str) -> None:
    assert recognise(fields) == format
    assert format in KINDS


def test_the_settings_say_it_first() -> None:
    fields = {"prompt": "", "completion": "", "text": ""}
    assert recognise(fields, format="text") == "text"
    templates = {"input_template": "{prompt}", "output_template": "{text}"}
    assert recognise(fields, format="text", **templates) == "template"
    assert make_reader("text", **templates).format == "template"


@pytest.mark.parametrize("fields", [{}, {"problem": "", "solution": ""}, {"question": ""}])
def test_unknown_keys_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r'^f\.jsonl:7: the keys .* fit no row format \(.*text has "text"') as caught:
        recognise(fields)
    assert (", ".join(f'"{key}"' for key in fields) or "none") in str(caught.value)
    assert "data.columns, or write data.input_template" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "unread"),
    [
        ({"question": "", "answer": "", "context": ""}, "context"),
        ({"question": "", "answer": "", "response": ""}, "response"),
        ({"input": "", "output": "", "prompt": ""}, "prompt"),
    ],
)
def test_names_that_are_not_clear_are_refused(fields: dict[str, Any], unread: str) -> None:
    with pytest.raises(
        DataError, match=f'^f.jsonl:7: .* but then "{unread}" would be ignored: map them with data.columns'
    ):
        recognise(fields)
    assert recognise({**fields, unread: None}) == "prompt_completion"


def test_two_pairs_of_names_are_not_clear() -> None:
    fields = {"question": "", "answer": "", "query": "", "response": ""}
    with pytest.raises(DataError, match="fit no row format"):
        recognise(fields)


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        ("prompt", "completion"),
        ("question", "answer"),
        ("query", "response"),
        ("prompt", "response"),
        ("input", "output"),
        ("instruction", "response"),
        ("instruction", "output"),
    ],
)
def test_a_question_and_its_answer_under_every_name(keys: tuple[str, str]) -> None:
    fields = dict(zip(keys, ("q", "a")))
    assert read(fields) == EXCHANGE
    plain = read(fields, has_template=False)
    assert isinstance(plain, Passage)
    assert plain.answer == "a"
    assert plain.prompt == "q" or keys == ("instruction", "output")


def test_columns_of_the_settings() -> None:
    columns = {"prompt": "problem", "completion": "solution", "system": "persona"}
    fields = {"problem": "q", "solution": "a", "persona": "s", "prompt": "hidden", "level": 3}
    expected = ({"role": "system", "content": "s"}, USER, ASSISTANT)
    assert read(fields, columns=columns) == Conversation("f.jsonl:7", expected, (2,))
    reader = make_reader("prompt_completion", columns=columns)
    assert reader.ignored_keys(Row("f:1", fields)) == {"prompt", "level"}
    ours = {"prompt": "q", "completion": "a", "persona": "s"}
    assert read(ours, columns=columns).messages == expected
    assert reader.ignored_keys(Row("f:1", ours)) == set()


def test_a_renamed_column_is_gone_from_its_old_name() -> None:
    content = read({"question": "q", "answer": "a", "context": "s"}, columns={"system": "context"})
    assert content.messages[0] == {"role": "system", "content": "s"}


def test_columns_must_be_of_some_format() -> None:
    with pytest.raises(DataError, match=r'^data\.columns: no format has "prmpt": .* Names are answer, .*, prompt, '):
        recognise({"question": "q"}, columns={"prmpt": "question"})
    with pytest.raises(DataError, match='no format has "prmpt"'):
        make_reader("text", columns={"prmpt": "question"})


def test_lists_of_messages_as_prompt_and_completion() -> None:
    content = read({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT, USER, ASSISTANT]})
    assert content.learned == (3, 5)
    assert read({"prompt": [HUMAN], "completion": "a"}) == read({"prompt": "q", "completion": [GPT]}) == EXCHANGE
    assert read({"prompt": [], "completion": [ASSISTANT]}).learned == (0,)
    late = read({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT, USER, ASSISTANT]}, train_on="last")
    assert late.learned == (5,)
    assert read({"system": "s", "prompt": [USER, ASSISTANT], "completion": [ASSISTANT]}).learned == (3,)


def test_text_stays_plain() -> None:
    assert read({"text": "t"}) == read({"text": "t"}, has_template=False) == Passage("f.jsonl:7", "", "t")


def test_every_token_is_learned_where_the_settings_say_so() -> None:
    for fields in ({"text": "t"}, {"prompt": "p", "completion": "c"}, {"instruction": "i", "output": "o"}):
        for has_template in (True, False):
            assert read(fields, has_template=has_template, train_on="all").whole
            assert not read(fields, has_template=has_template).whole


@pytest.mark.parametrize("empty", [{}, {"input": ""}, {"input": None}, {"input": " "}])
def test_alpaca_input(empty: dict[str, Any]) -> None:
    fields = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert read(fields).messages[0]["content"] == "Add.\n\n1 2"
    plain = read(fields, has_template=False)
    assert plain.prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n")
    without = {"instruction": "Add.", "output": "3", **empty}
    assert read(without).messages[0]["content"] == "Add."
    assert "### Input" not in read(without, has_template=False).prompt


def test_alpaca_with_system_and_history() -> None:
    fields = {"instruction": "q", "output": "a", "system": "s", "history": [["q1", "a1"], ["q2", "a2"]]}
    content = read(fields)
    assert [message["content"] for message in content.messages] == ["s", "q1", "a1", "q2", "a2", "q", "a"]
    assert content.learned == (2, 4, 6)
    assert read(fields, train_on="last").learned == (6,)
    assert read({**fields, "history": []}).learned == (2,)


def test_system_without_a_template_comes_before_the_prompt() -> None:
    assert read({"prompt": "p", "completion": "c", "system": "s"}, has_template=False).prompt == "s\n\np"


def test_dolly_context_belongs_to_the_prompt() -> None:
    fields = {"instruction": "Who?", "context": "Ann.", "response": "Ann", "category": "qa"}
    assert read(fields).messages[0]["content"] == "Who?\n\nAnn."
    assert read(fields, has_template=False).prompt == "Who?\n\nAnn."
    assert read({**fields, "context": ""}).messages[0]["content"] == "Who?"


def test_tools_beside_strings() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert read({"prompt": "q", "completion": "a", "tools": json.dumps([tool])}).tools == [tool]


@pytest.mark.parametrize(
    ("format", "fields", "ignored"),
    [
        ("messages", {"messages": [USER], "tools": [], "system": "", "id": 1, "label": 1}, {"id", "label"}),
        ("sharegpt", {"conversations": [HUMAN], "messages_of": 1}, {"messages_of"}),
        ("prompt_completion", {"question": "", "answer": "", "context": "", "system": ""}, {"context"}),
        ("prompt_completion", {"instruction": "", "response": "", "context": "", "category": ""}, {"category"}),
        ("alpaca", {"instruction": "", "input": "", "output": "", "history": [], "id": 1}, {"id"}),
        ("text", {"text": "", "system": ""}, {"system"}),
        ("preference", {"chosen": "", "rejected": "", "prompt": "", "messages": [], "score": 1}, {"messages", "score"}),
        ("preference", {"chosen": "", "rejected": "", "instruction": "", "input": ""}, set()),
        ("unpaired", {"messages": [], "label": 1, "id": 2}, {"id"}),
        ("unpaired", {"prompt": "", "completion": "", "kto_tag": 1, "label": "x"}, {"label"}),
    ],
)
def test_ignored_keys(format: str, fields: dict[str, Any], ignored: set[str]) -> None:
    assert make_reader(format).ignored_keys(Row("f:1", fields)) == ignored


def test_a_reader_pickles() -> None:
    reader = make_reader("sharegpt", columns={"conversations": "dialog"}, roles={"me": "assistant"})
    row = Row("f.jsonl:7", {"dialog": [HUMAN, {"from": "me", "value": "a"}]})
    assert reader.read(row) == EXCHANGE
    assert pickle.loads(pickle.dumps(reader)).read(row) == EXCHANGE


# --- errors ---------------------------------------------------------------------------------------------------------


def error_of(fields: dict[str, Any], **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(fields, **options)
    assert str(caught.value).startswith("f.jsonl:7: ")
    return str(caught.value)


@pytest.mark.parametrize(
    ("format", "fields", "words"),
    [
        (
            "prompt_completion",
            {"text": "x"},
            'the keys "prompt", "completion", found "text" (which looks like text): use',
        ),
        ("messages", {"conversations": [HUMAN, GPT]}, 'found "conversations" (which looks like sharegpt)'),
        ("sharegpt", {"conversations": [USER, ASSISTANT]}, 'found "conversations" (which looks like messages)'),
        ("sharegpt", {"prompt": "p", "completion": "c"}, "(which looks like prompt_completion)"),
        ("alpaca", {"instruction": "i"}, 'expected the keys "instruction", "output", found "instruction": use one'),
        ("text", {"messages": [USER, ASSISTANT]}, "(which looks like messages)"),
        (
            "preference",
            {"prompt": "p", "chosen": "c"},
            'expected the keys "chosen", "rejected", found "prompt", "chosen"',
        ),
        ("unpaired", {"messages": [USER, ASSISTANT]}, 'expected the keys "label" beside those of another format'),
        ("unpaired", {"text": "t", "label": True}, "(which looks like text)"),
    ],
)
def test_a_row_of_another_format(format: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        make_reader(format).read(Row("f.jsonl:7", fields))
    assert str(caught.value).startswith(f"f.jsonl:7: not a row of format {format}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"prompt": "q", "completion": " "},
            "nothing to learn: 'completion' is empty: write the answer or remove the row",
        ),
        ({"prompt": "", "completion": "a"}, "'prompt' is empty: write a prompt, or use rows with only \"text\""),
        ({"prompt": 3, "completion": "a"}, "'prompt' is a number: it must be a string"),
        ({"prompt": [USER], "completion": []}, "'completion' is empty"),
        ({"prompt": [USER], "completion": [USER]}, "no assistant turn"),
        ({"prompt": [USER], "completion": None}, "'completion' is null"),
        ({"question": "q", "answer": ["a"]}, "message 1 of 'answer' is a string"),
        ({"instruction": "i", "output": None}, "'output' is null"),
        ({"instruction": " ", "output": "o"}, "'instruction' is empty"),
        ({"instruction": "i", "input": {}, "output": "o"}, "'input' is an object"),
        ({"instruction": "i", "output": "o", "history": "h"}, "'history' is a string"),
        ({"instruction": "i", "output": "o", "history": [["q", None]]}, "entry 1 of 'history' must be two strings"),
        (
            {"instruction": "i", "output": "o", "history": [["q", "a"], ["q"]]},
            "entry 2 of 'history' must be two strings",
        ),
        ({"text": "\n\t "}, "nothing to learn: 'text' is empty"),
        ({"text": True}, "'text' is a boolean"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], words: str) -> None:
    assert words in error_of(fields)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"messages": [USER, ASSISTANT]}, "messages"),
        ({"conversations": [HUMAN, GPT], "label": True}, "messages"),
        ({"prompt": [USER], "completion": "a"}, "messages"),
        ({"instruction": "i", "output": "o", "history": [["q", "a"]]}, "earlier turns in 'history'"),
        ({"prompt": "p", "completion": "c", "tools": [{"name": "f"}]}, "tools"),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, "messages"),
        ({"prompt": "p", "chosen": [ASSISTANT], "rejected": "b"}, "messages"),
    ],
)
def test_messages_without_template(fields: dict[str, Any], what: str) -> None:
    words = error_of(fields, has_template=False)
    assert words.startswith(f"f.jsonl:7: {what} need a chat template and there is none: set data.chat_template")


# --- public data ----------------------------------------------------------------------------------------------------


def public_rows(name: str) -> list[Row]:
    if not (SHARED_DATA / name).exists():
        pytest.skip(f"needs {name}")
    text = (SHARED_DATA / name).read_text(encoding="utf-8")
    values = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
    return [Row(f"{name}:{number}", value) for number, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("name", "format", "num_rows"),
    [
        ("alpaca_en_demo.json", "alpaca", 999),
        ("dpo_en_demo.json", "preference", 300),
        ("glaive_toolcall_en_demo.json", "sharegpt", 300),
        ("gsm8k_test.jsonl", "prompt_completion", 1319),
        ("gsm8k_train.jsonl", "prompt_completion", 7473),
        ("kto_en_demo.json", "unpaired", 300),
    ],
)
def test_public_data_reads_without_error(name: str, format: str, num_rows: int) -> None:
    rows = public_rows(name)
    source = SourceConfig(path=name)
    assert recognise_format(rows[0], source) == format
    reader = RowReader(source, format, train_on="assistant", has_template=True)
    contents: list[Content | None] = [reader.read(row) for row in rows]
    assert len(contents) == num_rows
    assert all(isinstance(content, Pair if format == "preference" else Conversation) for content in contents)
    assert not set().union(*map(reader.ignored_keys, rows))


def test_public_tool_calls_are_all_read() -> None:
    rows = public_rows("glaive_toolcall_en_demo.json")
    contents = [read(row.fields) for row in rows]
    messages = [message for content in contents for message in content.messages]
    calls = [message for message in messages if "tool_calls" in message]
    assert len(calls) == sum(turn["from"] == "function_call" for row in rows for turn in row.fields["conversations"])
    assert all(isinstance(call["tool_calls"][0]["function"]["arguments"], dict) for call in calls)
    assert sum(content.tools is not None for content in contents) == sum(row.fields["tools"] != "[]" for row in rows)
