"""lockstep serve: the job service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli.options import app

_DEFAULT_DIR = Path("~/.local/share/lockstep")
_ACCESS, _JOBS, _COST, _TINKER = "Who may come in", "Jobs", "What requests may cost", "Tinker API"


def _option(panel: str, help: str, **settings: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=panel, **settings)


DataDir = Annotated[Path, typer.Option(metavar="DIR", help="Where jobs, data sets and the database are kept.")]
Database = Annotated[
    str | None, typer.Option(metavar="URL", help="Also $LOCKSTEP_DATABASE. Default: SQLite in the data directory.")
]
Rebuild = Annotated[bool, typer.Option("--rebuild", help="Make a lost list of jobs anew from the job folders.")]

Host = Annotated[str, _option(_ACCESS, "Addresses other than loopback need --token-file.")]
Port = Annotated[int, _option(_ACCESS, "0 picks a free port.", min=0, max=65535)]
TokenFile = Annotated[Path | None, _option(_ACCESS, "Tokens and their roles; see lockstep token.", metavar="FILE")]
TlsCert = Annotated[Path | None, _option(_ACCESS, "Certificate chain (PEM): serve https.", metavar="FILE")]
TlsKey = Annotated[Path | None, _option(_ACCESS, "Its private key (PEM).", metavar="FILE")]
Proxy = Annotated[
    list[str] | None,
    _option(_ACCESS, "Believe X-Forwarded headers from this reverse proxy. Can be repeated.", metavar="ADDRESS"),
]

Procs = Annotated[
    int | None, _option(_JOBS, "Ranks and engines of all jobs. Default: one per GPU, or per core.", min=1)
]
MaxJobs = Annotated[int | None, _option(_JOBS, "Jobs at a time. Default: as many as fit.", min=1)]
Launch = Annotated[
    Path | None,
    _option(_JOBS, "A launch section of kind slurm: jobs run there, not on this machine.", metavar="FILE"),
]
Gpu = Annotated[
    str | None,
    _option(_JOBS, "The GPU of the cluster's nodes, such as h100: what cannot fit is refused.", metavar="NAME"),
]
MaxHelpers = Annotated[
    int | None, _option(_JOBS, "Reward or tokenising processes of a job. Default: two per core.", min=1)
]
RestartDelay = Annotated[
    float, _option(_JOBS, "Seconds before a failed job's first restart; doubles each time.", min=0, max=300)
]
AllowPath = Annotated[list[Path] | None, _option(_JOBS, "Jobs may also read here. Can be repeated.", metavar="DIR")]
AllowWrite = Annotated[list[Path] | None, _option(_JOBS, "Jobs may also write here. Can be repeated.", metavar="DIR")]
AllowEndpoint = Annotated[
    list[str] | None, _option(_JOBS, "Jobs may sample from this server. Can be repeated.", metavar="URL")
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Let requests name code to run: as the service's user, with its rights.",
        rich_help_panel=_JOBS,
    ),
]
JobEnv = Annotated[
    list[str] | None, _option(_JOBS, "Jobs also get this variable, like HF_TOKEN. Can be repeated.", metavar="NAME")
]

MaxUploadMb = Annotated[int, _option(_COST, "Largest upload, in MB.", min=1)]
MaxDatasets = Annotated[int, _option(_COST, "Most data sets kept.", min=1)]
MaxPriority = Annotated[int, _option(_COST, "Highest priority of submitters.", min=-1000, max=1000)]
MaxQueued = Annotated[int, _option(_COST, "Waiting jobs of each submitter.", min=1)]
MaxRunning = Annotated[int | None, _option(_COST, "Running jobs of each user. Default: any.", min=1)]
MaxUserMb = Annotated[int, _option(_COST, "Data sets of each submitter, in MB.", min=1)]
MaxConnections = Annotated[int, _option(_COST, "At once, in all.", min=16)]
MaxConnectionsPerAddress = Annotated[int, _option(_COST, "At once, from one address.", min=4)]

Tinker = Annotated[
    list[str] | None,
    _option(_TINKER, "Serve this model to Tinker's client; NAME=MODEL names it. Can be repeated.", metavar="MODEL"),
]
TinkerOn = Annotated[str, _option(_TINKER, "Where these models are: auto, cpu or cuda.", metavar="DEVICE")]
TinkerIn = Annotated[str, _option(_TINKER, "What they compute in: auto, bf16 or fp32.", metavar="PRECISION")]
TinkerModels = Annotated[int, _option(_TINKER, "Models in training at once, of each base model.", min=1)]


@app.command()
def serve(
    data_dir: DataDir = _DEFAULT_DIR,
    database: Database = None,
    rebuild: Rebuild = False,
    host: Host = "127.0.0.1",
    port: Port = 8322,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    proxy: Proxy = None,
    procs: Procs = None,
    max_jobs: MaxJobs = None,
    launch: Launch = None,
    gpu: Gpu = None,
    max_helpers: MaxHelpers = None,
    restart_delay: RestartDelay = 5.0,
    allow_path: AllowPath = None,
    allow_write: AllowWrite = None,
    allow_endpoint: AllowEndpoint = None,
    allow_code: AllowCode = False,
    job_env: JobEnv = None,
    max_upload_mb: MaxUploadMb = 1024,
    max_datasets: MaxDatasets = 1000,
    max_priority: MaxPriority = 10,
    max_queued: MaxQueued = 100,
    max_running: MaxRunning = None,
    max_user_mb: MaxUserMb = 10240,
    max_connections: MaxConnections = 1000,
    max_connections_per_address: MaxConnectionsPerAddress = 250,
    tinker: Tinker = None,
    tinker_device: TinkerOn = "auto",
    tinker_precision: TinkerIn = "auto",
    tinker_max_models: TinkerModels = 16,
) -> None:
    """Serve training jobs over HTTP, with a dashboard."""
    from lockstep.service.admission import Allowed
    from lockstep.service.app import run_server
    from lockstep.service.limits import UserLimits
    from lockstep.service.placement import JobPlacement
    from lockstep.service.settings import ServiceSettings, TinkerSettings

    from_environment = os.environ.pop("LOCKSTEP_DATABASE", None)  # it may hold a password: jobs must not inherit it
    allowed = Allowed(tuple(allow_path or ()), tuple(allow_write or ()), tuple(allow_endpoint or ()), code=allow_code)
    run_server(
        ServiceSettings(
            data_dir=data_dir,
            host=host,
            port=port,
            database=database or from_environment,
            procs=procs,
            max_jobs=max_jobs,
            cluster=JobPlacement.read(launch) if launch is not None else None,
            gpu=gpu,
            token_file=token_file,
            allowed=allowed,
            job_env=tuple(job_env or ()),
            max_upload_mb=max_upload_mb,
            max_datasets=max_datasets,
            max_helpers=max_helpers,
            user_limits=UserLimits(max_priority, max_queued, max_running, max_user_mb),
            restart_delay_s=restart_delay,
            rebuild=rebuild,
            max_connections=max_connections,
            max_connections_per_address=max_connections_per_address,
            tls_cert=tls_cert,
            tls_key=tls_key,
            proxies=tuple(proxy or ()),
            tinker=TinkerSettings.parse(tinker or (), tinker_device, tinker_precision, tinker_max_models),
        )
    )
