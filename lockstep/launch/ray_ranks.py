"""The ranks of a run on a Ray cluster: an actor for each starts it as a process and reports on it.

A rank is the same process as on one machine, `python -m lockstep.train.worker`, but that it never outlives its actor.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, PoolConfig, RayLaunch
from lockstep.processes.ray import Interrupted, Reservation, import_ray, name_node
from lockstep.processes.tree import (
    FATAL_SIGNALS,
    StoppedTimes,
    describe_exit,
    describe_stop,
    die_with_parent,
    free_port,
    is_stopped,
)
from lockstep.rundir import EXIT_INTERRUPTED, RunDir, open_log

PARENT_VARIABLE = "LOCKSTEP_PARENT"
# What a user sets for a run goes with it to the nodes; everything else is the node's.
_LIBRARIES = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "MKL_")
_CARRIED = ("LOCKSTEP_", "PYTHONPATH", "PYTHONHASHSEED", *_LIBRARIES)


class RankHost:
    """The actor. Its calls are short, so that it answers while its rank computes."""

    def __init__(self) -> None:
        self._rank: subprocess.Popen[bytes] | None = None
        self._polled_at = 0.0

    def describe(self) -> dict[str, Any]:
        import ray

        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "host": socket.gethostname(),
            "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
            "cluster": context.gcs_address,
        }

    def find_port(self) -> int:
        return free_port()

    def can_read(self, path: str, expected: str, patience_s: float) -> bool:
        """Whether this node sees the same file. A network file system may take a moment to show a new one."""
        deadline = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(OSError):
                if Path(path).read_text() == expected:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)

    def start(self, module: str, run_dir: str, working_dir: str, environment: Mapping[str, str], lease_s: float) -> int:
        """Returns the pid. The rank is ended if it is not polled for `lease_s`: this node may be cut off from the
        others while the run goes on elsewhere."""
        inherited = {name: value for name, value in os.environ.items() if not _is_of_the_actor(name)}
        here = os.getcwd()
        with open_log(Path(run_dir, "logs", f"rank-{environment['RANK']}.log")) as log:
            self._rank = subprocess.Popen(
                [sys.executable, "-m", __name__, module, run_dir],
                env={**inherited, **environment, PARENT_VARIABLE: str(os.getpid())},
                cwd=working_dir if Path(working_dir).is_dir() else here,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._polled_at = time.monotonic()
        threading.Thread(target=self._keep_lease, args=(lease_s,), daemon=True).start()
        return self._rank.pid

    def _keep_lease(self, lease_s: float) -> None:
        assert self._rank is not None
        while self._rank.returncode is None:
            if time.monotonic() - self._polled_at > lease_s:
                self._rank.kill()
                return
            time.sleep(min(lease_s / 4, 1.0))

    def poll(self) -> tuple[int | None, bool]:
        """(exit code, None while it runs; whether it is stopped by a signal)."""
        assert self._rank is not None
        self._polled_at = time.monotonic()
        code = self._rank.poll()
        return code, code is None and is_stopped(self._rank.pid)

    def stop(self, grace_s: float) -> None:
        if self._rank is None or self._rank.poll() is not None:
            return
        self._rank.terminate()
        self._rank.send_signal(signal.SIGCONT)
        try:
            self._rank.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._rank.kill()
            self._rank.wait()


def _is_of_the_actor(name: str) -> bool:
    """A rank may join the cluster as a driver of its own, for which it needs the credentials."""
    return name.startswith("RAY_") and not name.startswith("RAY_AUTH_")


def carried_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}


def main(arguments: list[str] | None = None) -> int:
    """In the rank's process: tie it to its actor, then run the rank's module."""
    module, run_dir = sys.argv[1:] if arguments is None else arguments
    if not die_with_parent(int(os.environ[PARENT_VARIABLE])):
        return 1
    sys.argv = [module, run_dir]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


_LOOK_INTERVAL_S = 0.5
_START_S = 120.0  # what Ray may take to start a process on a node
_SEEN_WITHIN_S = 20.0  # what a network file system may take to show a new file
_GRACE_S = 3.0  # from SIGTERM to SIGKILL of a rank
_LEASE = 0.8  # of heartbeat_s: a rank ends by itself before it is given up here, so it never runs twice at once
_REPORT_S = 2.0  # from the first sign that a rank failed: time for the others to report what they saw
_ANSWER_S = 8.0  # after that, a rank that has not answered is lost


class RankLost(RuntimeError):
    """A rank that could not report its end: its process, its actor or its node is gone, or it is stopped."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass
class HostedRank:
    number: int
    host: Any
    """Ray's handle of a RankHost."""
    about: dict[str, Any] = field(default_factory=dict)
    """What RankHost.describe returned."""
    pid: int = 0
    code: int | None = None
    poll: Any = None
    """The call that has no answer yet."""
    answered_at: float = 0.0

    @property
    def name(self) -> str:
        return f"rank {self.number} on {self.node}"

    @property
    def has_failed(self) -> bool:
        return self.code not in (None, 0, EXIT_INTERRUPTED)

    @property
    def node(self) -> str:
        return name_node(self.about["node"], self.about["address"])


class RayRanks:
    def __init__(self, ranks: Sequence[HostedRank], launch: RayLaunch, pool: PoolConfig) -> None:
        self._ranks, self._launch, self._pool = list(ranks), launch, pool

    @classmethod
    def on(cls, reservation: Reservation, launch: RayLaunch) -> RayRanks:
        """An actor in each bundle."""
        ray, pool, ranks = import_ray(), reservation.pool, []
        for number in range(pool.procs or 0):
            place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(reservation.group, number)
            actor = ray.remote(RankHost).options(
                num_cpus=pool.cpus,
                num_gpus=pool.gpus,
                resources=pool.resources,
                scheduling_strategy=place,
                max_restarts=0,
            )
            ranks.append(HostedRank(number, actor.remote()))
        return cls(ranks, launch, pool)

    @property
    def cluster(self) -> str:
        """The address by which processes on the nodes join it."""
        return str(self._ranks[0].about["cluster"])

    def locate(self, interrupted: Callable[[], bool]) -> None:
        """Learn on which node each is."""
        calls = [rank.host.describe.remote() for rank in self._ranks]
        for rank, about in zip(self._ranks, self._answers(calls, interrupted)):
            rank.about = about

    def check_shared(self, path: Path, content: str, interrupted: Callable[[], bool]) -> None:
        calls = [rank.host.can_read.remote(str(path), content, _SEEN_WITHIN_S) for rank in self._ranks]
        answers = self._answers(calls, interrupted)
        blind = {rank.node: None for rank, seen in zip(self._ranks, answers) if not seen}
        if blind:
            raise ConfigError(
                f"{', '.join(blind)} cannot see the run directory {path.parents[1]}: with launch.kind ray it must be "
                "on a file system that all nodes share; choose another --run-dir"
            )

    def _answers(self, calls: Sequence[object], interrupted: Callable[[], bool]) -> list[Any]:
        """Of calls to the ranks in their order."""
        ray = import_ray()
        deadline = time.monotonic() + _START_S
        while len(ray.wait(calls, num_returns=len(calls), timeout=_LOOK_INTERVAL_S)[0]) < len(calls):
            if interrupted():
                raise Interrupted
            if time.monotonic() > deadline:
                silent = [number for number, call in enumerate(calls) if not ray.wait([call], timeout=0)[0]]
                names = ", ".join(map(str, silent))
                message = f"the node of rank {names} gave no answer within {_START_S:g} s: see logs/ray.log"
                raise RankLost(silent[0], message)
        answers = []
        for number, call in enumerate(calls):
            try:
                answers.append(ray.get(call))
            except ray.exceptions.RayActorError as error:
                print(error, file=sys.stderr)
                remedy = (
                    "is the same Lockstep installed there, and RAY_AUTH_MODE the same here and there? See logs/ray.log"
                )
                raise RankLost(number, f"rank {number} could not be started on its node: {remedy}") from error
        return answers

    def start(self, module: str, run_dir: Path, for_first: Mapping[str, str], interrupted: Callable[[], bool]) -> None:
        """`for_first` is added to the environment of rank 0."""
        first = self._ranks[0]
        (port,) = self._answers([first.host.find_port.remote()], interrupted)
        calls = []
        for rank in self._ranks:
            environment = {
                "OMP_NUM_THREADS": str(max(int(self._pool.cpus), 1)),
                **carried_environment(),
                **self._places(rank),
                "MASTER_ADDR": first.about["address"],
                "MASTER_PORT": str(port),
                **(for_first if rank is first else {}),
            }
            lease_s = _LEASE * self._launch.heartbeat_s
            place = (str(run_dir.resolve()), os.getcwd())
            calls.append(rank.host.start.remote(module, *place, environment, lease_s))
        for rank, pid in zip(self._ranks, self._answers(calls, interrupted)):
            rank.pid = pid

    def _places(self, rank: HostedRank) -> dict[str, str]:
        """Ranks on a node see all GPUs that the run has there, and each takes its own by its local rank."""
        beside = [other for other in self._ranks if other.about["node"] == rank.about["node"]]
        places = {
            "RANK": rank.number,
            "WORLD_SIZE": len(self._ranks),
            "LOCAL_RANK": beside.index(rank),
            "LOCAL_WORLD_SIZE": len(beside),
        }
        variables = {name: str(number) for name, number in places.items()}
        gpus = [gpu for other in beside for gpu in other.about["gpus"]]
        return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else variables

    # --- watching ----------------------------------------------------------------------------------------------------

    def watch(self, run: RunDir, interrupted: Callable[[], bool]) -> None:
        """Returns when all ranks have ended well, or one has failed and recorded why in the run directory."""
        times = StoppedTimes()
        failed_at: float | None = None
        for rank in self._ranks:
            rank.answered_at = time.monotonic()
        while any(rank.code is None for rank in self._ranks):
            if interrupted():
                raise Interrupted
            stopped, now = self._poll(), time.monotonic()
            for name in times.update(stopped, now):
                rank = next(rank for rank in self._ranks if rank.name == name)
                raise RankLost(rank.number, describe_stop(name, rank.pid, times.limit_s))
            self._find_silent(now - self._launch.heartbeat_s)
            if failed_at is None and any(rank.has_failed for rank in self._ranks):
                failed_at = now
            if failed_at is not None and self._is_settled(failed_at, now):
                break
        self._find_killed()
        failed = [rank for rank in self._ranks if rank.has_failed]
        if failed and not run.failures():
            ended = ", ".join(f"{rank.name} with exit code {rank.code}" for rank in failed)
            raise RankLost(0, f"ended without a reason: {ended}")

    def _is_settled(self, failed_at: float, now: float) -> bool:
        """Whether every rank has ended or answered since the first of them failed."""
        if now - failed_at > _ANSWER_S:
            self._find_silent(failed_at)
        return now - failed_at > _REPORT_S and all(r.code is not None or r.answered_at > failed_at for r in self._ranks)

    def _poll(self) -> list[str]:
        """Poll all that still run, but for those whose last poll has no answer yet. Returns those that are stopped."""
        ray = import_ray()
        for rank in self._ranks:
            if rank.code is None and rank.poll is None:
                rank.poll = rank.host.poll.remote()
        polled = [rank for rank in self._ranks if rank.poll is not None]
        time.sleep(_LOOK_INTERVAL_S)
        ready, _ = ray.wait([rank.poll for rank in polled], num_returns=len(polled), timeout=0)
        stopped = []
        for rank in polled:
            if rank.poll not in ready:
                continue
            call, rank.poll = rank.poll, None
            try:
                rank.code, is_stopped = ray.get(call)
            except ray.exceptions.ActorUnavailableError:
                continue  # perhaps the network: the heartbeat decides
            except ray.exceptions.RayActorError as error:
                raise RankLost(rank.number, self._describe_lost(rank, str(error))) from error
            rank.answered_at = time.monotonic()
            if is_stopped:
                stopped.append(rank.name)
        return stopped

    def _find_silent(self, since: float) -> None:
        for rank in self._ranks:
            if rank.code is None and rank.answered_at < since:
                raise RankLost(rank.number, self._describe_lost(rank, ""))

    def _find_killed(self) -> None:
        for rank in self._ranks:
            if rank.code is not None and -rank.code in FATAL_SIGNALS:
                raise RankLost(rank.number, describe_exit(rank.name, rank.code))

    def _describe_lost(self, rank: HostedRank, reason: str) -> str:
        is_alive = {node["NodeID"]: node["Alive"] for node in import_ray().nodes()}.get(rank.about["node"], False)
        if is_alive and reason:
            return f"the process that held {rank.name} ended"
        beside = [other for other in self._ranks if other.about["node"] == rank.about["node"]]
        if is_alive:  # as far as Ray knows: those that have answered since are well
            beside = [other for other in beside if other.answered_at < rank.answered_at + 2 * _LOOK_INTERVAL_S]
        names = ", ".join(str(other.number) for other in beside)
        return f"{rank.node} is lost or does not answer, and with it rank {names}"

    def end(self) -> None:
        """None is left when this returns, unless its node is out of reach: such a rank ends with its actor."""
        ray = import_ray()
        calls = [rank.host.stop.remote(_GRACE_S) for rank in self._ranks]
        ray.wait(calls, num_returns=len(calls), timeout=2 * _GRACE_S)
        for rank in self._ranks:
            ray.kill(rank.host, no_restart=True)


if __name__ == "__main__":
    sys.exit(main())
