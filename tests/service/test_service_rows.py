"""Rows on their way in: read in pieces, checked elsewhere in bounded memory, within what a user may have."""

from __future__ import annotations

import io
import json
import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from lockstep.service import datasets, rows
from lockstep.service.access import make_token
from lockstep.service.app import create_app
from lockstep.service.errors import NoSpace, ServiceError, TooLarge
from lockstep.service.jobs import JobManager
from lockstep.service.limits import UserLimits
from lockstep.service.rows import check_elsewhere, read_rows, write_rows
from lockstep.service.settings import ServiceSettings


def lines_of(body: bytes) -> list[bytes]:
    return list(read_rows(io.BytesIO(body)))


def test_an_array_in_pieces_is_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    texts = ["", "two words", "ÄÖ€😀", '"[{,}]"\\', "\n\t"]
    for piece in (1, 2, 7, 64, 4096):
        monkeypatch.setattr(rows, "_PIECE_BYTES", piece)
        for indent in (None, 2):
            values = [
                {draw.choice(texts) + str(number): [draw.choice(texts), {"x": [None, True, draw.random()]}]}
                for number in range(draw.randrange(1, 9))
            ]
            body = "  \n" + json.dumps(values, indent=indent, ensure_ascii=draw.random() < 0.5) + " \n"
            assert [json.loads(line) for line in lines_of(body.encode())] == values
            assert lines_of("\n".join(map(json.dumps, values)).encode()) == lines_of(body.encode())


@pytest.mark.parametrize("body", [b'[{"a": 1}, {"b": 2}]', b'[{"a": "\xc3\xa4"}]'])
def test_every_way_to_cut_an_array_short_is_refused(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_PIECE_BYTES", 3)
    for end in range(1, len(body)):
        with pytest.raises(ServiceError, match="not JSON"):
            lines_of(body[:end])
    assert lines_of(body)


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rows, "_MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(rows, "_PIECE_BYTES", 100)
    long = json.dumps({"a": "x" * 3000}).encode()
    for body in (long, b"[" + long + b"]"):
        with pytest.raises(ServiceError, match="longer than"):
            lines_of(body)
    monkeypatch.setattr(rows, "MAX_ROWS", 3)
    with pytest.raises(TooLarge, match="more than 3 rows"):
        write_rows([b'{"a": 1}\n'] * 4, tmp_path / "out", 100)
    with pytest.raises(TooLarge, match="larger than the"):
        write_rows([b'{"a": 1}\n'] * 3, tmp_path / "out", 20)


def test_a_process_of_its_own_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, here = tmp_path / "in", tmp_path / "out", tmp_path / "here"

    def check(body: bytes, max_bytes: int = 1 << 30) -> rows.Written:
        source.write_bytes(body)
        with source.open("r+b") as file:
            return check_elsewhere(file, out, max_bytes, tmp_path)

    good = b'[{"a": 1}, {"b": "\xc3\xa4"}]'
    assert check(good) == write_rows(read_rows(io.BytesIO(good)), here, 1 << 30)
    assert out.read_bytes() == here.read_bytes()
    with pytest.raises(ServiceError, match="row 2 is not an object"):
        check(b'[{"a": 1}, 2]')
    with pytest.raises(TooLarge, match="larger than the"):
        check(good, 5)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(rows.sys, "executable", "/bin/false")
    with pytest.raises(TooLarge, match="could not be checked"):
        check(good)


@pytest.mark.slow
def test_a_row_of_many_small_objects_is_refused_for_its_memory(tmp_path: Path) -> None:
    """Sixteen megabytes of text that would be half a gigabyte of objects."""
    (tmp_path / "in").write_bytes(b'{"a": [' + b"[{}]," * 3_200_000 + b"1]}")
    with (tmp_path / "in").open("r+b") as file, pytest.raises(TooLarge, match="memory"):
        check_elsewhere(file, tmp_path / "out", 1 << 30, tmp_path)


def test_a_full_disk_is_said_and_leaves_nothing(
    make_manager: Callable[..., JobManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager()
    app = create_app(ServiceSettings(data_dir=tmp_path / "data"), manager)
    name = uuid.uuid4()
    with TestClient(app, base_url="http://localhost:8322", raise_server_exceptions=False) as http:
        for module in ("lockstep.service.api.datasets", "lockstep.service.datasets"):
            with monkeypatch.context() as patch:
                patch.setattr(f"{module}.uuid.uuid4", lambda: name)
                (manager.data_dir.uploads / name.hex).symlink_to("/dev/full")
                with pytest.raises(NoSpace) if module.endswith("service.datasets") else _nothing():
                    if module.endswith("service.datasets"):
                        manager.datasets.add_rows("rows", [{"a": 1}])
                    else:
                        answer = http.post("/api/datasets/rows", content=b'{"a": "' + b"x" * 3_000_000 + b'"}')
                        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "no_space")
                        assert "disk is full" in answer.json()["error"]["message"]
            assert list(manager.data_dir.uploads.iterdir()) == []
            assert manager.datasets.list() == []
        assert http.post("/api/datasets/rows", content=b'{"a": 1}').status_code == 201, "it goes on afterwards"


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def users(make_manager: Callable[..., JobManager], tmp_path: Path) -> Iterator[tuple[TestClient, dict[str, str]]]:
    tokens = {name: make_token(name, role) for name, role in (("ann", "submit"), ("bob", "submit"), ("eve", "admin"))}
    (tmp_path / "tokens").write_text("\n".join(line for _, line in tokens.values()))
    app = create_app(
        ServiceSettings(tmp_path / "data", token_file=tmp_path / "tokens"),
        make_manager(user_limits=UserLimits(max_upload_mb=1)),
    )
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client, {name: f"Bearer {token}" for name, (token, _) in tokens.items()}


def test_each_user_has_room_of_their_own(users: tuple[TestClient, dict[str, str]]) -> None:
    http, tokens = users
    rows = json.dumps({"a": "x" * 400_000}).encode()

    def upload(user: str, name: str) -> int:
        answer = http.post(f"/api/datasets/{name}", content=rows, headers={"Authorization": tokens[user]})
        return answer.status_code

    assert [upload("ann", f"ann-{number}") for number in range(4)] == [201, 201, 413, 413]
    assert upload("bob", "bob-0") == 201
    assert [upload("eve", f"eve-{number}") for number in range(4)] == [201] * 4, "the operator's own are not counted"


def test_a_preview_shows_a_megabyte_at_most(
    make_manager: Callable[..., JobManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager()
    monkeypatch.setattr(datasets, "_PREVIEW_BYTES", 1000)
    manager.datasets.add_rows("short", [{"a": "x" * 300} for _ in range(20)])
    assert len(manager.datasets.preview("short", 20)) == 3
    manager.datasets.add_rows("long", [{"a": "x" * 3000}])
    with pytest.raises(TooLarge, match="the first row has more than"):
        manager.datasets.preview("long")
