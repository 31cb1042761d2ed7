"""Commands of the job service: serve, submit, jobs, logs, cancel, artifacts, token."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.options import Config, Json, Overrides, app

if TYPE_CHECKING:
    from lockstep.service.client import Client

Server = Annotated[
    str | None, typer.Option("--server", metavar="URL", help="Default: $LOCKSTEP_SERVER, or http://127.0.0.1:8322.")
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
_DEFAULT_DIR = Path("~/.local/share/lockstep")


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Other addresses than loopback need --token-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8322,
    data_dir: Annotated[Path, typer.Option(metavar="DIR", help="Jobs, data sets and the database.")] = _DEFAULT_DIR,
    database: Annotated[
        str | None, typer.Option(metavar="URL", help="Or $LOCKSTEP_DATABASE. Default: SQLite in the data directory.")
    ] = None,
    procs: Annotated[int | None, typer.Option(help="Processes for all jobs. Default: GPUs, else cores.", min=1)] = None,
    max_jobs: Annotated[int | None, typer.Option(help="Jobs at once. Default: as many as fit.", min=1)] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Who may do what; see lockstep token.")
    ] = None,
    allow_path: Annotated[list[Path] | None, typer.Option(metavar="DIR", help="Jobs may read here, too.")] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let jobs run trust_remote_code and converters.")
    ] = False,
    max_upload_mb: Annotated[int, typer.Option(help="Largest data set.", min=1)] = 1024,
    max_datasets: Annotated[int, typer.Option(help="How many data sets there may be.", min=1)] = 1000,
) -> None:
    """Serve training jobs over HTTP, with a page to watch them."""
    import os

    from lockstep.service.server import run_server
    from lockstep.service.settings import ServiceSettings

    from_environment = os.environ.pop("LOCKSTEP_DATABASE", None)  # it may hold a password, which no job needs
    run_server(
        ServiceSettings(
            data_dir=data_dir,
            host=host,
            port=port,
            database=database or from_environment,
            procs=procs,
            max_jobs=max_jobs,
            token_file=token_file,
            allow_paths=tuple(allow_path or ()),
            allow_code=allow_code,
            max_upload_mb=max_upload_mb,
            max_datasets=max_datasets,
        )
    )


@app.command()
def submit(
    config: Config = None,
    overrides: Overrides = None,
    job_id: Annotated[str | None, typer.Option("--id", help="Submitting the same id again gives the same job.")] = None,
    name: Annotated[str | None, typer.Option(help="For people. Default: the configuration's name.")] = None,
    priority: Annotated[int, typer.Option(help="Higher ones start first.")] = 0,
    max_restarts: Annotated[int, typer.Option(help="Go on from the last checkpoint so often.", min=0)] = 0,
    upload: Annotated[bool, typer.Option(help="Send local JSONL files of the data section along.")] = True,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Queue a configuration on a service."""
    from lockstep.cli.options import load_settings
    from lockstep.service.client import Client
    from lockstep.service.schemas import JobRequest
    from lockstep.service.submission import prepare_config

    settings = load_settings([a for a in (config, *(overrides or ())) if a is not None], None)
    with Client(server) as client:
        tree = prepare_config(settings, client if upload else None, lambda text: typer.echo(text, err=True))
        job = client.submit(JobRequest(id=job_id, name=name, config=tree, priority=priority, max_restarts=max_restarts))
        if as_json:
            typer.echo(job.model_dump_json())
        else:
            typer.echo(f"{job.id} {job.state}: follow it with 'lockstep logs {job.id} -f', or at {client.url}")


@app.command()
def jobs(
    state: Annotated[str | None, typer.Option(help="Only those: queued, running, completed, ...")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 50,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """List a service's jobs, newest first."""
    from typing import get_args

    from lockstep.service.client import Client
    from lockstep.service.schemas import JobState

    if state is not None and state not in get_args(JobState):
        raise ValueError(f"there is no state {state!r}: choose one of {', '.join(get_args(JobState))}")
    with Client(server) as client:
        found = client.jobs(state, limit=limit)  # type: ignore[arg-type]
    if as_json:
        typer.echo(found.model_dump_json())
    elif not found.jobs:
        typer.echo("no jobs")
    else:
        from lockstep.cli.display import make_console, runs_table

        make_console().print(runs_table([_row(job) for job in found.jobs]))
        if found.total > len(found.jobs):
            typer.echo(f"{found.total - len(found.jobs)} more: --limit shows them")


def _row(job: Any) -> dict[str, Any]:
    train, validation = job.metrics.train or {}, job.metrics.validation or {}
    return {
        "name": job.id,
        "state": job.state,
        "step": job.progress.step,
        "total_steps": job.progress.total_steps,
        "loss": train.get("loss"),
        "validation_loss": validation.get("loss"),
        "tokens_per_s": train.get("tokens_per_s"),
        "age_s": time.time() - job.created_at,
    }


@app.command()
def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    tail: Annotated[int | None, typer.Option(help="Only the last lines.", min=1)] = None,
    rank: Annotated[str | None, typer.Option(help="Of this rank, or 'launcher'. Default: 0.")] = None,
    server: Server = None,
) -> None:
    """Print a job's log."""
    from lockstep.service.client import Client

    with Client(server) as client:
        for text in client.logs(job, follow=follow, tail=tail, rank=rank):
            typer.echo(text, nl=False)
        if follow:
            raise typer.Exit(_say_end(client, job))


def _say_end(client: Client, job_id: str) -> int:
    """The exit code of the job: 0 completed, 1 otherwise."""
    job = client.job(job_id)
    typer.echo(f"{job.id} {job.state}" + (f": {job.reason.splitlines()[0]}" if job.reason else ""), err=True)
    return 0 if job.state == "completed" else 1


@app.command()
def cancel(job: JobId, server: Server = None) -> None:
    """End a job and all its processes."""
    from lockstep.service.client import Client

    with Client(server) as client:
        client.cancel(job)
        ended = client.wait(job, timeout_s=60.0)
        typer.echo(f"{ended.id} {ended.state}")


@app.command()
def artifacts(
    job: JobId,
    download: Annotated[Path | None, typer.Option(metavar="DIR", help="Fetch them into this folder.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also checkpoints, logs and metrics, not only the export.")
    ] = False,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """List what a job has made, or fetch it."""
    from lockstep.service.client import Client

    with Client(server) as client:
        found = [a for a in client.artifacts(job) if every or a.path.startswith("export/")]
        if as_json:
            typer.echo(json.dumps([artifact.model_dump() for artifact in found]))
        for artifact in found:
            if download is not None:
                client.download(job, artifact.path, _inside(download, artifact.path))
            if not as_json:
                typer.echo(f"{artifact.bytes:>14,}  {artifact.path}")
    if not found:
        typer.echo("nothing is exported yet" + ("" if every else ": --all shows checkpoints and logs"), err=True)
    elif download is not None:
        typer.echo(f"wrote {len(found)} files into {download}", err=True)


def _inside(folder: Path, name: str) -> Path:
    """What a server calls its files must not lead out of the folder."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"the service names an artifact {name!r}, which is outside of {folder}")
    return path


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="Whose token it is: jobs will belong to this name.")],
    role: Annotated[
        str, typer.Option(help="read: sees all. submit: sees and changes their own. admin: all.")
    ] = "submit",
) -> None:
    """Make a token, and its line for the token file of 'lockstep serve'."""
    from lockstep.service.access import make_token

    secret, line = make_token(name, role)
    typer.echo(f"token (shown once, for $LOCKSTEP_TOKEN): {secret}", err=True)
    typer.echo(line)
