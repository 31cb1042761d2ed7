"""Commands that talk to a job service: submit, jobs, logs, cancel, artifacts; and token, for its operator."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.display import make_console, runs_table
from lockstep.cli.options import Config, Json, Overrides, app, echo, echo_json, load_settings

if TYPE_CHECKING:
    pass

Server = Annotated[
    str | None, typer.Option("--server", metavar="URL", help="Default: $LOCKSTEP_SERVER, or http://127.0.0.1:8322.")
]
_END_OF_LOG = 4000  # characters in which a failure is looked for

JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]


@app.command()
def submit(
    config: Config = None,
    overrides: Overrides = None,
    job_id: Annotated[
        str | None, typer.Option("--id", help="Submitting the same id again returns the same job.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="A name to display. Default: the configuration's name.")] = None,
    priority: Annotated[int, typer.Option(help="Jobs with a higher priority start first.")] = 0,
    max_restarts: Annotated[
        int, typer.Option(help="How often a failed job resumes from its last checkpoint.", min=0)
    ] = 0,
    upload: Annotated[bool, typer.Option(help="Upload the local JSONL files of the data section.")] = True,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Submit a configuration to a service as a job."""
    from lockstep.service.client import Client, prepare_config
    from lockstep.service.schemas import JobRequest

    settings = load_settings(config, overrides)
    with Client(server) as client:
        tree = prepare_config(settings, client if upload else None, lambda text: echo(text, err=True))
        job = client.submit(JobRequest(id=job_id, name=name, config=tree, priority=priority, max_restarts=max_restarts))
        if as_json:
            echo_json(job.model_dump_json())
        else:
            echo(f"{job.id} {job.state}: follow it with 'lockstep logs {job.id} -f', or at {client.url}")


@app.command()
def jobs(
    state: Annotated[str | None, typer.Option(help="Only jobs in this state: queued, running, completed, ...")] = None,
    search: Annotated[str | None, typer.Option(help="Only jobs with these words in name, id, owner or model.")] = None,
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
        listing = client.jobs(state, search=search, limit=limit)  # type: ignore[arg-type]
    if as_json:
        echo_json(listing.model_dump_json())
    elif not listing.jobs:
        echo("no jobs")
    else:
        make_console().print(runs_table([_row(job) for job in listing.jobs], "job"))
        if listing.total > len(listing.jobs):
            echo(f"{listing.total - len(listing.jobs)} more: --limit shows them")


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
        "age_s": max(time.time() - job.created_at, 0.0),
    }


@app.command()
def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")] = False,
    tail: Annotated[int | None, typer.Option(help="Only the last N lines.", min=1)] = None,
    rank: Annotated[str | None, typer.Option(help="The log of this rank, or of 'launcher'. Default: 0.")] = None,
    server: Server = None,
) -> None:
    """Print a job's log."""
    from lockstep.service.client import Client

    with Client(server) as client:
        last = ""
        for text in client.logs(job, follow=follow, tail=tail, rank=rank):
            echo(text, nl=False, keep="\r")  # progress bars go back to the beginning of their line
            last = (last + text)[-_END_OF_LOG:]
        ended = client.job(job)
        reason = ended.reason.partition("\n")[0]
        if reason in last:
            reason = ""  # otherwise it is what happened before, or to, the process whose log this is
        if follow or reason:
            echo(f"{ended.id} {ended.state}" + (f": {reason}" if reason else ""), err=True)
        if follow:
            raise typer.Exit(0 if ended.state == "completed" else 1)


@app.command()
def cancel(job: JobId, server: Server = None) -> None:
    """Cancel a job: end all its processes."""
    from lockstep.service.client import Client

    with Client(server) as client:
        client.cancel(job)
        ended = client.wait(job, timeout_s=60.0)
        echo(f"{ended.id} {ended.state}")


@app.command()
def artifacts(
    job: JobId,
    download: Annotated[Path | None, typer.Option(metavar="DIR", help="Download them into this folder.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also checkpoints, logs and metrics, not only the export.")
    ] = False,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """List the files that a job has made, or download them."""
    from lockstep.service.client import Client

    with Client(server) as client:
        files = [a for a in client.artifacts(job) if every or a.path.startswith("export/")]
        if as_json:
            echo_json(json.dumps([artifact.model_dump() for artifact in files]))
        for artifact in files:
            if download is not None:
                client.download(job, artifact.path, _inside(download, artifact.path))
            if not as_json:
                echo(f"{artifact.bytes:>14,}  {artifact.path}")
    if not files:
        echo("nothing is exported yet" + ("" if every else ": --all shows checkpoints and logs"), err=True)
    elif download is not None:
        echo(f"wrote {len(files)} files into {download}", err=True)


def _inside(folder: Path, name: str) -> Path:
    """A path that the server sends must not lead out of the folder."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"the service names an artifact {name!r}, which is outside of {folder}")
    return path


@app.command()
def token(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The owner: jobs submitted with the token belong to this name.")
    ],
    role: Annotated[
        str, typer.Option(help="read: see all jobs. submit: see and change own jobs. admin: everything.")
    ] = "submit",
) -> None:
    """Create a token, and its line for the token file of 'lockstep serve'."""
    from lockstep.service.access import make_token

    secret, line = make_token(name, role)
    echo(f"token (shown once, for $LOCKSTEP_TOKEN): {secret}", err=True)
    echo(line)
