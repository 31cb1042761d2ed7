"""One rank on a node of a Ray cluster: an actor that starts it as a process of its own, and says how that stands.

The rank is what it is anywhere else, `python -m lockstep.train.worker`, only that it never outlives its actor.
Must not know the other ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, LaunchConfig
from lockstep.launch.local import StoppedTimes, process_stat, say_signal, say_stopped
from lockstep.launch.ray_cluster import Interrupted, Reservation, import_ray, name_node
from lockstep.rundir import RunDir

PARENT_VARIABLE = "LOCKSTEP_PARENT"
_PR_SET_PDEATHSIG = 1
# What a user sets for a run goes with it to the nodes; everything else is the node's own.
_LIBRARIES = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "MKL_")
_CARRIED = ("LOCKSTEP_", "PYTHONPATH", "PYTHONHASHSEED", *_LIBRARIES)


class RankHost:
    """The actor. Its calls are short and made one after another, so that it answers while its rank computes."""

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
        with socket.socket() as listener:
            listener.bind(("", 0))
            return int(listener.getsockname()[1])

    def can_read(self, path: str, expected: str, patience_s: float) -> bool:
        """Whether this node sees the same file. A network's file system may take a moment to show what is new."""
        deadline = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(OSError):
                if Path(path).read_text() == expected:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)

    def start(self, module: str, run_dir: str, working_dir: str, environment: Mapping[str, str], lease_s: float) -> int:
        """The process id. The rank is ended when nobody polls for `lease_s`: this node may be cut off from the others,
        and the run go on elsewhere."""
        own = {name: value for name, value in os.environ.items() if not _is_of_the_actor(name)}
        here = os.getcwd()
        with Path(run_dir, "logs", f"rank-{environment['RANK']}.log").open("ab") as log:
            self._rank = subprocess.Popen(
                [sys.executable, "-m", __name__, module, run_dir],
                env={**own, **environment, PARENT_VARIABLE: str(os.getpid())},
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
        state = process_stat(self._rank.pid) if code is None else None
        return code, state is not None and state[0] == "T"

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
    """A rank may join the cluster itself: as one of its own, but with the same right to."""
    return name.startswith("RAY_") and not name.startswith("RAY_AUTH_")


def carried_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}


def main(arguments: list[str] | None = None) -> int:
    """In the rank's process: tie it to its actor, then be an ordinary rank."""
    module, run_dir = sys.argv[1:] if arguments is None else arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT_VARIABLE]):
        return 1  # the actor ended before the line above
    sys.argv = [module, run_dir]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())


_LOOK_INTERVAL_S = 0.5
_START_S = 120.0  # what Ray may take to start a process on a node
_SEEN_WITHIN_S = 20.0  # what a network's file system may take to show a new file
_GRACE_S = 3.0  # from SIGTERM to SIGKILL of a rank
_LEASE = 0.8  # a rank ends by itself before this side gives it up: no two of a number ever run at once
_WORD_S = 2.0  # from the first sign that a rank failed: time for the others to say what they saw
_ANSWER_S = 8.0  # from then on, who has not answered is gone


class RankLost(RuntimeError):
    """A rank that ended without a word of its own: its process, its actor or its node is gone, or stands still."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass
class _Rank:
    number: int
    host: Any
    """Ray's handle of a RankHost."""
    about: dict[str, Any] = field(default_factory=dict)
    pid: int = 0
    code: int | None = None
    asked: Any = None
    """The call that is under way."""
    answered_at: float = 0.0

    @property
    def name(self) -> str:
        return f"rank {self.number} on {self.node}"

    @property
    def node(self) -> str:
        return name_node(self.about["node"], self.about["address"])


class RayRanks:
    def __init__(self, room: Reservation, launch: LaunchConfig) -> None:
        ray, pool = import_ray(), room.pool
        self._launch, self._pool = launch, pool
        self._ranks = []
        for number in range(pool.procs or 0):
            place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(room.group, number)
            actor = ray.remote(RankHost).options(
                num_cpus=pool.cpus,
                num_gpus=pool.gpus,
                resources=pool.resources,
                scheduling_strategy=place,
                max_restarts=0,
            )
            self._ranks.append(_Rank(number, actor.remote()))

    @property
    def cluster(self) -> str:
        """The address by which processes on the nodes join."""
        return str(self._ranks[0].about["cluster"])

    def meet(self, interrupted: Callable[[], bool]) -> None:
        """Learn where each is."""
        calls = [rank.host.describe.remote() for rank in self._ranks]
        for rank, about in zip(self._ranks, self._answers(calls, interrupted)):
            rank.about = about

    def check_sees(self, path: Path, content: str, interrupted: Callable[[], bool]) -> None:
        calls = [rank.host.can_read.remote(str(path), content, _SEEN_WITHIN_S) for rank in self._ranks]
        answers = self._answers(calls, interrupted)
        blind = {rank.node: None for rank, seen in zip(self._ranks, answers) if not seen}
        if blind:
            raise ConfigError(
                f"{', '.join(blind)} cannot see the run directory {path.parents[1]}: with launch.kind ray it must be "
                "on a file system that all nodes share; choose another --run-dir"
            )

    def _answers(self, calls: list[Any], interrupted: Callable[[], bool]) -> list[Any]:
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
        """`for_first` is what rank 0 finds in its environment besides."""
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

    def _places(self, rank: _Rank) -> dict[str, str]:
        """Ranks of a node see all the GPUs that the run has there, and each takes its own by its local number."""
        beside = [other for other in self._ranks if other.about["node"] == rank.about["node"]]
        places = {
            "RANK": rank.number,
            "WORLD_SIZE": len(self._ranks),
            "LOCAL_RANK": beside.index(rank),
            "LOCAL_WORLD_SIZE": len(beside),
        }
        found = {name: str(number) for name, number in places.items()}
        gpus = [gpu for other in beside for gpu in other.about["gpus"]]
        return {**found, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else found

    # --- watching ----------------------------------------------------------------------------------------------------

    def watch(self, run: RunDir, interrupted: Callable[[], bool]) -> None:
        """Returns when all ranks have ended well, or one has failed and said why in the run directory."""
        stopped = StoppedTimes()
        failed_at: float | None = None
        for rank in self._ranks:
            rank.answered_at = time.monotonic()
        while any(rank.code is None for rank in self._ranks):
            if interrupted():
                raise Interrupted
            standing, now = self._look(), time.monotonic()
            for name in stopped.look(standing, now):
                rank = next(rank for rank in self._ranks if rank.name == name)
                raise RankLost(rank.number, say_stopped(name, rank.pid))
            self._find_silent(now - self._launch.heartbeat_s)
            if failed_at is None and any(rank.code for rank in self._ranks):
                failed_at = now
            if failed_at is not None and self._is_settled(failed_at, now):
                break
        self._find_killed()
        if any(rank.code for rank in self._ranks) and not run.failures():
            ended = ", ".join(f"{rank.name} with exit code {rank.code}" for rank in self._ranks if rank.code)
            raise RankLost(0, f"ended without a word: {ended}")

    def _is_settled(self, failed_at: float, now: float) -> bool:
        """Whether it is known of every rank how it stands after the first of them failed."""
        if now - failed_at > _ANSWER_S:
            self._find_silent(failed_at)
        return now - failed_at > _WORD_S and all(r.code is not None or r.answered_at > failed_at for r in self._ranks)

    def _look(self) -> list[str]:
        """Ask all that still run; who has no answer is not asked again until it has. Returns who is stopped."""
        ray = import_ray()
        for rank in self._ranks:
            if rank.code is None and rank.asked is None:
                rank.asked = rank.host.poll.remote()
        asked = [rank for rank in self._ranks if rank.asked is not None]
        time.sleep(_LOOK_INTERVAL_S)
        ready, _ = ray.wait([rank.asked for rank in asked], num_returns=len(asked), timeout=0)
        standing = []
        for rank in asked:
            if rank.asked not in ready:
                continue
            call, rank.asked = rank.asked, None
            try:
                rank.code, is_stopped = ray.get(call)
            except ray.exceptions.ActorUnavailableError:
                continue  # it may be the network: silence counts
            except ray.exceptions.RayActorError as error:
                raise RankLost(rank.number, self._say_lost(rank, str(error))) from error
            rank.answered_at = time.monotonic()
            if is_stopped:
                standing.append(rank.name)
        return standing

    def _find_silent(self, since: float) -> None:
        for rank in self._ranks:
            if rank.code is None and rank.answered_at < since:
                raise RankLost(rank.number, self._say_lost(rank, ""))

    def _find_killed(self) -> None:
        for rank in self._ranks:
            if rank.code is not None and -rank.code in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL):
                raise RankLost(rank.number, say_signal(rank.name, -rank.code))

    def _say_lost(self, rank: _Rank, reason: str) -> str:
        is_alive = {found["NodeID"]: found["Alive"] for found in import_ray().nodes()}.get(rank.about["node"], False)
        if is_alive and reason:
            return f"the process that held {rank.name} ended"
        beside = [other for other in self._ranks if other.about["node"] == rank.about["node"]]
        if is_alive:  # as far as Ray knows: who has answered since is well
            beside = [other for other in beside if other.answered_at < rank.answered_at + 2 * _LOOK_INTERVAL_S]
        names = ", ".join(str(other.number) for other in beside)
        return f"{rank.node} is lost or does not answer, and with it rank {names}"

    def end(self) -> None:
        """None is left when this returns, unless its node is out of reach: what is there then ends with its actor."""
        ray = import_ray()
        calls = [rank.host.stop.remote(_GRACE_S) for rank in self._ranks]
        ray.wait(calls, num_returns=len(calls), timeout=2 * _GRACE_S)
        for rank in self._ranks:
            ray.kill(rank.host, no_restart=True)
