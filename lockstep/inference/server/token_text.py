"""Tokens as texts that tell them apart, and where in a text each begins: what log-probs are shown with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.inference.sequence import Detokenizer
from lockstep.types import Tokenizer

UNPRINTABLE = "token_id:"


class TokenPlaces:
    """`offsets`: for each token the length of the text before it."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer, self._length = detokenizer, 0
        self.offsets: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.offsets.append(self._length)
            self._length += len(self._detokenizer.push(token))


class TokenTexts:
    """A token that is no text by itself, as a part of a character, is shown by its number: no two look alike."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Any = tokenizer
        # Some tokenizers drop the space that a text begins with: tokens are decoded behind another one.
        self._anchor = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self._prefix = self._decode(self._anchor)
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._spell(token)
        return self._known[token]

    def place(self, tokens: Sequence[int]) -> TokenPlaces:
        places = TokenPlaces(Detokenizer(self._tokenizer))
        places.extend(tokens)
        return places

    def _spell(self, token: int) -> str:
        whole = self._decode([*self._anchor, token])
        text = whole[len(self._prefix) :] if whole.startswith(self._prefix) else ""
        return text if text and "\ufffd" not in text else f"{UNPRINTABLE}{token}"

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
