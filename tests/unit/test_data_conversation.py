"""Row formats: recognised from keys, every field checked, every error with its place."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.data.conversation import Conversation, Passage, ignored_keys, read_row, recognise_format
from lockstep.data.source import DataError, Row

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def read(fields: dict[str, Any], *, has_template: bool = True) -> Conversation | Passage:
    row = Row("f.jsonl:7", fields)
    return read_row(row, recognise_format(row), has_template=has_template)


@pytest.mark.parametrize(
    ("fields", "format"),
    [
        ({"messages": [], "prompt": ""}, "messages"),
        ({"prompt": "", "completion": "", "text": ""}, "prompt_completion"),
        ({"instruction": "", "input": "", "output": "", "text": ""}, "alpaca"),
        ({"instruction": "", "output": ""}, "alpaca"),
        ({"text": "", "id": 1}, "text"),
    ],
)
def test_recognised_from_keys(fields: dict[str, Any], format: str) -> None:
    assert recognise_format(Row("f:1", fields)) == format


def test_unknown_keys_are_named() -> None:
    with pytest.raises(DataError, match=r'^f\.jsonl:7: the keys "question", "answer" fit no row format'):
        recognise_format(Row("f.jsonl:7", {"question": "", "answer": ""}))


def test_mismatch_names_keys_found_and_expected() -> None:
    with pytest.raises(DataError, match=r'^f\.jsonl:7: .*expected the keys "prompt", "completion", found "text"'):
        read_row(Row("f.jsonl:7", {"text": "x"}), "prompt_completion", has_template=True)


def test_ignored_keys() -> None:
    assert ignored_keys(Row("f:1", {"instruction": "", "input": "", "output": "", "id": 1}), "alpaca") == {"id"}


def test_all_assistant_turns_are_learned() -> None:
    system = {"role": "system", "content": "s"}
    content = read({"messages": [system, USER, ASSISTANT, USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT]})
    assert isinstance(content, Conversation)
    assert content.learned == (2, 6)


def test_prompt_completion_lists_learn_only_the_completion() -> None:
    content = read({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT, USER, ASSISTANT]})
    assert isinstance(content, Conversation)
    assert content.learned == (3, 5)
    mixed = read({"prompt": [USER], "completion": "a"})
    assert mixed == Conversation("f.jsonl:7", (USER, ASSISTANT), (1,))


def test_strings_become_messages_or_stay_plain() -> None:
    fields = {"prompt": "q", "completion": "a"}
    assert read(fields) == Conversation("f.jsonl:7", (USER, ASSISTANT), (1,))
    assert read(fields, has_template=False) == Passage("f.jsonl:7", "q", "a")
    assert read({"text": "t"}) == read({"text": "t"}, has_template=False) == Passage("f.jsonl:7", "", "t")


@pytest.mark.parametrize("empty", [{}, {"input": ""}, {"input": None}, {"input": " "}])
def test_alpaca_input(empty: dict[str, Any]) -> None:
    fields = {"instruction": "Add.", "input": "1 2", "output": "3"}
    templated, plain = read(fields), read(fields, has_template=False)
    assert isinstance(templated, Conversation)
    assert templated.messages[0]["content"] == "Add.\n\n1 2"
    assert isinstance(plain, Passage)
    assert plain.prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n")
    without = {"instruction": "Add.", "output": "3", **empty}
    templated, plain = read(without), read(without, has_template=False)
    assert isinstance(templated, Conversation)
    assert templated.messages[0]["content"] == "Add."
    assert isinstance(plain, Passage)
    assert "### Input" not in plain.prompt


def test_tool_calls_and_tools_pass_through() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    content = read({"messages": [USER, call], "tools": [{"name": "f"}]})
    assert isinstance(content, Conversation)
    assert (content.learned, content.tools) == ((1,), [{"name": "f"}])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": "hello"}, "'messages' is a string"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ["hello"]}, "message 1 of 'messages' is a string"),
        ({"messages": [USER, {"from": "gpt", "value": "a"}]}, "message 2 of 'messages' has no \"role\""),
        ({"messages": [USER, {"role": "asistant", "content": "a"}]}, "unknown role 'asistant'"),
        ({"messages": [USER, {"role": "assistant", "content": [1]}]}, "its content is an array"),
        ({"messages": [USER, {"role": "assistant"}]}, "its content is missing"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0.5}]}, "weight 0.5"),
        ({"messages": [USER]}, "nothing to learn: no assistant turn"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0}]}, "nothing to learn: no assistant turn"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "nothing to learn in message 2"),
        ({"messages": [USER, ASSISTANT], "tools": "[]"}, "'tools' is a string"),
        ({"prompt": "q", "completion": " "}, "nothing to learn: 'completion' is empty"),
        ({"prompt": "", "completion": "a"}, "'prompt' is empty"),
        ({"prompt": 3, "completion": "a"}, "'prompt' is a number"),
        ({"prompt": [USER], "completion": []}, "'completion' is empty"),
        ({"prompt": [USER], "completion": [USER]}, "no assistant turn"),
        ({"instruction": "i", "output": None}, "'output' is null"),
        ({"instruction": "i", "input": {}, "output": "o"}, "'input' is an object"),
        ({"text": "\n\t "}, "nothing to learn: 'text' is empty"),
        ({"text": True}, "'text' is a boolean"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        read(fields)
    assert str(caught.value).startswith("f.jsonl:7: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("fields", [{"messages": [USER, ASSISTANT]}, {"prompt": [USER], "completion": "a"}])
def test_messages_without_template(fields: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"^f\.jsonl:7: messages need a chat template .* set data\.chat_template"):
        read(fields, has_template=False)
