"""Images by address: from a real server, in bounded time and size, and from nowhere that others cannot reach."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lockstep.data import images
from lockstep.data.formats.image_parts import ImageSource
from lockstep.data.images import ImageReader, fetch
from lockstep.data.sources.rows import DataError, SourceFile

CONTENT = b"bytes of a picture"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        with contextlib.suppress(OSError):  # who asked has left
            getattr(self, f"send_{self.path.partition('?')[0].strip('/').replace('-', '_')}")()

    def _start(self, code: int, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def send_picture(self) -> None:
        self._start(200, Content_Length=str(len(CONTENT)))
        self.wfile.write(CONTENT)

    def send_redirect(self) -> None:
        self._start(302, Location="/picture")

    def send_loop(self) -> None:
        self._start(302, Location="/loop")

    def send_file(self) -> None:
        self._start(302, Location="file:///etc/passwd")

    def send_ftp(self) -> None:
        self._start(302, Location="ftp://127.0.0.1/picture")

    def send_elsewhere(self) -> None:
        self._start(302, Location=f"http://127.0.0.2:{self.server.server_address[1]}/picture")

    def send_huge(self) -> None:
        self._start(200, Content_Length=str(2**40))

    def send_endless(self) -> None:
        self._start(200)
        while True:
            self.wfile.write(bytes(2**20))

    def send_drip(self) -> None:
        self._start(200)
        while True:
            self.wfile.write(b"x")
            time.sleep(0.02)

    def send_slow_headers(self) -> None:
        while True:
            self.wfile.write(b"H")
            time.sleep(0.02)

    def send_missing(self) -> None:
        self._start(404)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def read(address: str, fetches: Any) -> bytes:
    reader = ImageReader(processor=None, fetches=fetches)  # type: ignore[arg-type]
    return reader.read(
        ImageSource(address), SourceFile("rows.jsonl", Path("rows.jsonl"), "json"), "rows.jsonl:3: image 1"
    )[1]


@pytest.mark.parametrize("path", ["picture", "redirect"])
def test_a_picture_is_fetched_where_that_is_allowed(url: str, path: str) -> None:
    assert read(f"{url}/{path}", "private") == CONTENT


@pytest.mark.parametrize(
    ("path", "fetches", "words"),
    [
        ("picture", False, "is an address, and images are not fetched: download it, or set data.image_urls to true"),
        ("picture", True, r"127\.0\.0\.1 is an address of this machine or its network: .* set data.image_urls to priv"),
        ("missing", "private", "could not be fetched .*Not Found"),
        ("loop", "private", "could not be fetched .*infinite loop"),
        ("file", "private", "could not be fetched .*not allowed"),
        ("ftp", "private", "could not be fetched .*unknown url type: ftp"),
        ("huge", "private", "larger than 64 MiB: make it smaller"),
        ("endless", "private", "larger than 64 MiB: make it smaller"),
    ],
)
def test_what_is_not_fetched_is_said_with_its_row(url: str, path: str, fetches: Any, words: str) -> None:
    with pytest.raises(DataError, match=rf"^rows.jsonl:3: image 1: .*{words}"):
        read(f"{url}/{path}", fetches)


@pytest.mark.parametrize("path", ["drip", "slow-headers"])
def test_a_server_that_sends_a_byte_now_and_then_is_left_in_time(url: str, path: str) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"not done after 0.3 s"):
        fetch(f"{url}/{path}", private=True, timeout_s=0.3)
    assert time.monotonic() - started < 20


def test_a_redirect_is_checked_like_the_first_address(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def refuse(address: str) -> None:
        checked.append(address)
        if address == "127.0.0.2":
            raise ValueError("private")

    monkeypatch.setattr(images, "refuse_private", refuse)
    with pytest.raises(ValueError, match="private"):
        fetch(f"{url}/elsewhere", private=False)
    assert checked == ["127.0.0.1", "127.0.0.2"]


def test_a_name_is_looked_up_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could lead elsewhere between the check and the connection."""
    honest, asked = images.socket.getaddrinfo, []

    def look_up(host: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(host)
        return honest("127.0.0.1" if host == "pictures.example" else host, *arguments, **options)

    monkeypatch.setattr(images.socket, "getaddrinfo", look_up)
    assert fetch(url.replace("127.0.0.1", "pictures.example") + "/picture", private=True) == CONTENT
    assert asked.count("pictures.example") == 1


PRIVATE = (
    "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 "
    "::1 :: fe80::1%eth0 fc00::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 2002:7f00:1:: 64:ff9b::7f00:1"
)


@pytest.mark.parametrize("address", PRIVATE.split())
def test_private_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="of this machine or its network"):
        images.refuse_private(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_ones_are_not(address: str) -> None:
    images.refuse_private(address)
