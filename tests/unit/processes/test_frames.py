"""Messages between processes: what is sent comes back, and what lies about itself is refused."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.processes import frames
from lockstep.processes.frames import (
    DTYPES,
    FrameError,
    Request,
    describe,
    pack,
    pack_message,
    pack_result,
    read_frame,
    read_result,
    read_tensors,
    receive_into,
    restore,
    send_all,
    unpack,
)
from lockstep.processes.worker import Reply


def joined(packed: list[bytes | memoryview]) -> bytes:
    return b"".join(bytes(piece) for piece in packed)


def lying(header: object, parts: bytes = b"", *, total: int | None = None, num_header: int | None = None) -> bytes:
    """A frame by hand, with lengths that may be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    num_header = len(text) if num_header is None else num_header
    total = 4 + len(text) + len(parts) if total is None else total
    return struct.pack("<QI", total, num_header) + text + parts


@given(
    header=st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.floats(allow_nan=False))),
    parts=st.lists(st.binary(max_size=70), max_size=5),
)
def test_what_is_packed_is_read_again(header: dict[str, object], parts: list[bytes]) -> None:
    header.pop("sizes", None)
    frame = unpack(joined(pack(header, [memoryview(part) for part in parts])))
    assert frame.header == header
    assert [bytes(part) for part in frame.parts] == parts


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES], ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (3, 5)], ids=str)
def test_every_kind_and_shape_of_tensor_arrives_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    tensor = sent.view(dtype).reshape(shape) if sent.numel() else torch.empty(shape, dtype=dtype)
    frame = unpack(joined(pack_message({}, {"before": torch.ones(1, dtype=torch.uint8), "it": tensor})))
    found = read_tensors(frame)["it"]
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), sent)
    found.add_(1) if dtype.is_floating_point and dtype.itemsize > 1 else None  # the receiver may write into it


def test_a_tensor_that_does_not_lie_in_a_row_arrives_as_it_reads() -> None:
    tensor = torch.arange(12.0, requires_grad=True).reshape(3, 4).T[::2]
    assert torch.equal(read_tensors(unpack(joined(pack_message({}, {"t": tensor}))))["t"], tensor)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ([1.0], "not a tensor"),
        (torch.ones(3).to_sparse(), "no dense memory"),
        (torch.ones(3, device="meta"), "no dense memory"),
        (torch.ones(3, dtype=torch.complex64), "cannot be sent: convert it"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(tensor: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"^weight.*{words}"):
        describe({"weight": tensor})  # type: ignore[dict-item]


def test_what_json_cannot_hold_and_what_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="only what JSON can"):
        pack({"body": {1, 2}})
    monkeypatch.setattr(frames, "MAX_HEADER_BYTES", 100)
    monkeypatch.setattr(frames, "MAX_PARTS_BYTES", 100)
    with pytest.raises(ValueError, match="bytes of JSON are too many"):
        pack({"body": "x" * 101})
    with pytest.raises(ValueError, match="101 bytes are too many"):
        pack({}, [memoryview(bytes(101))])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lying({"sizes": []}, num_header=1 << 31, total=(1 << 31) + 4), "a header of .*: the limit is"),
        (lying({"sizes": []}, num_header=200), "with a header of 200"),
        (lying({"sizes": []}, total=1 << 62), "a frame of 4,611"),
        (lying({"sizes": [16]}), "should take 16 bytes and take 0"),
        (lying({"sizes": [16]}, bytes(32)), "should take 16 bytes and take 32"),
        (lying({"sizes": [16, -16]}), "not a list of numbers"),
        (lying({"sizes": 3}), "not a list of numbers"),
        (lying({"sizes": [True]}, bytes(16)), "not a list of numbers"),
        (lying({}), "unexpected content"),
        (lying([1, 2]), "unexpected content"),
        (lying(b"\x80\x04K\x01."), "unexpected content"),
        (lying({"sizes": [16]}, bytes(16))[:-1], "ends 1 bytes early"),
        (lying({"sizes": []}) + b"more", "4 bytes follow"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_frame_that_lies_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(FrameError, match=words):
        unpack(data)


def test_a_length_that_lies_takes_no_memory() -> None:
    asked = []

    def fill(buffer: memoryview) -> None:
        asked.append(len(buffer))
        text = b'{"sizes": [16]}'
        buffer[:] = text if len(asked) > 1 else struct.pack("<QI", 4 + len(text) + (8 << 30), len(text))

    with pytest.raises(FrameError, match="should take 16 bytes"):
        read_frame(fill)
    assert sum(asked) < 100


@given(data=st.binary(max_size=200))
@settings(max_examples=200)
def test_random_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(FrameError):
        unpack(data)


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ([{"name": "w", "dtype": "float32", "shape": [5]}], "w is float32 .5. and comes in 16 bytes"),
        ([{"name": "w", "dtype": "float32", "shape": [-2, -2]}], "w is float32"),
        ([{"name": "w", "dtype": "object", "shape": [4]}], "described as"),
        ([{"name": "w", "shape": [4]}], "described as"),
        ([], "0 tensors in 1 parts"),
    ],
)
def test_a_tensor_that_is_not_what_its_header_says_is_refused(described: list[dict[str, object]], words: str) -> None:
    with pytest.raises(FrameError, match=words):
        restore(described, [memoryview(bytearray(16))])


def test_a_stream_holds_many_frames_and_ends_between_or_within_them() -> None:
    here, there = socket.socketpair()
    big = torch.arange(1 << 20)
    with here, there:
        sender = threading.Thread(
            target=lambda: [
                send_all(here, pack_message({"number": 1}, {"big": big})),
                send_all(here, pack({"number": 2, "tensors": []})),
                here.sendall(joined(pack({"number": 3}))[:9]),
                here.close(),
            ]
        )
        sender.start()
        first, second = (read_frame(lambda buffer: receive_into(there, buffer)) for _ in range(2))
        assert torch.equal(read_tensors(first)["big"], big)
        assert second.header["number"] == 2
        with pytest.raises(EOFError, match="3 bytes early"):
            read_frame(lambda buffer: receive_into(there, buffer))
        sender.join()


def test_an_answer_that_no_message_can_hold_becomes_a_failure() -> None:
    frame = unpack(joined(pack_result(7, Reply({"value": torch.ones(1)}))))
    assert frame.header["number"] == 7
    assert frame.header["failure"]["kind"] == "ValueError"
    assert "only what JSON can" in frame.header["failure"]["reason"]


def test_a_request_is_read_from_its_frame() -> None:
    sent = {"number": 3, "method": "learn", "body": {"rows": [1, 2]}}
    request = Request.from_frame(unpack(joined(pack_message(sent, {"w": torch.ones(2)}))))
    assert (request.number, request.method, request.body) == (3, "learn", {"rows": [1, 2]})
    assert torch.equal(request.tensors["w"], torch.ones(2))


def test_bytes_in_a_body_travel_raw_beside_tensors() -> None:
    blob = bytes(range(256)) * 3
    sent = {"number": 3, "method": "run", "body": {"item": blob, "none": b"", "n": 1}}
    request = Request.from_frame(unpack(joined(pack_message(sent, {"w": torch.ones(2)}))))
    assert (bytes(request.body["item"]), bytes(request.body["none"]), request.body["n"]) == (blob, b"", 1)
    assert torch.equal(request.tensors["w"], torch.ones(2))
    result = read_result(unpack(joined(pack_result(3, Reply({"result": blob})))), "worker", "run")
    assert isinstance(result, Reply)
    assert bytes(result.body["result"]) == blob


def test_a_process_connects_without_torch_and_numpy() -> None:
    program = "import sys, lockstep.processes.child; print(*{'torch', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
