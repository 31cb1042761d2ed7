"""A real HTTP server that speaks as OpenAI-compatible ones do, and fails as its script says."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar


class ScriptedServer(ThreadingHTTPServer):
    """Answers a prompt with itself in capitals. What is in `script` comes first: (status, headers, body) or "hang"."""

    daemon_threads = True
    request_queue_size = 64  # clients come in crowds

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Any] = []
        self.models = ["scripted"]
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.finish_reason = "stop"
        self.release = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def get(self, path: str) -> tuple[int, Any]:
        return 200, {"data": [{"id": name} for name in self.models]}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        reason = self.finish_reason
        if "messages" in body:
            text = body["messages"][-1]["content"].upper()
            return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}
        return 200, {"choices": [{"text": body["prompt"].upper(), "finish_reason": reason}]}


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        status, reply = self.server.get(self.path)
        self._reply(reply, status)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, body))
            self.server.keys.append(self.headers.get("Authorization"))
            scripted = self.server.script.pop(0) if self.server.script else None
        if scripted == "hang":  # a patient client would get its answer
            self.server.release.wait(3)
            scripted = None
        if scripted == "cut":  # promises more than it sends
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            return
        if scripted == "drip":  # a byte now and then, so that the line is never silent for long
            self._drip(b'{"choices": [{"text": "late"}]}')
            return
        if scripted is not None:
            self._reply(scripted[2], scripted[0], scripted[1])
            return
        status, reply = self.server.post(self.path, body)
        self._reply(reply, status)

    def _reply(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        with contextlib.suppress(ConnectionError):  # the client did not wait
            self._send(body, status, headers)

    def _send(self, body: Any, status: int, headers: dict[str, str] | None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _drip(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for position in range(len(data)):
                self.wfile.write(data[position : position + 1])
                if self.server.release.wait(0.1):
                    return

    def log_message(self, *arguments: Any) -> None:
        pass


Server = TypeVar("Server", bound=ScriptedServer)


@contextlib.contextmanager
def scripted_server(make: Callable[[], Server] = ScriptedServer) -> Iterator[Server]:  # type: ignore[assignment]
    scripted = make()
    thread = threading.Thread(target=scripted.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield scripted
    finally:
        scripted.release.set()
        scripted.shutdown()
        scripted.server_close()
        thread.join(5)
