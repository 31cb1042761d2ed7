"""An answer while it grows: where it ends, and its text, whole or in pieces.

What is kept is what was sampled, up to and with the token that ended it. Must not know models or slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from lockstep.types import PartialCompletion, SamplingParams, TextCompletion


class GrowingAnswer:
    """`end_tokens` end it and are not part of its text. `on_text` gets the text in pieces, without stop texts.

    `version`: of the weights that the next token comes from; whoever changes them changes it.
    """

    def __init__(
        self,
        tokenizer: Any,
        params: SamplingParams,
        end_tokens: frozenset[int],
        max_tokens: int,
        on_text: Callable[[str], None] | None = None,
        version: int = 0,
    ) -> None:
        self._tokenizer, self._params, self._on_text = tokenizer, params, on_text
        self._end_tokens, self._max_tokens = end_tokens, max_tokens
        self.version = version
        # Only ever added to, in this order: another thread may read as many of each as there are of the last.
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self._finish: Literal["stop", "length"] | None = None
        # Most answers need their text only once: reading along costs about as much as a step of a small model.
        self._pieces = TextPieces(tokenizer) if params.stop or on_text is not None else None
        self._text, self._shown = "", 0

    @property
    def finished(self) -> bool:
        return self._finish is not None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_left(self) -> int:
        return self._max_tokens - len(self.tokens)

    def go_on_from(self, begun: PartialCompletion) -> None:
        """Take over what another has sampled of this answer."""
        current = self.version
        for token, logprob, self.version in zip(begun.tokens, begun.logprobs, begun.versions, strict=True):
            if self.finished:
                raise ValueError(
                    f"an answer was begun with {len(begun.tokens)} tokens and ends after {self.num_tokens}"
                )
            self.push(token, logprob)
        self.version = current

    def so_far(self, start: int = 0) -> PartialCompletion:
        """What there is of it, from its token `start` on."""
        end = len(self.versions)
        return PartialCompletion(*(tuple(part[start:end]) for part in (self.tokens, self.logprobs, self.versions)))  # type: ignore[arg-type]

    def push(self, token: int, logprob: float) -> None:
        assert not self.finished, "an answer that has ended takes no more tokens"
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(self.version)
        if token in self._end_tokens or self._reads_stop_text(token):
            self._finish = "stop"
        elif self.num_left == 0:
            self._finish = "length"
        if self._on_text is not None:
            self._show(self._on_text)

    def completion(self) -> TextCompletion:
        assert self._finish is not None, "the answer has not ended"
        logprobs = tuple(self.logprobs) if self._params.logprobs else None
        newest = max(self.versions)
        versions = tuple(self.versions) if min(self.versions) != newest else ()
        return TextCompletion(tuple(self.tokens), self._whole_text(), self._finish, logprobs, newest, versions)

    def _reads_stop_text(self, token: int) -> bool:
        if self._pieces is None:
            return False
        piece = self._pieces.push(token)
        if not piece:
            return False
        before, self._text = len(self._text), self._text + piece
        return any(self._text.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in self._params.stop)

    def _whole_text(self) -> str:
        ends = bool(self.tokens) and self.tokens[-1] in self._end_tokens
        text = self._tokenizer.decode(self.tokens[:-1] if ends else self.tokens, skip_special_tokens=True)
        return text[: min((at for at in map(text.find, self._params.stop) if at >= 0), default=len(text))]

    def _show(self, on_text: Callable[[str], None]) -> None:
        """All that cannot turn out to be the beginning of a stop text."""
        if self.finished:
            text, until = self._whole_text(), None
        else:
            text, until = self._text, len(self._text) - max((len(stop) - 1 for stop in self._params.stop), default=0)
        piece = text[self._shown : until]
        if piece:
            self._shown += len(piece)
            on_text(piece)


class TextPieces:
    """Tokens one by one, text as soon as it is certain: bytes of one character may come in several tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # Tokens before `_start` are done with; those up to `_told` are read again, as text may depend on its left.
        self._start = self._told = 0

    def push(self, token: int) -> str:
        self._tokens.append(token)
        known = self._decode(self._tokens[self._start : self._told])
        text = self._decode(self._tokens[self._start :])
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return ""
        self._start, self._told = self._told, len(self._tokens)
        return text[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
