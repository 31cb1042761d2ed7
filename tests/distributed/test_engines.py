"""Engines as processes: killed, stopped, and given spoiled weights while they work. Every answer is still right.

What is stopped for good is found by the pool's own clock; tests wait for the event, never for a time.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import build_model, build_tokenizer, write_model

from lockstep.config import LoraConfig
from lockstep.inference.engine import LocalEngine
from lockstep.model.lora import add_lora
from lockstep.processes.local import LocalWorker
from lockstep.processes.worker import Worker
from lockstep.rollouts.engines import supervision
from lockstep.rollouts.engines.pool import EnginePool, EnginesLost
from lockstep.rollouts.engines.publishing import Publication
from lockstep.rollouts.engines.worker import ENTRY
from lockstep.types import SamplingParams, TextCompletion

PATIENCE_S = 120.0  # against hanging only
PROMPTS = [[10, 20, 30], [11], [12, 13], [9, 8, 7, 6], [15, 12], [40, 41]]
KEYS = list(range(len(PROMPTS)))
SHORT = SamplingParams(max_tokens=20, temperature=1.0, seed=3, num_samples=2, logprobs=True)
LONG = SamplingParams(max_tokens=250, temperature=1.0, seed=4, num_samples=3, logprobs=True)


class Crew:
    """A pool of processes, and what happened to it."""

    def __init__(self, folder: Path, num_engines: int, *, entry: str = ENTRY, lora: Any = None, **options: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.pids: set[int] = set()
        self.version = -1
        self._folder, self._entry = folder, entry
        self._settings: dict[str, Any] = {
            "model": {"path": str(folder / "model")},
            "lora": lora,
            "precision": "fp32",
            "device": "cpu",
            "batch_size": 8,
            "chat_template": "auto",
        }
        settings: dict[str, Any] = {"check_interval_s": 0.5, "deadline_s": 2.0, "start_timeout_s": PATIENCE_S}
        settings |= {"max_replacements": 10, "keeps_partials": False, "on_event": self.note, **options}
        self.pool = EnginePool(self.spawn, num_engines, **settings)

    def note(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def spawn(self, name: str) -> Worker:
        env, log = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, self._folder / f"{name}.log"
        worker = LocalWorker.spawn(name, self._entry, self._settings, env=env, log_path=log)
        self.pids.add(worker.pid)
        return worker

    def publish(self, seed: int) -> None:
        """Other weights under the next version. Events come on a thread of their own: waits for this one."""
        self.version += 1
        self.pool.publish(self.version, build_model(seed=seed).state_dict())
        self.wait_until(lambda: self.version in [f.get("version") for k, f in self.events if k == "weights_published"])

    def sample(self, params: SamplingParams) -> list[list[TextCompletion]]:
        return self.pool.sample(PROMPTS, params, KEYS, versions=(self.version, self.version))

    def names_of(self, kind: str) -> list[str]:
        """Of the engines that it happened to."""
        return [str(fields.get("engine")) for found, fields in list(self.events) if found == kind]

    def wait_until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"this took too long: {self.events}"
            time.sleep(0.02)

    def is_busy(self, name: str) -> bool:
        return self.pool.loads.get(name, 0) > 0

    def is_gone(self) -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in self.pids)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    write_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def shared_crew(model_folder: Path) -> Iterator[Crew]:
    crew = Crew(model_folder, 2)
    yield crew
    crew.pool.close()
    assert crew.is_gone(), "a process is left"


@pytest.fixture
def crew(shared_crew: Crew) -> Crew:
    """Two that serve, and nothing that happened before."""
    if shared_crew.version < 0:
        shared_crew.publish(seed=0)
    shared_crew.wait_until(lambda: shared_crew.pool.num_serving == 2)
    shared_crew.events.clear()
    return shared_crew


def expected(seed: int, params: SamplingParams) -> list[list[TextCompletion]]:
    return LocalEngine(build_model(seed=seed), build_tokenizer(), batch_size=8).sample(PROMPTS, params, KEYS)


def assert_alike(found: list[list[TextCompletion]], wanted: list[list[TextCompletion]]) -> None:
    for answers, others in zip(found, wanted, strict=True):
        for answer, other in zip(answers, others, strict=True):
            assert (answer.tokens, answer.text, answer.finish_reason) == (other.tokens, other.text, other.finish_reason)
            assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def in_background(work: Callable[[], Any]) -> Future[Any]:
    threads = ThreadPoolExecutor(1)
    future = threads.submit(work)
    threads.shutdown(wait=False)
    return future


def test_two_engines_answer_as_one_does(crew: Crew) -> None:
    crew.publish(seed=1)
    assert_alike(crew.sample(SHORT), expected(1, SHORT))
    crew.publish(seed=2)
    found = crew.sample(SHORT)
    assert_alike(found, expected(2, SHORT))
    assert {answer.version for group in found for answer in group} == {crew.version}
    assert not crew.names_of("engine_lost")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_an_engine_lost_while_it_generates_is_named_replaced_and_not_missed(number: signal.Signals, crew: Crew) -> None:
    crew.publish(seed=1)
    answers = in_background(lambda: crew.sample(LONG))
    crew.wait_until(lambda: crew.is_busy("engine-1"))
    lost = crew.pool.pids["engine-1"]
    assert lost is not None
    os.kill(lost, number)
    assert_alike(answers.result(PATIENCE_S), expected(1, LONG))
    crew.wait_until(lambda: crew.names_of("engine_started"))
    assert crew.names_of("engine_lost") == crew.names_of("engine_started") == ["engine-1"]
    (reason,) = [fields["reason"] for kind, fields in crew.events if kind == "engine_lost"]
    assert ("SIGKILL" if number == signal.SIGKILL else "did not reply to a ping within 2 s") in reason
    crew.wait_until(lambda: crew.pool.num_serving == 2)
    assert not Path(f"/proc/{lost}").exists()
    assert crew.pool.pids["engine-1"] != lost
    assert_alike(crew.sample(SHORT), expected(1, SHORT))


def test_a_short_stop_changes_nothing(crew: Crew) -> None:
    crew.publish(seed=1)
    before = crew.pool.pids
    answers = in_background(lambda: crew.sample(LONG))
    crew.wait_until(lambda: crew.is_busy("engine-0"))
    pid = before["engine-0"]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.8)
    os.kill(pid, signal.SIGCONT)
    assert_alike(answers.result(PATIENCE_S), expected(1, LONG))
    assert not crew.names_of("engine_lost")
    assert crew.pool.pids == before


def meddle(monkeypatch: pytest.MonkeyPatch, with_bucket: Callable[[Worker, int, dict[str, Any]], None]) -> None:
    """Weights travel in small buckets, and somebody has a hand in each of them before it is sent."""
    send, cut = supervision.send_publication, Publication.of

    class Meddler:
        def __init__(self, worker: Worker) -> None:
            self._worker = worker

        def call(self, method: str, body: Any = None, tensors: Any = None, *, timeout_s: float) -> Any:
            if method == "bucket":
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
                with_bucket(self._worker, body["number"], tensors)
            return self._worker.call(method, body, tensors, timeout_s=timeout_s)

    monkeypatch.setattr(Publication, "of", lambda version, tensors: cut(version, tensors, 4096))
    monkeypatch.setattr(supervision, "send_publication", lambda worker, *rest: send(Meddler(worker), *rest))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=lambda number: number.name
)
def test_an_engine_lost_while_weights_are_published_gets_them_when_it_is_back(
    number: signal.Signals, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = [crew.pool.pids["engine-0"]]

    def end(worker: Worker, bucket: int, tensors: dict[str, Any]) -> None:
        if worker.name == "engine-0" and bucket == 7 and victim:
            pid = victim.pop()
            assert pid is not None
            os.kill(pid, number)

    meddle(monkeypatch, end)
    crew.publish(seed=2)
    assert not victim
    crew.wait_until(lambda: crew.names_of("engine_lost") == ["engine-0"])  # said by another thread than the publishing
    assert_alike(crew.sample(SHORT), expected(2, SHORT))
    crew.wait_until(lambda: crew.pool.num_serving == 2)
    assert_alike(crew.sample(SHORT), expected(2, SHORT))
    published = [fields for kind, fields in crew.events if kind == "weights_published"]
    assert [fields["engines"] for fields in published] == [["engine-1"]]


def test_a_spoiled_bucket_is_named_and_never_served(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    crew.publish(seed=1)
    left, lock = [1], threading.Lock()

    def spoil(worker: Worker, bucket: int, tensors: dict[str, Any]) -> None:
        with lock:
            if worker.name == "engine-1" and bucket == 3 and left[0]:
                left[0] -= 1
                tensors["content"][17] ^= 4

    meddle(monkeypatch, spoil)
    crew.publish(seed=2)
    (rejected,) = [fields for kind, fields in crew.events if kind == "bucket_rejected"]
    assert (rejected["engine"], rejected["version"]) == ("engine-1", crew.version)
    assert f"model.embed_tokens.weight of version {crew.version} has the digest" in rejected["reason"]
    assert not crew.names_of("engine_lost")
    assert_alike(crew.sample(SHORT), expected(2, SHORT))


def test_adapters_alone_are_published_and_partial_completions_survive_it(model_folder: Path) -> None:
    lora = LoraConfig(rank=2, alpha=4)

    def make_adapted(seed: int) -> Any:
        model = add_lora(build_model(), lora)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.3)
        return model

    def adapters(seed: int) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in make_adapted(seed).state_dict().items() if "lora_" in name}

    crew = Crew(model_folder, 1, lora=lora.model_dump(mode="json"), keeps_partials=True)
    try:
        crew.pool.publish(5, adapters(1))
        found = crew.pool.sample(PROMPTS, SHORT, KEYS, versions=(5, 5))
        assert_alike(found, LocalEngine(make_adapted(1), build_tokenizer()).sample(PROMPTS, SHORT, KEYS))
        answers = in_background(lambda: crew.pool.sample(PROMPTS, LONG, KEYS, versions=(0, 9)))
        crew.wait_until(lambda: crew.is_busy("engine-0"))
        time.sleep(0.2)
        crew.pool.publish(6, adapters(2))
        mixed = [answer for group in answers.result(PATIENCE_S) for answer in group if answer.versions]
        assert mixed, "no answer was under way"
        for answer in mixed:
            assert set(answer.versions) == {5, 6}
            assert list(answer.versions) == sorted(answer.versions)
            assert (answer.version, answer.oldest_version) == (6, 5)
    finally:
        crew.pool.close()
    assert crew.is_gone()


def test_an_engine_that_cannot_start_says_why(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_entry.py").write_text(
        "import os\ndef die(settings):\n    print('the tokenizer is of another model', flush=True)\n    os._exit(3)\n"
        "def refuse(settings):\n    raise ValueError('no room for the weights')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for entry, reason in (
        ("broken_entry:die", "(?s)engine-0 ended with exit code 3.*the tokenizer is of another model"),
        ("broken_entry:refuse", "engine-0: ping failed: no room for the weights"),
    ):
        crew = Crew(model_folder, 1, entry=entry)
        try:
            with pytest.raises(EnginesLost, match=reason):
                crew.publish(seed=0)
        finally:
            crew.pool.close()
        assert len(crew.pids) == 3
        assert crew.is_gone()
