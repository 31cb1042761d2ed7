"""Where an answer ends, and its text in pieces: the pieces are the text, whatever the tokens cut through."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import build_tokenizer

from lockstep.inference.sequence import TokenSequence
from lockstep.types import SamplingParams, TextCompletion

TOKENIZER = build_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def grow(tokens: list[int], max_tokens: int = 1000, **options: Any) -> tuple[TextCompletion, list[str]]:
    """The answer after as many of the tokens as it takes, and the pieces of its text."""
    pieces: list[str] = []
    params = SamplingParams(logprobs=True, **options)
    ends = frozenset({END})
    sequence = TokenSequence([1], TOKENIZER, params, ends, max_tokens, on_text=pieces.append, version=3)
    for number, token in enumerate(tokens):
        if sequence.finished:
            break
        sequence.append(token, -float(number))
    return sequence.completion(), pieces


def test_the_token_that_ends_a_turn_is_kept_and_its_text_is_not() -> None:
    answer, _ = grow([*encode("hi"), END, *encode("more")])
    assert (answer.tokens, answer.text, answer.finish_reason) == ((*encode("hi"), END), "hi", "stop")
    assert answer.logprobs == (0.0, -1.0, -2.0)
    assert answer.version == 3


def test_an_answer_that_ends_with_its_last_token_was_not_cut() -> None:
    assert grow([*encode("hi"), END], max_tokens=3)[0].finish_reason == "stop"
    assert grow([*encode("hi!"), END], max_tokens=3)[0].finish_reason == "length"
    assert grow(encode("a;"), max_tokens=2, stop=(";",))[0].finish_reason == "stop"


def test_a_stop_text_over_several_tokens_ends_where_it_is_complete() -> None:
    answer, pieces = grow(encode("one END, two END"), stop=("never", "END", "D, t"))
    assert (answer.text, answer.finish_reason) == ("one ", "stop")
    assert answer.tokens == tuple(encode("one END"))
    assert len(answer.logprobs or ()) == len(answer.tokens)
    assert "".join(pieces) == "one "


def test_what_only_looks_like_a_stop_text_is_shown_in_the_end() -> None:
    answer, pieces = grow([*encode("the EN"), END], stop=("END",))
    assert answer.text == "the EN" == "".join(pieces)
    assert len(pieces) > 2


def test_a_character_of_several_bytes_comes_whole() -> None:
    _, pieces = grow([*encode("aé🙂b"), END])
    assert pieces == ["a", "é", "🙂", "b"]


def test_bytes_that_are_no_character_come_in_the_end() -> None:
    answer, pieces = grow([*encode("a🙂")[:-1], END])
    assert answer.text == "".join(pieces) == "a\ufffd"


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=2), st.integers(1, 60))
def test_pieces_are_the_text_and_the_text_has_no_stop(text: str, stops: list[str], max_tokens: int) -> None:
    answer, pieces = grow([*encode(text), END], max_tokens=max_tokens, stop=tuple(stops))
    assert "".join(pieces) == answer.text
    assert not any(stop in answer.text for stop in stops)
    if not stops and answer.finish_reason == "stop":
        assert answer.text == TOKENIZER.decode(encode(text), skip_special_tokens=True)
    whole = TOKENIZER.decode(answer.tokens, skip_special_tokens=True)
    assert whole.startswith(answer.text)
    without_last = TOKENIZER.decode(answer.tokens[:-1], skip_special_tokens=True)
    assert not any(stop in without_last.rstrip("\ufffd") for stop in stops), "it went on after a stop text"


def test_an_answer_takes_nothing_after_its_end() -> None:
    sequence = TokenSequence([1], TOKENIZER, SamplingParams(), frozenset({END}), 5)
    sequence.append(END, 0.0)
    with pytest.raises(AssertionError, match="a finished sequence"):
        sequence.append(END, 0.0)
