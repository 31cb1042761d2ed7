"""Rendered text as tokens and weights: one Datum for each row.

Text is tokenised whole, once; tokens are learned by the character span they lie in, never by a guess.
Must not know files, formats or the order of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lockstep.data.rendering import Rendered, Span, Tokenizer
from lockstep.data.source import DataError
from lockstep.types import Completion, Datum

Ints = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A datum and what happened to it on the way, for the report. `num_uncut` counts tokens before cutting."""

    datum: Datum
    num_uncut: int
    prompt_cut: bool
    answer_cut: bool
    split: bool
    num_unclosed: int


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Ids of a text and the characters [starts, ends) each of them covers."""

    ids: Ints
    starts: Ints
    ends: Ints


@dataclass(frozen=True, slots=True)
class _Turn:
    """Tokens [first, stop) of one answer; `closed` when they end with an end-of-turn token."""

    first: int
    stop: int
    closed: bool


class Encoder:
    """Turns rendered rows into data of at most `max_length` tokens."""

    def __init__(self, tokenizer: Tokenizer, *, max_length: int) -> None:
        if max_length < 2:
            raise DataError(f"data.max_length is {max_length}: a row needs at least one prompt and one answer token")
        self._tokenizer = tokenizer
        self._name = tokenizer.name_or_path or "the tokenizer"
        if not tokenizer.is_fast:
            raise DataError(f"{self._name} is a slow tokenizer without character offsets: use its fast version")
        self._max_length = max_length
        added = tokenizer.added_tokens_decoder
        self._special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self._bos = tokenizer.bos_token_id
        self._adds_bos = self._bos is not None and self._would_add_bos()

    def encode(self, rows: Sequence[Rendered]) -> list[Encoded]:
        """One call of the tokenizer for all rows, which it spreads over the cores."""
        if not rows:
            return []
        return [self._encode_row(row, t) for row, t in zip(rows, self._tokenise([row.text for row in rows]))]

    def _encode_row(self, row: Rendered, tokens: _Tokens) -> Encoded:
        if np.any(np.diff(tokens.starts) < 0):
            raise DataError(f"{row.origin}: the offsets of {self._name} are not in order: use another tokenizer")
        whole, cuts = tokens, set[int]()
        turns = [self._find_turn(row, tokens, span) for span in row.spans]
        while uncertain := _uncertain_cuts(row, tokens, turns) - cuts:
            cuts |= uncertain
            tokens = self._tokenise_split(row, whole, sorted(cuts))
            turns = [self._find_turn(row, tokens, span) for span in row.spans]
        self._check_substance(row, tokens, turns)
        weights = np.zeros(len(tokens.ids), dtype=np.float32)
        for turn in turns:
            weights[turn.first : turn.stop] = 1.0
        ids, num_unclosed = tokens.ids, sum(not turn.closed for turn in turns)
        if row.plain:
            ids, weights = self._frame(row, ids, weights)
            num_unclosed = 0
        return self._build(row, ids, weights, split=bool(cuts), num_unclosed=num_unclosed)

    def _build(self, row: Rendered, ids: Ints, weights: Ints, *, split: bool, num_unclosed: int) -> Encoded:
        learned = np.flatnonzero(weights)
        # Nothing predicts the first token of all: where it was to be learned, it becomes the prompt.
        first, stop = max(int(learned[0]), 1), int(learned[-1]) + 1
        if first == stop:
            raise DataError(f"{row.origin}: nothing to learn: one token with nothing before it: remove the row")
        prompt, answer, answer_weights = ids[:first], ids[first:stop], weights[first:stop]
        num_uncut = len(prompt) + len(answer)
        answer_cut = len(answer) > self._max_length - 1
        if answer_cut:
            # The cut may fall into context between two answers: tokens after the last learned one are of no use.
            num_kept = int(np.flatnonzero(answer_weights[: self._max_length - 1])[-1]) + 1
            answer, answer_weights = answer[:num_kept], answer_weights[:num_kept]
        cut_prompt = _cut_left(prompt, self._max_length - len(answer), self._bos)
        completion = Completion(cast(Sequence[int], answer), cast(Sequence[float], answer_weights))
        return Encoded(
            Datum(cast(Sequence[int], cut_prompt), (completion,), row.origin),
            num_uncut=num_uncut,
            prompt_cut=len(cut_prompt) < len(prompt),
            answer_cut=answer_cut,
            split=split,
            num_unclosed=num_unclosed,
        )

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

    def _tokenise_split(self, row: Rendered, whole: _Tokens, cuts: list[int]) -> _Tokens:
        """Tokenise the pieces between cuts on their own, as a prompt is at inference.

        Certain only if the pieces together still say the same: some tokenizers add a space to each piece.
        """
        edges = [0, *cuts, len(row.text)]
        pieces = self._tokenise([row.text[a:b] for a, b in pairwise(edges)])
        joined = _Tokens(
            np.concatenate([piece.ids for piece in pieces]),
            # Offsets without whitespace put a space that ends a piece at the start of the next: it stays in its own.
            np.concatenate([np.minimum(p.starts + a, b - 1) for p, (a, b) in zip(pieces, pairwise(edges))]),
            np.concatenate([p.ends + a for p, a in zip(pieces, edges)]),
        )
        if self._decode(joined.ids) != self._decode(whole.ids):
            around = row.text[max(cuts[0] - 10, 0) : cuts[0] + 10]
            raise DataError(
                f"{row.origin}: {self._name} joins characters on both sides of where an answer starts or ends into one "
                f"token (around {around!r}), so the tokens to learn are not certain: move the whitespace there to the "
                "other side, or remove it"
            )
        return joined

    def _decode(self, ids: Ints) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # --- what is learned ---------------------------------------------------------------------------------------

    def _find_turn(self, row: Rendered, tokens: _Tokens, span: Span) -> _Turn:
        """The tokens of a span up to its end-of-turn token; whitespace that the template writes after it is left out.

        Plain text, and a turn that its template does not close with a special token, is learned to its end.
        """
        first, stop = (int(i) for i in np.searchsorted(tokens.starts, span))
        for last in range(stop - 1, first - 1, -1) if not row.plain else ():
            if int(tokens.ids[last]) in self._special:
                return _Turn(first, last + 1, closed=True)
            if row.text[tokens.starts[last] : tokens.ends[last]].strip():
                break
        return _Turn(first, stop, closed=False)

    def _check_substance(self, row: Rendered, tokens: _Tokens, turns: list[_Turn]) -> None:
        for turn in turns:
            if not any(
                int(tokens.ids[i]) not in self._special and row.text[tokens.starts[i] : tokens.ends[i]].strip()
                for i in range(turn.first, turn.stop)
            ):
                raise DataError(
                    f"{row.origin}: nothing to learn: an answer has only whitespace and special tokens: "
                    "write the answer or remove the row"
                )

    # --- plain text --------------------------------------------------------------------------------------------

    def _would_add_bos(self) -> bool:
        with_special = self._tokenizer("x", add_special_tokens=True)["input_ids"]
        without = self._tokenizer("x", add_special_tokens=False)["input_ids"]
        return with_special[0] == self._bos and without[0] != self._bos

    def _frame(self, row: Rendered, ids: Ints, weights: Ints) -> tuple[Ints, Ints]:
        """One BOS in front where the tokenizer adds it by itself, one EOS at the end, which is learned."""
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise DataError(f"{row.origin}: {self._name} has no EOS token to end plain text with: set its eos_token")
        head = [self._bos] if self._adds_bos and ids[0] != self._bos else []
        tail = [eos] if ids[-1] != eos else []
        ids = np.concatenate([head, ids, tail]).astype(np.int32)
        weights = np.concatenate([np.zeros(len(head)), weights, np.ones(len(tail))]).astype(np.float32)
        return ids, weights


def _uncertain_cuts(row: Rendered, tokens: _Tokens, turns: list[_Turn]) -> set[int]:
    """Characters where an answer starts (or ends without an end-of-turn token) inside a token.

    Some tokenizers leave a token's leading whitespace out of its offsets, so a gap before the start is as uncertain.
    """
    cuts: set[int] = set()
    for (start, end), turn in zip(row.spans, turns):
        if start != (tokens.ends[turn.first - 1] if turn.first else 0):
            cuts.add(start)
        if not turn.closed and turn.stop and tokens.ends[turn.stop - 1] > end:
            cuts.add(end)
    return cuts


def _cut_left(prompt: Ints, room: int, bos: int | None) -> Ints:
    """The last `room` tokens of the prompt (at least one), its BOS kept in front."""
    if len(prompt) <= room:
        return prompt
    if bos is not None and prompt[0] == bos:
        return np.concatenate([prompt[:1], prompt[len(prompt) - (room - 1) :]])
    return prompt[-room:]
