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
    """A host that hands work to a device, in order, and waits only where it reads. All of it in simulated seconds."""

    def __init__(self) -> None:
        self.now, self._device_free_at = 1000.0, 0.0

    def work(self, host_s: float, device_s: float) -> float:
        """Returns when the device will have done it."""
        self.now += host_s
        self._device_free_at = max(self._device_free_at, self.now) + device_s
        return self._device_free_at

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize(
    ("forward_s", "optim_s", "device_s"),
    [
        pytest.param(0.08, 0.02, [1.0], id="the device is slow"),
        pytest.param(0.08, 0.02, [0.001], id="the host is slow"),
        pytest.param(0.08, 0.02, [0.1], id="they are level"),
        pytest.param(0.08, 0.02, [0.11, 0.001], id="now one, now the other"),
    ],
)
def test_no_step_is_faster_or_slower_than_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forward_s: float,
    optim_s: float,
    device_s: list[float],
    deferred: bool,
) -> None:
    machine = Machine()
    clock: Any = SimpleNamespace(perf_counter=lambda: machine.now, monotonic=lambda: machine.now, time=lambda: 0.0)
    monkeypatch.setattr(steps, "time", clock)
    config = parse_config("model: x\ndata: {train: a}")
    run, progress = RunDir.create(tmp_path / "run", config), Progress()
    logger = StepLogger(
        config, MetricsLog(run, config.logging, last_step=0), progress, num_rows=100, num_steps=NUM_STEPS
    )
    for step in range(1, NUM_STEPS + 1):
        done_at = machine.work(forward_s, device_s[step % len(device_s)])

        def read(done_at: float = done_at) -> LossValues:
            machine.wait_until(done_at)
            return LossValues(1.0)

        logger.flush()
        machine.work(optim_s, 0.0)
        progress.step = step
        loss = LossResult(read, num_tokens=NUM_TOKENS, num_supervised=1, deferred=deferred)
        logger.record(BATCH, loss, OptimResult(lambda: 1.0, deferred=deferred), 0.1)
        if step % EVERY == 0:
            logger.flush()
            machine.wait_until(machine.now + CHECKPOINT_S)
            logger.restart_clock()
    records = run.metrics()
    host_s = forward_s + optim_s
    # Without running ahead, the host's work and the device's do not overlap.
    fastest, slowest = max(host_s, min(device_s)), host_s + max(device_s)
    for record in records:
        assert 0.85 * fastest <= record["step_time_s"] <= 1.15 * slowest, record["step"]
        assert record["tokens_per_s"] == pytest.approx(NUM_TOKENS / record["step_time_s"])
    assert logger.mean_tokens_per_s is not None
    assert NUM_TOKENS / slowest * 0.95 <= logger.mean_tokens_per_s <= NUM_TOKENS / fastest * 1.05
