"""The real worker, and the real engines it starts, with one fault at one moment of the protocol.

LOCKSTEP_TEST_FAULT is the JSON of a Fault. It happens once: whatever is started later finds the mark that it left.
Besides, rank 0 writes down which weights it publishes, and engines which they took over and what they answered.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "LOCKSTEP_TEST_FAULT"
DELAY_S = 2
BUCKET_BYTES = 32768  # several of them for a tiny model
SPOILED_BUCKET = 2  # when it is sent, the first one has arrived
WATCHING_ENGINE = "engine-0"
NUM_ENGINES = 2
_PATIENCE_S = 120.0  # against hanging only
_SLOW_STEP_S = 0.15  # of decoding, so that tokens of answers under way are asked for


@dataclass(frozen=True)
class Fault:
    """`step`: of the loop; what is sampled and published for it has the version of one less. `folder` is for what is
    written down, and `checkpoint` is there before anything happens: it is written behind the loop.
    `after_news`: while answers are generated, only once some of their tokens have been reported.
    """

    kind: str
    victim: str
    state: str
    step: int
    folder: str
    checkpoint: str
    after_news: bool = False

    @classmethod
    def of_this_process(cls) -> Fault:
        return cls(**json.loads(os.environ[VARIABLE]))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def mark(self) -> Path:
        return Path(self.folder) / "happened.json"

    @property
    def num_spoiled(self) -> int:
        return {"corrupted": 1, "corrupted twice": 2}.get(self.kind, 0)

    @property
    def pid_file(self) -> Path:
        return Path(self.folder) / f"{self.victim}.pid"

    @property
    def is_over(self) -> bool:
        """Whether it has happened, and another process is in the place of an engine that is not to come back."""
        if not self.mark.exists():
            return False
        if not self.victim.startswith("engine") or self.kind in ("delay", "corrupted"):
            return True
        return int(self.pid_file.read_text()) != json.loads(self.mark.read_text())["pid"]

    def claim(self) -> int | None:
        """The process to be hit, for the first who asks in all processes and starts of the run."""
        pid, deadline = int(self.pid_file.read_text()), time.monotonic() + _PATIENCE_S
        while not Path(self.checkpoint).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        own = self.mark.with_name(f"happened-{os.getpid()}")
        own.write_text(json.dumps({"time": time.time(), "pid": pid}))
        try:
            os.link(own, self.mark)
        except FileExistsError:
            return None
        return pid

    def happen(self) -> None:
        pid = self.claim()
        if pid is None:
            return
        if self.kind == "delay":  # with an empty environment, so that it is no process of the run
            waking = f"sleep {DELAY_S}; kill -CONT {pid}"
            subprocess.Popen(["/bin/sh", "-c", waking], env={}, start_new_session=True)
        os.kill(pid, signal.SIGKILL if self.kind == "SIGKILL" else signal.SIGSTOP)


def note_process(fault: Fault, name: str) -> None:
    from lockstep.rundir import write_atomically

    write_atomically(Path(fault.folder) / f"{name}.pid", str(os.getpid()), durable=False)


def write_down(fault: Fault, file: str, **fields: Any) -> None:
    record = {"launch": os.environ["LOCKSTEP_LAUNCH_ID"], **fields}
    with (Path(fault.folder) / f"{file}.jsonl").open("a") as opened:
        opened.write(json.dumps(record) + "\n")


def digest_tensors(tensors: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0" + tensors[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


# --- in the ranks ---------------------------------------------------------------------------------------------------


def watch_training(fault: Fault) -> None:
    """Between the gradients of a step and its update."""
    from lockstep.backend.torch_backend import TorchBackend

    honest, calls = TorchBackend.optim_step, []

    def optim_step(self: TorchBackend, step: Any) -> Any:
        calls.append(step)
        if len(calls) == fault.step:
            fault.happen()
        return honest(self, step)

    TorchBackend.optim_step = optim_step  # type: ignore[method-assign]


def watch_checkpointing(fault: Fault) -> None:
    """All files of a checkpoint are there, also its manifest; its folder does not have its name yet."""
    from lockstep import rundir

    honest = rundir._fsync

    def fsync(path: Path) -> None:
        honest(path)
        if path.name == f"writing-step-{fault.step}":
            fault.happen()

    rundir._fsync = fsync


def watch_publishing(fault: Fault) -> None:
    """One engine has the first bucket of a version, and not yet the others."""
    from lockstep.processes.worker import Worker
    from lockstep.rollouts.engines import supervision
    from lockstep.rollouts.engines.publishing import Publication

    send, cut = supervision.send_publication, Publication.of
    spoiled: list[int] = []

    def in_small_buckets(version: int, tensors: Mapping[str, Any]) -> Publication:
        write_down(fault, "published", version=version, digest=digest_tensors(tensors))
        return cut(version, tensors, BUCKET_BYTES)

    def spoil(content: Any) -> Any:
        if len(spoiled) == fault.num_spoiled or (not spoiled and fault.claim() is None):
            return content
        spoiled.append(1)
        content = content.clone()
        content[7] ^= 0x80  # the sign of a number
        return content

    class Meddler:
        def __init__(self, worker: Worker) -> None:
            self._worker = worker

        def call(self, method: str, body: Any = None, tensors: Any = None, *, timeout_s: float) -> Any:
            if method == "bucket" and body["number"] == SPOILED_BUCKET:
                if fault.num_spoiled:
                    tensors = {"content": spoil(tensors["content"])}
                else:
                    fault.happen()
            return self._worker.call(method, body, tensors, timeout_s=timeout_s)

    def send_publication(worker: Any, publication: Publication, timeout_s: float) -> None:
        is_meant = fault.state == "publishing" and publication.version == fault.step - 1
        meddled: Any = Meddler(worker) if is_meant and worker.name == WATCHING_ENGINE else worker
        send(meddled, publication, timeout_s)

    Publication.of = in_small_buckets  # type: ignore[method-assign, assignment]
    supervision.send_publication = send_publication


def start_such_engines() -> None:
    from lockstep.rollouts.engines import pool

    pool.ENTRY = "fault_worker:start_engine"


def await_replacement(fault: Fault) -> None:
    """The run does not end before the fault, nor before all engines are there again and have something to do."""
    from lockstep.rollouts.engines.pool import EnginePool

    honest_publish, honest_sample = EnginePool.publish, EnginePool.sample

    def wait(pool: EnginePool) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not (fault.is_over and pool.num_serving == NUM_ENGINES) and time.monotonic() < deadline:
            time.sleep(0.02)

    def publish(self: EnginePool, version: int, tensors: Mapping[str, Any]) -> None:
        if version == fault.step + 1:
            wait(self)
        honest_publish(self, version, tensors)

    def sample(self: EnginePool, *given: Any, versions: tuple[int, int], **options: Any) -> Any:
        if versions[0] == fault.step:  # of the first weights after the fault
            wait(self)
        return honest_sample(self, *given, versions=versions, **options)

    EnginePool.publish = publish  # type: ignore[method-assign]
    EnginePool.sample = sample  # type: ignore[method-assign]


# --- in the engines -------------------------------------------------------------------------------------------------


def start_engine(settings: Mapping[str, Any]) -> Any:
    """The entry of an engine: its command line has its name."""
    from lockstep.rollouts.engines import worker as engine_worker

    fault, name = Fault.of_this_process(), sys.argv[1]
    trace_engine(fault, f"{name}-{os.getpid()}")
    if fault.state == "generating" and name == WATCHING_ENGINE:
        watch_generating(fault)
    handler = engine_worker.start(settings)
    note_process(fault, name)
    return handler


def trace_engine(fault: Fault, file: str) -> None:
    """Which weights it computes with, and which answers it gives: those of its tokens that it did not get."""
    from lockstep.inference.continuous_engine import ContinuousEngine
    from lockstep.rollouts.engines.worker import EngineHandler

    load, submit, answer = ContinuousEngine.load_weights, ContinuousEngine.submit, EngineHandler.reply
    keys: dict[Any, list[int]] = {}
    begun: dict[Any, list[list[int]]] = {}

    def load_weights(self: Any, weights: Mapping[str, Any], version: int) -> None:
        load(self, weights, version)
        write_down(fault, file, version=version, digest=digest_tensors(weights))

    def submit_call(self: Any, prompts: Any, params: Any, call_keys: Any, *rest: Any, **options: Any) -> Any:
        call = submit(self, prompts, params, call_keys, *rest, **options)
        keys[call], begun[call] = list(call_keys), [[s.num_sampled for s in group] for group in call.groups]
        return call

    def answer_call(self: Any, call: Any) -> None:
        for key, group, starts in zip(keys.pop(call), call.groups, begun.pop(call), strict=True):
            for sample, (sequence, start) in enumerate(zip(group, starts, strict=True)):
                given = {"text": sequence.completion().text, "versions": sequence.versions, "begun": start}
                write_down(fault, file, key=key, sample=sample, **given)
        answer(self, call)

    ContinuousEngine.load_weights = load_weights  # type: ignore[method-assign]
    ContinuousEngine.submit = submit_call  # type: ignore[method-assign, assignment]
    EngineHandler.reply = answer_call  # type: ignore[method-assign]


def watch_generating(fault: Fault) -> None:
    """Some tokens are there, and the answers they are of have not ended."""
    from lockstep.inference.continuous_engine import SampleCall
    from lockstep.inference.scheduler import ContinuousBatch

    honest, take = ContinuousBatch.advance, SampleCall.take_progress
    reported: list[Any] = []

    def take_progress(self: SampleCall) -> Any:
        progress = take(self)
        reported.extend(sequence for sequence in self.sequences if progress)
        return progress

    def advance(self: ContinuousBatch) -> Any:
        finished = honest(self)
        growing = [sequence for sequence in self.unfinished if sequence.num_sampled > 1]
        is_meant = bool(growing) and growing[0].version >= fault.step - 1 and not fault.mark.exists()
        if is_meant and fault.after_news:
            time.sleep(_SLOW_STEP_S)
            is_meant = any(sequence in reported for sequence in growing)
        if is_meant and not finished:
            fault.happen()
        return finished

    ContinuousBatch.advance = advance  # type: ignore[method-assign]
    SampleCall.take_progress = take_progress  # type: ignore[method-assign]


def main() -> int:
    from lockstep.train import worker

    fault, rank = Fault.of_this_process(), int(os.environ.get("RANK", "0"))
    note_process(fault, f"rank {rank}")
    if rank == 0:
        watch_publishing(fault)
        start_such_engines()
        await_replacement(fault)
        if fault.state == "checkpointing":
            watch_checkpointing(fault)
    hits_training = f"rank {rank}" == fault.victim or (rank == 0 and fault.victim == WATCHING_ENGINE)
    if fault.state == "training" and hits_training:
        watch_training(fault)
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
