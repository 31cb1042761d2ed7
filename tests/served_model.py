"""A model behind the HTTP API, in a thread of the test's own process or as the command that a person starts."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import peft
import torch
from tiny import build_model, build_tokenizer, start_lockstep

from lockstep.inference.engine import LocalEngine
from lockstep.inference.server.app import ModelServer
from lockstep.inference.server.served import ServedModels
from lockstep.inference.server.settings import ServerSettings
from lockstep.service.connections import ConnectionLimits, GuardedServer, guarded_config

BASE = "tiny"


class ServedModel:
    """`server` is what answers at `url`."""

    def __init__(self, server: ModelServer, url: str, web: GuardedServer) -> None:
        self.server, self.url, self.web = server, url, web

    def post(self, path: str, timeout: float = 60.0, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json={"model": BASE, **body}, timeout=timeout)

    def wait_until_idle(self) -> None:
        """For as long as the test may take: rows are freed by threads."""
        while self.server.engine.num_rows:
            time.sleep(0.01)


@contextlib.contextmanager
def serve(
    model: Any = None,
    tokenizer: Any = None,
    adapters: Mapping[str, Path] | None = None,
    batch_size: int = 4,
    header_s: float = 10.0,
    **settings: Any,
) -> Iterator[ServedModel]:
    engine = LocalEngine(model or build_model().double(), tokenizer or build_tokenizer(), batch_size)
    models = ServedModels(engine, BASE)
    for name, folder in (adapters or {}).items():
        models.add_adapter(name, folder)
    server = ModelServer(models, ServerSettings(**settings))
    limits = ConnectionLimits(total=64, per_address=64, header_s=header_s, stall_s=10.0)
    web = GuardedServer(guarded_config(server.app(), "127.0.0.1", 0, limits), "", server.drain)
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    try:
        while not web.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = web.servers[0].sockets[0].getsockname()[1]
        yield ServedModel(server, f"http://127.0.0.1:{port}", web)
    finally:
        web.should_exit = True
        thread.join()


def write_adapter(folder: Path, seed: int, **settings: Any) -> Path:
    """A LoRA adapter of the tiny model with random weights, as PEFT writes it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False, **{"r": 4, **settings}
        )
        peft.get_peft_model(build_model(), config).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def serve_command(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(`lockstep chat --serve` in a process of its own, its address)."""
    process = start_lockstep("chat", *arguments, "--serve", "0")
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"serving on (http://\S+)", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()  # so that the pipe never fills
                yield process, found[1]
                return
        raise AssertionError("the command ended: " + "".join(said))
    finally:
        process.kill()
        process.wait()
