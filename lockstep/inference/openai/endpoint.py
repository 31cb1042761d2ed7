"""Answers from an OpenAI-compatible server, as vLLM, SGLang and others run: chat for conversations, plain completions.

Text goes in and comes out; tokens stay with the server. Every request has a deadline and is tried a bounded number
of times. Must not know torch, metrics or files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.inference.openai.http import Connection, EndpointError, ask_all, normalise_url, shorten
from lockstep.inference.prompts import PromptRow
from lockstep.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """`finish_reason` length: the answer was cut."""

    text: str
    finish_reason: Literal["stop", "length"]


class EndpointEngine:
    """One server and one of its models; `batch_size` requests are under way at once."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        batch_size: int = 8,
        timeout_s: float = 120.0,
        num_tries: int = 5,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = normalise_url(url)
        self.batch_size = batch_size
        self._server = Connection(self.url, api_key=api_key, timeout_s=timeout_s, num_tries=num_tries, sleep=sleep)
        self.model = model or self._find_model()

    def answer(self, rows: Sequence[PromptRow], params: SamplingParams) -> Iterator[tuple[int, Answer]]:
        """(place in `rows`, answer) of every row as they come. A row that fails ends it; the error names the row."""
        return ask_all(lambda row: self.answer_one(row, params), rows, self.batch_size)

    def answer_one(self, row: PromptRow, params: SamplingParams) -> Answer:
        body: dict[str, Any] = {"model": self.model, "max_tokens": params.max_tokens, "top_p": params.top_p}
        body["temperature"] = params.temperature
        if params.seed is not None and params.temperature > 0:
            body["seed"] = params.seed
        if params.stop:
            body["stop"] = list(params.stop)
        # Beyond OpenAI's own, by the names that vLLM and SGLang know.
        more = {"top_k": params.top_k, "min_p": params.min_p, "stop_token_ids": list(params.stop_tokens)}
        body |= {name: value for name, value in more.items() if value}
        if isinstance(row.content, str):
            body["prompt"] = row.content
            return _read_choice(self._server.ask_object("/completions", body, origin=row.origin), self.url)
        body["messages"] = row.content
        if row.tools:
            body["tools"] = row.tools
        return _read_choice(self._server.ask_object("/chat/completions", body, origin=row.origin), self.url)

    def _find_model(self) -> str:
        listing = self._server.ask_object("/models", origin="its list of models")
        entries = listing.get("data")
        names = (
            [str(m["id"]) for m in entries if isinstance(m, dict) and "id" in m] if isinstance(entries, list) else []
        )
        if len(names) != 1:
            found = f"serves {', '.join(names)}" if names else "does not say which models it serves"
            raise ValueError(f"{self.url} {found}: choose one with --endpoint-model")
        return names[0]


def _read_choice(reply: dict[str, Any], url: str) -> Answer:
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (KeyError, IndexError, TypeError) as error:
        raise EndpointError(
            f"{url} sent a reply of an unknown shape, without choices[0].message.content or choices[0].text: "
            f"{shorten(json.dumps(reply))}"
        ) from error
    if text is None:  # only tool calls, or nothing
        text = ""
    if not isinstance(text, str):
        raise EndpointError(f"{url} sent an answer that is not text: {shorten(json.dumps(text))}")
    return Answer(text, "length" if choice.get("finish_reason") == "length" else "stop")
