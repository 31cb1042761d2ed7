"""`lockstep serve`: the application on uvicorn, until a signal ends it. Jobs run on."""

from __future__ import annotations

import logging
import sys

import uvicorn

from lockstep.service.app import create_app, make_manager
from lockstep.service.jobs import JobManager
from lockstep.service.settings import ServiceSettings


def run_server(settings: ServiceSettings, manager: JobManager | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    manager = manager or make_manager(settings)
    app = create_app(settings, manager)
    devices = f"GPUs {', '.join(manager.slots.devices)}" if manager.slots.devices else "on CPU"
    logging.info("data in %s, %d processes, %s", manager.data_dir.path, manager.slots.count, devices)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        log_level="info",
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=3,
    )
    uvicorn.Server(config).run()
