"""Turns of a conversation: both styles, tool calls, roles and systems, what is learned, every error with its place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.data import SourceConfig
from lockstep.data.formats.conversation import Content, Conversation, Message
from lockstep.data.formats.reader import RowReader, recognise_format
from lockstep.data.sources.rows import DataError, Row

SYSTEM, USER, ASSISTANT = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def read(fields: dict[str, Any], *, train_on: str = "assistant", **source: Any) -> Content | None:
    row, settings = Row("f.jsonl:7", fields), SourceConfig(path="f.jsonl", **source)
    format = recognise_format(row, settings)
    assert format is not None
    return RowReader(settings, format, train_on=train_on, has_template=True).read(row)


def converse(fields: dict[str, Any], **options: Any) -> Conversation:
    content = read(fields, **options)
    assert isinstance(content, Conversation)
    return content


def read_message(message: dict[str, Any]) -> Message:
    """An assistant's message as it comes out."""
    return converse({"messages": [USER, {"role": "assistant", **message}, ASSISTANT]}).messages[1]


def error_of(fields: dict[str, Any], **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(fields, **options)
    assert str(caught.value).startswith("f.jsonl:7: ")
    return str(caught.value)


# --- what is learned ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("train_on", "learned"), [("assistant", (2, 6)), ("last", (6,)), ("all", (2, 6))])
def test_learned_turns(train_on: str, learned: tuple[int, ...]) -> None:
    context_only = {**ASSISTANT, "weight": 0}
    turns = [SYSTEM, USER, ASSISTANT, USER, context_only, USER, {**ASSISTANT, "weight": 1}, USER, context_only]
    content = converse({"messages": turns}, train_on=train_on)
    assert content.learned == learned
    assert content.whole is (train_on == "all")


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_messages_of_a_table_without_arrays_are_json_text(key: str) -> None:
    turns = (
        [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
        if key == "conversations"
        else [USER, ASSISTANT]
    )
    assert converse({key: json.dumps(turns, indent=1)}) == converse({key: turns})


def test_two_answers_in_a_row_and_a_question_at_the_end() -> None:
    assert converse({"messages": [USER, ASSISTANT, ASSISTANT, USER]}).learned == (1, 2)


def test_an_answer_that_is_not_learned_may_be_empty() -> None:
    turns = [USER, {"role": "assistant", "content": ""}, USER, ASSISTANT]
    assert converse({"messages": turns}, train_on="last").learned == (3,)
    assert "nothing to learn in message 2: the answer is empty" in error_of({"messages": turns})


@pytest.mark.parametrize(
    "message", [{"reasoning_content": "why", "content": ""}, {"content": None, "tool_calls": [CALL]}]
)
def test_an_answer_without_text_may_have_substance(message: dict[str, Any]) -> None:
    assert converse({"messages": [USER, {"role": "assistant", **message}]}).learned == (1,)


# --- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": 1}', {"x": 1}),
        ({"x": 1}, {"x": 1}),
        (None, {}),
        ("not JSON", "not JSON"),
        ("[1]", "[1]"),
        ('{"x": "\\ud800"}', '{"x": "\\ud800"}'),  # half a character: no tokenizer takes it
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_become_objects_where_they_are_json(arguments: Any, expected: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = read_message({"content": None, "tool_calls": [call]})
    expected_call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": expected}}
    assert message == {"role": "assistant", "content": None, "tool_calls": [expected_call]}


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]},
        {"tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}, "id": None}]},
        {"function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"tool_calls": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
    ],
)
def test_every_way_to_write_a_call_reads_the_same(message: dict[str, Any]) -> None:
    assert read_message({"content": None, **message}) == {"role": "assistant", "content": None, "tool_calls": [CALL]}


def test_nulls_of_a_table_are_no_fields() -> None:
    message = {"content": "a", "tool_calls": None, "name": None, "weight": None, "reasoning_content": "r"}
    assert read_message(message) == {"role": "assistant", "content": "a", "reasoning_content": "r"}
    assert read_message({"content": "a", "tool_calls": []}) == ASSISTANT


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert read_message({"content": parts})["content"] == "one two"


def test_tool_results_keep_their_names() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "3"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", **CALL}]}
    content = converse({"messages": [{"role": "developer", "content": "d"}, USER, call, result, ASSISTANT]})
    assert content.messages[3] == result
    assert content.learned == (2, 4)


@pytest.mark.parametrize("name", ["conversation", "conversations"])
def test_messages_under_other_names(name: str) -> None:
    assert converse({name: [USER, ASSISTANT]}) == converse({"messages": [USER, ASSISTANT]})


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([TOOL], [TOOL]),
        (json.dumps([TOOL]), [TOOL]),
        ([TOOL["function"]], [TOOL]),
        ([{"type": "retrieval"}], [{"type": "retrieval"}]),
        *((nothing, None) for nothing in (None, [], "", " ", "[]")),
    ],
)
def test_tools(tools: Any, expected: Any) -> None:
    assert converse({"messages": [USER, ASSISTANT], "tools": tools}).tools == expected


def test_the_system_field_comes_first() -> None:
    assert converse({"messages": [USER, ASSISTANT], "system": "s"}) == converse({"messages": [SYSTEM, USER, ASSISTANT]})
    for nothing in (None, "", " "):
        assert converse({"messages": [USER, ASSISTANT], "system": nothing}).messages == (USER, ASSISTANT)


def test_roles_of_the_settings() -> None:
    turns = [{"role": "player", "content": "u"}, {"role": "bot", "content": "a"}]
    assert converse({"messages": turns}, roles={"player": "user", "bot": "assistant"}).messages == (USER, ASSISTANT)


# --- ShareGPT -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "role"),
    [
        *((tag, "user") for tag in ("human", "user", "prompter", "Human")),
        *((tag, "assistant") for tag in ("gpt", "assistant", "bot", "model", "chatgpt", "bing", "bard")),
        *((tag, "tool") for tag in ("observation", "tool", "function_response")),
    ],
)
def test_known_tags(tag: str, role: str) -> None:
    content = converse({"conversations": [{"from": tag, "value": "v"}, {"from": "gpt", "value": "a"}]})
    assert content.messages[0] == {"role": role, "content": "v"}


def test_tags_and_keys_of_the_settings() -> None:
    turns = [{"tag": "Q", "text": "u"}, {"tag": "A", "text": "a", "weight": 1}]
    content = converse(
        {"dialog": turns},
        columns={"conversations": "dialog", "from": "tag", "value": "text"},
        roles={"Q": "user", "A": "assistant"},
    )
    assert content.messages == (USER, {**ASSISTANT, "weight": 1})


CALL_VALUE = {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("value", "num_calls"),
    [
        (json.dumps(CALL_VALUE), 1),
        (json.dumps({"name": "f", "arguments": '{"x": 1}'}), 1),
        (json.dumps([CALL_VALUE, CALL_VALUE]), 2),
        (CALL_VALUE, 1),
    ],
)
def test_function_call_turns(value: Any, num_calls: int) -> None:
    turns = [{"from": "human", "value": "u"}, {"from": "function_call", "value": value}]
    content = converse({"conversations": [*turns, {"from": "observation", "value": "3"}], "tools": "[]"})
    call = {"role": "assistant", "content": None, "tool_calls": [CALL] * num_calls}
    assert content == Conversation("f.jsonl:7", (USER, call, {"role": "tool", "content": "3"}), (1,))


texts = st.text(min_size=1).filter(str.strip)
plain_turns = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool"]), texts)
answers = st.builds(lambda text: {"role": "assistant", "content": text}, texts)
arguments = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text())
calls = st.builds(lambda name, values: {"name": name, "arguments": values}, st.text(min_size=1), arguments)
call_turns = st.builds(
    lambda functions: {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    },
    st.lists(calls, min_size=1, max_size=3),
)


def as_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" in message:
        return {"from": "function_call", "value": json.dumps([call["function"] for call in message["tool_calls"]])}
    tags = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
    return {"from": tags[message["role"]], "value": message["content"]}


@settings(max_examples=200, deadline=None)
@given(st.lists(plain_turns | answers | call_turns, max_size=6), answers, st.none() | texts)
def test_both_styles_read_the_same(turns: list[dict[str, Any]], answer: dict[str, Any], system: str | None) -> None:
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = [*opening, *turns, answer]
    expected = converse({"messages": messages})
    assert expected.messages == tuple(messages)
    assert converse({"conversations": [as_sharegpt(message) for message in messages]}) == expected
    shown = [as_sharegpt(message) for message in (*turns, answer)]
    assert converse({"conversations": shown, "system": system}) == expected


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ("hello", "'messages' is a string: it must be an array of messages"),
        ("[{'role': 'user'}]", "'messages' is a string and not JSON ("),
        ([], "'messages' is empty"),
        (["hello"], "message 1 of 'messages' is a string"),
        ([USER, None], "message 2 of 'messages' is null"),
        ([USER, {"from": "gpt", "value": "a"}], 'message 2 of \'messages\' has no "role", only "from", "value"'),
        (
            [USER, {"role": "bot", "content": "a"}],
            "message 2 of 'messages' has the unknown role 'bot': use one of system",
        ),
        ([USER, {"role": "bot", "content": "a"}], "or set data.roles"),
        ([USER, {"role": ["assistant"], "content": "a"}], "its role is an array"),
        ([USER, {"role": None, "content": "a"}], "its role is null"),
        ([USER, {"role": "assistant", "content": {}}], "its content is an object: it must be a string"),
        ([USER, {"role": "assistant", "content": None}], "its content is null"),
        ([USER, {"role": "assistant"}], "its content is missing"),
        ([USER, {"role": "assistant", "content": ["a"]}], "part 1 of its content is a string"),
        ([USER, {"role": "user", "content": [{"type": "image_url"}]}], "is an image: images are learned from by sft"),
        ([USER, {"role": "user", "content": [{"type": "text", "text": None}]}], "its text is null"),
        ([USER, {**ASSISTANT, "weight": 0.5}], "weight 0.5: it must be 0 or 1"),
        ([USER, {**ASSISTANT, "tool_calls": {}, "weight": [1]}], "weight [1]"),
        ([USER, {**ASSISTANT, "tool_calls": CALL}], "its tool_calls are an object"),
        ([USER, {**ASSISTANT, "tool_calls": [None]}], "tool call 1 is null"),
        ([USER, {**ASSISTANT, "tool_calls": [CALL, {"id": "c"}]}], 'tool call 2 has no function with a "name"'),
        ([USER, {**ASSISTANT, "tool_calls": [{"function": "f"}]}], 'tool call 1 has no function with a "name"'),
        ([USER], "nothing to learn: no assistant turn: add the answer or remove the row"),
        ([USER, {**ASSISTANT, "weight": 0}], "nothing to learn: no assistant turn"),
        ([USER, {"role": "assistant", "content": " \n"}], "nothing to learn in message 2: the answer is empty"),
        ([SYSTEM, SYSTEM, USER, ASSISTANT], "message 2 is a system message: only the first may be one: merge it"),
        ([USER, ASSISTANT, SYSTEM, ASSISTANT], "message 3 is a system message"),
        ([SYSTEM, {"role": "developer", "content": "d"}, ASSISTANT], "message 2 is a developer message"),
    ],
)
def test_wrong_messages(turns: Any, words: str) -> None:
    assert words in error_of({"messages": turns})


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (
            {"from": "robot", "value": "a"},
            "message 2 of 'conversations' has the unknown tag 'robot': name its role in data.roles",
        ),
        ({"from": "robot", "value": "a"}, "for example {robot: assistant}"),
        ({"role": "assistant", "content": "a"}, 'has no "from", only "role", "content"'),
        ({"from": "gpt"}, "its value is missing"),
        ({"from": "gpt", "value": None}, "its value is null"),
        ({"from": "gpt", "value": "a", "weight": 2}, "weight 2"),
        ({"from": "function_call", "value": "f(1)"}, "is a function call and not JSON"),
        ({"from": "function_call", "value": '{"name": "\\ud800"}'}, "is a function call and not JSON"),
        ({"from": "function_call", "value": '{"name": "f"}'}, 'is a function call without "name" and "arguments"'),
        ({"from": "function_call", "value": "[]"}, 'is a function call without "name" and "arguments"'),
        ({"from": "function_call", "value": None}, 'is a function call without "name" and "arguments"'),
        ({"from": "function_call", "value": '{"name": 1, "arguments": {}}'}, 'has no function with a "name"'),
    ],
)
def test_wrong_sharegpt_turns(turn: dict[str, Any], words: str) -> None:
    assert words in error_of({"conversations": [{"from": "human", "value": "u"}, turn]})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": {}}, "'tools' is an object: it must be an array"),
        ({"tools": "{}"}, "'tools' is an object: it must be an array"),
        ({"tools": "f(x)"}, "'tools' is a string and not JSON"),
        ({"tools": '["\\ud800"]'}, "'tools' is a string and not JSON"),
        ({"tools": [TOOL, None]}, "tool 2 of 'tools' is null"),
        ({"system": ["s"]}, "'system' is an array: it must be a string"),
    ],
)
def test_wrong_fields_beside_the_messages(fields: dict[str, Any], words: str) -> None:
    assert words in error_of({"messages": [USER, ASSISTANT], **fields})


def test_system_as_field_and_as_message() -> None:
    assert "there is a 'system' field and a system message" in error_of(
        {"messages": [SYSTEM, ASSISTANT], "system": "s"}
    )


def test_roles_must_be_roles() -> None:
    with pytest.raises(
        DataError, match=r"^data\.roles: 'bot' is set to 'asistant', which is no role: use one of system"
    ):
        read({"messages": [USER, ASSISTANT]}, roles={"bot": "asistant"})
