"""Compares answers as text: white space, a pattern's last match, and the number that an answer comes to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction

# 1,234.5  .5  3/4  1.5e3. A list like "1,2" is two numbers; the minus of "5-3" is no sign.
NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-\u2212])?(?:\s?[$€£¥](?P<inner>[-\u2212])?)?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?P<power>[eE][+-]?\d{1,3}(?!\d))?"
    r"(?:/(?P<below>\d+))?"
)
# What a number can begin with: looked for first, which takes a tenth of the time.
_FIRST = re.compile(r"[-\u2212$€£¥.\d]")
_DATE = re.compile(r"\d+(?:/\d+){2,}")
_FRACTION_COMMAND = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_LONGEST_NUMBER = 400  # characters; a model that repeats a digit for ever writes no number


def collapse_whitespace(text: str) -> str:
    return " ".join(text.split())


def find_last(pattern: str | None) -> Callable[[str], str | None]:
    """A function that returns the first group of the pattern's last match, or the whole text without a pattern."""
    if pattern is None:
        return lambda text: text
    compiled = re.compile(pattern, re.DOTALL)
    if compiled.groups < 1:
        raise ValueError(f"pattern {pattern!r} has no group: put ( ) around the answer")

    def find(text: str) -> str | None:
        matches = list(compiled.finditer(text))
        return matches[-1][1] if matches else None

    return find


def find_number(text: str) -> Fraction | None:
    r"""The number a text comes to: the first after the last "####", else the last in \boxed{}, else the last of all.

    Thousands commas, currency and percent signs do not count: "$1,800.0" is 1800 and "50%" is 50. "3/4" is a fraction.
    """
    marker = text.rfind("####")
    if marker >= 0 and (found := _numbers(text[marker + 4 :], first=True)) is not None:
        return found
    boxed = _last_boxed(text)
    if boxed is not None and (found := _numbers(boxed)) is not None:
        return found
    return _numbers(text)


def _numbers(text: str, *, first: bool = False) -> Fraction | None:
    """The first or the last number."""
    text = _FRACTION_COMMAND.sub(r"\1/\2", text).replace(r"\$", "$").replace("{,}", ",")
    text = _DATE.sub(lambda date: date[0].replace("/", " "), text)  # 1/2/2025 holds no fraction
    found = None
    for match in match_numbers(text):
        found = _value(match)
        if first and found is not None:
            return found
    return found


def match_numbers(text: str) -> Iterator[re.Match[str]]:
    place = 0
    while (start := _FIRST.search(text, place)) is not None:
        match = NUMBER.match(text, start.start())
        if match is not None:
            yield match
        place = start.end() if match is None else match.end()


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _LONGEST_NUMBER:
        return None
    value = Fraction(match["digits"].replace(",", "") + (match["power"] or ""))
    below = match["below"]
    if below is not None:
        if int(below) == 0:
            return None
        value /= int(below)
    return -value if match["sign"] or match["inner"] else value


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + 7 : end]
    return None
