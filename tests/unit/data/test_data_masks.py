"""Golden masks: what is learned of public chat templates, token by token, written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from data_tokenizers import TEMPLATES, build_word_tokenizer

from lockstep.data.chat_template import load_template
from lockstep.data.encoder import Encoded, Encoder
from lockstep.data.formats.conversation import Conversation
from lockstep.data.rendering import render
from lockstep.data.sources.rows import DataError

Mask = list[tuple[str, bool]]
SYSTEM = {"role": "system", "content": "Brief."}
HI, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
WHY, BECAUSE = {"role": "user", "content": "Why"}, {"role": "assistant", "content": "Because"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
RESULT = {"role": "tool", "content": "4"}
TOOLS = [{"type": "function", "function": {"n": 1}}]
THOUGHT = {**BECAUSE, "reasoning_content": "why because"}


def skip(tokens: str) -> Mask:
    r"""Tokens that are not learned, between blanks: \n is a line break and _ a space."""
    return [({r"\n": "\n", "_": " "}.get(token, token), False) for token in tokens.split()]


def learn(tokens: str) -> Mask:
    return [(token, True) for token, _ in skip(tokens)]


def encode(template: str, messages: list[Any], *, tools: Any = None, **options: Any) -> tuple[Mask, Encoded]:
    """The mask of a conversation of which every answer is learned."""
    learned = tuple(i for i, message in enumerate(messages) if message["role"] == "assistant")
    tokenizer = build_word_tokenizer(template)
    conversation = Conversation("f.jsonl:7", tuple(messages), learned, tools)
    rendered = render(conversation, load_template(tokenizer, "auto", options))
    (encoded,) = Encoder(tokenizer, max_length=1000, truncate="error").encode([rendered])
    if isinstance(encoded, DataError):
        raise encoded
    assert encoded.datum is not None
    (completion,) = encoded.datum.completions
    ids = [*encoded.datum.prompt, *completion.tokens]
    weights = [*np.zeros(len(encoded.datum.prompt)), *completion.weights]
    tokens = tokenizer.convert_ids_to_tokens([int(i) for i in ids])
    assert "?" not in tokens, f"a word of the template is not in the vocabulary: {tokens}"
    assert rendered.variants[0].text.startswith("".join(tokens))
    return list(zip(tokens, [weight == 1 for weight in weights])), encoded


def answers(mask: Mask) -> str:
    """The learned tokens as text, other tokens as a bar."""
    text = "".join(token if is_learned else "\0" for token, is_learned in mask)
    return "|".join(part for part in text.split("\0") if part)


IM = r"<|im_start|>"
CHATML_HI = skip(rf"{IM} user \n Hi <|im_end|> \n {IM} assistant \n")
HEADER = "<|start_header_id|> {} <|end_header_id|> " + r"\n \n"
DATE = skip("<s> " + HEADER.format("system") + r" Today: _ 01 _ Jan _ 2025 \n \n")
LLAMA_ASSISTANT = skip(HEADER.format("assistant"))

CASES: dict[str, tuple[str, list[Any], Any, Mask]] = {
    "chatml single": ("chatml", [HI, HELLO], None, CHATML_HI + learn("Hello <|im_end|>")),
    "chatml multi": (
        "chatml",
        [HI, HELLO, WHY, BECAUSE],
        None,
        CHATML_HI
        + learn("Hello <|im_end|>")
        + skip(rf"\n {IM} user \n Why <|im_end|> \n {IM} assistant \n")
        + learn("Because <|im_end|>"),
    ),
    "chatml system": (
        "chatml",
        [SYSTEM, HI, HELLO],
        None,
        skip(rf"{IM} system \n Brief. <|im_end|> \n") + CHATML_HI + learn("Hello <|im_end|>"),
    ),
    "llama single": (
        "llama31",
        [HI, HELLO],
        None,
        DATE
        + skip("<|eot_id|> " + HEADER.format("user") + " Hi <|eot_id|>")
        + LLAMA_ASSISTANT
        + learn("Hello <|eot_id|>"),
    ),
    "llama system multi": (
        "llama31",
        [SYSTEM, HI, HELLO, WHY, BECAUSE],
        None,
        DATE
        + skip("Brief. <|eot_id|> " + HEADER.format("user") + " Hi <|eot_id|>")
        + LLAMA_ASSISTANT
        + learn("Hello <|eot_id|>")
        + skip(HEADER.format("user") + " Why <|eot_id|>")
        + LLAMA_ASSISTANT
        + learn("Because <|eot_id|>"),
    ),
    "llama tool": (
        "llama31",
        [HI, CALL, RESULT, HELLO],
        TOOLS,
        skip("<s> " + HEADER.format("system") + r" Environment: _ ipython \n Today: _ 01 _ Jan _ 2025 \n \n <|eot_id|>")
        + skip(HEADER.format("user") + r' {"type": _ "function", _ "function": _ {"n": _ 1}} \n \n Hi <|eot_id|>')
        + LLAMA_ASSISTANT
        + learn('{"name": _ "add", _ "parameters": _ {"a": _ 1}} <|eot_id|>')
        + skip(HEADER.format("ipython") + " 4 <|eot_id|>")
        + LLAMA_ASSISTANT
        + learn("Hello <|eot_id|>"),
    ),
    "qwen3 single": (
        "qwen3",
        [HI, HELLO],
        None,
        CHATML_HI + learn(r"<think> \n \n </think> \n \n Hello <|im_end|>"),
    ),
    "qwen3 system multi with thoughts": (
        "qwen3",
        [SYSTEM, HI, {**HELLO, "reasoning_content": "why"}, WHY, THOUGHT],
        None,
        skip(rf"{IM} system \n Brief. <|im_end|> \n")
        + CHATML_HI
        + learn("Hello <|im_end|>")
        + skip(rf"\n {IM} user \n Why <|im_end|> \n {IM} assistant \n")
        + learn(r"<think> \n why _ because \n </think> \n \n Because <|im_end|>"),
    ),
    "qwen3 tool": (
        "qwen3",
        [HI, {**CALL, "content": "Sum"}, RESULT, RESULT, THOUGHT],
        TOOLS,
        skip(rf'{IM} system \n # _ Tools \n <tools> \n {{"type": _ "function", _ "function": _ {{"n": _ 1}}}} \n')
        + skip(r"</tools> <|im_end|> \n")
        + CHATML_HI
        + learn(r'Sum \n <tool_call> \n {"name": _ "add", _ "arguments": _ {"a": _ 1}} \n </tool_call> <|im_end|>')
        + skip(rf"\n {IM} user \n <tool_response> \n 4 \n </tool_response> \n <tool_response> \n 4 \n")
        + skip(rf"</tool_response> <|im_end|> \n {IM} assistant \n")
        + learn(r"<think> \n why _ because \n </think> \n \n Because <|im_end|>"),
    ),
    "mistral single": ("mistral", [HI, HELLO], None, skip("<s> [INST] _ Hi [/INST]") + learn("_ Hello </s>")),
    "mistral system multi": (
        "mistral",
        [SYSTEM, HI, HELLO, WHY, BECAUSE],
        None,
        skip("<s> [INST] _ Hi [/INST]")
        + learn("_ Hello </s>")
        + skip("[INST] _ Why [/INST]")
        + learn("_ Because </s>"),
    ),
    "mistral tool": (
        "mistral",
        [HI, CALL, RESULT, HELLO],
        None,
        skip("<s> [INST] _ Hi [/INST]")
        + learn('[TOOL_CALLS] _ [{"name": _ "add", _ "arguments": _ {"a": _ 1}}] </s>')
        + skip('[TOOL_RESULTS] _ {"content": _ "4"} [/TOOL_RESULTS]')
        + learn("_ Hello </s>"),
    ),
    "gemma multi": (
        "gemma",
        [HI, HELLO, WHY, BECAUSE],
        None,
        skip(r"<s> <start_of_turn> user \n Hi <end_of_turn> \n <start_of_turn> model \n")
        + learn("Hello <end_of_turn>")
        + skip(r"\n <start_of_turn> user \n Why <end_of_turn> \n <start_of_turn> model \n")
        + learn("Because <end_of_turn>"),
    ),
    "phi3 multi": (
        "phi3",
        [SYSTEM, HI, HELLO, WHY, BECAUSE],
        None,
        skip(r"<|system|> \n Brief. <|end|> \n <|user|> \n Hi <|end|> \n <|assistant|> \n")
        + learn("Hello <|end|>")
        + skip(r"\n <|user|> \n Why <|end|> \n <|assistant|> \n")
        + learn("Because <|end|>"),
    ),
    "zephyr multi": (
        "zephyr",
        [SYSTEM, HI, HELLO, WHY, BECAUSE],
        None,
        skip(r"<|system|> \n Brief. </s> \n <|user|> \n Hi </s> \n <|assistant|> \n")
        + learn("Hello </s>")
        + skip(r"\n <|user|> \n Why </s> \n <|assistant|> \n")
        + learn("Because </s>"),
    ),
    "hermes tool": (
        "hermes",
        [HI, CALL, RESULT, HELLO],
        TOOLS,
        skip(rf'<s> {IM} system \n You _ call _ functions. _ <tools> _ {{"n": _ 1}} _ </tools> <|im_end|> \n')
        + CHATML_HI
        + learn(r'<tool_call> \n {"name": _ "add", _ "arguments": _ {"a": _ 1}} \n </tool_call> <|im_end|>')
        + skip(rf"\n {IM} tool \n <tool_response> \n 4 \n </tool_response> \n <|im_end|> \n {IM} assistant \n")
        + learn("Hello <|im_end|>"),
    ),
    "tagged multi": (
        "tagged",
        [HI, THOUGHT, RESULT, HELLO],
        None,
        CHATML_HI
        + learn("<think>why _ because</think>")
        + skip(r"\n")
        + learn("Because <|im_end|>")
        + skip(rf"\n {IM} tool \n 4 <|im_end|> \n {IM} assistant \n \n")
        + learn("Hello <|im_end|>"),
    ),
}


@pytest.mark.parametrize(("template", "messages", "tools", "expected"), CASES.values(), ids=CASES)
def test_golden_mask(template: str, messages: list[Any], tools: Any, expected: Mask) -> None:
    mask, encoded = encode(template, messages, tools=tools)
    assert mask == expected
    assert encoded.num_unclosed == 0
    assert encoded.num_unprompted == 0
    assert not encoded.retokenised


def test_deepseek_answers_without_a_thought_are_counted() -> None:
    """Generation would start with <think>, which the template takes out of every answer."""
    mask, encoded = encode("deepseek", [SYSTEM, HI, {"role": "assistant", "content": "<think> why </think>Because"}])
    assert mask == skip("<s> Brief. <|User|> Hi <|Assistant|>") + learn("Because </s>")
    assert encoded.num_unprompted == 1


def test_qwen3_without_thinking() -> None:
    """Generation would start with an empty thought, which the template writes in the last answer only."""
    mask, encoded = encode("qwen3", [HI, HELLO, WHY, BECAUSE], enable_thinking=False)
    assert answers(mask) == "Hello<|im_end|>|Because<|im_end|>"
    assert mask[-8:] == skip(r"<think> \n \n </think> \n \n") + learn("Because <|im_end|>")
    assert encoded.num_unprompted == 1
    with pytest.raises(DataError, match=r"^f\.jsonl:7: message 2: .* where generation would start with .*not certain"):
        encode("qwen3", [HI, THOUGHT], enable_thinking=False)


def test_a_date_is_the_same_every_day() -> None:
    assert "01 Jan 2025" in "".join(token for token, _ in encode("llama31", [HI, HELLO])[0])
    mask, _ = encode("llama31", [HI, HELLO], date_string="Bye")
    assert mask[:10] == skip("<s> " + HEADER.format("system") + r" Today: _ Bye \n")


def test_the_tail_closes_a_turn_that_nothing_else_closes() -> None:
    source = TEMPLATES["phi3"].replace("<|end|>", "")
    TEMPLATES["tail"] = source
    try:
        mask, encoded = encode("tail", [HI, HELLO, WHY, BECAUSE])
    finally:
        del TEMPLATES["tail"]
    assert answers(mask) == "Hello\n|Because\n</s>"
    assert encoded.num_unclosed == 1


def test_only_the_turns_to_learn_are_learned_in_a_tagged_template() -> None:
    tokenizer = build_word_tokenizer("tagged")
    conversation = Conversation("f.jsonl:7", (HI, HELLO, WHY, BECAUSE), (3,))
    (variant,) = render(conversation, load_template(tokenizer, "auto", {})).variants
    assert [variant.text[span.start : span.end] for span in variant.spans] == ["Because<|im_end|>"]
