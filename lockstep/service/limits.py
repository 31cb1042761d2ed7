"""How much one job may start, and how much one user may have."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config import GrpoConfig, RunConfig
from lockstep.service.errors import Forbidden, ServiceError, TooMany
from lockstep.service.scheduler import Slots
from lockstep.service.schemas import JobRequest
from lockstep.service.store import Store

_MAX_THREADS = 1024


@dataclass(frozen=True)
class UserLimits:
    """Of each user with the role submit; `max_running` of every user that has a name."""

    max_priority: int = 10
    max_queued: int = 100
    max_running: int | None = None
    max_upload_mb: int = 10 << 10


DEFAULT_LIMITS = UserLimits()


def check_user(request: JobRequest, owner: str, limits: UserLimits, store: Store) -> None:
    """Before a job of this user is queued."""
    if request.priority > limits.max_priority:
        raise Forbidden(
            f"priority: {request.priority} is more than the {limits.max_priority} that a submitter may ask for: lower "
            "it, or ask an administrator"
        )
    waiting = store.num_queued(owner)
    if waiting >= limits.max_queued:
        raise TooMany(f"{waiting} of your jobs wait, and a user may have {limits.max_queued}: wait, or cancel some")


def count_slots(config: RunConfig, slots: Slots, max_helpers: int) -> int:
    """The slots that a job takes: one for each process that computes, rank or engine. Others are bounded.

    On GPUs, engines share those that there are, one for each at most.
    """
    num_ranks, num_engines = config.launch.procs, config.rollouts.engines
    wanted = num_ranks + num_engines
    can_share = bool(slots.devices) and max(num_ranks, num_engines) <= slots.count
    if wanted > slots.count and not can_share:
        engines = f" and {num_engines} of rollouts.engines" if num_engines else ""
        raise ServiceError(
            f"launch.procs: the job needs {num_ranks} processes{engines}, and this service has {slots.count}: it would "
            "never start"
        )
    helpers = {"data.procs": config.data.procs}
    if isinstance(config.algorithm, GrpoConfig):
        helpers["algorithm.reward_procs"] = config.algorithm.reward_procs
    for key, number in helpers.items():
        if isinstance(number, int) and number > max_helpers:
            raise ServiceError(f"{key}: {number} processes are more than the {max_helpers} that this service allows")
    if (config.rollouts.threads or 0) > _MAX_THREADS:
        raise ServiceError(f"rollouts.threads: {config.rollouts.threads} are more than the {_MAX_THREADS} allowed")
    return min(wanted, slots.count)
