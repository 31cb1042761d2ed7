"""TrainingService: a TrainingBackend on processes of its own, on this machine or on Ray, called without waiting.

Every call gives a handle at once and is done in the order in which it was made. Must not know algorithms' loops.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lockstep.backend import wire
from lockstep.backend.service_ranks import Ranks, TrainingFailed
from lockstep.types import Datum, Logprobs, LossResult, LossSpec, OptimResult, OptimStep
from lockstep.workers.worker import Reply

if TYPE_CHECKING:
    from lockstep.backend.service_options import ServiceOptions

__all__ = ["Handle", "TrainingFailed", "TrainingService"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")

T = TypeVar("T")


class Handle(Generic[T]):
    """What a call will come to: `await handle.result()`, or `handle.wait()` without asyncio.

    Raises ValueError for what the caller can put right, after which the service goes on, and TrainingFailed otherwise.
    """

    def __init__(self, answer: Future[Reply], read: Callable[[Reply], T]) -> None:
        self._future: Future[T] = Future()
        self._future.set_running_or_notify_cancel()  # nobody can take back what was asked
        self._read = read
        self.seen = False
        answer.add_done_callback(self._settle)

    async def result(self) -> T:
        self.seen = True
        return await asyncio.wrap_future(self._future)

    def wait(self, timeout_s: float | None = None) -> T:
        """`timeout_s`: TimeoutError after it. The call has a deadline of its own."""
        self.seen = True
        return self._future.result(timeout_s)

    def done(self) -> bool:
        return self._future.done()

    def unseen_failure(self) -> BaseException | None:
        return self._future.exception() if self._future.done() and not self.seen else None

    def _settle(self, answer: Future[Reply]) -> None:
        try:
            self._future.set_result(self._read(answer.result()))
        except Exception as error:
            self._future.set_exception(error)


class TrainingService:
    """Made by `TrainingService.options(...).as_service(...)`. Thread-safe; calls are done in their order."""

    def __init__(self, ranks: Ranks, step: OptimStep | None, has_checkpoints: bool, timeout_s: float) -> None:
        self._ranks, self._step, self._has_checkpoints, self._timeout_s = ranks, step, has_checkpoints, timeout_s
        self._lock = threading.Lock()
        self._handles: list[Handle[Any]] = []
        self.about: dict[str, Any] = {}

    @staticmethod
    def options(procs: int = 1, backend: str = "local", **options: Any) -> ServiceOptions:
        """`backend`: where the ranks run (local, ray), how the model lies over them (ddp, fsdp), or both ("ray+fsdp").

        The other options are the fields of ServiceOptions.
        """
        from lockstep.backend.service_options import ServiceOptions

        return ServiceOptions(procs, backend, **options)

    # --- the backend's calls ----------------------------------------------------------------------------------------

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> Handle[list[Logprobs]]:
        body, tensors = wire.encode_batch(batch)
        asked = {"batch": body, "reference": bool(reference)}
        return self._ask("forward", asked, lambda reply: wire.decode_logprobs(reply.body, reply.tensors), tensors)

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec | None = None) -> Handle[LossResult]:
        body, tensors = wire.encode_batch(batch)
        asked = {"batch": body, "loss": wire.encode_loss(loss or LossSpec())}
        return self._ask("forward_backward", asked, lambda reply: wire.decode_loss_result(reply.body), tensors)

    def optim_step(self, step: OptimStep | Mapping[str, Any] | None = None) -> Handle[OptimResult]:
        """Without a step: with the settings that the service was given as its optimizer."""
        step = self._step if step is None else wire.read_step(step)
        if step is None:
            raise ValueError("optim_step needs a step: give it one, or give the service an optimizer")
        return self._ask("optim_step", wire.encode_step(step), lambda reply: wire.decode_optim_result(reply.body))

    def mix_reference(self, share: float) -> Handle[None]:
        return self._ask("mix_reference", {"share": float(share)}, _nothing)

    def save_state(self, path: str | Path) -> Handle[None]:
        """Into a folder that all ranks see. Not committed: for that there is `save`."""
        return self._ask("save_state", {"path": absolute(path)}, _check_written)

    def load_state(self, path: str | Path, *, with_optimizer: bool = True) -> Handle[None]:
        return self._ask("load_state", {"path": absolute(path), "with_optimizer": bool(with_optimizer)}, _nothing)

    def export_weights(self, path: str | Path) -> Handle[None]:
        return self._ask("export_weights", {"path": absolute(path)}, _nothing)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, name: str) -> Handle[Path]:
        """Weights, optimizer and random generators under a name in checkpoint_dir: all of it or nothing.

        The state is that of this place in the order of calls; it is written while later ones are done. What was saved
        under the name before stays until the new one is complete.
        """
        return self._ask("save", {"name": self._checked(name)}, _read_saved)

    def load(self, name: str, *, with_optimizer: bool = True) -> Handle[None]:
        return self._ask("load", {"name": self._checked(name), "with_optimizer": bool(with_optimizer)}, _nothing)

    def _checked(self, name: str) -> str:
        if not self._has_checkpoints:
            raise ValueError("this service has no place for checkpoints: give as_service a checkpoint_dir")
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a checkpoint: use letters, digits, '.', '_' and '-'")
        return name

    # --- the end ----------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        """As `close`."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Do what was asked for, then end every process. Raises the first failure that nobody has looked at."""
        try:
            self._ask("leave", {}, _nothing).wait()
        except TrainingFailed:
            pass  # whoever waited for a call was told
        finally:
            self._ranks.shut()
        with self._lock:
            handles, self._handles = self._handles, []
        failures = [failure for handle in handles if (failure := handle.unseen_failure()) is not None]
        if failures:
            raise failures[0]

    def kill(self) -> None:
        """End every process at once; what is under way fails."""
        self._ranks.kill()
        with self._lock:
            self._handles = []

    async def __aenter__(self) -> TrainingService:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await (self.shutdown() if error is None else asyncio.to_thread(self.kill))

    def __enter__(self) -> TrainingService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if error is None else self.kill()

    @property
    def pids(self) -> list[int | None]:
        """Of the ranks, where they are on this machine."""
        return [worker.pid for worker in self._ranks.workers]

    def _ask(
        self, method: str, body: dict[str, Any], read: Callable[[Reply], T], tensors: Mapping[str, Any] | None = None
    ) -> Handle[T]:
        handle = Handle(self._ranks.ask(method, body, tensors, timeout_s=self._timeout_s), read)
        with self._lock:
            kept = [h for h in self._handles if not h.done() or h.unseen_failure() is not None]
            self._handles = [*kept, handle]
        return handle


def absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().absolute())


def _nothing(reply: Reply) -> None:
    return None


def _check_written(reply: Reply) -> None:
    if "unwritten" in reply.body:
        raise RuntimeError(f"the checkpoint could not be written: {reply.body['unwritten']}; training can go on")


def _read_saved(reply: Reply) -> Path:
    _check_written(reply)
    return Path(reply.body["path"])
