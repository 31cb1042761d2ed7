"""Random conversations: masks and cuts against an oracle that writes the text itself, character by character."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import numpy as np
import pytest
from data_tokenizers import TEMPLATE_SPECIAL, build_character_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.chat_template import load_template
from lockstep.data.encoder import Encoder
from lockstep.data.formats.conversation import Conversation
from lockstep.data.rendering import render
from lockstep.data.sources.rows import DataError

Written = list[tuple[str, bool]]  # text, and whether it is learned
SPECIAL = re.compile("|".join(map(re.escape, sorted(TEMPLATE_SPECIAL, key=len, reverse=True))))
quick = settings(max_examples=150, derandomize=True, deadline=None, database=None)

PLAIN = ["one", "Zwei", "日本", "🎉", "é", " ", "  ", "\n", "\n\n", "\t", "user", "\u00a0", "\u200b", "a\u0301"]
ODD = ["<", "|>", "<think>", "</think>", "assistant\n", "{{ x }}", "<|im_end|>", "<|im_start|>", "<|eot_id|>", "</s>"]
words = st.sampled_from(PLAIN + ODD)
texts = st.lists(words, min_size=1, max_size=6).map("".join)
# A question that looks like the result of a tool moves where Qwen3 writes thoughts, which is not the point here.
questions = texts.map(lambda text: {"role": "user", "content": "Q" + text})
answers = texts.map(lambda text: {"role": "assistant", "content": text})
thoughts = st.builds(lambda message, thought: {**message, "reasoning_content": thought}, answers, texts)
calls = st.builds(
    lambda message, argument: {
        **message,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": argument}}}],
    },
    answers,
    texts,
)
results = st.lists(texts.map(lambda text: {"role": "tool", "content": text}), min_size=1, max_size=2)
exchanges = st.tuples(questions, answers).map(list)
thinking = st.tuples(questions, thoughts).map(list)
tool_use = st.builds(lambda q, call, found, answer: [q, call, *found, answer], questions, calls, results, answers)


def conversations(*kinds: Any) -> st.SearchStrategy[list[Any]]:
    systems = st.lists(texts.map(lambda text: {"role": "system", "content": text}), max_size=1)
    parts = st.lists(st.one_of(*kinds), min_size=1, max_size=3)
    return st.builds(lambda system, found: system + [m for part in found for m in part], systems, parts)


# --- the oracle ----------------------------------------------------------------------------------------------------


def write_chatml(messages: list[Any]) -> Written:
    written: Written = []
    for message in messages:
        is_answer = message["role"] == "assistant"
        written += [
            (f"<|im_start|>{message['role']}\n", False),
            (message["content"] + "<|im_end|>", is_answer),
            ("\n", False),
        ]
    return written


def write_llama(messages: list[Any]) -> Written:
    system = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
    head = "<s><|start_header_id|>system<|end_header_id|>\n\nToday: 01 Jan 2025\n\n"
    written: Written = [(head + system + "<|eot_id|>", False)]
    for message in messages:
        if message["role"] != "system":
            written.append((f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False))
            written.append((message["content"].strip() + "<|eot_id|>", message["role"] == "assistant"))
    return written


def write_qwen3(messages: list[Any]) -> Written:
    last_question = max(i for i, message in enumerate(messages) if message["role"] == "user")
    written: Written = []
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "assistant":
            written += [
                ("<|im_start|>assistant\n", False),
                (_qwen3_answer(messages, i, last_question), True),
                ("\n", False),
            ]
        elif role == "tool":
            opening = "" if messages[i - 1]["role"] == "tool" else "<|im_start|>user"
            closing = "" if i + 1 < len(messages) and messages[i + 1]["role"] == "tool" else "<|im_end|>\n"
            written.append((f"{opening}\n<tool_response>\n{content}\n</tool_response>{closing}", False))
        else:
            written.append((f"<|im_start|>{role}\n{content}<|im_end|>\n", False))
    return written


def _qwen3_answer(messages: list[Any], i: int, last_question: int) -> str:
    content, thought = messages[i]["content"], messages[i].get("reasoning_content", "")
    if "reasoning_content" not in messages[i] and "</think>" in content:
        thought = content.partition("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
        content = content.rpartition("</think>")[2].lstrip("\n")
    if i > last_question and (i == len(messages) - 1 or thought):
        answer = "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + content.lstrip("\n")
    else:
        answer = content
    for call in messages[i].get("tool_calls", ()):
        function = json.dumps(call["function"], ensure_ascii=False)
        answer += ("\n" if content else "") + f"<tool_call>\n{function}\n</tool_call>"
    return answer + "<|im_end|>"


def tokens_of(written: Written) -> list[tuple[str, bool]]:
    """Special tokens and bytes, each with the flag of the text it is in."""
    flags = [is_learned for text, is_learned in written for _ in text]
    text = "".join(text for text, _ in written)
    tokens: list[tuple[str, bool]] = []
    position = 0
    for match in [*SPECIAL.finditer(text), None]:
        end = match.start() if match else len(text)
        for i in range(position, end):
            tokens += [(f"{byte:02x}", flags[i]) for byte in text[i].encode()]
        if match:
            tokens.append((match[0], flags[match.start()]))
            position = match.end()
    return tokens


def has_empty_answer(written: Written) -> bool:
    return any(is_learned and not SPECIAL.sub("", text).strip() for text, is_learned in written)


def cut(tokens: list[Any], max_length: int, policy: str) -> list[Any] | None:
    """What the four policies leave of a row; None where it is left out."""
    learned = [i for i, (_, is_learned) in enumerate(tokens) if is_learned]
    tokens, first = tokens[: learned[-1] + 1], learned[0]
    if len(tokens) <= max_length:
        return tokens
    if policy == "drop":
        return None
    kept = tokens[:max_length] if policy == "right" else tokens[: first + max_length - 1]
    while kept and not kept[-1][1]:
        kept = kept[:-1]
    if policy == "right":
        return kept or None
    room = max_length - (len(kept) - first)
    if first <= room:
        return kept
    if kept[0][0] == "<s>":
        return kept[:1] + kept[first - room + 1 :]
    return kept[first - room :]


# --- what is compared ----------------------------------------------------------------------------------------------


@functools.cache
def tools_of(template: str) -> tuple[Any, Any]:
    tokenizer = build_character_tokenizer(template)
    return tokenizer, load_template(tokenizer, "auto", {})


def read_tokens(tokenizer: Any, datum: Any) -> list[tuple[str, bool]]:
    (completion,) = datum.completions
    ids = [*map(int, datum.prompt), *map(int, completion.tokens)]
    flags = [*np.zeros(len(datum.prompt), dtype=bool), *(np.asarray(completion.weights) == 1)]
    characters = {c: f"{byte:02x}" for byte, c in _byte_characters().items()}
    names = [characters.get(token, token) for token in tokenizer.convert_ids_to_tokens(ids)]
    return list(zip(names, map(bool, flags)))


@functools.cache
def _byte_characters() -> dict[int, str]:
    """How byte-level tokenizers write each byte: printable ones as they are, the others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def check(template: str, messages: list[Any], written: Written, max_length: int, policy: str) -> None:
    tokenizer, used = tools_of(template)
    learned = tuple(i for i, message in enumerate(messages) if message["role"] == "assistant")
    rendered = render(Conversation("f:1", tuple(messages), learned), used)
    assert rendered.variants[0].text == "".join(text for text, _ in written)
    (encoded,) = Encoder(tokenizer, max_length=max_length, truncate=policy).encode([rendered])
    if has_empty_answer(written):
        assert isinstance(encoded, DataError)
        return
    whole = tokens_of(written)
    num_uncut = max(i for i, (_, is_learned) in enumerate(whole) if is_learned) + 1
    if policy == "error" and num_uncut > max_length:
        assert isinstance(encoded, DataError)
        assert f"{num_uncut} tokens, data.max_length is {max_length}" in str(encoded)
        return
    assert not isinstance(encoded, DataError), encoded
    assert encoded.num_uncut == num_uncut
    expected = cut(whole, max_length, policy)
    if expected is None:
        assert encoded.datum is None
        return
    assert encoded.datum is not None
    assert read_tokens(tokenizer, encoded.datum) == expected
    num_learned = sum(is_learned for _, is_learned in whole)
    assert encoded.answer_cut or encoded.datum.num_supervised == num_learned, "an answer is whole or counted as cut"
    assert len(expected) == num_uncut or encoded.prompt_cut or encoded.answer_cut
    assert encoded.holds_special == any(SPECIAL.search(text) for m in messages for text in _strings(m))


def _strings(message: dict[str, Any]) -> list[str]:
    found = [message["content"], message.get("reasoning_content", "")]
    return found + [call["function"]["arguments"]["a"] for call in message.get("tool_calls", ())]


lengths = st.one_of(st.just(10_000), st.integers(2, 150))
policies = st.sampled_from(["prompt_left", "right", "drop", "error"])


@quick
@given(conversations(exchanges), lengths, policies)
def test_chatml(messages: list[Any], max_length: int, policy: str) -> None:
    check("chatml", messages, write_chatml(messages), max_length, policy)


@quick
@given(conversations(exchanges), lengths, policies)
def test_llama(messages: list[Any], max_length: int, policy: str) -> None:
    check("llama31", messages, write_llama(messages), max_length, policy)


@quick
@given(conversations(exchanges, thinking, tool_use), lengths, policies)
def test_qwen3(messages: list[Any], max_length: int, policy: str) -> None:
    check("qwen3", messages, write_qwen3(messages), max_length, policy)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("prompt_left", ["<s>abCDeFG", "<s>bCDeFG", "<s>CDeFG", "<s>CDeF", "<s>CD"]),
        ("right", ["<s>abCDeFG", "<s>abCDeF", "<s>abCD", "<s>abCD", None]),
        ("drop", ["<s>abCDeFG", None, None, None, None]),
    ],
)
def test_the_oracle_cuts_as_people_expect(policy: str, expected: list[str | None]) -> None:
    """Three prompt tokens, two answers of two, one token of context between them."""
    row = [("<s>", False), ("a", False), ("b", False), ("C", True), ("D", True), ("e", False), ("F", True), ("G", True)]
    for max_length, text in zip((8, 7, 6, 5, 3), expected):
        found = cut(row, max_length, policy)
        assert (None if found is None else "".join(token for token, _ in found)) == text
