"""A conversation on a terminal or a pipe: read a turn, stream the answer, remember both."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from lockstep.types import Prompt, SamplingParams, TextCompletion

_HELP = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"


class StreamingEngine(Protocol):
    def encode(self, prompt: str | Sequence[Any]) -> list[int]: ...

    def stream(self, prompt: Prompt, params: SamplingParams, on_text: Callable[[str], None]) -> TextCompletion: ...


def converse(engine: StreamingEngine, params: SamplingParams, system: str | None = None) -> None:
    """Until the input ends. On a terminal an impossible turn is explained and dropped; in a pipe it raises."""
    interactive = sys.stdin.isatty()
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    if interactive:
        _say(_HELP + "\n")
    for line in _read_turns(interactive):
        if interactive and line == "/exit":
            return
        if interactive and line == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": _answer(engine, messages, params)})
        except ValueError as error:
            if not interactive:
                raise
            messages.pop()
            _say(f"error: {error} (/reset starts over)\n")


def _answer(engine: StreamingEngine, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Ctrl-C keeps what was said so far."""
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        _write(text)

    tokens = engine.encode(messages)
    note = ""
    try:
        if engine.stream(tokens, params, write).finish_reason == "length":
            note = " [cut: --max-tokens or the model's length is reached]"
    except KeyboardInterrupt:
        note = " [stopped]"
    _write("\n")
    if note:
        _say(note.strip() + "\n")
    return "".join(pieces)


def _read_turns(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # importing it gives input() a history and line editing
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            _write("\n")
            return
        except KeyboardInterrupt:
            _write("\n")
            continue
        if line:
            yield line


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    """Words that are not the model's go to stderr, so that a pipe carries only answers."""
    sys.stderr.write(text)
    sys.stderr.flush()
