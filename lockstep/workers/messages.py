"""Requests and results as frames, the same whatever carries them. Must not know how they travel."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.workers.frames import Frame, FrameError, pack
from lockstep.workers.worker import Reply, WorkerFailed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Request:
    number: int
    method: str
    body: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def from_frame(cls, frame: Frame) -> Request:
        header = frame.header
        return cls(header["number"], header["method"], header["body"], read_tensors(frame))


def pack_message(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> list[bytes | memoryview]:
    """torch is imported only where there are tensors: a process is connected before it has time for that."""
    if not tensors:
        return pack({**header, "tensors": []})
    from lockstep.workers.tensors import describe

    described, parts = describe(tensors)
    return pack({**header, "tensors": described}, parts)


def read_tensors(frame: Frame) -> dict[str, Tensor]:
    if not frame.header["tensors"]:
        return {}
    from lockstep.workers.tensors import restore

    return restore(frame.header["tensors"], frame.parts)


def pack_result(number: int, result: Reply | BaseException) -> list[bytes | memoryview]:
    """An answer that no message can hold becomes a failure that says so."""
    if isinstance(result, Reply):
        try:
            return pack_message({"number": number, "body": result.body}, result.tensors)
        except ValueError as error:
            result = error
    reason = str(result).strip() or type(result).__name__
    trace = "".join(traceback.format_exception(result))
    failure = {"kind": type(result).__name__, "reason": reason, "traceback": trace}
    return pack_message({"number": number, "failure": failure}, None)


def read_result(frame: Frame, worker: str, method: str) -> Reply | WorkerFailed:
    """`method` is the one that was asked for."""
    try:
        if "failure" not in frame.header:
            return Reply(frame.header["body"], read_tensors(frame))
        failure = frame.header["failure"]
        return WorkerFailed(worker, method, failure["kind"], failure["reason"], failure["traceback"])
    except (LookupError, TypeError) as error:
        raise FrameError(f"an answer that is not what was agreed on: {error!r}") from None
