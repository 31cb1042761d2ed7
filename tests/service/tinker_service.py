"""A service with the Tinker API for tests: uvicorn in a thread, a scripted base model, and its client."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import tinker
from service_process import free_port, wait_for
from tinker.proto.request_conv import forward_backward_request_to_proto

from lockstep.service.app import create_app
from lockstep.service.connections import make_server
from lockstep.service.settings import ServiceSettings
from lockstep.service.tinker.settings import TinkerModel, TinkerSettings

MODEL = "tiny/model"
KEY = "tml-anything"
PROTOBUF = "application/x-protobuf"


class TinkerService:
    """`other` is a second base model, in a process of its own."""

    def __init__(self, folder: Path, *, token_file: Path | None = None, **settings: Any) -> None:
        self.model, self.other = folder / "model", folder / "other"
        for path in (self.model, self.other):
            path.mkdir(parents=True, exist_ok=True)
        served = (TinkerModel(MODEL, str(self.model)), TinkerModel("other", str(self.other)))
        self.data_dir, self.port = folder / "data", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        api = TinkerSettings(served, "cpu", **{"entry": "tinker_worker:start", **settings})
        self._settings = ServiceSettings(self.data_dir, port=self.port, procs=1, token_file=token_file, tinker=api)
        self._clients: list[tinker.ServiceClient] = []

    def start(self) -> None:
        self._server = make_server(create_app(self._settings), self._settings)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_for(lambda: self._server.started, 60)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def client(self, key: str = KEY) -> tinker.ServiceClient:
        made = tinker.ServiceClient(base_url=self.url, api_key=key)
        self._clients.append(made)
        return made

    def post(self, path: str, body: Any = None, key: str = KEY, **options: Any) -> httpx.Response:
        headers = {"X-API-Key": key, **options.pop("headers", {})}
        sent = options if "content" in options else {"json": {} if body is None else body}
        return httpx.post(f"{self.url}/api/v1/{path}", headers=headers, timeout=60, **sent)

    def get(self, path: str, key: str = KEY) -> httpx.Response:
        return httpx.get(f"{self.url}/api/v1/{path}", headers={"X-API-Key": key})

    def fetch(self, request_id: str) -> Any:
        return self.post("retrieve_future", {"request_id": request_id}).json()

    def open_session(self, key: str = KEY) -> str:
        return self.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"}, key).json()[
            "session_id"
        ]

    def open_model(self, session: str, number: int = 0, *, base: str = MODEL, key: str = KEY, **lora: Any) -> str:
        """Over plain HTTP, when it has been created."""
        body = {"session_id": session, "model_seq_id": number, "base_model": base, "lora_config": {"rank": 2, **lora}}
        answer = self.post("create_model", body, key).json()
        assert "request_id" in answer, answer
        made = self.post("retrieve_future", {"request_id": answer["request_id"]}, key).json()
        assert made.get("model_id"), made
        return made["model_id"]

    def send_pass(
        self, model: str, number: int, *data: tinker.Datum, loss: str = "cross_entropy", **options: Any
    ) -> Any:
        """forward_backward as the client writes it, with any number."""
        inner = tinker.types.ForwardBackwardInput(data=list(data) or [datum(1, 2)], loss_fn=loss)
        request = tinker.types.ForwardBackwardRequest(forward_backward_input=inner, model_id=model, seq_id=number)
        content = forward_backward_request_to_proto(request).SerializeToString()
        return self.post("forward_backward", content=content, headers={"Content-Type": PROTOBUF}, **options)

    def step(self, model: str, number: int, **params: Any) -> httpx.Response:
        return self.post("optim_step", {"model_id": model, "seq_id": number, "adam_params": params})

    def journal(self, *methods: str) -> list[dict[str, Any]]:
        file = self.model / "journal.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in map(json.loads, lines) if line["method"] in methods]

    def close_clients(self) -> None:
        for client in self._clients:
            with contextlib.suppress(RuntimeError, tinker.TinkerError):  # closed, or refused
                client.holder.close()


@contextlib.contextmanager
def tinker_service(folder: Path, **settings: Any) -> Iterator[TinkerService]:
    service = TinkerService(folder, **settings)
    service.start()
    try:
        yield service
    finally:
        service.close_clients()
        service.stop()


def datum(*tokens: int, **inputs: Any) -> tinker.Datum:
    """Its targets are the tokens that follow."""
    inputs.setdefault("target_tokens", [*tokens[1:], 0])
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)
