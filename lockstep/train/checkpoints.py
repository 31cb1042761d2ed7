"""The progress of a run and its checkpoints. Every rank runs this; only the run directory's owner commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.config import CheckpointConfig
from lockstep.rundir import RunDir
from lockstep.types import SavedState, TrainingBackend


@dataclass
class Progress:
    """The loop's own state, written beside the tensors of each checkpoint."""

    step: int = 0
    cursor: int = 0
    tokens: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    validation_step: int | None = None
    best_validation_loss: float | None = None
    best_step: int | None = None
    evaluations_without_improvement: int = 0

    def note_validation(self, loss: float, min_delta: float) -> None:
        self.validation_loss, self.validation_step = loss, self.step
        if self.best_validation_loss is None or loss < self.best_validation_loss - min_delta:
            self.best_validation_loss, self.best_step = loss, self.step
            self.evaluations_without_improvement = 0
        else:
            self.evaluations_without_improvement += 1


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Those before it are untouched."""


class Checkpoints:
    """Saves in the background, at most one at a time; a failed write surfaces at the next step."""

    def __init__(
        self,
        run: RunDir,
        backend: TrainingBackend,
        config: CheckpointConfig,
        *,
        data_digest: str,
        timeout_s: float,
        last_step: int | None = None,
    ) -> None:
        """`last_step`: of the checkpoint that the run resumed from, which is not written again."""
        self._run, self._backend, self._config = run, backend, config
        self._data_digest, self._timeout_s = data_digest, timeout_s
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-commit")
        self.pending: Future[None] | None = None
        """The checkpoint that is being written and committed, if any."""
        self._last_step = last_step
        self._told: set[str] = set()  # reasons for which training stood still

    def save(self, progress: Progress, add: Callable[[Path], None] | None = None) -> None:
        """Snapshot now; written and committed in the background. All ranks.

        `add` writes more files into the checkpoint, on the run directory's owner.
        """
        if progress.step == self._last_step:
            return
        self.wait()
        self._last_step = progress.step
        try:
            folder = self._run.begin_checkpoint(progress.step)
            if add is not None and self._run.owner:
                add(folder)
            written = self._backend.save_state(folder)
        except Exception as error:
            raise self._abandon(error) from error
        extra = {"progress": asdict(progress), "data_digest": self._data_digest}
        score = progress.validation_loss if progress.validation_step == progress.step else None
        self.pending = self._committer.submit(self._finish, written, progress.step, extra, score)
        if not self._config.asynchronous:
            self.wait()

    def poll(self) -> None:
        """Raise the error of a background write that has failed. Never waits."""
        if self.pending is not None and self.pending.done():
            self.wait()

    def wait(self) -> None:
        pending, self.pending = self.pending, None
        if pending is None:
            return
        try:
            pending.result(timeout=self._timeout_s)
        except Exception as error:
            if pending.done():
                raise self._abandon(error) from error
            raise CheckpointError(
                f"the checkpoint of step {self._last_step} was not written within {self._timeout_s:.0f} s"
            ) from error

    def _abandon(self, error: Exception) -> CheckpointError:
        assert self._last_step is not None
        self._run.abandon_checkpoint(self._last_step)
        return CheckpointError(
            f"the checkpoint of step {self._last_step} could not be written: {_root_cause(error)}; "
            + self._run.describe_last_checkpoint()
        )

    def close(self) -> None:
        self._committer.shutdown(wait=False)

    def _finish(self, written: Future[SavedState], step: int, extra: Mapping[str, object], score: float | None) -> None:
        started = time.perf_counter()
        saved = written.result()
        if not self._run.owner:
            return
        path = self._run.commit_checkpoint(step, extra, score, saved.digests)
        self._run.prune_checkpoints(keep_last=self._config.keep_last, keep_best=self._config.keep_best)
        facts = {
            "bytes": sum(file.stat().st_size for file in path.iterdir()),
            "copy_s": round(saved.copy_s, 3),
            "write_s": round(time.perf_counter() - started, 3),
            **({"staging_gib": round(saved.staging_bytes / 2**30, 2)} if saved.staging_bytes else {}),
        }
        self._run.log_event("checkpoint", step=step, validation_loss=score, **facts)
        if saved.slow and saved.slow not in self._told:
            self._told.add(saved.slow)
            stood_still = (
                f"training stood still for {saved.copy_s:.1f} s while the checkpoint of step {step} was copied"
            )
            self._run.report_slow(f"{stood_still}: {saved.slow}")


def _root_cause(error: BaseException) -> str:
    """The operating system's message, however deep the writer wrapped it."""
    seen: list[BaseException] = []
    while error not in seen:
        seen.append(error)
        failures = getattr(error, "failures", None)  # torch's CheckpointException: {rank: (exception, stack)}
        inner = next(iter(failures.values()))[0] if failures else error.__cause__ or error.__context__
        error = inner or error
    os_error = next((e for e in seen if isinstance(e, OSError) and e.strerror), None)
    if os_error is not None:
        return str(os_error.strerror)
    text = str(seen[-1]).strip().split("\n")[0]
    return "No space left on device" if "No space left" in str(seen[-1]) else text or type(seen[-1]).__name__
