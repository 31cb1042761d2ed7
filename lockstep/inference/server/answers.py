"""Answers as OpenAI's API writes them: whole, or in chunks while they grow."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from lockstep.inference.sequence import TokenSequence
from lockstep.inference.server.token_text import UNPRINTABLE, TokenPlaces, TokenTexts
from lockstep.inference.server.tool_calls import read_calls
from lockstep.inference.token_sampling import TokenScores

Kind = Literal["chat", "text"]
_IDS = {"chat": "chatcmpl", "text": "cmpl"}
_LEAST = -9999.0  # as OpenAI writes the log-prob of what is impossible
_OBJECTS = {"chat": "chat.completion", "text": "text_completion"}


class Answer:
    """One request's answer. `echoes`: the texts of the prompts, which its choices then begin with."""

    def __init__(
        self,
        kind: Kind,
        model: str,
        sequences: Sequence[TokenSequence],
        texts: TokenTexts,
        *,
        num_samples: int = 1,
        echoes: Sequence[str] | None = None,
        with_tools: bool = False,
    ) -> None:
        self._kind, self._texts, self._with_tools = kind, texts, with_tools
        self._head = {"id": f"{_IDS[kind]}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._num_samples = num_samples
        echoed = [""] * len(sequences) if echoes is None else [t for t in echoes for _ in range(num_samples)]
        self.choices = [_Choice(s, echo, echoes is not None) for s, echo in zip(sequences, echoed, strict=True)]

    @property
    def usage(self) -> dict[str, int]:
        """Every prompt counts once, and every token that was sampled, the one that ended a turn too."""
        prompts = sum(len(choice.sequence.prompt) for choice in self.choices[:: self._num_samples])
        sampled = sum(choice.sequence.num_sampled for choice in self.choices)
        return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}

    def whole(self) -> dict[str, Any]:
        choices = [self._whole_choice(number, choice) for number, choice in enumerate(self.choices)]
        return {"object": _OBJECTS[self._kind], **self._head, "choices": choices, "usage": self.usage}

    def chunks(self, *, ended: bool, with_usage: bool) -> Iterator[dict[str, Any]]:
        """What is new since the last time. The first chunk of a choice in a chat names the role."""
        for number, choice in enumerate(self.choices):
            if not choice.opened and self._kind == "chat":
                yield self._chunk(number, {"delta": {"role": "assistant", "content": ""}}, with_usage)
            choice.opened = True
            if choice.closed or not (piece := self._new_piece(choice)):
                continue
            yield self._chunk(number, piece, with_usage)
        if ended and with_usage:
            yield {"object": self._chunk_object, **self._head, "choices": [], "usage": self.usage}

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self._kind == "chat" else "text_completion"

    def _chunk(self, number: int, content: Mapping[str, object], with_usage: bool) -> dict[str, object]:
        choice = {"index": number, "logprobs": None, "finish_reason": None, **content}
        head = {"object": self._chunk_object, **self._head, "choices": [choice]}
        return head | ({"usage": None} if with_usage else {})

    def _new_piece(self, choice: _Choice) -> dict[str, object]:
        """Text, scores and the reason of the end, if there is any of them. Calls of tools come whole, at the end."""
        finished = choice.sequence.finished
        if self._with_tools and not finished:
            return {}
        text = choice.sequence.take_text()
        choice.num_shown += len(text)
        scores = self._scores(choice, choice.num_shown)
        if not finished:
            return self._content(choice, text, scores, None) if text else {}
        choice.closed = True
        return self._content(choice, text, scores, choice.sequence.completion().finish_reason, is_delta=True)

    def _whole_choice(self, number: int, choice: _Choice) -> dict[str, object]:
        completion = choice.sequence.completion()
        scores = self._scores(choice, len(completion.text))
        content = self._content(choice, choice.echo + completion.text, scores, completion.finish_reason, is_delta=False)
        return {"index": number, "logprobs": None, **content}

    def _content(
        self, choice: _Choice, text: str, scores: object, reason: str | None, *, is_delta: bool = True
    ) -> dict[str, object]:
        found: dict[str, Any] = {"finish_reason": reason, **({} if scores is None else {"logprobs": scores})}
        if self._kind == "text":
            return {"text": text, **found}
        message: dict[str, object] = {"content": text} if text or not is_delta else {}
        if self._with_tools:
            said, calls = read_calls(text)
            if calls:
                numbered = [{"index": number, **call} for number, call in enumerate(calls)] if is_delta else calls
                message, found["finish_reason"] = {"content": said, "tool_calls": numbered}, "tool_calls"
        if is_delta:
            return {"delta": message, **found}
        return {"message": {"role": "assistant", "refusal": None, **message}, **found}

    # --- log-probs --------------------------------------------------------------------------------------------------

    def _scores(self, choice: _Choice, num_shown: int) -> dict[str, object] | None:
        """Of tokens that the text shows, and no others: not of an end of turn, nor of a stop text."""
        sequence = choice.sequence
        if sequence.options.num_top is None:
            return None
        scored = len(sequence.scores)
        choice.places = choice.places or self._texts.place(())
        choice.places.extend(sequence.sampled[len(choice.places.offsets) : scored])
        end = _num_shown_tokens(sequence, choice.places.offsets, num_shown)
        start, choice.num_scored = choice.num_scored, max(end, choice.num_scored)
        tokens, scores = sequence.sampled[start:end], sequence.scores[start:end]
        if self._kind == "chat":
            return {"content": [self._chat_score(*pair) for pair in zip(tokens, scores, strict=True)], "refusal": None}
        offsets = choice.places.offsets[start:end]
        found: list[TokenScores | None] = list(scores)
        if choice.echoes and start == 0:
            prompt = sequence.prompt
            tokens = [*prompt, *tokens]
            found = [None, *sequence.prompt_scores, *found]
            offsets = [*self._texts.place(prompt).offsets, *(len(choice.echo) + offset for offset in offsets)]
        return self._text_scores(tokens, found, offsets)

    def _chat_score(self, token: int, scores: TokenScores) -> dict[str, object]:
        top = [self._one_score(other, logprob) for other, logprob in scores.top]
        return {**self._one_score(token, scores.logprob), "top_logprobs": top}

    def _one_score(self, token: int, logprob: float) -> dict[str, object]:
        text = self._texts[token]
        encoded = None if text.startswith(UNPRINTABLE) else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": encoded}

    def _text_scores(
        self, tokens: Sequence[int], scores: Sequence[TokenScores | None], offsets: Sequence[int]
    ) -> dict[str, object]:
        tops = [
            None if s is None else {self._texts[t]: _finite(p) for t, p in ((token, s.logprob), *s.top)}
            for token, s in zip(tokens, scores, strict=True)
        ]
        return {
            "tokens": [self._texts[token] for token in tokens],
            "token_logprobs": [None if s is None else _finite(s.logprob) for s in scores],
            "top_logprobs": tops,
            "text_offset": list(offsets),
        }


class _Choice:
    """How far one sequence has been told."""

    def __init__(self, sequence: TokenSequence, echo: str, echoes: bool) -> None:
        self.sequence, self.echo, self.echoes = sequence, echo, echoes
        self.opened = self.closed = False
        self.num_shown = self.num_scored = 0  # characters and tokens
        self.places: TokenPlaces | None = None


def _num_shown_tokens(sequence: TokenSequence, offsets: Sequence[int], num_shown: int) -> int:
    if sequence.finished and sequence.completion().finish_reason == "length":
        return len(offsets)
    if sequence.finished and sequence.ended_by_token:
        return len(offsets) - 1
    return sum(offset < num_shown for offset in offsets)


def _finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, _LEAST)
