"""One sequence: a prompt and the completion that is sampled for it, token by token, until it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.inference.token_sampling import TokenScores, Truncation
from lockstep.types import PartialCompletion, SamplingParams, TextCompletion, Tokenizer


@dataclass(frozen=True)
class SequenceOptions:
    """What one caller wants beyond sampling. `adapter`: of the engine's bank; None is the base model.

    `num_top`: tokens are scored too, with as many of the likeliest; with `prompt_scores` also those of the prompt.
    `score_only`: nothing is sampled. `streams`: text can be taken while it grows. `ignores_end`: the model's own end of
    turn ends nothing.
    """

    adapter: str | None = None
    num_top: int | None = None
    prompt_scores: bool = False
    score_only: bool = False
    streams: bool = False
    ignores_end: bool = False


NOTHING_ELSE = SequenceOptions()


class TokenSequence:
    """`end_tokens` end it and are not part of its text. `on_text` receives the text in pieces, without stop texts.

    `random_stream`: what its random numbers follow from, together with their positions. `version`: of the weights that
    the next token comes from; the caller updates it when weights change.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        params: SamplingParams,
        end_tokens: frozenset[int],
        max_new_tokens: int,
        *,
        random_stream: int = 0,
        on_text: Callable[[str], None] | None = None,
        version: int = 0,
        options: SequenceOptions = NOTHING_ELSE,
        routing_bytes: int = 0,
    ) -> None:
        """`routing_bytes`: of each token that is computed, where the choices of routers are recorded."""
        self.prompt = tuple(int(token) for token in prompt)
        self.truncation, self.random_stream, self.version = Truncation.of(params), random_stream, version
        # Append-only, in this order: another thread may read as many of each as the last one has.
        self._routing, self._routing_bytes = bytearray(), routing_bytes
        self.sampled: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.options = options
        self.scores: list[TokenScores] = []  # of sampled tokens, where the options ask for them
        self.prompt_scores: list[TokenScores] = []  # of all but the prompt's first
        self._pieces: deque[str] = deque()  # of text that nobody has taken yet
        if options.streams:
            on_text = self._pieces.append
        self._tokenizer, self._params, self._on_text = tokenizer, params, on_text
        self._end_tokens, self._max_new_tokens = end_tokens, max_new_tokens
        self._finish_reason: Literal["stop", "length"] | None = None
        self._cancelled = False
        # Most completions need their text only once: detokenising each step costs as much as a step of a small model.
        self._detokenizer = Detokenizer(tokenizer) if params.stop or on_text is not None else None
        self._text, self._num_shown = "", 0  # the text so far, and how many of its characters went to `on_text`

    @property
    def finished(self) -> bool:
        return self._finish_reason is not None or self._cancelled

    @property
    def ended_by_token(self) -> bool:
        """Whether the last token is an end of turn, which is not part of the text."""
        return bool(self.sampled) and self.sampled[-1] in self._end_tokens

    @property
    def is_partial(self) -> bool:
        """Whether its cache cannot be that of another sample of its prompt: it has more tokens, or wants scores."""
        return bool(self.sampled) or self.options.prompt_scores

    def cancel(self) -> None:
        """Nobody wants the rest. From any thread: it takes effect before the next token."""
        self._cancelled = True

    def finish_scoring(self) -> None:
        """There is nothing to sample, and its prompt is scored."""
        self._finish_reason = "length"

    def take_text(self) -> str:
        """What was shown since the last time. From any thread."""
        pieces = []
        while self._pieces:
            pieces.append(self._pieces.popleft())
        return "".join(pieces)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and completion so far."""
        return (*self.prompt, *self.sampled)

    @property
    def num_sampled(self) -> int:
        return len(self.sampled)

    @property
    def num_left(self) -> int:
        return self._max_new_tokens - len(self.sampled)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.sampled)

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self._max_new_tokens

    def resume(self, partial: PartialCompletion) -> None:
        """Take over what another engine has sampled of this completion."""
        current = self.version
        for token, logprob, self.version in zip(partial.tokens, partial.logprobs, partial.versions, strict=True):
            if self.finished:
                raise ValueError(
                    f"a partial completion has {len(partial.tokens)} tokens and ends after {self.num_sampled}"
                )
            self.append(token, logprob)
        self.version = current
        self.add_routing(0, partial.routing)

    def add_routing(self, position: int, rows: bytes) -> None:
        """Of the tokens from `position` on. What is known stays: a cache that is computed anew, perhaps with newer
        weights, is not what the next tokens were sampled from."""
        known = len(self._routing) - position * self._routing_bytes
        assert known >= 0, "tokens are computed in order"
        self._routing += rows[known:]

    def _routing_of(self, start: int, end: int) -> bytes:
        """What the sampled tokens from `start` to `end` add: each that of the token before it, the first that of the
        whole prompt."""
        edges = [(len(self.prompt) + place - 1) * self._routing_bytes if place else 0 for place in (start, end)]
        return bytes(self._routing[edges[0] : edges[1]])

    def partial(self, start: int = 0) -> PartialCompletion:
        """The completion so far, from its token `start` on. From any thread."""
        end = len(self.versions)
        return PartialCompletion(
            tuple(self.sampled[start:end]),
            tuple(self.logprobs[start:end]),
            tuple(self.versions[start:end]),
            self._routing_of(start, end),
        )

    def append(self, token: int, logprob: float, scores: TokenScores | None = None) -> None:
        assert self._finish_reason is None, "a finished sequence takes no more tokens"
        self.sampled.append(token)
        self.logprobs.append(logprob)
        if scores is not None:
            self.scores.append(scores)
        self.versions.append(self.version)
        if token in self._end_tokens or self._completes_stop_text(token):
            self._finish_reason = "stop"
        elif self.num_left == 0:
            self._finish_reason = "length"
        if self._on_text is not None:
            self._show(self._on_text)

    def completion(self) -> TextCompletion:
        assert self._finish_reason is not None, "the sequence is not finished"
        logprobs = tuple(self.logprobs) if self._params.logprobs else None
        newest = max(self.versions, default=self.version)
        versions = tuple(self.versions) if min(self.versions, default=newest) != newest else ()
        routing = self._routing_of(0, len(self.sampled))
        return TextCompletion(
            tuple(self.sampled), self._final_text(), self._finish_reason, logprobs, newest, versions, routing
        )

    def _completes_stop_text(self, token: int) -> bool:
        piece = self._detokenizer.push(token) if self._detokenizer is not None else ""
        if not piece:
            return False
        before, self._text = len(self._text), self._text + piece
        return any(self._text.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in self._params.stop)

    def _final_text(self) -> str:
        shown = self.sampled[:-1] if self.ended_by_token else self.sampled
        text = self._tokenizer.decode(shown, skip_special_tokens=True)
        return text[: min((at for at in map(text.find, self._params.stop) if at >= 0), default=len(text))]

    def _show(self, on_text: Callable[[str], None]) -> None:
        """All text that cannot turn out to be the beginning of a stop text."""
        if self._finish_reason is not None:
            text, end = self._final_text(), None
        else:
            text, end = self._text, len(self._text) - max((len(stop) - 1 for stop in self._params.stop), default=0)
        piece = text[self._num_shown : end]
        if piece:
            self._num_shown += len(piece)
            on_text(piece)


class Detokenizer:
    """Tokens one by one to text, as soon as it is certain: the bytes of one character may span several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # Text up to `_emitted` was returned; tokens from `_start` on are decoded again, as text depends on its left.
        self._start = self._emitted = 0

    def push(self, token: int) -> str:
        self._tokens.append(token)
        known = self._decode(self._tokens[self._start : self._emitted])
        text = self._decode(self._tokens[self._start :])
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return ""
        self._start, self._emitted = self._emitted, len(self._tokens)
        return text[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
