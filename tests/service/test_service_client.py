"""The client against a service that breaks off, answers wrongly, or is not one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.service import client as client_module
from lockstep.service.client import Client, ServiceFault

Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_RECONNECT_S", 0.0)


def client(answer: Answer, **options: float) -> Client:
    return Client("http://service", "secret", transport=httpx.MockTransport(answer), **options)


class Breaks(httpx.SyncByteStream):
    """A body whose connection is lost after some bytes."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        yield self._body
        raise httpx.ReadError("connection lost")


def test_a_download_goes_on_where_it_broke(tmp_path: Path) -> None:
    asked: list[tuple[str | None, str | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.headers.get("range"), request.headers.get("if-range")))
        if len(asked) == 1:
            return httpx.Response(200, headers={"etag": '"one"'}, stream=Breaks(b"0123"))
        return httpx.Response(206, headers={"etag": '"one"'}, content=b"456789")

    assert client(answer).download("job", "export/x.bin", tmp_path / "deep" / "x.bin").read_bytes() == b"0123456789"
    assert asked == [(None, None), ("bytes=4-", '"one"')]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.bin"]


def test_a_file_that_changed_meanwhile_is_fetched_anew(tmp_path: Path) -> None:
    answers = [httpx.Response(200, stream=Breaks(b"old")), httpx.Response(200, content=b"new and longer")]
    assert client(lambda _: answers.pop(0)).download("job", "x", tmp_path / "x").read_bytes() == b"new and longer"


def test_a_download_that_fails_leaves_nothing(tmp_path: Path) -> None:
    error = {"error": {"code": "not_found", "message": "the job has no such artifact"}}
    with pytest.raises(ServiceFault, match="no such artifact") as caught:
        client(lambda _: httpx.Response(404, json=error)).download("job", "x", tmp_path / "x")
    assert (caught.value.status, caught.value.code) == (404, "not_found")
    with pytest.raises(ServiceFault, match="cannot reach the service"):
        client(lambda _: httpx.Response(200, stream=Breaks(b"")), patience_s=0.0).download("job", "x", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_follower_misses_nothing_when_the_connection_breaks() -> None:
    resumed_from: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        resumed_from.append(request.headers.get("last-event-id"))
        if len(resumed_from) == 1:
            return httpx.Response(200, stream=Breaks(b': hello\n\nid: 4\ndata: {"step": 1}\n\nid: 8\ndata: {"st'))
        if len(resumed_from) == 2:
            return httpx.Response(200, content=b'id: 8\ndata: {"step": 2}\n\n')  # ends without saying so
        return httpx.Response(200, content=b'id: 12\ndata: {"step": 3}\n\nevent: end\ndata: {"state": "completed"}\n\n')

    assert [record["step"] for record in client(answer).metrics("job", follow=True)] == [1, 2, 3]
    assert resumed_from == [None, "4", "8"]


def test_a_follower_gives_up_on_a_service_that_stays_away() -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ServiceFault, match="cannot reach the service at http://service"):
        list(client(away, patience_s=0.05).logs("job", follow=True))
    with pytest.raises(ServiceFault, match="start it with lockstep serve"):
        client(away).health()


def test_what_is_not_a_service_is_said_to_be_none() -> None:
    with pytest.raises(ServiceFault, match="is it a Lockstep service"):
        client(lambda _: httpx.Response(502, text="<html>bad gateway</html>")).jobs()


def test_the_token_goes_into_the_header_and_nowhere_else() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(401, json={"error": {"code": "unauthorised", "message": "this service wants a token"}})

    with pytest.raises(ServiceFault) as caught:
        client(answer).upload("rows", [{"prompt": "a"}, {"prompt": "b"}])
    assert seen[0].headers["authorization"] == "Bearer secret"
    assert seen[0].read() == b'{"prompt": "a"}\n{"prompt": "b"}\n'
    assert "secret" not in f"{seen[0].url}{caught.value}"


@pytest.mark.parametrize(
    ("options", "log", "err", "code"),
    [
        ([], "step 1\n", "one failed: the disk is full\n", 0),
        ([], "Traceback\nerror: rank 0: the disk is full\n", "", 0),
        (["-f"], "step 1\n", "one failed: the disk is full\n", 1),
        (["-f"], "Traceback\nerror: rank 0: the disk is full\n", "one failed\n", 1),
    ],
)
def test_why_a_job_failed_is_said_below_its_log_and_once(
    options: list[str], log: str, err: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = SimpleNamespace(id="one", state="failed", reason="the disk is full\nTraceback")
    monkeypatch.setattr(Client, "logs", lambda *_, **__: iter([log]))
    monkeypatch.setattr(Client, "job", lambda *_: failed)
    result = CliRunner().invoke(app, ["logs", "one", *options, "--server", "http://service"])
    assert (result.stdout, result.stderr, result.exit_code) == (log, err, code)
