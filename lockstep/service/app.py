"""The HTTP application and `lockstep serve`: the manager, the middleware, the routes, on uvicorn."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator

from anyio import CapacityLimiter
from fastapi import FastAPI

from lockstep.config import ConfigError
from lockstep.launch import Launcher
from lockstep.service import dashboard
from lockstep.service.access import Tokens
from lockstep.service.api import datasets, jobs, system
from lockstep.service.api.error_responses import describe_errors, install_handlers
from lockstep.service.api.system import DryRuns
from lockstep.service.connections import load_tls, make_server
from lockstep.service.jobs import JobManager
from lockstep.service.llama_stack import routes as llama_stack
from lockstep.service.middleware import NamingMiddleware, SecurityMiddleware
from lockstep.service.run_files import Streams
from lockstep.service.settings import VERSION, ServiceSettings
from lockstep.service.tinker.settings import TinkerSettings

_SWITCH_INTERVAL_S = 0.001  # a thread that reads a configuration lets the others go on soon
_MAX_SUBMISSIONS = 4  # at once: each may take some milliseconds, or wait for the database

_PR_SET_DUMPABLE = 4


def create_app(settings: ServiceSettings, manager: JobManager | None = None) -> FastAPI:
    """`manager` is made from the settings if none is given. It runs for as long as the application does."""
    tokens = None if settings.token_file is None else Tokens(settings.token_file)
    manager = manager or make_manager(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.dry_runs = DryRuns(manager.data_dir, manager.environment, settings.plan_timeout_s)
        app.state.health_threads = CapacityLimiter(2)
        app.state.submission_threads = CapacityLimiter(_MAX_SUBMISSIONS)
        manager.start()
        try:
            if app.state.tinker is not None:
                await app.state.tinker.start()
            yield
        finally:
            if app.state.tinker is not None:
                await app.state.tinker.close()
            manager.close()

    app = FastAPI(
        title="Lockstep",
        version=VERSION,
        description="Post-training jobs: submit, follow, fetch. Errors are `{error: {code, message}}`.",
        openapi_url="/api/openapi.json",
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.manager = manager
    app.state.tokens = tokens
    app.state.streams = Streams()
    app.state.response_counts = Counter()
    app.state.uploads = Counter()
    app.state.health_threads = app.state.submission_threads = None  # made where the event loop is: those of all
    app.state.tinker = None
    app.state.max_connections_per_address = settings.max_connections_per_address
    install_handlers(app)
    if settings.tinker is not None:
        _add_tinker(app, settings.tinker, manager)
    for router in (jobs.router, jobs.run_router, datasets.router, system.router, llama_stack.router, dashboard.router):
        app.include_router(router)
    describe_errors(app)
    app.add_middleware(NamingMiddleware, places=manager.admission.places)
    app.add_middleware(SecurityMiddleware, settings=settings, tokens=tokens, response_counts=app.state.response_counts)
    return app


def _add_tinker(app: FastAPI, settings: TinkerSettings, manager: JobManager) -> None:
    try:
        from lockstep.service.tinker import listing, routes
        from lockstep.service.tinker.server import TinkerServer
    except ImportError as error:
        raise ConfigError(f"--tinker needs a package: pip install 'lockstep[tinker]' ({error})") from error
    app.state.tinker = TinkerServer(settings, manager.data_dir)
    app.include_router(routes.router)
    app.include_router(listing.router)


def make_manager(settings: ServiceSettings, launcher: Launcher | None = None) -> JobManager:
    return JobManager(
        settings.data_dir,
        database=settings.database,
        procs=settings.procs,
        max_jobs=settings.max_jobs,
        launcher=launcher,
        cluster=settings.cluster,
        allowed=settings.allowed,
        job_env=settings.job_env,
        max_upload_mb=settings.max_upload_mb,
        max_datasets=settings.max_datasets,
        max_helpers=settings.max_helpers,
        user_limits=settings.user_limits,
        restart_delay_s=settings.restart_delay_s,
        rebuild=settings.rebuild,
        gpu=settings.gpu,
    )


def _close_to_others() -> None:
    """Jobs run as the same user: what came to us in the environment, and our memory, are not theirs to read."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def run_server(settings: ServiceSettings, manager: JobManager | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    _close_to_others()
    load_tls(settings)  # what is wrong with it is said before anything is opened
    manager = manager or make_manager(settings)
    server = make_server(create_app(settings, manager), settings)
    if settings.cluster is not None:
        logging.info("jobs run as jobs of Slurm, on %d nodes each at most", settings.cluster.launch.nodes)
    devices = f"GPUs {', '.join(manager.slots.devices)}" if manager.slots.devices else "on CPU"
    logging.info("data in %s, %d processes, %s", manager.data_dir.path, manager.slots.count, devices)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    server.run()
