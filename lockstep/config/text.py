"""Letters that nobody sees: in a name they deceive, on a terminal they are commands."""

from __future__ import annotations

import re
import unicodedata

_JOINERS = "\u200c\u200d"  # Persian, Indian scripts and emoji are written with them
# Commands of terminals, line separators, and what turns the order of other letters around.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def find_invisible(name: str) -> str | None:
    """The first letter of a name that cannot be seen: a control or format character, or a line break."""
    hidden = (letter for letter in name if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp"))
    return next((letter for letter in hidden if letter not in _JOINERS), None)


def write_out(text: str, keep: str = "") -> str:
    """The text with harmful letters as escapes. Line breaks and tabs stay, and those of `keep`."""
    return _HARMFUL.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)
