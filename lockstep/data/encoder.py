"""From rendered rows to token ids with weights, cut to data.max_length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain, pairwise
from typing import cast

import numpy as np
import numpy.typing as npt

from lockstep.data.chat_template import special_texts
from lockstep.data.rendering import Rendered, Span, Variant
from lockstep.data.sources.rows import DataError
from lockstep.types import Completion, Datum, ImageRef, Tokenizer

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
# Ids of an answer and the weight of each; the last weight is never zero.
Answer = tuple[Ints, Floats]
POLICIES = ("prompt_left", "right", "drop", "error")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A row that fits; `answers` is empty where nothing to learn is left."""

    prompt: Ints
    answers: tuple[Answer, ...]
    prompt_cut: bool = False
    answer_cut: bool = False


def fit(prompt: Ints, answers: Sequence[Answer], *, max_length: int, policy: str, bos: int | None) -> Fitted:
    """Cut a row whose prompt with its longest answer has more than `max_length` tokens.

    prompt_left: the start of the prompt is cut, as much as the longest answer needs. At least one token of the prompt
    is kept, its BOS where it has one, and an answer that does not fit after that loses its end.
    right: everything after `max_length` is cut; a row that loses an answer, or one of two, is dropped.
    drop: the row is dropped.
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
    """The first `room` tokens, up to the last learned one."""
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
    # Where messages start with a BOS too, a cut right before one must not double it.
    return rest if len(rest) and rest[0] == bos else np.concatenate([prompt[:1], rest])


@dataclass(frozen=True, slots=True)
class Encoded:
    """A datum with counts for the report. `datum` is None where data.truncate drops the row.

    `num_uncut` counts tokens before cutting: of the prompt and the longest answer. `retokenised`: some text was
    tokenised in pieces. `num_unclosed` answers end without an end-of-turn token; `num_unprompted` do not start with the
    whole generation prompt. `holds_special`: a special token is written out in a message. `unwritten`: the row has
    parts that the template knows nothing of. Equal keys mean equal tokens before cutting; a row without a prompt has
    its row_key as prompt_key.
    """

    datum: Datum | None
    num_uncut: int
    prompt_cut: bool
    answer_cut: bool
    retokenised: bool
    num_unclosed: int
    num_unprompted: int
    holds_special: bool
    unwritten: bool
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
    weights: Floats
    retokenised: bool
    num_unclosed: int

    def divide(self) -> tuple[Ints, Answer]:
        """The prompt, and what follows up to the last learned token.

        Nothing predicts the first token of a text: where it should be learned, it becomes the prompt.
        """
        learned = np.flatnonzero(self.weights)
        first, stop = max(int(learned[0]), 1), int(learned[-1]) + 1
        return self.ids[:first], (self.ids[first:stop], self.weights[first:stop])


class Encoder:
    """Turns rendered rows into data of at most `max_length` tokens; longer rows are cut as `truncate` says.

    `image_token`: the one that stands for an image's features; rows may then have images.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_length: int, truncate: str, image_token: int | None = None) -> None:
        if max_length < 2:
            raise DataError(f"data.max_length is {max_length}: a row needs at least one prompt and one answer token")
        assert truncate in POLICIES, truncate
        self._tokenizer = tokenizer
        self._name = tokenizer.name_or_path or "the tokenizer"
        if not tokenizer.is_fast:
            raise DataError(f"{self._name} is a slow tokenizer without character offsets: use its fast version")
        self._max_length = max_length
        self._truncate = truncate
        self._image_token = image_token
        added = tokenizer.added_tokens_decoder
        self._special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self._special_text = re.compile("|".join(map(re.escape, special_texts(tokenizer))) or "(?!)")
        self._bos = tokenizer.bos_token_id
        self._eos = tokenizer.eos_token_id
        self._adds_bos = self._bos is not None and self._would_add_bos()

    def encode(self, rows: Sequence[Rendered]) -> list[Encoded | DataError]:
        """In order; the error in place of a row that cannot be used. One tokenizer call, which uses all cores."""
        if not rows:
            return []
        tokens = iter(self._tokenise([variant.text for row in rows for variant in row.variants]))
        encoded: list[Encoded | DataError] = []
        for row in rows:
            row_tokens = [next(tokens) for _ in row.variants]
            try:
                encoded.append(self._encode_row(row, row_tokens))
            except DataError as error:
                encoded.append(error)
        return encoded

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
        images = self._count_images(row, tokens[0], prompt, answers)
        fitted = self._fit(row, prompt, answers, num_uncut)
        if images and self._num_image_tokens(fitted.prompt, fitted.answers) < sum(i.num_tokens for i in images):
            fitted = Fitted(prompt, ())  # a part of an image cannot be learned from
        prompt_key, row_key = _keys(prompt, answers, images)
        return Encoded(
            make_datum(fitted.prompt, fitted.answers, row.label, row.origin, images) if fitted.answers else None,
            num_uncut=num_uncut,
            prompt_cut=fitted.prompt_cut,
            answer_cut=fitted.answer_cut,
            retokenised=any(m.retokenised for m in masked),
            num_unclosed=sum(m.num_unclosed for m in masked),
            num_unprompted=sum(variant.num_unprompted for variant in row.variants),
            holds_special=any(map(self._special_text.search, row.written)),
            unwritten=row.unwritten,
            prompt_key=prompt_key if row.has_prompt else row_key,
            row_key=row_key,
        )

    def _count_images(
        self, row: Rendered, tokens: _Tokens, prompt: Ints, answers: list[Answer]
    ) -> tuple[ImageRef, ...]:
        """The images with the number of their tokens, before anything is cut."""
        if self._image_token is None:
            return ()
        is_image = tokens.ids == self._image_token
        images = tuple(
            replace(image, num_tokens=int(np.count_nonzero(is_image & _inside(tokens, span))))
            for image, span in zip(row.images, row.variants[0].images, strict=True)
        )
        # What follows the last learned token is left out, images too.
        kept = self._num_image_tokens(prompt, answers)
        while images and kept < sum(image.num_tokens for image in images):
            images = images[:-1]
        if kept != sum(image.num_tokens for image in images):
            raise DataError(
                f"{row.origin}: a message has the image token of {self._name} written out, which stands for an image "
                "that is not there: remove it, or add the image"
            )
        return images

    def _num_image_tokens(self, prompt: Ints, answers: Iterable[Answer]) -> int:
        return sum(int(np.count_nonzero(ids == self._image_token)) for ids in (prompt, *(ids for ids, _ in answers)))

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
        # A pair that differs only after the cut has nothing to prefer: it is dropped as too long.
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
        tokens = []
        for ids, offsets in zip(encoding["input_ids"], encoding["offset_mapping"]):
            # fromiter, because np.array of a list of pairs takes twice as long.
            flat = np.fromiter(chain.from_iterable(offsets), dtype=np.int32, count=2 * len(offsets))
            tokens.append(_Tokens(np.array(ids, dtype=np.int32), flat[::2], flat[1::2]))
        return tokens

    def _tokenise_split(self, row: Rendered, text: str, whole: _Tokens, cuts: list[int]) -> _Tokens:
        """Tokenise the pieces between cuts on their own, as a prompt is at inference.

        Valid only if the pieces together decode to the same text: some tokenizers add a space to each piece.
        """
        edges = [0, *cuts, len(text)]
        pieces = self._tokenise([text[a:b] for a, b in pairwise(edges)])
        joined = _Tokens(
            np.concatenate([piece.ids for piece in pieces]),
            # Offsets that leave whitespace out put a space at the end of a piece into the next: keep it in its own.
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
        required = {split_at} if split_at else set[int]()
        while uncertain := (_uncertain_cuts(variant, tokens, turns) | required) - cuts:
            cuts |= uncertain
            tokens = self._tokenise_split(row, variant.text, whole, sorted(cuts))
            turns = [self._find_turn(row, variant, tokens, span) for span in variant.spans]
        self._check_substance(row, variant, tokens, turns)
        weights = np.zeros(len(tokens.ids), dtype=np.float32)
        for turn in turns:
            weights[turn.first : turn.stop] = 1.0
        for image in variant.images:
            weights[_inside(tokens, image)] = 0.0
        if row.plain:
            return _Masked(*self._frame(row, tokens.ids, weights), retokenised=bool(cuts), num_unclosed=0)
        num_unclosed = sum(span.ends_turn and not turn.closed for span, turn in zip(variant.spans, turns))
        return _Masked(tokens.ids, weights, retokenised=bool(cuts), num_unclosed=num_unclosed)

    def _find_turn(self, row: Rendered, variant: Variant, tokens: _Tokens, span: Span) -> _Turn:
        """The tokens of a span up to its end-of-turn token, without the whitespace that the template writes after it.

        Plain text, and a turn that the template does not close with a special token, is learned to its end.
        """
        first, stop = (int(i) for i in np.searchsorted(tokens.starts, span[:2]))
        for last in range(stop - 1, first - 1, -1) if not row.plain and span.ends_turn else ():
            if int(tokens.ids[last]) in self._special:
                return _Turn(first, last + 1, closed=True)
            if variant.text[tokens.starts[last] : tokens.ends[last]].strip():
                break
        return _Turn(first, stop, closed=False)

    def _check_substance(self, row: Rendered, variant: Variant, tokens: _Tokens, turns: list[_Turn]) -> None:
        """Every answer needs a token that is neither special nor whitespace, in one of its spans."""
        has_substance = False
        for span, turn in zip(variant.spans, turns):
            has_substance = has_substance or any(
                int(tokens.ids[i]) not in self._special and variant.text[tokens.starts[i] : tokens.ends[i]].strip()
                for i in range(turn.first, turn.stop)
            )
            if span.ends_turn and not has_substance:
                raise DataError(
                    f"{row.origin}: nothing to learn: an answer has only whitespace and special tokens: "
                    "write the answer or remove the row"
                )
            has_substance = has_substance and not span.ends_turn

    # --- plain text --------------------------------------------------------------------------------------------

    def _would_add_bos(self) -> bool:
        with_special = self._tokenizer("x", add_special_tokens=True)["input_ids"]
        without = self._tokenizer("x", add_special_tokens=False)["input_ids"]
        return with_special[0] == self._bos and without[0] != self._bos

    def _frame(self, row: Rendered, ids: Ints, weights: Floats) -> tuple[Ints, Floats]:
        """A BOS in front where the tokenizer itself would add one, and an EOS at the end, which is learned."""
        if self._eos is None:
            raise DataError(f"{row.origin}: {self._name} has no EOS token to end plain text with: set its eos_token")
        head = [self._bos] if self._adds_bos and ids[0] != self._bos else []
        tail = [self._eos] if ids[-1] != self._eos else []
        ids = np.concatenate([head, ids, tail]).astype(np.int32)
        weights = np.concatenate([np.zeros(len(head)), weights, np.ones(len(tail))]).astype(np.float32)
        return ids, weights


def _uncertain_cuts(variant: Variant, tokens: _Tokens, turns: list[_Turn]) -> set[int]:
    """Characters where an answer starts (or ends without an end-of-turn token) inside a token.

    Some tokenizers leave a token's leading whitespace out of its offsets, so a gap before the start is uncertain too.
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


def _inside(tokens: _Tokens, span: tuple[int, int]) -> npt.NDArray[np.bool_]:
    return (tokens.starts >= span[0]) & (tokens.starts < span[1])


def make_datum(
    prompt: Ints, answers: Iterable[Answer], label: int | None, origin: str, images: Sequence[ImageRef] = ()
) -> Datum:
    """Arrays serve as the sequences of a datum. `label` becomes a value of every token."""
    completions = []
    for ids, weights in answers:
        values = {} if label is None else {"label": np.full(len(ids), label, dtype=np.float32)}
        completions.append(
            Completion(
                cast(Sequence[int], ids), cast(Sequence[float], weights), cast(Mapping[str, Sequence[float]], values)
            )
        )
    return Datum(cast(Sequence[int], prompt), tuple(completions), origin, images)


def _keys(prompt: Ints, answers: list[Answer], images: Sequence[ImageRef] = ()) -> tuple[int, int]:
    """64 bits for the prompt and for the whole row; the same question about another image is another row."""
    digest = blake2b(prompt.tobytes(), digest_size=8)
    for image in images:
        digest.update(image.digest.to_bytes(8, "little"))
    prompt_key = int.from_bytes(digest.digest(), "little")
    for ids, _ in answers:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.tobytes())
    return prompt_key, int.from_bytes(digest.digest(), "little")
