"""One message on a stream: 8 bytes of length, a JSON header, then raw parts of bytes. No pickle.

Every size is checked before memory is taken for it. Must not know torch, nor what messages mean.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_HEADER_BYTES = 64 << 20
MAX_PARTS_BYTES = 16 << 30
# Of everything that follows, and of the header alone.
_LENGTHS = struct.Struct("<QI")
_LENGTH_BYTES = 8
# Parts begin at multiples of this, so that any kind of number may be read where it lies.
_ALIGNMENT = 16


class FrameError(RuntimeError):
    """What came is not a frame: the stream cannot be read any further."""


@dataclass(frozen=True)
class Frame:
    """`parts` are writable and share one piece of memory."""

    header: dict[str, Any]
    parts: list[memoryview]


def pack(header: Mapping[str, Any], parts: Sequence[memoryview] = ()) -> list[bytes | memoryview]:
    """What to send one after the other. The parts themselves are not copied."""
    sizes = [part.nbytes for part in parts]
    if sum(map(_padded, sizes)) > MAX_PARTS_BYTES:
        raise ValueError(f"{sum(sizes):,} bytes are too many for one message: the most are {MAX_PARTS_BYTES:,}")
    try:
        text = json.dumps({**header, "sizes": sizes}).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"a message can hold only what JSON can: {error}") from error
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{len(text):,} bytes of JSON are too many for one message: the most are {MAX_HEADER_BYTES:,}; "
            "send long lists of numbers as tensors"
        )
    total = _LENGTHS.size - _LENGTH_BYTES + len(text) + sum(map(_padded, sizes))
    packed: list[bytes | memoryview] = [_LENGTHS.pack(total, len(text)) + text]
    for part in parts:
        packed.append(part.cast("B"))
        packed.append(bytes(_padded(part.nbytes) - part.nbytes))
    return [piece for piece in packed if len(piece)]


def read_frame(fill: Callable[[memoryview], None]) -> Frame:
    """`fill` puts the next bytes of the stream into a buffer, all of it, or raises."""
    total, num_header = _LENGTHS.unpack(_take(fill, _LENGTHS.size))
    num_rest = total - (_LENGTHS.size - _LENGTH_BYTES) - num_header
    if num_header > MAX_HEADER_BYTES:
        raise FrameError(f"a header of {num_header:,} bytes: the most are {MAX_HEADER_BYTES:,}")
    if not 0 <= num_rest <= MAX_PARTS_BYTES:
        raise FrameError(f"a frame of {total:,} bytes with a header of {num_header:,} bytes")
    try:
        header = json.loads(bytes(_take(fill, num_header)))
        sizes = header.pop("sizes")
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise FrameError(f"a header that is not what was agreed on: {error!r}") from None
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise FrameError("a header whose sizes are not a list of numbers")
    if sum(map(_padded, sizes)) != num_rest:
        raise FrameError(f"a frame whose parts should take {sum(map(_padded, sizes)):,} bytes and take {num_rest:,}")
    rest = _take(fill, num_rest)
    parts, begin = [], 0
    for size in sizes:
        parts.append(rest[begin : begin + size])
        begin += _padded(size)
    return Frame(header, parts)


def unpack(data: bytes | memoryview) -> Frame:
    """Of one whole frame in memory."""
    unread = memoryview(data)

    def fill(buffer: memoryview) -> None:
        nonlocal unread
        if len(unread) < len(buffer):
            raise FrameError(f"a frame ends {len(buffer) - len(unread):,} bytes early")
        buffer[:] = unread[: len(buffer)]
        unread = unread[len(buffer) :]

    frame = read_frame(fill)
    if len(unread):
        raise FrameError(f"{len(unread):,} bytes follow after a frame")
    return frame


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill it from a stream. EOFError where the other side has ended."""
    filled = 0
    while filled < len(buffer):
        received = connection.recv_into(buffer[filled:])
        if not received:
            raise EOFError(f"the connection ended {len(buffer) - filled:,} bytes early")
        filled += received


def send_all(connection: socket.socket, packed: Sequence[bytes | memoryview]) -> None:
    for piece in packed:
        connection.sendall(piece)


def _take(fill: Callable[[memoryview], None], size: int) -> memoryview:
    buffer = np.empty(size, dtype=np.uint8).data  # unlike a bytearray not filled with zeros first
    if size:
        fill(buffer)
    return buffer


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
