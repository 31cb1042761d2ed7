"""Traces: every piece of text belongs to the message whose turn of the loop wrote it."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.data.chat_template import Tracer

MESSAGES = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}, {"role": "user", "content": "R"}]


def pieces(source: str, messages: list[Any] = MESSAGES, **variables: Any) -> list[tuple[int | None, str]]:
    trace = Tracer(source).run(messages, variables)
    assert "".join(trace.text[p.start : p.end] for p in trace.pieces) == trace.text
    return [(piece.owner, trace.text[piece.start : piece.end]) for piece in trace.pieces]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "[{% for m in messages %}{{ m.content }}{% endfor %}]",
            [(None, "["), (0, "Q"), (1, "A"), (2, "R"), (None, "]")],
        ),
        ("{% for m in messages[1:] %}{{ m.content }}{% endfor %}", [(1, "A"), (2, "R")]),
        ("{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}.", [(1, "A"), (None, ".")]),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}.",
            [(1, "assistant"), (None, ".")],
        ),
        ("{% for i, m in [(7, messages[1])] %}{{ i }}{{ m.content }}{% endfor %}", [(1, "7A")]),
        ("{% for i in range(2) %}{{ messages[i].content }}{% endfor %}", [(None, "QA")]),
        # A loop inside a turn: its text is the turn's, unless it goes over messages too.
        ("{% for m in messages[:2] %}{% for c in 'xy' %}{{ c }}{% endfor %}.{% endfor %}", [(0, "xy."), (1, "xy.")]),
        (
            "{% for m in messages[:2] %}{% for n in messages[2:] %}{{ n.content }}{% endfor %}.{% endfor %}",
            [(2, "R"), (0, "."), (2, "R"), (1, ".")],
        ),
        (
            "{% macro say(m) %}<{{ m.content }}>{% endmacro %}{% for m in messages[:2] %}{{ say(m) }}{% endfor %}",
            [(0, "<Q>"), (1, "<A>")],
        ),
    ],
)
def test_pieces(source: str, expected: list[tuple[int | None, str]]) -> None:
    assert pieces(source) == expected


def test_a_message_has_one_segment_or_none() -> None:
    once = "{% for m in messages %}{{ m.content }}{% endfor %}"
    trace = Tracer("{% for m in messages[::-1] %} {% endfor %}" + once).run(MESSAGES, {})
    assert [trace.text[s.start : s.end] for s in map(trace.segment, range(3)) if s] == ["Q", "A", "R"]
    assert Tracer(once + once).run(MESSAGES, {}).segment(1) is None


def test_a_turn_goes_on_after_a_loop_inside_it() -> None:
    ahead = "{% for n in messages[loop.index:] %}{% endfor %}"
    source = "{% for m in messages[:2] %}{{ m.role }}" + ahead + "{{ m.content }}{% endfor %}"
    assert pieces(source) == [(0, "userQ"), (1, "assistantA")]


def test_tags() -> None:
    tracer = Tracer("{% for m in messages %}<{% generation %}{{ m.content }}{% endgeneration %}>{% endfor %}")
    trace = tracer.run(MESSAGES, {})
    assert tracer.has_tags
    assert [trace.text[a:b] for a, b in trace.tagged] == ["Q", "A", "R"]
    assert not Tracer("{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}x{% endcall %}").has_tags


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_every_name(name: str) -> None:
    source = "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}"
    assert pieces(source, [{"role": "assistant", "content": "", name: "why"}]) == [(0, "whywhy")]


def test_a_template_sees_messages_as_they_are() -> None:
    source = "{% for m in messages %}{{ m | tojson }}{{ m is mapping }}{{ m == messages[loop.index0] }}{% endfor %}"
    assert pieces(source, [{"role": "user", "content": "é<"}]) == [(0, '{"role": "user", "content": "é<"}TrueTrue')]
