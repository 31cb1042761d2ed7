"""The HTTP application: the manager, the guard, the routes. Composes; decides nothing itself."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from fastapi import FastAPI

from lockstep.launch import Launcher
from lockstep.service.access import Tokens
from lockstep.service.api import answers, datasets, jobs, runs, system
from lockstep.service.dashboard import dashboard
from lockstep.service.dryrun import DryRuns
from lockstep.service.guard import Guard
from lockstep.service.jobs import JobManager
from lockstep.service.llama_stack import routes as llama_stack
from lockstep.service.settings import VERSION, ServiceSettings
from lockstep.service.streams import Streams


def create_app(settings: ServiceSettings, manager: JobManager | None = None) -> FastAPI:
    """`manager` is made from the settings if none is given. It runs for as long as the application does."""
    tokens = None if settings.token_file is None else Tokens(settings.token_file)
    manager = manager or make_manager(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.dry_runs = DryRuns(manager.data_dir, settings.plan_timeout_s)
        manager.start()
        try:
            yield
        finally:
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
    app.state.answers = Counter()
    app.state.num_uploads = 0
    answers.install(app)
    for module in (jobs, runs, datasets, system, llama_stack, dashboard):
        app.include_router(module.router)
    answers.describe_errors(app)
    app.add_middleware(Guard, settings=settings, answers=app.state.answers)
    return app


def make_manager(settings: ServiceSettings, launcher: Launcher | None = None) -> JobManager:
    return JobManager(
        settings.data_dir,
        database=settings.database,
        procs=settings.procs,
        max_jobs=settings.max_jobs,
        launcher=launcher,
        allow_paths=settings.allow_paths,
        allow_code=settings.allow_code,
        max_upload_mb=settings.max_upload_mb,
        max_datasets=settings.max_datasets,
    )
