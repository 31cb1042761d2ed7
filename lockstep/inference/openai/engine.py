"""A server of models as the engine of a run in training: weights are published to it over a folder, answers come back
as tokens with their log-probs.

The same two calls as a pool of engines. An answer is only taken from weights that the server has acknowledged.
Must not know training, nor how weights are written.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.inference.openai.http import Connection, EndpointError, EndpointRefusal, ask_all, normalise_url
from lockstep.inference.openai.servers import SERVERS, Published, Server
from lockstep.types import Prompt, SamplingParams, TextCompletion

Write = Callable[[Mapping[str, Any], Path], None]


class RolloutEndpoint:
    """`write` makes a folder that the server can read out of tensors by their names; `folder` is where, on a disk that
    both see. While weights change nobody samples, so every answer is of one version from its first token to its last.
    """

    def __init__(
        self,
        server: Server,
        write: Write,
        folder: Path,
        *,
        num_at_once: int = 64,
        drain_timeout_s: float = 600.0,
    ) -> None:
        self._server, self._write, self._folder = server, write, folder
        self._num_at_once = num_at_once
        self._turns = _Turns(drain_timeout_s)
        self._serving: Published | None = None
        self.check()

    @property
    def version(self) -> int | None:
        """Of the weights that the server has acknowledged."""
        return None if self._serving is None else self._serving.version

    @property
    def num_serving(self) -> int:
        return int(self._serving is not None)

    def check(self) -> None:
        """Whether it is there and well; raises if not."""
        self._server.connection.tell("/health", origin="whether it is well")

    def publish(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Returns once the server serves these weights. What fails is sent once more; then it raises, and nothing is
        sampled until a publication succeeds."""
        published = self._write_version(version, tensors)
        with self._turns.changing():
            before, self._serving = self._serving, None
            if before is None or before.name != published.name:
                self._load(published)
            self._serving = published
        if before is not None and before.name != published.name:
            self._server.unload(before)
        for other in set(self._folder.glob("lockstep-*")) - {self._folder / published.name}:
            shutil.rmtree(other, ignore_errors=True)

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int],
        *,
        versions: tuple[int, int],
        begun: Any = None,
        on_progress: Any = None,
    ) -> list[list[TextCompletion]]:
        """From any thread. Nothing is reported on the way: an answer that was `begun` is begun anew."""
        del begun, on_progress
        assert len(keys) == len(prompts), "each prompt needs a key"
        with self._turns.sampling():
            published = self._serving
            if published is None or not versions[0] <= published.version <= versions[1]:
                raise EndpointError(
                    f"{self._server.connection.root} serves version {self.version}, and {versions[0]} to {versions[1]} "
                    "are asked for"
                )

            def ask(place: int) -> list[TextCompletion]:
                seeds = draw_seeds(params, keys[place])
                return self._server.answer(prompts[place], params, seeds, published, f"the prompt of key {keys[place]}")

            found = dict(ask_all(ask, range(len(prompts)), self._num_at_once))
            self._server.confirm(published)
        return [found[place] for place in range(len(prompts))]

    def close(self) -> None:
        """The server goes on: it is not ours. What was published last stays on disk for it."""

    def _load(self, published: Published) -> None:
        try:
            self._server.load(published)
        except (EndpointError, EndpointRefusal):
            self._server.load(published)

    def _write_version(self, version: int, tensors: Mapping[str, Any]) -> Published:
        writing = self._folder / f"writing-{version}"
        shutil.rmtree(writing, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write(tensors, writing)
        name = f"lockstep-{version}-{_digest(writing)[:16]}"
        # Absolute, and never written to again: a server may read it whenever it likes.
        folder = (self._folder / name).absolute()
        if folder.exists():
            shutil.rmtree(writing)
        else:
            writing.rename(folder)
        return Published(version, name, folder)


def connect(
    url: str,
    kind: str,
    write: Write,
    folder: Path,
    *,
    adapters: bool,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    num_tries: int = 3,
    num_at_once: int = 64,
    sleep: Callable[[float], None] = time.sleep,
) -> RolloutEndpoint:
    """The server at `url`, of `kind` vllm or sglang. `adapters`: LoRA adapters are published, not whole models."""
    root = normalise_url(url).removesuffix("/v1")
    connection = Connection(root, api_key=api_key, timeout_s=timeout_s, num_tries=num_tries, sleep=sleep)
    options = {"model": model} if kind == "vllm" else {}
    server: Server = SERVERS[kind](connection, adapters=adapters, **options)
    return RolloutEndpoint(server, write, folder, num_at_once=num_at_once, drain_timeout_s=timeout_s)


def draw_seeds(params: SamplingParams, key: int) -> list[int]:
    """Consecutive, from a beginning that follows from the run's seed and the prompt's key. Positive int64."""
    text = f"{params.seed or 0} {key}".encode()
    first = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2
    return [first + number for number in range(params.num_samples)]


class _Turns:
    """Many may sample together; who changes the weights waits for them, and new ones wait for it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._num_sampling, self._is_changing = 0, False

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        with self._condition:
            self._wait(lambda: not self._is_changing, "weights to be published")
            self._num_sampling += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_sampling -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        with self._condition:
            self._wait(lambda: not self._is_changing, "weights to be published")
            self._is_changing = True
        try:
            with self._condition:
                self._wait(lambda: not self._num_sampling, "answers under way to end")
            yield
        finally:
            with self._condition:
                self._is_changing = False
                self._condition.notify_all()

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        if not self._condition.wait_for(until, self._timeout_s):
            raise EndpointError(f"waited {self._timeout_s:g} s in vain for {what}")


def _digest(folder: Path) -> str:
    """SHA-256 over all files and their names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(folder)).encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
