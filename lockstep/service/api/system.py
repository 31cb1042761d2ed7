"""The service itself: health, Prometheus metrics, the plan of a configuration."""

from __future__ import annotations

from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse

from lockstep.service.access import Manager, Reader, Submitter
from lockstep.service.api.answers import documented
from lockstep.service.dryrun import DryRuns
from lockstep.service.prometheus import render
from lockstep.service.schemas import Health, PlanRequest, PlanView
from lockstep.service.settings import VERSION

router = APIRouter(tags=["service"])


@router.get("/api/health", responses=documented())
def get_health(manager: Manager, caller: Reader) -> Health:
    return Health(
        version=VERSION,
        procs=manager.slots.count,
        free=manager.num_free(),
        devices=list(manager.slots.devices),
        jobs=manager.store.counts(),
        user=caller.name,
        role=caller.role,
    )


@router.post("/api/plan", responses=documented(400, 408, 413))
async def plan_run(body: PlanRequest, request: Request, manager: Manager, caller: Submitter) -> PlanView:
    """What a configuration would train, and every mistake that can be found without training."""
    admitted = await to_thread.run_sync(lambda: manager.admit(body.config, owner=caller.name, admin=caller.is_admin))
    dry_runs: DryRuns = request.app.state.dry_runs
    found = await dry_runs.plan(admitted.config, request.is_disconnected)
    return PlanView(config=found["config"], plan=found["plan"])


@router.get("/metrics", response_class=PlainTextResponse, responses=documented())
def get_prometheus(request: Request, manager: Manager, caller: Reader) -> PlainTextResponse:
    """In Prometheus' text format."""
    state = request.app.state
    text = render(manager, state.answers, state.streams.num_open, caller.sees_owner)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
