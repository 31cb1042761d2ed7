"""Runs on a Ray cluster: a driver process here reserves resources there, starts the ranks and watches them.

To the launcher the driver is the run: it is started, polled and ended like the one process of a local run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from lockstep.config import ConfigError, RayLaunch, RunConfig, SlurmLaunch, load_config, resolve_pool
from lockstep.launch.launcher import Resources, RunHandle
from lockstep.launch.local import LAUNCH_ID_VARIABLE, LocalLauncher
from lockstep.launch.ray_ranks import RankLost, RayRanks, carried_environment
from lockstep.processes.ray import RESERVATION_VARIABLE, Interrupted, Reservation, join_cluster, reserve
from lockstep.processes.tree import catch_signals, end_gently
from lockstep.rundir import RunDir, open_log

DRIVER_MODULE = "lockstep.launch.ray_driver"
DRIVER = "the Ray driver"


class RayLauncher(LocalLauncher):
    kind = "ray"
    patience_s = 30.0  # the driver itself ends the ranks when one has failed, and finds out why

    def __init__(
        self, worker_module: str | None = None, grace_s: float = 20.0, working_dir: Path | None = None
    ) -> None:
        super().__init__(worker_module, grace_s, working_dir)

    def _command(self, run_dir: Path, procs: int) -> list[str]:
        return [sys.executable, "-m", DRIVER_MODULE, str(run_dir), self.worker_module]

    def _environment(self, launch_id: str, resources: Resources) -> dict[str, str]:
        return {**os.environ, LAUNCH_ID_VARIABLE: launch_id, "PYTHONUNBUFFERED": "1"}

    def _first_process(self, num_ranks: int) -> str:
        return DRIVER

    def _end(self, handle: RunHandle, hurry: Callable[[], bool] = lambda: False) -> None:
        """The driver first, alone: it ends what runs on all nodes, for which it needs the cluster."""
        if self._is_alive(handle):
            end_gently([handle.pid])
            deadline = time.monotonic() + self.grace_s
            while self._is_alive(handle) and time.monotonic() < deadline and not hurry():
                time.sleep(0.05)
        super()._end(handle, hurry)


def main(arguments: list[str] | None = None) -> int:
    """RUN_DIR MODULE, and the file to make the run from where it is not there."""
    run_dir, module, *config_file = sys.argv[1:] if arguments is None else arguments
    run = RunDir(Path(run_dir), owner=True)
    if config_file and not run.config_path.exists():
        RunDir.create(run.path, load_config(config_file[0]))
    _redirect_output(run.logs / "ray.log")

    def give_up(why: str) -> None:
        run.record_failure(0, why, 2)
        os._exit(2)

    try:
        config = run.config()
        name = os.environ.get(LAUNCH_ID_VARIABLE, "lockstep")
        # Signals are caught after joining, because Ray installs its own handlers then.
        with join_cluster(_of_ray(config), name, give_up), catch_signals() as received:
            _drive(run, config, module, lambda: bool(received))
    except Interrupted:
        return 1
    except RankLost as lost:
        record_cause(run, lost.rank, str(lost))
        return 1
    except Exception as error:
        traceback.print_exc()
        is_mistake = isinstance(error, ValueError)
        sentence = str(error) if is_mistake else f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        if not run.failures():
            run.record_failure(0, sentence, 2 if is_mistake else 1)
        return 2 if is_mistake else 1
    return 0


def _drive(run: RunDir, config: RunConfig, module: str, interrupted: Callable[[], bool]) -> None:
    with contextlib.ExitStack() as held:
        run.write_status(phase="waiting for room on the cluster")
        training = held.enter_context(_reserved(config, "training", interrupted))
        rollouts = None
        if config.rollouts.engines:
            rollouts = held.enter_context(_reserved(config, "rollouts", interrupted))
        run.write_status(phase="starting the ranks")
        ranks = RayRanks.on(training, _of_ray(config))
        held.callback(ranks.end)
        ranks.locate(interrupted)
        with _shared_file(run) as (path, content):
            ranks.check_shared(path, content, interrupted)
        for_first = {} if rollouts is None else {RESERVATION_VARIABLE: _for_engines(rollouts, ranks.cluster)}
        ranks.start(module, run.path, for_first, interrupted)
        ranks.watch(run, interrupted)


def _of_ray(config: RunConfig) -> RayLaunch:
    launch = config.launch
    if isinstance(launch, SlurmLaunch):  # the batch script has started a cluster on the nodes of the job
        kept = {key: getattr(launch, key) for key in ("procs", "device", "timeout_s", "max_restarts")}
        return RayLaunch(kind="ray", address=os.environ["RAY_ADDRESS"], **kept)
    assert isinstance(launch, RayLaunch), launch.kind
    return launch


@contextlib.contextmanager
def _reserved(config: RunConfig, name: str, interrupted: Callable[[], bool]) -> Iterator[Reservation]:
    launch, rollouts = _of_ray(config), config.rollouts

    def is_possible(procs: int) -> bool:
        """Whether the run can go on with so few ranks."""
        if name != "training" or launch.min_procs is None or procs < launch.min_procs:
            return False
        try:
            config.parallel.degrees(procs)
        except ConfigError:
            return False
        return True

    if name == "training":
        pool = resolve_pool(config.cluster, name, launch.procs, launch.device)
    else:
        device = launch.device if rollouts.device == "auto" else rollouts.device
        pool = resolve_pool(config.cluster, name, rollouts.engines, device)
    reservation = reserve(pool, launch.placement_timeout_s, interrupted, is_possible)
    try:
        yield reservation
    finally:
        reservation.release()


def _for_engines(reservation: Reservation, cluster: str) -> str:
    """For rank 0, which starts the engines."""
    environment = {"OMP_NUM_THREADS": str(max(int(reservation.pool.cpus), 1)), **carried_environment()}
    return replace(reservation, cluster=cluster, environment=environment).to_json()


@contextlib.contextmanager
def _shared_file(run: RunDir) -> Iterator[tuple[Path, str]]:
    path, content = run.logs / f".seen-{uuid.uuid4().hex}", uuid.uuid4().hex
    path.write_text(content)
    try:
        yield path, content
    finally:
        path.unlink(missing_ok=True)


def record_cause(run: RunDir, rank: int, message: str) -> None:
    """A lost rank is why others failed, though they may have reported that before the loss was noticed."""
    earliest = min((failure["time"] for failure in run.failures()), default=time.time())
    run.record_failure(rank, message, at=earliest - 0.001)


def _redirect_output(path: Path) -> None:
    """What Ray prints, also from its other processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_log(path) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


if __name__ == "__main__":
    sys.exit(main())
