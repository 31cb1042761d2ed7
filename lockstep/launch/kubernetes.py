"""Runs on Kubernetes: applied once under a launch id, then watched. The cluster itself starts lost pods again.

The run directory that counts is the pods'. The one here follows it by what the first pod prints (run_echo).
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from lockstep.config import ConfigError, KubernetesLaunch
from lockstep.launch.kubernetes_api import Absent, Cluster, ClusterSilent, Exists
from lockstep.launch.kubernetes_manifest import WORKLOADS, Manifest, Plan
from lockstep.launch.kubernetes_pods import Judgement, judge
from lockstep.launch.launcher import Resources, RunHandle, RunState, record_stop
from lockstep.launch.local import HANDLE_FILE, read_handle
from lockstep.launch.run_echo import RunMirror
from lockstep.rundir import RunDir, open_log, write_atomically

_OVERLAP_S = 10  # of what is read of a log and what was read before: clocks differ
_ATTEMPTS = 4  # to apply something, before the last one
T = TypeVar("T")
_ALIVE = (None, "Pending", "Running", "Unknown")


class AppliedAs(NamedTuple):
    """What identifies a launch in its cluster; `uid` tells it from another of the same name."""

    target: str
    namespace: str
    name: str
    uid: str


class KubernetesLauncher:
    kind = "kubernetes"
    interval_s = 2.0  # between two looks at the cluster
    silence_limit_s = 900.0  # of the API server
    stuck_limit_s = 120.0  # of an image that cannot be pulled, or a container that cannot be made

    def __init__(self) -> None:
        self._followers: dict[str, _Follower] = {}

    def start(self, run_dir: Path, resources: Resources, *, launch_id: str | None = None) -> RunHandle:
        """Everything that can be wrong is found before anything is made, by letting the cluster look at it first."""
        run = RunDir(Path(run_dir).resolve(), owner=True)
        plan = Plan.of(run.config(), run.path.name, launch_id or uuid.uuid4().hex)
        cluster = Cluster(plan.launch.context, plan.launch.namespace)
        self._refuse_if_alive(run, cluster)
        _check(cluster, plan)
        run.clear_failures()
        run.write_status(state="created", error=None, phase="starting", launch=plan.launch_id)
        return _apply(cluster, plan, run)

    def find(self, run_dir: Path, launch_id: str) -> RunHandle | None:
        run = RunDir(Path(run_dir).resolve(), owner=True)
        plan = Plan.of(run.config(), run.path.name, launch_id)
        cluster = Cluster(plan.launch.context, plan.launch.namespace)
        found = cluster.find(WORKLOADS[plan.target], launch_id)
        if found is not None:  # whoever applied it may have been killed before the rest was there
            return _complete(cluster, plan, run, found)
        written = read_handle(run.path)
        return written if written is not None and written.launch_id == launch_id else None

    def poll(self, handle: RunHandle) -> RunState:
        return self._follower(handle).poll()

    def stop(self, handle: RunHandle, hurry: Callable[[], bool] = lambda: False) -> None:
        self._follower(handle).stop(hurry)

    def _follower(self, handle: RunHandle) -> _Follower:
        if handle.launch_id not in self._followers:
            self._followers[handle.launch_id] = _Follower(handle, self)
        return self._followers[handle.launch_id]

    def _refuse_if_alive(self, run: RunDir, cluster: Cluster) -> None:
        earlier = read_handle(run.path)
        if earlier is None or earlier.launcher != self.kind:
            return
        applied = AppliedAs(*earlier.started.split("/"))
        if any((pod.get("status") or {}).get("phase") in _ALIVE for pod in cluster.pods(earlier.launch_id)):
            raise ValueError(
                f"{run.path} is still running as {WORKLOADS[applied.target].kind} {applied.name} in namespace "
                f"{applied.namespace}: follow it with lockstep attach {run.path}"
            )


def _check(cluster: Cluster, plan: Plan) -> None:
    """What the cluster would refuse, or take and not honour."""
    found, wanted = WORKLOADS[plan.target], plan.workload()
    try:
        seen = cluster.create(found, wanted, dry_run=True)
    except Exists:  # applied before, under this launch id
        return
    if plan.target == "trainjob" and "runtimePatches" not in seen.get("spec", {}):
        raise ConfigError(
            "this cluster's Kubeflow Trainer does not know runtimePatches, by which a TrainJob gets its volumes: it "
            "must be 2.2 or newer; or use launch.target jobset"
        )
    for volume in plan.launch.volumes:
        _check_claim(cluster, plan, volume.claim, writes=not volume.read_only)


def _check_claim(cluster: Cluster, plan: Plan, name: str, *, writes: bool) -> None:
    try:
        claim = cluster.claim(name)
    except Absent:
        raise ConfigError(
            f"namespace {cluster.namespace} has no PersistentVolumeClaim {name} (launch.volumes)"
        ) from None
    except ConfigError:  # not everybody who may run jobs may look at claims
        return
    modes = claim.get("spec", {}).get("accessModes") or []
    shared = "ReadWriteMany" in modes or (not writes and "ReadOnlyMany" in modes)
    if (plan.launch.nodes > 1 or plan.target == "rayjob") and not shared:
        raise ConfigError(
            f"the claim {name} can be mounted as {', '.join(modes)} only, and several pods need it: use one with "
            "ReadWriteMany"
        )


def _apply(cluster: Cluster, plan: Plan, run: RunDir) -> RunHandle:
    """The workload comes first, so that the rest is removed with it; its pods wait for their configuration."""
    found = WORKLOADS[plan.target]

    def create() -> Manifest:
        try:
            return cluster.create(found, plan.workload())
        except Exists:  # of the same launch id, which nobody else has: by a call whose answer was lost, say
            return cluster.get(found, plan.name)

    return _complete(cluster, plan, run, _insist(create, run))


def _insist(call: Callable[[], T], run: RunDir) -> T:
    """A server that does not answer may have done what it was asked."""
    for attempt in range(_ATTEMPTS):
        with contextlib.suppress(ClusterSilent):
            return call()
        time.sleep(2**attempt)
    try:
        return call()
    except ClusterSilent as error:
        raise ClusterSilent(f"{error}; it may have been applied: lockstep attach {run.path} finds it") from error


def _complete(cluster: Cluster, plan: Plan, run: RunDir, made: Manifest) -> RunHandle:
    uid = made["metadata"]["uid"]
    try:
        _insist(lambda: cluster.create_config_map(plan.config_map(uid)), run)
    except Exists:
        pass
    except ConfigError:
        cluster.delete(WORKLOADS[plan.target], plan.name)  # it would wait for its configuration
        raise
    applied = AppliedAs(plan.target, cluster.namespace, plan.name, uid)
    handle = RunHandle(KubernetesLauncher.kind, str(run.path), 0, "/".join(applied), plan.launch_id)
    write_atomically(run.path / HANDLE_FILE, handle.to_json())
    return handle


class _Follower:
    """One launch, watched: its state, and its run directory here."""

    def __init__(self, handle: RunHandle, launcher: KubernetesLauncher) -> None:
        self._handle, self._launcher = handle, launcher
        self._applied = AppliedAs(*handle.started.split("/"))
        self._run = RunDir(handle.run_dir, owner=True)
        config = self._run.config().launch
        if not isinstance(config, KubernetesLaunch):
            raise ConfigError(f"{handle.run_dir} was started on Kubernetes: set launch.kind to kubernetes to follow it")
        self._config = config
        self._cluster = Cluster(config.context, self._applied.namespace)
        self._mirror = RunMirror(self._run)
        self._unseen_s = self._mirror.age_s()
        self._read: dict[str, tuple[str, float]] = {}  # by pod: the time of its last line, and when that was read
        self._said: dict[str, str] = {}  # by pod: the last line that begins with "error: "
        self._looked_at = self._silent_since = self._stuck_since = self._waiting_since = -1.0
        self._state = RunState("running")
        self._where = f"{WORKLOADS[self._applied.target].kind} {self._applied.name}"

    def poll(self) -> RunState:
        now = time.monotonic()
        if self._state.state == "running" and (
            self._looked_at < 0 or now - self._looked_at >= self._launcher.interval_s
        ):
            try:
                self._state = self._look()
                self._silent_since = -1.0
            except ClusterSilent as error:
                self._state = self._note_silence(str(error), now)
            self._looked_at = time.monotonic()
        return self._state

    def stop(self, hurry: Callable[[], bool]) -> None:
        """The pods get their grace period, in which the ranks may save."""
        self._remove(hurry)
        record_stop(self._run)
        self._state = RunState("completed" if self._run.status().get("state") == "completed" else "cancelled")

    # --- looking ------------------------------------------------------------------------------------------------------

    def _look(self) -> RunState:
        workload = self._workload()
        pods = self._cluster.pods(self._handle.launch_id)  # after it: those of a job that has ended are as they ended
        judgement = self._judge(workload, pods)
        for pod in pods:
            self._follow_log(pod)
        self._mirror.flush()
        if judgement.phase == "completed":
            return self._complete()
        if judgement.phase in ("failed", "absent"):
            return self._fail(judgement)
        overdue = self._overdue(judgement)
        if overdue:
            self._remove(lambda: False)
            return self._fail(Judgement("failed", overdue, judgement.exit_code))
        if self._run.status().get("state") in ("failed", "interrupted"):  # so said a pod that has a successor
            self._run.write_status(state="created", error=None, phase="starting again")
        if judgement.phase != "running":
            self._show(judgement.reason)
        return RunState("running")

    def _workload(self) -> Manifest | None:
        try:
            return self._cluster.get(WORKLOADS[self._applied.target], self._applied.name)
        except Absent:
            return None

    def _judge(self, workload: Manifest | None, pods: list[Manifest]) -> Judgement:
        if workload is not None and workload["metadata"].get("uid") == self._applied.uid:
            return judge(self._applied.target, workload, pods)
        what = "was deleted" if workload is None else "was deleted, and somebody made another of that name"
        return Judgement("absent", f"{self._where} {what} from namespace {self._applied.namespace}")

    def _follow_log(self, pod: Manifest) -> None:
        name = pod["metadata"]["name"]
        last, read_at = self._read.get(name, ("", 0.0))
        now = time.monotonic()
        unseen_s = now - read_at if last else self._unseen_s
        since_s = None if unseen_s is None else int(unseen_s) + _OVERLAP_S
        lines = [(when, line) for when, line in self._cluster.log(pod, since_s) if when > last]
        plain = []
        for _, line in lines:
            if not self._mirror.take(line):
                plain.append(line)
                if line.startswith("error: "):
                    self._said[name] = line.removeprefix("error: ")
        if plain:
            self._run.logs.mkdir(exist_ok=True)
            with open_log(self._run.logs / f"{name}.log") as file:
                file.write("".join(f"{line}\n" for line in plain).encode())
        self._read[name] = (lines[-1][0] if lines else last, now)

    def _overdue(self, judgement: Judgement) -> str:
        """Why nobody should wait any longer; empty: somebody should."""
        now, limit_s = time.monotonic(), self._config.pending_timeout_s
        is_queued = judgement.reason.startswith(("waiting in the queue", "the job is suspended"))
        if judgement.phase != "stuck":
            self._stuck_since = -1.0
        elif self._stuck_since < 0:
            self._stuck_since = now
        if judgement.phase == "running" or is_queued:
            self._waiting_since = -1.0
        elif self._waiting_since < 0:
            self._waiting_since = now
        if self._stuck_since >= 0 and now - self._stuck_since >= self._launcher.stuck_limit_s:
            return judgement.reason
        if self._waiting_since >= 0 and now - self._waiting_since >= limit_s:
            return f"{judgement.reason}; launch.pending_timeout_s allows {limit_s:g} s for that"
        return ""

    def _show(self, phase: str) -> None:
        if self._run.status().get("phase") != phase:
            self._run.write_status(phase=phase)

    def _note_silence(self, sentence: str, now: float) -> RunState:
        if self._silent_since < 0:
            self._silent_since = now
        waited = now - self._silent_since
        if waited < self._launcher.silence_limit_s:
            self._show(sentence)
            return RunState("running")
        reason = (
            f"{sentence}, for {waited:.0f} s now; the run may go on there: follow it with lockstep attach "
            f"{self._run.path}"
        )
        return RunState("failed", reason, 1)  # not written: what the run does is not known

    # --- ending -------------------------------------------------------------------------------------------------------

    def _complete(self) -> RunState:
        if self._run.status().get("state") != "completed":  # its last lines were not to be had
            self._run.write_status(state="completed", phase="done", error=None)
        return RunState("completed")

    def _fail(self, judgement: Judgement) -> RunState:
        """The ranks' own sentence, where they had one and the cluster did nothing to them."""
        status = self._run.status()
        if status.get("state") in ("completed", "cancelled"):  # cancelled: by another process
            return RunState("completed" if status["state"] == "completed" else "cancelled")
        failures = self._run.failures()
        of_cluster = "ended with exit code" not in judgement.reason and judgement.exit_code not in (2, 3)
        own = failures[0]["message"] if failures else next(iter(self._said.values()), "")
        reason = judgement.reason if of_cluster or not own else own
        code = judgement.exit_code if judgement.exit_code in (2, 3) else 1
        if failures and not of_cluster:
            code = int(failures[0].get("exit_code", 1))
        self._run.write_status(state="failed", error=reason, phase=None)
        return RunState("failed", reason, code)

    def _remove(self, hurry: Callable[[], bool]) -> None:
        """Returns when no pod is left."""
        found = WORKLOADS[self._applied.target]
        self._cluster.delete(found, self._applied.name)
        deadline = time.monotonic() + self._config.grace_s + 60
        hurried = False
        while pods := self._cluster.pods(self._handle.launch_id):
            for pod in pods:
                self._follow_log(pod)
            if not hurried and (hurry() or time.monotonic() > deadline):
                hurried, deadline = True, time.monotonic() + 60
                for pod in pods:
                    self._cluster.delete_pod_now(pod["metadata"]["name"])
            elif hurried and time.monotonic() > deadline:
                raise ClusterSilent(f"pods of {self._where} are still there: see kubectl get pods")
            time.sleep(min(self._launcher.interval_s, 1.0))
