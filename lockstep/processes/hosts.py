"""Workers on other machines, without Ray: a host process there connects to us, and a worker starts in its place.

The launcher starts the hosts (`python -m lockstep.processes.hosts FILE`) and gives them and us the same secret; where
we listen is in the file, which they must see. Both sides prove that they know the secret before anything else is read.
What follows is as open as the traffic of collectives: the network of the cluster is trusted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue

from lockstep.processes.connected import ConnectedWorker
from lockstep.processes.frames import FrameError, pack, read_frame, receive_into, send_all
from lockstep.processes.local import kill_session, start_child
from lockstep.processes.stop_notice import StopNotice
from lockstep.processes.tree import describe_exit
from lockstep.processes.worker import WorkerTimedOut
from lockstep.rundir import open_log, write_atomically

SECRET_VARIABLE = "LOCKSTEP_HOSTS_SECRET"
HOSTS_FILE = "engine-hosts.json"  # in the run directory: where rank 0 waits for hosts of engines
_PROOF_BYTES = 32
_HANDSHAKE_S = 10.0
_MAX_HANDSHAKES = 64  # at once: more are turned away
_LOOK_S = 0.2
_RETRY_S = 0.5
# A machine that is gone without a word is noticed after 10 + 3 * 5 s.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000, "TCP_NODELAY": 1}
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR if hasattr(select, "POLLRDHUP") else select.POLLHUP


# --- the owner of the workers ----------------------------------------------------------------------------------------


class HostListener:
    """Gives workers on the hosts that have connected. `address` is what other machines call this one."""

    def __init__(self, secret: str, address: str, file: Path) -> None:
        self._secret, self._file = secret.encode(), file
        self._server = _listen(address)
        self._address = f"{address}:{self._server.getsockname()[1]}"
        self._idle: SimpleQueue[socket.socket] = SimpleQueue()
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._is_closed = False
        write_atomically(file, json.dumps({"address": address, "port": self._server.getsockname()[1]}))
        threading.Thread(target=self._accept, name="hosts", daemon=True).start()

    def spawn(
        self,
        name: str,
        entry: str,
        settings: Mapping[str, object],
        *,
        log_path: Path | None = None,
        start_timeout_s: float = 60.0,
    ) -> ConnectedWorker:
        """As LocalWorker.spawn, on the first host that has no worker; the log is written there."""
        deadline = time.monotonic() + start_timeout_s
        preface = pack({"name": name, "log": None if log_path is None else str(log_path)})
        while True:
            try:
                connection = self._idle.get(timeout=max(deadline - time.monotonic(), 0.0))
            except Empty:
                raise WorkerTimedOut(
                    name,
                    f"{name} did not start within {start_timeout_s:g} s: no process on the nodes for it has connected "
                    f"to {self._address}; what they print is in logs/launcher.log",
                ) from None
            process = _HostedProcess(connection)
            try:
                if process.has_ended():
                    raise ConnectionError
                send_all(connection, preface)
            except OSError:  # that host is gone; another one may come
                connection.close()
                continue
            worker = ConnectedWorker(name, process, connection, log_path)
            worker.start(entry, settings, max(deadline - time.monotonic(), 0.1))
            return worker

    def close(self) -> None:
        """Hosts without a worker are let go; workers are ended by who has them."""
        self._is_closed = True
        self._file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with contextlib.suppress(Empty):
            while True:
                self._idle.get_nowait().close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(connection,), name="host", daemon=True).start()
            else:
                connection.close()

    def _greet(self, connection: socket.socket) -> None:
        try:
            prepare(connection)
            connection.settimeout(_HANDSHAKE_S)
            theirs, ours = _receive(connection), secrets.token_bytes(_PROOF_BYTES)
            connection.sendall(ours + _prove(self._secret, b"owner", theirs, ours))
            if not hmac.compare_digest(_receive(connection), _prove(self._secret, b"host", theirs, ours)):
                raise ConnectionError("the host does not know the secret")
            connection.settimeout(None)
            self._idle.put(connection)
        except (OSError, EOFError):
            connection.close()
        finally:
            self._handshakes.release()


class _HostedProcess:
    """What can be seen of it is the connection: its host closes that when the process has ended, and ends the process
    when we close it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._host = _peer_name(connection)

    def has_ended(self) -> bool:
        return is_closed(self._connection)

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.05)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def describe_end(self, name: str) -> tuple[str, int | None]:
        return f"{name} on {self._host} has ended, or is out of reach", None


def _listen(address: str) -> socket.socket:
    """On that address alone, where it is one of this machine's own."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((address, 0), family=family, backlog=_MAX_HANDSHAKES)
    except OSError:
        return socket.create_server(("", 0), family=family, backlog=_MAX_HANDSHAKES)


# --- both ------------------------------------------------------------------------------------------------------------


def prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_closed(connection: socket.socket, timeout_s: float = 0.0, wake_on: int = 0) -> bool:
    """Whether the other side has closed it; nothing is read. Waits for so long, or for what `wake_on` says."""
    if connection.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(connection, _GONE | wake_on)
    return any(event & _GONE for _, event in poll.poll(timeout_s * 1000))


def _prove(secret: bytes, side: bytes, theirs: bytes, ours: bytes) -> bytes:
    return hmac.digest(secret, side + theirs + ours, "sha256")


def _receive(connection: socket.socket) -> bytes:
    data = bytearray(_PROOF_BYTES)
    receive_into(connection, memoryview(data))
    return bytes(data)


def _peer_name(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "its node"


# --- the host --------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Until a signal says that the turn of the job is over. A worker is not disturbed by that: its owner ends it."""
    (file,) = sys.argv[1:] if arguments is None else arguments
    secret = os.environ.pop(SECRET_VARIABLE).encode()  # not for workers
    with StopNotice.listening() as notice:
        said = ""
        while True:
            try:
                connection = _connect(Path(file), secret)
            except (OSError, EOFError, ValueError) as error:
                reason = "nobody listens yet" if isinstance(error, FileNotFoundError) else str(error)
                if reason != said:
                    said = reason
                    print(f"waiting for work: {said}", flush=True)
                if notice.asked():
                    return 0
                time.sleep(_RETRY_S)
                continue
            with connection:
                _serve(connection, notice)
            if notice.asked():
                return 0


def _connect(file: Path, secret: bytes) -> socket.socket:
    where = json.loads(file.read_text())
    connection = socket.create_connection((where["address"], where["port"]), timeout=_HANDSHAKE_S)
    try:
        prepare(connection)
        ours = secrets.token_bytes(_PROOF_BYTES)
        connection.sendall(ours)
        theirs, proof = _receive(connection), _receive(connection)
        if not hmac.compare_digest(proof, _prove(secret, b"owner", ours, theirs)):
            raise ConnectionError(f"who listens at {where['address']}:{where['port']} does not know the secret")
        connection.sendall(_prove(secret, b"host", ours, theirs))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _serve(connection: socket.socket, notice: StopNotice) -> None:
    """One worker, from its start to its end; nothing where the owner or this host is to end before."""
    while not is_closed(connection, _LOOK_S, select.POLLIN):
        if notice.asked():
            return
        if select.select([connection], [], [], 0)[0]:
            break
    try:
        connection.settimeout(_HANDSHAKE_S)
        header = read_frame(lambda buffer: receive_into(connection, buffer)).header
        connection.settimeout(None)  # also for the worker, which shares it
        log_path = None if header["log"] is None else Path(header["log"])
        worker = start_child(str(header["name"]), connection, {}, log_path)
    except (EOFError, FrameError, LookupError, OSError) as error:
        if not isinstance(error, EOFError):
            print(f"no worker could be started: {error!r}", flush=True)
        return
    print(f"{header['name']} is process {worker.pid} on {socket.gethostname()}", flush=True)
    while worker.poll() is None and not is_closed(connection, _LOOK_S):
        pass
    with contextlib.suppress(OSError):  # also where a process that the worker has started holds it open
        connection.shutdown(socket.SHUT_RDWR)
    _end(worker, str(header["name"]), log_path)


def _end(worker: subprocess.Popen[bytes], name: str, log_path: Path | None) -> None:
    """Also one that is stopped, or does not see that its owner is gone."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(1.0)
    kill_session(worker)
    if worker.returncode and log_path is not None:
        with contextlib.suppress(OSError), open_log(log_path) as log:
            log.write(f"{describe_exit(name, worker.returncode)}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
