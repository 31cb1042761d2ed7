"""Rows that are longer than data.max_length: what is kept of them.

Must not know text: it cuts token ids and their weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lockstep.data.chat_template import Tokenizer, special_texts
from lockstep.data.rendering import Rendered, Span, Variant
from lockstep.data.sources.rows import DataError
from lockstep.types import Completion, Datum

Ints = npt.NDArray[Any]
# Ids of an answer and the weight of each; the last weight is never zero.
Answer = tuple[Ints, Ints]
POLICIES = ("prompt_left", "right", "drop", "error")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A row that fits; `answers` is empty where nothing to learn was left."""

    prompt: Ints
    answers: tuple[Answer, ...]
    prompt_cut: bool = False
    answer_cut: bool = False


def fit(prompt: Ints, answers: Sequence[Answer], *, max_length: int, policy: str, bos: int | None) -> Fitted:
    """Cut a row whose prompt with its longest answer has more than `max_length` tokens.

    prompt_left: the start of the prompt goes, as much as the longest answer needs. At least one token of the prompt
    stays, its BOS where it has one, and an answer that does not fit beside that loses its end.
    right: what is behind `max_length` goes; a row of which no answer, or only one of two, is left is dropped.
    drop: the row goes.
    """
    if policy == "drop":
        return Fitted(prompt, ())
    room = max_length - 1 if policy == "prompt_left" else max_length - len(prompt)
    kept = tuple(_cut_right(answer, room) for answer in answers)
    answer_cut = any(len(ids) > room for ids, _ in answers)
    if any(len(ids) == 0 for ids, _ in kept):
        return Fitted(prompt, (), answer_cut=True)
    cut_prompt = _cut_left(prompt, max_length - max(len(ids) for ids, _ in kept), bos)
    return Fitted(cut_prompt, kept, prompt_cut=len(cut_prompt) < len(prompt), answer_cut=answer_cut)


def _cut_right(answer: Answer, room: int) -> Answer:
    """The first `room` tokens, without those after the last learned one: they are of no use."""
    ids, weights = answer
    if len(ids) <= room:
        return answer
    learned = np.flatnonzero(weights[: max(room, 0)])
    num_kept = int(learned[-1]) + 1 if len(learned) else 0
    return ids[:num_kept], weights[:num_kept]


def _cut_left(prompt: Ints, room: int, bos: int | None) -> Ints:
    """The last `room` tokens of the prompt (at least one), its BOS kept in front."""
    if len(prompt) <= room:
        return prompt
    if bos is None or prompt[0] != bos:
        return prompt[-room:]
    rest = prompt[len(prompt) - (room - 1) :]
    # Where messages start with the BOS too, a cut in front of one leaves it there once.
    return rest if len(rest) and rest[0] == bos else np.concatenate([prompt[:1], rest])


@dataclass(frozen=True, slots=True)
class Encoded:
    """A datum and what happened to it on the way, for the report. `datum` is None where data.truncate left it out.

    `num_uncut` counts tokens before cutting: of the prompt and the longest answer. `split`: some text was tokenised in
    pieces. `num_unclosed` answers end without an end-of-turn token; `num_unprompted` do not start with what the chat
    template writes for generation. `holds_special`: people wrote a special token in their text. The keys are the same
    for the same tokens before cutting; without a prompt of its own, a row's prompt_key is its row_key.
    """

    datum: Datum | None
    num_uncut: int
    prompt_cut: bool
    answer_cut: bool
    split: bool
    num_unclosed: int
    num_unprompted: int
    holds_special: bool
    prompt_key: int
    row_key: int


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Ids of a text and the characters [starts, ends) each of them covers."""

    ids: Ints
    starts: Ints
    ends: Ints


@dataclass(frozen=True, slots=True)
class _Turn:
    """Tokens [first, stop) of one span; `closed` when they end with an end-of-turn token."""

    first: int
    stop: int
    closed: bool


@dataclass(frozen=True, slots=True)
class _Masked:
    """A whole text in tokens, each with its weight."""

    ids: Ints
    weights: Ints
    split: bool
    num_unclosed: int

    def divide(self) -> tuple[Ints, Answer]:
        """The prompt, and what follows up to the last learned token.

        Nothing predicts the first token of all: where it was to be learned, it becomes the prompt.
        """
        learned = np.flatnonzero(self.weights)
        first, stop = max(int(learned[0]), 1), int(learned[-1]) + 1
        return self.ids[:first], (self.ids[first:stop], self.weights[first:stop])


class Encoder:
    """Turns rendered rows into data of at most `max_length` tokens; longer ones as `truncate` says (truncation.fit)."""

    def __init__(self, tokenizer: Tokenizer, *, max_length: int, truncate: str) -> None:
        if max_length < 2:
            raise DataError(f"data.max_length is {max_length}: a row needs at least one prompt and one answer token")
        assert truncate in POLICIES, truncate
        self._tokenizer = tokenizer
        self._name = tokenizer.name_or_path or "the tokenizer"
        if not tokenizer.is_fast:
            raise DataError(f"{self._name} is a slow tokenizer without character offsets: use its fast version")
        self._max_length = max_length
        self._truncate = truncate
        added = tokenizer.added_tokens_decoder
        self._special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self._special_text = re.compile("|".join(map(re.escape, special_texts(tokenizer))) or "(?!)")
        self._bos = tokenizer.bos_token_id
        self._eos = tokenizer.eos_token_id
        self._adds_bos = self._bos is not None and self._would_add_bos()

    def encode(self, rows: Sequence[Rendered]) -> list[Encoded | DataError]:
        """In order; a row that cannot be used is its error. One call of the tokenizer, which it spreads over cores."""
        if not rows:
            return []
        tokens = iter(self._tokenise([variant.text for row in rows for variant in row.variants]))
        found: list[Encoded | DataError] = []
        for row in rows:
            own = [next(tokens) for _ in row.variants]
            try:
                found.append(self._encode_row(row, own))
            except DataError as error:
                found.append(error)
        return found

    def _encode_row(self, row: Rendered, tokens: list[_Tokens]) -> Encoded:
        masked = [self._mask(row, variant, t) for variant, t in zip(row.variants, tokens)]
        divided = [m.divide() for m in masked]
        if not _same_prompt(divided):
            # An answer can change how the end of the prompt is tokenised: then the prompt is tokenised on its own.
            masked = [
                self._mask(row, variant, t, split_at=variant.spans[0].start) for variant, t in zip(row.variants, tokens)
            ]
            divided = [m.divide() for m in masked]
            if not _same_prompt(divided):
                raise DataError(f"{row.origin}: the two answers of this pair do not have the same prompt in tokens")
        prompt, answers = divided[0][0], [answer for _, answer in divided]
        self._check_answers(row, prompt, answers)
        num_uncut = len(prompt) + max(len(ids) for ids, _ in answers)
        fitted = self._fit(row, prompt, answers, num_uncut)
        prompt_key, row_key = _keys(prompt, answers)
        return Encoded(
            _build_datum(row, fitted),
            num_uncut=num_uncut,
            prompt_cut=fitted.prompt_cut,
            answer_cut=fitted.answer_cut,
            split=any(m.split for m in masked),
            num_unclosed=sum(m.num_unclosed for m in masked),
            num_unprompted=sum(variant.num_unprompted for variant in row.variants),
            holds_special=any(map(self._special_text.search, row.written)),
            prompt_key=prompt_key if row.has_prompt else row_key,
            row_key=row_key,
        )

    def _check_answers(self, row: Rendered, prompt: Ints, answers: list[Answer]) -> None:
        if any(len(ids) == 0 for ids, _ in answers):
            raise DataError(f"{row.origin}: nothing to learn: one token with nothing before it: remove the row")
        if _are_alike(answers):
            raise DataError(
                f"{row.origin}: nothing to prefer: 'chosen' and 'rejected' are the same in tokens: remove the row"
            )
        start = [int(i) for i in (*prompt[:2], *answers[0][0][:1])][:2]
        if self._bos is not None and self._bos != self._eos and start == [self._bos, self._bos]:
            raise DataError(
                f"{row.origin}: starts with the BOS token twice: remove it from the text, or from the chat template"
            )

    def _fit(self, row: Rendered, prompt: Ints, answers: list[Answer], num_uncut: int) -> Fitted:
        if num_uncut <= self._max_length:
            return Fitted(prompt, tuple(answers))
        if self._truncate == "error":
            raise DataError(
                f"{row.origin}: {num_uncut} tokens, data.max_length is {self._max_length}: raise it, shorten the row, "
                "or set data.truncate to prompt_left, right or drop"
            )
        fitted = fit(prompt, answers, max_length=self._max_length, policy=self._truncate, bos=self._bos)
        # A pair that differs only behind the cut says nothing: it goes, and is counted among those that are too long.
        return Fitted(prompt, (), answer_cut=True) if _are_alike(fitted.answers) else fitted

    # --- text to tokens ----------------------------------------------------------------------------------------

    def _tokenise(self, texts: list[str]) -> list[_Tokens]:
        encoding = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,  # rows longer than the model are cut here, and counted
        )
        found = []
        for ids, offsets in zip(encoding["input_ids"], encoding["offset_mapping"]):
            # fromiter, because np.array of a list of pairs takes twice as long.
            flat = np.fromiter(chain.from_iterable(offsets), dtype=np.int32, count=2 * len(offsets))
            found.append(_Tokens(np.array(ids, dtype=np.int32), flat[::2], flat[1::2]))
        return found

    def _tokenise_split(self, row: Rendered, text: str, whole: _Tokens, cuts: list[int]) -> _Tokens:
        """Tokenise the pieces between cuts on their own, as a prompt is at inference.

        Certain only if the pieces together still say the same: some tokenizers add a space to each piece.
        """
        edges = [0, *cuts, len(text)]
        pieces = self._tokenise([text[a:b] for a, b in pairwise(edges)])
        joined = _Tokens(
            np.concatenate([piece.ids for piece in pieces]),
            # Offsets without whitespace put a space that ends a piece at the start of the next: it stays in its own.
            np.concatenate([np.minimum(p.starts + a, b - 1) for p, (a, b) in zip(pieces, pairwise(edges))]),
            np.concatenate([p.ends + a for p, a in zip(pieces, edges)]),
        )
        if self._decode(joined.ids) != self._decode(whole.ids):
            around = text[max(cuts[0] - 10, 0) : cuts[0] + 10]
            raise DataError(
                f"{row.origin}: {self._name} joins characters on both sides of where an answer starts or ends into one "
                f"token (around {around!r}), so the tokens to learn are not certain: move the whitespace there to the "
                "other side, or remove it"
            )
        return joined

    def _decode(self, ids: Ints) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # --- what is learned ---------------------------------------------------------------------------------------

    def _mask(self, row: Rendered, variant: Variant, whole: _Tokens, *, split_at: int | None = None) -> _Masked:
        if np.any(np.diff(whole.starts) < 0):
            raise DataError(f"{row.origin}: the offsets of {self._name} are not in order: use another tokenizer")
        tokens, cuts = whole, set[int]()
        turns = [self._find_turn(row, variant, tokens, span) for span in variant.spans]
        wanted = {split_at} if split_at else set[int]()
        while uncertain := (_uncertain_cuts(variant, tokens, turns) | wanted) - cuts:
            cuts |= uncertain
            tokens = self._tokenise_split(row, variant.text, whole, sorted(cuts))
            turns = [self._find_turn(row, variant, tokens, span) for span in variant.spans]
        self._check_substance(row, variant, tokens, turns)
        weights = np.zeros(len(tokens.ids), dtype=np.float32)
        for turn in turns:
            weights[turn.first : turn.stop] = 1.0
        if row.plain:
            return _Masked(*self._frame(row, tokens.ids, weights), split=bool(cuts), num_unclosed=0)
        num_unclosed = sum(span.ends_turn and not turn.closed for span, turn in zip(variant.spans, turns))
        return _Masked(tokens.ids, weights, split=bool(cuts), num_unclosed=num_unclosed)

    def _find_turn(self, row: Rendered, variant: Variant, tokens: _Tokens, span: Span) -> _Turn:
        """The tokens of a span up to its end-of-turn token; whitespace that the template writes after it is left out.

        Plain text, and a turn that its template does not close with a special token, is learned to its end.
        """
        first, stop = (int(i) for i in np.searchsorted(tokens.starts, span[:2]))
        for last in range(stop - 1, first - 1, -1) if not row.plain and span.ends_turn else ():
            if int(tokens.ids[last]) in self._special:
                return _Turn(first, last + 1, closed=True)
            if variant.text[tokens.starts[last] : tokens.ends[last]].strip():
                break
        return _Turn(first, stop, closed=False)

    def _check_substance(self, row: Rendered, variant: Variant, tokens: _Tokens, turns: list[_Turn]) -> None:
        """Every answer says something, in one of its spans."""
        says_something = False
        for span, turn in zip(variant.spans, turns):
            says_something = says_something or any(
                int(tokens.ids[i]) not in self._special and variant.text[tokens.starts[i] : tokens.ends[i]].strip()
                for i in range(turn.first, turn.stop)
            )
            if span.ends_turn and not says_something:
                raise DataError(
                    f"{row.origin}: nothing to learn: an answer has only whitespace and special tokens: "
                    "write the answer or remove the row"
                )
            says_something = says_something and not span.ends_turn

    # --- plain text --------------------------------------------------------------------------------------------

    def _would_add_bos(self) -> bool:
        with_special = self._tokenizer("x", add_special_tokens=True)["input_ids"]
        without = self._tokenizer("x", add_special_tokens=False)["input_ids"]
        return with_special[0] == self._bos and without[0] != self._bos

    def _frame(self, row: Rendered, ids: Ints, weights: Ints) -> tuple[Ints, Ints]:
        """One BOS in front where the tokenizer adds it by itself, one EOS at the end, which is learned."""
        if self._eos is None:
            raise DataError(f"{row.origin}: {self._name} has no EOS token to end plain text with: set its eos_token")
        head = [self._bos] if self._adds_bos and ids[0] != self._bos else []
        tail = [self._eos] if ids[-1] != self._eos else []
        ids = np.concatenate([head, ids, tail]).astype(np.int32)
        weights = np.concatenate([np.zeros(len(head)), weights, np.ones(len(tail))]).astype(np.float32)
        return ids, weights


def _uncertain_cuts(variant: Variant, tokens: _Tokens, turns: list[_Turn]) -> set[int]:
    """Characters where an answer starts (or ends without an end-of-turn token) inside a token.

    Some tokenizers leave a token's leading whitespace out of its offsets, so a gap before the start is as uncertain.
    """
    cuts: set[int] = set()
    for (start, end, _), turn in zip(variant.spans, turns):
        if start != (tokens.ends[turn.first - 1] if turn.first else 0):
            cuts.add(start)
        if not turn.closed and turn.stop and tokens.ends[turn.stop - 1] > end:
            cuts.add(end)
    return cuts


def _same_prompt(divided: list[tuple[Ints, Answer]]) -> bool:
    first = divided[0][0]
    return all(np.array_equal(first, prompt) for prompt, _ in divided[1:])


def _are_alike(answers: Sequence[Answer]) -> bool:
    """Whether a row has several answers, and they have the same tokens."""
    return len(answers) > 1 and all(np.array_equal(answers[0][0], ids) for ids, _ in answers[1:])


def _build_datum(row: Rendered, fitted: Fitted) -> Datum | None:
    if not fitted.answers:
        return None
    completions = []
    for ids, weights in fitted.answers:
        values = {} if row.label is None else {"label": np.full(len(ids), float(row.label), dtype=np.float32)}
        completions.append(Completion(cast(Sequence[int], ids), cast(Sequence[float], weights), cast(Any, values)))
    return Datum(cast(Sequence[int], fitted.prompt), tuple(completions), row.origin)


def _keys(prompt: Ints, answers: list[Answer]) -> tuple[int, int]:
    """64 bits for the prompt and for the whole row."""
    digest = blake2b(prompt.tobytes(), digest_size=8)
    prompt_key = int.from_bytes(digest.digest(), "little")
    for ids, _ in answers:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.tobytes())
    return prompt_key, int.from_bytes(digest.digest(), "little")
