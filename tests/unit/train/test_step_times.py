"""The time and the rate of a step are its own, also beside checkpoints, which make the loop read its numbers early."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config import parse_config
from lockstep.rundir import RunDir
from lockstep.train import steps
from lockstep.train.checkpoints import Progress
from lockstep.train.steps import MetricsLog, StepLogger
from lockstep.types import Completion, Datum, LossResult, LossValues, OptimResult

NUM_STEPS, EVERY, CHECKPOINT_S, NUM_TOKENS = 12, 4, 3.0, 1000
BATCH = [Datum((1, 2), [Completion((3,), [1.0], {})], "row:1")]


class Machine:
    """A host that hands work to a device, in order, and waits where it reads, and where too much is handed over. All of
    it in simulated seconds."""

    def __init__(self, queue_s: float) -> None:
        self.now, self._device_free_at, self._queue_s = 1000.0, 0.0, queue_s

    def work(self, host_s: float, device_s: float) -> float:
        """Returns when the device will have done it."""
        self.now += host_s
        self._device_free_at = max(self._device_free_at, self.now) + device_s
        self.wait_until(self._device_free_at - self._queue_s)
        return self._device_free_at

    def wait_until(self, moment: float) -> float:
        self.now = max(self.now, moment)
        return self.now


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize(
    ("forward_s", "optim_s", "device_s", "queue_s"),
    [
        pytest.param(0.08, 0.02, [1.0], 9.0, id="the device is slow"),
        pytest.param(0.08, 0.02, [1.0], 0.5, id="the device is slow and its queue is short"),
        pytest.param(0.08, 0.02, [1.0, 1.0, 0.2], 0.7, id="a short step among long ones"),
        pytest.param(0.08, 0.02, [0.001], 9.0, id="the host is slow"),
        pytest.param(0.08, 0.02, [0.1], 9.0, id="they are level"),
        pytest.param(0.08, 0.02, [0.11, 0.001], 9.0, id="now one, now the other"),
    ],
)
def test_no_step_is_faster_or_slower_than_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forward_s: float,
    optim_s: float,
    device_s: list[float],
    queue_s: float,
    deferred: bool,
) -> None:
    machine = Machine(queue_s)
    clock: Any = SimpleNamespace(perf_counter=lambda: machine.now, monotonic=lambda: machine.now, time=lambda: 0.0)
    monkeypatch.setattr(steps, "time", clock)
    config = parse_config("model: x\ndata: {train: a}")
    run, progress = RunDir.create(tmp_path / "run", config), Progress()
    logger = StepLogger(
        config, MetricsLog(run, config.logging, last_step=0), progress, num_rows=100, num_steps=NUM_STEPS
    )
    began_at, expected = machine.now, []
    for step in range(1, NUM_STEPS + 1):
        machine.work(forward_s, device_s[step % len(device_s)])
        logger.flush()
        done_at = machine.work(optim_s, 0.0)
        progress.step = step
        expected.append(done_at - began_at)
        began_at = done_at

        def read(done_at: float = done_at) -> LossValues:
            machine.wait_until(done_at)
            return LossValues(1.0)

        loss = LossResult(read, num_tokens=NUM_TOKENS, num_supervised=1, deferred=deferred)
        # What is read at once has ended when it has been read.
        ended_at = (lambda moment=done_at: moment) if deferred else clock.perf_counter
        logger.record(BATCH, loss, OptimResult(lambda: 1.0, deferred=deferred, ended_at=ended_at), 0.1)
        if step % EVERY == 0:
            logger.flush()
            began_at = machine.wait_until(machine.now + CHECKPOINT_S)
            logger.restart_clock()
    records = run.metrics()
    assert [record["step_time_s"] for record in records] == pytest.approx(expected)
    assert [record["tokens_per_s"] for record in records] == pytest.approx([NUM_TOKENS / s for s in expected])
    assert logger.mean_tokens_per_s == pytest.approx(NUM_TOKENS * NUM_STEPS / sum(expected))
