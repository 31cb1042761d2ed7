"""The command that a person starts: official clients, crowds that are killed, signals."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served_model import serve_command, write_adapter
from tiny import run_lockstep, write_model

pytestmark = pytest.mark.slow
TURNS: Any = [{"role": "user", "content": "red blue"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("served")
    return write_model(root / "parrot"), write_adapter(root / "poet", 1)


def test_the_official_client_streams_what_generate_writes(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, adapter = folders
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": TURNS}))
    with serve_command(model, "--adapter", f"poet={adapter}") as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for name, source in (("parrot", model), ("poet", tmp_path / "poet")):
            if name == "poet":  # generate finds the base model of an adapter by the path that it names
                source.mkdir()
                for file in adapter.iterdir():
                    text = file.read_bytes()
                    if file.name == "adapter_config.json":
                        text = json.dumps(json.loads(text) | {"base_model_name_or_path": str(model)}).encode()
                    (source / file.name).write_bytes(text)
            code, out, err = run_lockstep("generate", source, "--prompts", prompts, "--max-tokens", "24")
            assert code == 0, err
            pieces = client.chat.completions.create(
                model=name, messages=TURNS, max_tokens=24, temperature=0, stream=True
            )
            assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == json.loads(out)["completion"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (130, -signal.SIGINT)


def test_a_crowd_whose_members_are_killed_leaves_nothing_behind(folders: tuple[Path, Path]) -> None:
    """Of 100 at a time, a third leaves in the middle. Twice as many rounds take no more memory, files or threads."""
    model, adapter = folders
    with serve_command(model, "--adapter", f"poet={adapter}", "--batch", "8") as (process, url):
        for _ in range(2):
            crowd(url, seed=0)
        before = resources(process.pid)
        for seed in range(4):
            crowd(url, seed=seed)
        wait_for_rows(url)
        after = resources(process.pid)
        assert after["files"] <= before["files"]
        assert after["threads"] <= before["threads"]
        assert after["bytes"] < before["bytes"] + (64 << 20)
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        process.terminate()
        assert process.wait(60) in (143, -signal.SIGTERM)


def crowd(url: str, seed: int) -> None:
    draw = random.Random(seed)
    plans = [
        (number, draw.choice(["whole", "stream", "leave"]), draw.choice(["parrot", "poet"])) for number in range(100)
    ]
    with ThreadPoolExecutor(100) as pool:
        results = list(pool.map(lambda plan: visit(url, *plan), plans))
    assert {status for status in results if status} == {200}
    wait_for_rows(url)


def visit(url: str, number: int, way: str, model: str) -> int | None:
    """The status; None of one who left on purpose."""
    body = {
        "model": model,
        "messages": TURNS,
        "max_tokens": 40,
        "temperature": number % 3 / 2,
        "stream": way != "whole",
    }
    address = f"{url}/v1/chat/completions"
    try:
        with httpx.stream("POST", address, json=body, timeout=0.3 if way == "leave" else 600) as answer:
            for count, line in enumerate(answer.iter_lines()):
                if way == "leave" and count == number % 5:
                    return None
                assert "error" not in line, line
            return answer.status_code
    except httpx.TimeoutException:
        assert way == "leave"
        return None


def wait_for_rows(url: str) -> None:
    while httpx.get(f"{url}/health").json()["rows"]["in_use_or_waiting"]:
        time.sleep(0.05)


def resources(pid: int) -> dict[str, int]:
    """When idle connections are closed."""
    time.sleep(1.0)
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return {"files": files, "threads": int(status["Threads"]), "bytes": int(status["VmRSS"].split()[0]) << 10}


def test_a_signal_cuts_streams_with_a_word_about_it(folders: tuple[Path, Path]) -> None:
    with serve_command(folders[0]) as (process, url):
        body = {"model": "parrot", "prompt": "a", "max_tokens": 480, "stream": True, "n": 16, "temperature": 1}
        lines: list[str] = []

        def listen() -> None:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                lines.extend(line for line in answer.iter_lines() if line)

        listener = threading.Thread(target=listen)
        listener.start()
        while not lines and not httpx.get(f"{url}/health").json()["rows"]["in_use_or_waiting"]:
            time.sleep(0.01)
        process.terminate()
        listener.join()
        assert process.wait(60) in (143, -signal.SIGTERM)
        assert lines[-1] == "data: [DONE]" or "shutting_down" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--serve", "eight"), "give a port"),
        (("--serve", "0.0.0.0:8000"), "lets other machines in"),
        (("--serve", "0", "--adapter", "poet"), "as poet=runs/poet"),
        (("--serve", "0", "--adapter", "poet=nowhere"), "there is no folder nowhere"),
        (("--serve", "0", "--api-key-file", "nowhere"), "cannot be read"),
        (("--serve", "0", "--system", "hello"), "does not go with --serve"),
        (("--adapter", "a=b"), "--adapter goes with --serve"),
    ],
)
def test_options_that_cannot_be_are_said_at_once(
    folders: tuple[Path, Path], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run_lockstep("chat", folders[0], *arguments)
    assert (code, out) == (2, "")
    assert message in err
