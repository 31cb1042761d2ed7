"""Rows for the data tests, as content and as tokens."""

from __future__ import annotations

from typing import Any

from data_tokenizers import CHATML, LLAMA3, MISTRAL

from lockstep.data.chat_template import load_template
from lockstep.data.encoder import Encoded, Encoder
from lockstep.data.formats.conversation import Conversation, Passage
from lockstep.data.rendering import render
from lockstep.data.sources.rows import DataError

ENDS = {CHATML: "<|im_end|>", LLAMA3: "<|eot_id|>", MISTRAL: "</s>"}
NAMES = {CHATML: "chatml", LLAMA3: "llama3", MISTRAL: "mistral"}


def read(fields: dict[str, Any], **settings: Any) -> Conversation | Passage:
    """A row as its content, every answer to be learned."""
    if "messages" in fields:
        messages = tuple(fields["messages"])
        learned = tuple(i for i, message in enumerate(messages) if message["role"] == "assistant")
        return Conversation("f.jsonl:7", messages, learned, **settings)
    return Passage("f.jsonl:7", fields.get("prompt", ""), fields.get("completion") or fields["text"], **settings)


def encode_content(tokenizer: Any, content: Any, *, template: str = "auto", max_length: int = 1000) -> Encoded:
    rendered = render(content, load_template(tokenizer, template, {}))
    (encoded,) = Encoder(tokenizer, max_length=max_length, truncate="prompt_left").encode([rendered])
    if isinstance(encoded, DataError):
        raise encoded
    return encoded


def encode(tokenizer: Any, fields: dict[str, Any], **options: Any) -> Encoded:
    return encode_content(tokenizer, read(fields), **options)


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


def learned(tokenizer: Any, encoded: Encoded) -> list[str]:
    """The text of each run of learned tokens."""
    (completion,) = encoded.datum.completions
    runs: list[list[int]] = []
    previous = 0.0
    for token, weight in zip(completion.tokens, completion.weights):
        assert weight in (0.0, 1.0)
        if weight and not previous:
            runs.append([])
        if weight:
            runs[-1].append(int(token))
        previous = weight
    return [tokenizer.decode(run) for run in runs]


def all_tokens(encoded: Encoded) -> list[int]:
    return [*map(int, encoded.datum.prompt), *map(int, encoded.datum.completions[0].tokens)]
