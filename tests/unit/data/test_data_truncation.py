"""Rows that are too long: what each policy keeps, and that it is counted."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from data_rows import chat, read
from data_tokenizers import CHATML, LLAMA3, build_tokenizer

from lockstep.data.chat_template import load_template
from lockstep.data.encoder import Encoded, Encoder, fit
from lockstep.data.formats.conversation import Pair, Passage
from lockstep.data.rendering import render
from lockstep.data.sources.rows import DataError

BOS = 7


def encode(tokenizer: Any, content: Any, *, max_length: int, truncate: str = "prompt_left") -> Encoded:
    rendered = render(content, load_template(tokenizer, "auto", {}))
    (encoded,) = Encoder(tokenizer, max_length=max_length, truncate=truncate).encode([rendered])
    if isinstance(encoded, DataError):
        raise encoded
    return encoded


def random_content(rng: random.Random) -> Any:
    def text(low: int, high: int) -> str:
        return " ".join(rng.choice(["one", "two", "forty", "日本", "x"]) for _ in range(rng.randint(low, high)))

    kind = rng.randrange(3)
    if kind == 0:
        return read(chat(*(text(1, 12) for _ in range(2 * rng.randint(1, 3)))))
    if kind == 1:
        return read({"prompt": text(1, 30), "completion": text(1, 30)})
    return read({"text": text(2, 40)})


@pytest.mark.parametrize("source", [CHATML, LLAMA3])
def test_prompt_left_keeps_its_rules(source: str) -> None:
    rng = random.Random(0)
    tokenizer = build_tokenizer(source, adds_bos=True)
    for _ in range(60):
        content, max_length = random_content(rng), rng.randint(2, 60)
        whole, cut = encode(tokenizer, content, max_length=1000), encode(tokenizer, content, max_length=max_length)
        assert whole.datum is not None
        assert cut.datum is not None
        prompt, answer = list(whole.datum.prompt), list(whole.datum.completions[0].tokens)
        weights = list(whole.datum.completions[0].weights)
        cut_prompt, cut_answer = list(cut.datum.prompt), list(cut.datum.completions[0].tokens)
        assert cut.num_uncut == whole.num_uncut == len(prompt) + len(answer)
        assert (cut.prompt_cut, cut.answer_cut) == (len(cut_prompt) < len(prompt), len(cut_answer) < len(answer))
        assert cut_answer == answer[: len(cut_answer)]
        assert list(cut.datum.completions[0].weights) == weights[: len(cut_answer)]
        assert cut.datum.completions[0].weights[-1] == 1.0
        assert cut.answer_cut == (len(answer) > max_length - 1)
        assert not any(weights[len(cut_answer) : max_length - 1])
        assert len(cut_prompt) == min(max_length - len(cut_answer), len(prompt))
        if prompt[0] == tokenizer.bos_token_id:
            assert cut_prompt[0] == prompt[0]
            assert cut_prompt[1:] == prompt[len(prompt) - len(cut_prompt) + 1 :]
        else:
            assert cut_prompt == prompt[len(prompt) - len(cut_prompt) :]


def answer(*ids: int, weights: tuple[int, ...] | None = None) -> tuple[Any, Any]:
    return np.array(ids), np.array(weights or [1] * len(ids))


def fit_lists(prompt: list[int], *answers: tuple[Any, Any], max_length: int, policy: str) -> list[list[int]]:
    fitted = fit(np.array(prompt), answers, max_length=max_length, policy=policy, bos=BOS)
    return [fitted.prompt.tolist(), *(ids.tolist() for ids, _ in fitted.answers)]


def test_a_pair_is_cut_for_its_longest_answer() -> None:
    pair = (answer(21, 22), answer(31, 32, 33))
    assert fit_lists([BOS, 1, 2, 3], *pair, max_length=5, policy="prompt_left") == [[BOS, 3], [21, 22], [31, 32, 33]]
    assert fit_lists([BOS, 1, 2, 3], *pair, max_length=3, policy="prompt_left") == [[BOS], [21, 22], [31, 32]]
    assert fit_lists([BOS, 1], *pair, max_length=4, policy="right") == [[BOS, 1], [21, 22], [31, 32]]
    assert fit_lists([BOS, 1], *pair, max_length=2, policy="right") == [[BOS, 1]]
    assert fit_lists([BOS, 1], *pair, max_length=4, policy="drop") == [[BOS, 1]]


def test_one_answer_of_a_pair_that_loses_its_end_is_counted() -> None:
    pair = (answer(21, 22), answer(31, 32, 33))
    for policy in ("prompt_left", "right"):
        fitted = fit(np.array([1]), pair, max_length=3, policy=policy, bos=BOS)
        assert (fitted.prompt_cut, fitted.answer_cut) == (False, True)


def test_a_pair_of_which_one_answer_would_be_lost_is_dropped() -> None:
    pair = (answer(21, 22), answer(31, 32, 33, weights=(0, 0, 1)))
    assert fit_lists([1, 2], *pair, max_length=4, policy="right") == [[1, 2]]


def test_a_bos_in_front_of_every_message_is_not_doubled() -> None:
    long = answer(21, 22)
    assert fit_lists([BOS, 1, BOS, 2, 3], long, max_length=6, policy="prompt_left") == [[BOS, 2, 3], [21, 22]]
    assert fit_lists([BOS, 1, BOS, 2, 3], long, max_length=5, policy="prompt_left") == [[BOS, 2, 3], [21, 22]]
    assert fit_lists([BOS, 1, BOS, 2, 3], long, max_length=4, policy="prompt_left") == [[BOS, 3], [21, 22]]


@pytest.mark.parametrize("policy", ["right", "drop"])
def test_a_row_without_room_for_an_answer_is_dropped(policy: str) -> None:
    tokenizer = build_tokenizer(CHATML)
    encoded = encode(tokenizer, read(chat("one two three four five", "a")), max_length=5, truncate=policy)
    assert encoded.datum is None
    assert encoded.answer_cut == (policy == "right")
    assert encoded.num_uncut > 5


def test_error_says_how_long_the_row_is() -> None:
    tokenizer = build_tokenizer()
    content = read({"prompt": "one two", "completion": " three four"})
    num_tokens = encode(tokenizer, content, max_length=1000).num_uncut
    with pytest.raises(
        DataError, match=rf"^f\.jsonl:7: {num_tokens} tokens, data\.max_length is {num_tokens - 1}: raise"
    ):
        encode(tokenizer, content, max_length=num_tokens - 1, truncate="error")
    assert encode(tokenizer, content, max_length=num_tokens, truncate="error").datum is not None


def test_a_pair_is_as_long_as_its_longer_answer() -> None:
    tokenizer = build_tokenizer()
    pair = Pair("f.jsonl:7", Passage("f.jsonl:7", "one two", " x"), Passage("f.jsonl:7", "one two", " three four five"))
    whole = encode(tokenizer, pair, max_length=1000)
    assert encode(tokenizer, pair, max_length=whole.num_uncut, truncate="drop").datum is not None
    assert encode(tokenizer, pair, max_length=whole.num_uncut - 1, truncate="drop").datum is None
