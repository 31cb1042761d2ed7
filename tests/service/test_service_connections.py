"""Floods of connections, senders and readers that are slow, strangers with bodies, TLS: against a real server."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_process import Service, job, serving, wait_for

from lockstep.service.access import make_token
from lockstep.service.client import Client
from lockstep.service.connections import ConnectionLimits, Connections, load_tls
from lockstep.service.settings import ServiceSettings

TOTAL, PER_ADDRESS = 60, 20
OTHER = "127.0.0.2"


class FakeConnection:
    """Only what the registry asks of one."""

    def __init__(self, registry: Connections) -> None:
        self.registry = registry
        self.closed = False

    def abort(self) -> None:
        self.closed = True
        self.registry.remove(self)  # type: ignore[arg-type]


def admit(registry: Connections, host: str) -> FakeConnection | None:
    made = FakeConnection(registry)
    return made if registry.admit(made, host) else None  # type: ignore[arg-type]


def test_who_never_asked_goes_first_and_who_is_answered_stays() -> None:
    limits = ConnectionLimits(total=4, per_address=2, header_s=1, stall_s=1, proxies=frozenset({"9.9.9.9"}))
    registry = Connections(limits)
    first, second = admit(registry, "1.1.1.1"), admit(registry, "1.1.1.1")
    assert first is not None
    assert second is not None
    registry.work(first)  # type: ignore[arg-type]
    third = admit(registry, "1.1.1.1")
    assert third is not None
    assert (first.closed, second.closed, len(registry)) == (False, True, 2)
    registry.work(third)  # type: ignore[arg-type]
    assert admit(registry, "1.1.1.1") is None, "both are being answered"
    shared = [one for one in (admit(registry, "9.9.9.9") for _ in range(5)) if one is not None]
    assert len(registry) == 4, "many may come through a proxy, but not more than in all"
    assert [one.closed for one in shared] == [True, True, True, False, False]
    registry.wait(first)  # type: ignore[arg-type]
    for expected in shared[3:]:
        newest = admit(registry, "2.2.2.2")
        assert newest is not None
        assert (expected.closed, first.closed) == (True, False), "it has asked something before"
        registry.work(newest)  # type: ignore[arg-type]
    assert admit(registry, "3.3.3.3") is not None
    assert first.closed, "the only one that waits"


def test_an_ipv6_client_has_a_whole_network() -> None:
    registry = Connections(ConnectionLimits(total=10, per_address=1, header_s=1, stall_s=1))
    one, other = admit(registry, "2001:db8::1"), admit(registry, "2001:db8:1::1")
    assert one is not None
    assert other is not None
    assert admit(registry, "2001:db8::2") is not None
    assert (one.closed, other.closed) == (True, False)
    assert admit(registry, "::ffff:1.2.3.4") is not None
    assert admit(registry, "1.2.3.4") is not None
    assert len(registry) == 3


# --- a real server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    folder = tmp_path_factory.mktemp("guarded")
    token, line = make_token("ann", "admin")
    (folder / "tokens").write_text(line)
    settings: dict[str, Any] = {"max_connections": TOTAL, "max_connections_per_address": PER_ADDRESS, "procs": 1}
    settings |= {"header_timeout_s": 2.0, "stall_timeout_s": 1.5, "token_file": folder / "tokens"}
    with serving(folder, **{key: str(value) for key, value in settings.items()}) as service:
        yield service, token


def connect(service: Service, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), timeout=30, source_address=(source, 0))


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_half_open_connections_keep_nobody_out(guarded: tuple[Service, str]) -> None:
    service, token = guarded
    with Client(service.url, token) as client:
        client.health()  # one connection that is kept
        silent = [connect(service, f"127.0.0.{10 + number % 20}") for number in range(3 * TOTAL)]
        silent += [connect(service) for _ in range(2 * PER_ADDRESS)]
        silent[-1].sendall(b"GET /api/health HTT")  # and not a byte more
        for _ in range(5):
            with Client(service.url, token) as another:
                assert another.health().status == "ok"
        open_ones = [connection for connection in silent if not is_closed(connection)]
        assert len(open_ones) <= TOTAL
        wait_for(lambda: all(is_closed(connection) for connection in open_ones), 60.0)
        assert client.health().status == "ok"


def test_headers_that_come_a_byte_at_a_time_are_cut_off(guarded: tuple[Service, str]) -> None:
    service, _ = guarded
    with connect(service) as connection:
        began = time.monotonic()
        for sign in "GET /api/health HTTP/1.1\r\n" + "x: y\r\n" * 1000:
            if is_closed(connection):
                break
            connection.sendall(sign.encode())
            time.sleep(0.1)
        assert 1.0 < time.monotonic() - began < 30


def test_a_request_being_answered_is_not_given_up_for_others(guarded: tuple[Service, str]) -> None:
    service, token = guarded
    with Client(service.url, token) as client:
        client.submit(job("hangs", "followed"))
        ask = f"GET /api/jobs/followed/logs/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
        followers = [connect(service, OTHER) for _ in range(PER_ADDRESS)]
        for follower in followers:
            follower.sendall(ask.encode())
            assert b" 200 " in follower.recv(200)
        with connect(service, OTHER) as refused:
            assert b" 503 " in refused.recv(500)
        silent = [connect(service) for _ in range(2 * TOTAL)]
        for connection in silent:
            connection.close()
        assert client.health().status == "ok", "another address has its own share"
        assert not any(_ended(follower) for follower in followers)
        for follower in followers:
            follower.close()
        client.cancel("followed")


def _ended(follower: socket.socket) -> bool:
    follower.settimeout(0.01)
    try:
        while follower.recv(4096):
            pass
    except TimeoutError:
        return False
    return True


def test_a_reader_that_does_not_read_is_cut_off(guarded: tuple[Service, str]) -> None:
    service, token = guarded
    with Client(service.url, token) as client:
        client.submit(job("quick", "long-log"))
        client.wait("long-log", timeout_s=300)
    (service.data_dir / "jobs" / "long-log" / "export" / "large.bin").write_bytes(bytes(64 << 20))
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", service.port))
        path = "/api/jobs/long-log/artifacts/export/large.bin"
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        time.sleep(4.0)
        connection.settimeout(30)
        taken = 0
        try:
            while piece := connection.recv(1 << 20):
                taken += len(piece)
        except ConnectionError:
            pass
        assert taken < 64 << 20


@pytest.mark.parametrize("path", ["/api/jobs", "/api/datasets/rows", "/v1/post-training/supervised-fine-tune", "/x"])
def test_of_a_strangers_body_not_a_byte_is_read(guarded: tuple[Service, str], path: str) -> None:
    service, _ = guarded
    with connect(service) as connection:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 900000\r\n"
        )
        connection.sendall(f"{head}Authorization: Bearer wrong\r\n\r\n".encode())
        answer = connection.recv(4000)
        assert b" 401 " in answer.split(b"\r\n")[0]
        assert b"www-authenticate: Bearer" in answer
        wait_for(lambda: is_closed(connection), 30)


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("a", "b"):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
        command += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
        subprocess.run(command, check=True, capture_output=True)
    return folder / "a.pem", folder / "a.key"


def test_what_is_wrong_with_tls_files_is_said_at_the_start(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate

    def problem(cert: Path, key: Path) -> str:
        with pytest.raises(ValueError) as caught:
            load_tls(ServiceSettings(tmp_path, tls_cert=cert, tls_key=key))
        return str(caught.value)

    assert "--tls-cert" in problem(tmp_path / "none.pem", key)
    assert "No such file" in problem(cert, tmp_path / "none.key")
    assert "Is a directory" in problem(cert, tmp_path)
    assert "not the certificate's" in problem(cert, key.with_name("b.key"))
    (tmp_path / "text").write_text("hello")
    assert "not PEM" in problem(tmp_path / "text", key)
    locked = tmp_path / "locked.key"
    encrypt = ["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:x", "-out", locked]
    subprocess.run(encrypt, check=True, capture_output=True)
    assert "passphrase" in problem(cert, locked)
    with pytest.raises(ValueError, match="belong together"):
        ServiceSettings(tmp_path, tls_cert=cert)
    with pytest.raises(ValueError, match="token file"):
        ServiceSettings(tmp_path, proxies=("127.0.0.1",))
    with pytest.raises(ValueError, match="address that the proxy connects from"):
        ServiceSettings(tmp_path, proxies=("nginx",), token_file=tmp_path / "text")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_a_service_with_tls(certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    service = Service(tmp_path / "data", tls_cert=str(cert), tls_key=str(key), header_timeout_s="2.0")
    service.url = service.url.replace("http", "https")
    try:
        service.start()
        service.wait_until_up()
        with Client(service.url) as client:
            assert client.health().status == "ok"
        assert "serving on https://127.0.0.1" in service.log()
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(cert)
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        with connect(service) as raw, pytest.raises((ssl.SSLError, ConnectionError)):
            old.wrap_socket(raw, server_hostname="localhost")
        silent, plain = connect(service), connect(service)
        plain.sendall(b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for(lambda: is_closed(silent) and is_closed(plain), 60.0)
        # The request in the same packet as the end of the handshake
        context = ssl.create_default_context(cafile=str(cert))
        for _ in range(5):
            with context.wrap_socket(connect(service), server_hostname="localhost") as secured:
                secured.sendall(b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b" 200 " in secured.recv(200)
    finally:
        service.end_everything()
