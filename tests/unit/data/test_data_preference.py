"""Judged rows: pairs with an explicit or an implicit prompt, labels, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.data import SourceConfig
from lockstep.data.formats.conversation import Conversation, Pair, Passage
from lockstep.data.formats.reader import RowReader, recognise_format
from lockstep.data.sources.rows import DataError, Row

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "g"), ("assistant", "b"))
)
SYSTEM = {"role": "system", "content": "s"}
HUMAN = {"from": "human", "value": "q"}
GPT_GOOD, GPT_BAD = {"from": "gpt", "value": "g"}, {"from": "gpt", "value": "b"}


def read(fields: dict[str, Any], *, has_template: bool = True, train_on: str = "assistant") -> Any:
    row, source = Row("f.jsonl:7", fields), SourceConfig(path="f.jsonl")
    format = recognise_format(row, source)
    assert format in ("preference", "unpaired")
    return RowReader(source, format, train_on=train_on, has_template=has_template).read(row)


def pair_of(*prompt: dict[str, Any]) -> Pair:
    chosen, rejected = (Conversation("f.jsonl:7", (*prompt, answer), (len(prompt),)) for answer in (GOOD, BAD))
    return Pair("f.jsonl:7", chosen, rejected)


def error_of(fields: dict[str, Any]) -> str:
    with pytest.raises(DataError) as caught:
        read(fields)
    assert str(caught.value).startswith("f.jsonl:7: ")
    return str(caught.value)


# --- pairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "q"},
        {"question": "q"},
        {"instruction": "q", "input": ""},
        {"prompt": [USER]},
        {"prompt": [HUMAN]},
        {"messages": [USER]},
        {"conversations": [HUMAN]},
        {"conversation": [HUMAN]},
        {"prompt": "q", "messages": [USER, GOOD]},
    ],
)
@pytest.mark.parametrize(
    "answers",
    [
        ("g", "b"),
        (GOOD, BAD),
        (GPT_GOOD, GPT_BAD),
        ([GOOD], [BAD]),
        ("g", [GPT_BAD]),
        ([USER, GOOD], [USER, BAD]),
        ([HUMAN, GPT_GOOD], "b"),
    ],
)
def test_an_explicit_prompt(prompt: dict[str, Any], answers: tuple[Any, Any]) -> None:
    assert read({**prompt, "chosen": answers[0], "rejected": answers[1]}) == pair_of(USER)


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ([USER, GOOD], [USER, BAD]),
        ([HUMAN, GPT_GOOD], [USER, BAD]),
        ("\n\nHuman: q\n\nAssistant: g", "\n\nHuman: q\n\nAssistant: b"),
    ],
)
def test_an_implicit_prompt(chosen: Any, rejected: Any) -> None:
    assert read({"chosen": chosen, "rejected": rejected}) == pair_of(USER)
    assert read({"chosen": chosen, "rejected": rejected, "prompt": None}) == pair_of(USER)


def test_earlier_turns_are_context_whatever_is_trained_on() -> None:
    turns = [USER, BAD, USER]
    for train_on in ("assistant", "last", "all"):
        assert read({"chosen": [*turns, GOOD], "rejected": [*turns, BAD]}, train_on=train_on) == pair_of(*turns)
    weighted = {"chosen": [USER, {**GOOD, "weight": 0}], "rejected": [USER, BAD]}
    assert read(weighted).chosen.learned == (1,)


def test_a_long_dialogue_in_strings() -> None:
    opening = "\n\nHuman: q\n\nAssistant: b\n\nHuman: q\n\nAssistant:"
    assert read({"chosen": f"{opening} g", "rejected": f"{opening} b"}) == pair_of(USER, BAD, USER)


def test_system_and_tools() -> None:
    fields = {"system": "s", "tools": '[{"name": "f"}]', "prompt": "q", "chosen": "g", "rejected": "b"}
    pair = read(fields)
    assert pair.chosen.messages == (SYSTEM, USER, GOOD)
    assert pair.rejected.messages == (SYSTEM, USER, BAD)
    assert pair.chosen.tools == pair.rejected.tools == [{"type": "function", "function": {"name": "f"}}]
    repeated = {"prompt": "q", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}
    assert read(repeated) == pair_of(SYSTEM, USER)
    assert read({**repeated, "prompt": [USER]}) == pair_of(SYSTEM, USER)
    turns = [USER, BAD, USER]
    longer = {"prompt": turns, "chosen": [SYSTEM, *turns, GOOD], "rejected": [SYSTEM, *turns, BAD]}
    assert read(longer) == pair_of(SYSTEM, *turns)


def test_plain_pairs() -> None:
    pair = read({"prompt": "q", "chosen": "g", "rejected": "b"}, has_template=False, train_on="all")
    assert pair == Pair("f.jsonl:7", Passage("f.jsonl:7", "q", "g"), Passage("f.jsonl:7", "q", "b"))
    headed = read({"instruction": "i", "input": "c", "chosen": "g", "rejected": "b"}, has_template=False)
    assert headed.chosen.prompt == headed.rejected.prompt
    assert headed.chosen.prompt.endswith("### Instruction:\ni\n\n### Input:\nc\n\n### Response:\n")


texts = st.text(min_size=1).filter(str.strip)
turns = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), texts)


@settings(max_examples=150, deadline=None)
@given(st.lists(turns, max_size=4), texts, texts, texts, st.booleans())
def test_explicit_and_implicit_prompts_read_the_same(
    opening: list[dict[str, Any]], question: str, chosen: str, rejected: str, with_system: bool
) -> None:
    if chosen == rejected:
        rejected += "."
    prompt = [*([SYSTEM] if with_system else []), *opening, {"role": "user", "content": question}]
    good, bad = ({"role": "assistant", "content": text} for text in (chosen, rejected))
    expected = read({"chosen": [*prompt, good], "rejected": [*prompt, bad]})
    assert expected.chosen.messages == (*prompt, good)
    assert expected.rejected.messages == (*prompt, bad)
    assert expected.chosen.learned == expected.rejected.learned == (len(prompt),)
    for answers in ((chosen, rejected), (good, bad), ([good], [bad]), ([*prompt, good], [*prompt, bad])):
        assert read({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}) == expected


SAME = "nothing to prefer: 'chosen' and 'rejected' are the same: remove the row"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, SAME),
        ({"prompt": "q", "chosen": "g", "rejected": GOOD}, SAME),
        ({"chosen": [USER, GOOD], "rejected": [HUMAN, GPT_GOOD]}, SAME),
        ({"prompt": "q", "chosen": "g", "rejected": " "}, "nothing to learn: 'rejected' is empty"),
        ({"prompt": [USER], "chosen": "", "rejected": "b"}, "nothing to learn in 'chosen': the answer is empty"),
        ({"prompt": "", "chosen": "g", "rejected": "b"}, "'prompt' is empty"),
        ({"prompt": 3, "chosen": "g", "rejected": "b"}, "'prompt' is a number"),
        ({"instruction": "i", "input": 3, "chosen": "g", "rejected": "b"}, "'input' is a number"),
        (
            {"prompt": "q", "chosen": None, "rejected": "b"},
            "'chosen' is null: it must be a string, a message or an array",
        ),
        ({"prompt": "q", "chosen": [], "rejected": "b"}, "'chosen' is empty"),
        ({"prompt": "q", "chosen": {"text": "g"}, "rejected": "b"}, '\'chosen\' has no "role", only "text"'),
        (
            {"prompt": "q", "chosen": HUMAN, "rejected": "b"},
            "'chosen' ends with a user message: it must end with the answer",
        ),
        ({"prompt": [USER, GOOD], "chosen": "g", "rejected": "b"}, "the prompt in 'prompt' ends with an answer"),
        ({"chosen": "g", "rejected": "b"}, "'chosen' is a string and there is no prompt: add the field \"prompt\""),
        ({"chosen": "So:\n\nHuman: q\n\nAssistant: g", "rejected": "b"}, "'chosen' is a string and there is no prompt"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "'chosen' is an answer without a prompt: add the field \"prompt\""),
        ({"chosen": [USER, GOOD], "rejected": [SYSTEM, BAD]}, "'chosen' and 'rejected' differ from message 1 on"),
        (
            {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, BAD, USER, BAD]},
            "differ from message 2 on: only their",
        ),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}, "differ from message 3 on"),
        ({"prompt": "other", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "do not begin with those of 'prompt'"),
        (
            {"prompt": [USER], "chosen": [SYSTEM, GOOD], "rejected": "b"},
            "'chosen' has 2 messages that do not begin with",
        ),
        ({"prompt": [USER, SYSTEM, USER], "chosen": "g", "rejected": "b"}, "message 2 is a system message"),
        (
            {"system": "s", "prompt": [SYSTEM, USER], "chosen": "g", "rejected": "b"},
            "a 'system' field and a system message",
        ),
    ],
)
def test_pairs_that_are_refused(fields: dict[str, Any], words: str) -> None:
    assert words in error_of(fields)


# --- labels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, GOOD]},
        {"conversations": [HUMAN, GPT_GOOD]},
        {"prompt": "q", "completion": "g"},
        {"question": "q", "answer": "g"},
        {"instruction": "q", "output": "g"},
    ],
)
@pytest.mark.parametrize("key", ["label", "kto_tag"])
def test_every_row_with_a_label(row: dict[str, Any], key: str) -> None:
    assert read({**row, key: True}) == Conversation("f.jsonl:7", (USER, GOOD), (1,), label=True)
    assert read({**row, key: False}).label is False


@pytest.mark.parametrize(
    ("value", "label"),
    [(1, True), (0, False), (1.0, True), ("true", True), ("False", False), (" TRUE ", True), ("1", True), ("0", False)],
)
def test_labels(value: Any, label: bool) -> None:
    assert read({"prompt": "q", "completion": "g", "label": value}, has_template=False) == Passage(
        "f.jsonl:7", "q", "g", label=label
    )


def test_only_the_last_answer_is_judged() -> None:
    turns = [USER, BAD, USER, {**GOOD, "weight": 0}, USER]
    for train_on in ("assistant", "last", "all"):
        content = read({"messages": turns, "label": True}, train_on=train_on)
        assert (content.learned, content.whole) == ((3,), False)


def test_an_empty_last_answer_is_not_replaced_by_an_earlier_one() -> None:
    turns = [USER, GOOD, USER, {"role": "assistant", "content": "", "weight": 0}]
    assert "nothing to learn in message 4: the answer is empty" in error_of({"messages": turns, "label": True})


@pytest.mark.parametrize("value", [2, 0.5, "good", "", None, [True]])
def test_a_label_that_is_none(value: Any) -> None:
    reader = RowReader(SourceConfig(path="f"), "unpaired", train_on="assistant", has_template=True)
    with pytest.raises(DataError) as caught:
        reader.read(Row("f.jsonl:7", {"messages": [USER, GOOD], "label": value}))
    assert str(caught.value).startswith(
        f"f.jsonl:7: 'label' is {value!r}: it must be true or false; if it does not rate the answer"
    )
