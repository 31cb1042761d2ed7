"""What the cluster says about a launch, as the state of a run with one sentence. Pure: objects in, judgement out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.launch.kubernetes_manifest import CONTAINER, Manifest

Phase = Literal["waiting", "stuck", "running", "completed", "failed", "absent"]
# A container that waits for one of these waits for a person.
_STUCK = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"})
_DISRUPTIONS = {
    "PreemptionByScheduler": "made room for a pod of higher priority",
    "DeletionByTaintManager": "was removed from its node, which is tainted or does not answer",
    "EvictionByEvictionAPI": "was evicted, as when a node is drained",
    "DeletionByPodGC": "was lost with its node",
    "TerminationByKubelet": "was ended by its node, which shuts down or lacks memory or disk",
}
_FINISHED = {"job": "Complete", "jobset": "Completed", "trainjob": "Complete"}


@dataclass(frozen=True)
class Judgement:
    """`reason` is one sentence: why pods wait, or why they failed. `exit_code` is that of the first failed pod."""

    phase: Phase
    reason: str = ""
    exit_code: int = 1


def judge(target: str, workload: Manifest, pods: Sequence[Manifest]) -> Judgement:
    ended = _ended(target, workload)
    if ended is not None and ended[0]:
        return Judgement("completed")
    if ended is not None:
        lost = next((found for pod in reversed(pods) if (found := why_failed(pod)) is not None), None)
        deadline = "DeadlineExceeded" in ended[1]
        if lost is None or deadline:
            return Judgement("failed", ended[1], 1)
        return Judgement("failed", lost.reason, lost.exit_code)
    if _is_suspended(workload):
        queue = workload["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        return Judgement("waiting", f"waiting in the queue {queue}" if queue else "the job is suspended")
    return _judge_pods(pods)


def _judge_pods(pods: Sequence[Manifest]) -> Judgement:
    alive = [pod for pod in pods if pod.get("status", {}).get("phase") in (None, "Pending", "Running", "Unknown")]
    if not alive:
        failed = next((found for pod in reversed(pods) if (found := why_failed(pod)) is not None), None)
        again = f"{failed.reason}; it is started again" if failed is not None else "waiting for pods"
        return Judgement("waiting", again)
    waits = [found for pod in alive if (found := _why_waiting(pod)) is not None]
    stuck = next((found for found in waits if found.phase == "stuck"), None)
    return stuck or (waits[0] if waits else Judgement("running"))


def _ended(target: str, workload: Manifest) -> tuple[bool, str] | None:
    """(whether well, why not), or None while it goes on."""
    status, kind = workload.get("status") or {}, workload["kind"]
    if target == "rayjob":
        return _ray_job_ended(status)
    for condition in status.get("conditions") or ():
        if condition.get("status") != "True":
            continue
        if condition.get("type") == _FINISHED[target]:
            return True, ""
        if condition.get("type") == "Failed":
            reason, message = condition.get("reason", "Failed"), condition.get("message") or "no reason given"
            if reason == "DeadlineExceeded":
                return False, f"the {kind} took longer than launch.deadline_s allows (DeadlineExceeded)"
            return False, f"the {kind} failed ({reason}): {message}"
    return None


def _ray_job_ended(status: Mapping[str, Any]) -> tuple[bool, str] | None:
    deployment, job = status.get("jobDeploymentStatus"), status.get("jobStatus")
    if deployment == "Complete" and job == "SUCCEEDED":
        return True, ""
    if deployment in ("Complete", "Failed", "ValidationFailed"):
        reason = status.get("reason") or job or deployment
        if reason == "DeadlineExceeded":
            return False, "the RayJob took longer than launch.deadline_s allows (DeadlineExceeded)"
        return False, f"the RayJob failed ({reason}): {status.get('message') or 'no reason given'}"
    return None


def _is_suspended(workload: Manifest) -> bool:
    if workload.get("spec", {}).get("suspend"):
        return True
    conditions = (workload.get("status") or {}).get("conditions") or ()
    return any(one.get("type") == "Suspended" and one.get("status") == "True" for one in conditions)


# --- one pod ----------------------------------------------------------------------------------------------------------


def why_failed(pod: Manifest) -> Judgement | None:
    """None: it has not failed. What the cluster did to it comes before what its process made of that."""
    status, name = pod.get("status") or {}, pod["metadata"]["name"]
    if status.get("phase") not in ("Failed", "Unknown") and status.get("reason") != "NodeLost":
        return None
    node = (pod.get("spec") or {}).get("nodeName")
    where = f"pod {name}" + (f" on node {node}" if node else "")
    ended = _terminated(status)
    code = int(ended.get("exitCode", 1)) if ended else 1
    if ended and ended.get("reason") == "OOMKilled":
        limit = _memory_limit(pod)
        return Judgement("failed", f"{where} ran out of memory{limit}: raise launch.memory", code)
    if status.get("reason") == "Evicted":
        return Judgement("failed", f"{where} was evicted: {status.get('message') or 'no reason given'}", code)
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            what = _DISRUPTIONS.get(condition.get("reason", ""), "had to go")
            return Judgement("failed", f"{where} {what} ({condition.get('message') or condition.get('reason')})", code)
    if status.get("phase") == "Unknown" or status.get("reason") == "NodeLost":
        return Judgement("failed", f"{where} is lost: its node does not answer", 1)
    if ended:
        killed = " (SIGKILL)" if code == 137 else ""
        return Judgement("failed", f"{where} ended with exit code {code}{killed}", code)
    return Judgement("failed", f"{where} failed: {status.get('message') or status.get('reason') or 'no reason given'}")


def _terminated(status: Mapping[str, Any]) -> Mapping[str, Any]:
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended and ended.get("exitCode") != 0:
            found: Mapping[str, Any] = ended
            return found
    return {}


def _memory_limit(pod: Manifest) -> str:
    for container in (pod.get("spec") or {}).get("containers") or ():
        limit = (container.get("resources") or {}).get("limits", {}).get("memory")
        if limit and container.get("name") in (CONTAINER, "ray-head", "ray-worker"):
            return f" (its limit is {limit})"
    return ""


def _why_waiting(pod: Manifest) -> Judgement | None:
    """None: its container runs."""
    status, name = pod.get("status") or {}, pod["metadata"]["name"]
    if status.get("phase") == "Unknown" or status.get("reason") == "NodeLost":
        return Judgement("waiting", f"pod {name} is on a node that does not answer")
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = condition.get("message") or condition.get("reason") or "no reason given"
            return Judgement("waiting", f"no node for pod {name}: {message}")
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return _describe_wait(name, container, waiting)
    if status.get("phase") == "Running":
        return None
    return Judgement("waiting", f"pod {name} is starting")


def _describe_wait(name: str, container: Mapping[str, object], waiting: Mapping[str, object]) -> Judgement:
    reason, message = str(waiting.get("reason", "")), str(waiting.get("message") or "").strip()
    said = f": {message}" if message else ""
    if reason in _IMAGE:
        image = container.get("image")
        return Judgement("stuck", f"the image {image} of pod {name} cannot be pulled ({reason}){said}", 2)
    if reason in _STUCK:
        return Judgement("stuck", f"the container of pod {name} cannot be made ({reason}){said}", 2)
    return Judgement("waiting", f"pod {name} is starting ({reason})" if reason else f"pod {name} is starting")
