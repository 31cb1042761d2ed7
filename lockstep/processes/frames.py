"""Messages on a stream: 8 bytes of length, a JSON header, then raw parts of bytes. No pickle.

Every size is checked before memory is allocated for it. Importing this brings neither numpy nor torch: a process
connects before it has time for them, and only tensors need them.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.processes.worker import Body, Reply, WorkerFailed

if TYPE_CHECKING:
    from torch import Tensor


MAX_HEADER_BYTES = 64 << 20
MAX_PARTS_BYTES = 16 << 30
# Of everything after it, and of the header alone.
_LENGTHS = struct.Struct("<QI")
_LENGTH_BYTES = 8
# Parts begin at multiples of this, so that every dtype can be read in place.
_ALIGNMENT = 16
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)


class FrameError(RuntimeError):
    """The bytes are not a frame: the stream cannot be read any further."""


@dataclass(frozen=True)
class Frame:
    """`parts` are writable and share one buffer."""

    header: dict[str, Any]
    parts: list[memoryview]


def pack(header: Mapping[str, object], parts: Sequence[memoryview] = ()) -> list[bytes | memoryview]:
    """The pieces to send in order. The parts themselves are not copied."""
    sizes = [part.nbytes for part in parts]
    if sum(map(_padded, sizes)) > MAX_PARTS_BYTES:
        raise ValueError(f"{sum(sizes):,} bytes are too many for one message: the limit is {MAX_PARTS_BYTES:,}")
    try:
        text = json.dumps({**header, "sizes": sizes}).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"a message can hold only what JSON can: {error}") from error
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{len(text):,} bytes of JSON are too many for one message: the limit is {MAX_HEADER_BYTES:,}; "
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
        raise FrameError(f"a header of {num_header:,} bytes: the limit is {MAX_HEADER_BYTES:,}")
    if not 0 <= num_rest <= MAX_PARTS_BYTES:
        raise FrameError(f"a frame of {total:,} bytes with a header of {num_header:,} bytes")
    try:
        header = json.loads(bytes(_take(fill, num_header)))
        sizes = header.pop("sizes")
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise FrameError(f"a header with unexpected content: {error!r}") from None
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
    """One whole frame in memory."""
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
    """Fill `buffer` from the connection. EOFError when the other side has closed it."""
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
    import numpy as np

    buffer = np.empty(size, dtype=np.uint8).data  # unlike a bytearray not filled with zeros first
    if size:
        fill(buffer)
    return buffer


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# --- tensors ---------------------------------------------------------------------------------------------------------


def describe(tensors: Mapping[str, Tensor]) -> tuple[list[dict[str, object]], list[memoryview]]:
    """(what the header says of each, their bytes). A contiguous tensor on the CPU is not copied."""
    import torch

    described: list[dict[str, object]] = []
    parts = []
    for name, tensor in tensors.items():
        _check(name, tensor)
        described.append({"name": name, "dtype": _dtype_name(tensor), "shape": list(tensor.shape)})
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        parts.append(flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b""))
    return described, parts


def restore(described: Sequence[Mapping[str, Any]], parts: Sequence[memoryview]) -> dict[str, Tensor]:
    """The tensors share the frame's memory, without a copy."""
    import torch

    if len(described) != len(parts):
        raise FrameError(f"{len(described)} tensors in {len(parts)} parts")
    tensors = {}
    for entry, part in zip(described, parts, strict=True):
        try:
            name, shape = entry["name"], [int(size) for size in entry["shape"]]
            dtype: torch.dtype = getattr(torch, DTYPES[DTYPES.index(entry["dtype"])])
        except (LookupError, TypeError, ValueError) as error:
            raise FrameError(f"a tensor that is described as {entry!r}: {error!r}") from None
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != part.nbytes:
            raise FrameError(f"{name} is {entry['dtype']} {shape} and comes in {part.nbytes:,} bytes")
        whole = torch.frombuffer(part, dtype=dtype) if part.nbytes else torch.empty(0, dtype=dtype)
        tensors[name] = whole.reshape(shape)
    return tensors


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check(name: str, tensor: Tensor) -> None:
    import torch
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if isinstance(tensor, DTensor):
        raise ValueError(f"{name} is spread over several processes: gather it first")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ValueError(f"{name} has no dense memory to send: it is {tensor.layout} on {tensor.device}")
    if _dtype_name(tensor) not in DTYPES:
        raise ValueError(f"{name} is {tensor.dtype}, which cannot be sent: convert it to one of {', '.join(DTYPES)}")


# --- requests and results --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    number: int
    method: str
    body: Body
    tensors: dict[str, Tensor]

    @classmethod
    def from_frame(cls, frame: Frame) -> Request:
        return cls(frame.header["number"], frame.header["method"], read_body(frame), read_tensors(frame))


def pack_message(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> list[bytes | memoryview]:
    """Values of header["body"] that are bytes travel as raw parts, after those of the tensors."""
    body = header.get("body", {})
    raw = {name: memoryview(value) for name, value in body.items() if isinstance(value, (bytes, memoryview))}
    if raw:
        header = {**header, "body": {name: body[name] for name in body if name not in raw}, "raw": list(raw)}
    described, parts = describe(tensors) if tensors else ([], [])
    return pack({**header, "tensors": described}, [*parts, *raw.values()])


def read_body(frame: Frame) -> Body:
    body: Body = frame.header["body"]
    raw = frame.header.get("raw", [])
    return {**body, **dict(zip(raw, frame.parts[len(frame.parts) - len(raw) :]))}


def read_tensors(frame: Frame) -> dict[str, Tensor]:
    described = frame.header["tensors"]
    return restore(described, frame.parts[: len(frame.parts) - len(frame.header.get("raw", []))]) if described else {}


def pack_result(number: int, result: Reply | BaseException) -> list[bytes | memoryview]:
    """A reply that no message can hold becomes a failure that says so."""
    if isinstance(result, Reply):
        try:
            return pack_message({"number": number, "body": result.body}, result.tensors)
        except ValueError as error:
            result = error
    return pack_message({"number": number, "failure": describe_failure(result)})


def describe_failure(error: BaseException) -> dict[str, str]:
    """What WorkerFailed is made of, on the other side."""
    reason = str(error).strip() or type(error).__name__
    return {"kind": type(error).__name__, "reason": reason, "traceback": "".join(traceback.format_exception(error))}


def read_result(frame: Frame, worker: str, method: str) -> Reply | WorkerFailed:
    """`method` is the one that was called."""
    try:
        if "failure" not in frame.header:
            return Reply(read_body(frame), read_tensors(frame))
        failure = frame.header["failure"]
        return WorkerFailed(worker, method, failure["kind"], failure["reason"], failure["traceback"])
    except (LookupError, TypeError) as error:
        raise FrameError(f"an answer with unexpected content: {error!r}") from None
