"""Every command. What a command needs is imported inside it: `--help` must not wait for torch.

Exit codes: 0 done, 1 failed, 2 bad configuration or usage, 128 + N stopped by signal N.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.data import Compiled
    from lockstep.rundir import RunDir
    from lockstep.sampling.local import LocalEngine

DEFAULT_CONFIG = Path("lockstep.yaml")

app = typer.Typer(
    name="lockstep",
    help="Post-training for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout; all else goes to stderr.")]
Config = Annotated[str | None, typer.Argument(metavar="CONFIG", help="The YAML file; lockstep.yaml if none is named.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Settings that win over the file.")
]
Source = Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run directory, a model folder or a Hub id.")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.", min=0.0)]


def main() -> None:
    """The entry point: what a user got wrong is one sentence, what we got wrong is a traceback."""
    try:
        app()
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from lockstep import __version__

        typer.echo(f"lockstep {__version__}")
        raise typer.Exit


@app.command()
def train(
    config: Config = None,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is kept. Default: runs/<name>-<date>-<time>.")
    ] = None,
    procs: Annotated[int | None, typer.Option(help="Processes on this machine; same as launch.procs=N.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue a run from its last checkpoint.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Train a model, and follow the run until it ends."""
    given = [a for a in (config, *(overrides or ())) if a is not None]
    if resume is not None:
        _refuse_with_resume(given, run_dir, procs, dry_run)
        raise typer.Exit(_resume(resume, as_json))
    settings = _load(given, procs)
    if dry_run:
        _describe(settings, as_json)
        return
    from lockstep.launch.start import new_run_dir
    from lockstep.rundir import RunDir

    run = RunDir.create(run_dir or new_run_dir(settings.name), settings)
    raise typer.Exit(_follow(run, settings, as_json, resumed=False))


def _load(given: Sequence[str], procs: int | None) -> RunConfig:
    from lockstep.config import ConfigError, load_config
    from lockstep.config.data import PARTS

    named = bool(given) and ("=" not in given[0] or Path(given[0]).is_file())
    path, overrides = (Path(given[0]), list(given[1:])) if named else (DEFAULT_CONFIG, list(given))
    if not named and not path.is_file():
        raise ConfigError(f"no configuration: name a YAML file, or write {DEFAULT_CONFIG} with 'lockstep init'")
    if procs is not None:
        overrides.append(f"launch.procs={procs}")
    settings = load_config(path, overrides)
    settings.parallel.degrees(settings.launch.procs)
    for part in PARTS:
        for source in getattr(settings.data, part):
            if source.path.startswith("/") and "*" not in source.path and not Path(source.path).exists():
                raise ConfigError(f"data.{part}: there is no file {source.path}")
    return settings


def _refuse_with_resume(given: Sequence[str], run_dir: Path | None, procs: int | None, dry_run: bool) -> None:
    if given or run_dir or dry_run:
        raise ValueError(
            "--resume continues a run exactly as it was configured: give no CONFIG, overrides or --run-dir"
        )
    if procs is not None:
        raise ValueError("--resume continues a run on as many processes as before: --procs cannot change it yet")


def _resume(path: Path, as_json: bool) -> int:
    from lockstep.display import make_console, print_summary
    from lockstep.rundir import RunDir

    run = RunDir(path)
    settings = run.config()
    if run.status().get("state") != "completed":
        return _follow(run, settings, as_json, resumed=True)
    console = make_console(stderr=as_json)
    console.print("This run is already complete: there is nothing to resume.", highlight=False)
    print_summary(console, run)
    _print_result(run, as_json)
    return 0


def _follow(run: RunDir, settings: RunConfig, as_json: bool, resumed: bool) -> int:
    """Start the workers, show what they write, end with them: none is left when this returns."""
    from lockstep.display import RunDisplay, make_console, print_header, print_summary
    from lockstep.launch import LocalLauncher, Resources
    from lockstep.launch.signals import catch_signals

    console = make_console(stderr=as_json)
    print_header(console, run, settings, resumed)
    display, launcher = RunDisplay(run, console), LocalLauncher()
    with catch_signals() as received:
        handle = launcher.start(run.path, Resources(settings.launch.procs, settings.launch.device))
        try:
            display.follow(lambda: not received and launcher.poll(handle).state == "running")
        except BaseException:
            launcher.stop(handle)
            raise
        if received:
            console.print("stopping the run (Ctrl-C again ends it at once)", highlight=False)
            launcher.stop(handle, hurry=lambda: len(received) > 1)
        outcome = launcher.poll(handle)
    print_summary(console, run)
    _print_result(run, as_json)
    if outcome.state == "cancelled":
        return 128 + received[0] if received else 1
    if outcome.state == "failed":
        _print_failure(run, outcome.reason)
    return outcome.exit_code


def _print_failure(run: RunDir, reason: str) -> None:
    failures = run.failures()
    where = run.logs / f"rank-{failures[0]['rank']}.log" if failures else run.logs
    typer.echo(f"error: {reason}\n       more in {where}", err=True)


def _print_result(run: RunDir, as_json: bool) -> None:
    if not as_json:
        return
    from lockstep.launch.start import result_of

    typer.echo(json.dumps(result_of(run)))


def _describe(settings: RunConfig, as_json: bool) -> None:
    from lockstep.display import make_console, print_facts
    from lockstep.train.run import describe

    facts = describe(settings)
    if as_json:
        typer.echo(json.dumps({"config": settings.model_dump(mode="json"), "plan": facts}, default=str))
        return
    console = make_console()
    console.print("[bold]configuration[/]")
    typer.echo("".join(f"  {line}\n" for line in settings.to_yaml().splitlines()))
    console.print("[bold]what would be trained[/]")
    print_facts(console, facts)


@app.command()
def data(
    config: Config = None,
    overrides: Overrides = None,
    row: Annotated[
        list[str] | None, typer.Option(metavar="FILE:LINE", help="Show this row; or its number. Can be repeated.")
    ] = None,
    longest: Annotated[int, typer.Option(help="How many of the longest rows to show.", min=0)] = 1,
    shortest: Annotated[int, typer.Option(help="How many of the shortest rows to show.", min=0)] = 1,
    random: Annotated[int, typer.Option(help="How many rows to show at random.", min=0)] = 2,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write all of it as one HTML page.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 if there is any warning.")] = False,
    as_json: Json = False,
) -> None:
    """Show what would be learned: rows, tokens, masks, lengths, and whatever is wrong with them."""
    from lockstep.datapage import sheet_page
    from lockstep.datasheet import Choice, gather, print_sheet
    from lockstep.display import make_console, quieten_libraries

    settings = _load([a for a in (config, *(overrides or ())) if a is not None], None)
    quieten_libraries()
    compiled, tokenizer = _compile(settings)
    chosen = Choice(tuple(row or ()), longest, shortest, random, settings.seed)
    sheet = gather(settings, compiled, tokenizer, chosen)
    if html is not None:
        html.write_text(sheet_page(sheet), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(sheet.as_json()))
    else:
        print_sheet(make_console(), sheet)
    if html is not None:
        typer.echo(f"wrote {html}", err=True)
    if strict and sheet.warnings:
        typer.echo(f"error: {len(sheet.warnings)} warnings, and --strict", err=True)
        raise typer.Exit(1)


def _compile(settings: RunConfig) -> tuple[Compiled, Any]:
    """The data and its tokenizer, with a progress bar."""
    from lockstep.data import compile_data
    from lockstep.display import data_progress
    from lockstep.model.load import load_run_tokenizer

    tokenizer = load_run_tokenizer(settings)
    with data_progress() as show:
        compiled = compile_data(
            settings.data, tokenizer, seed=settings.seed, timeout_s=settings.launch.timeout_s, on_progress=show
        )
    return compiled, tokenizer


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = DEFAULT_CONFIG,
    algorithm: Annotated[str, typer.Option(help="What to train with: sft.")] = "sft",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a commented starter configuration."""
    from lockstep.starter import ALGORITHMS, starter_yaml

    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: choose one of {', '.join(ALGORITHMS)}")
    if file.exists() and not force:
        raise ValueError(f"{file} already exists: name another file, or overwrite it with --force")
    try:
        file.write_text(starter_yaml(algorithm, str(file)), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror or error}") from error
    typer.echo(f"wrote {file}: set model.path and data.train, then: lockstep train {file}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    to: Annotated[Path | None, typer.Option(help="Where to write. Default: inside the run directory.")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the LoRA adapter, not merged into the model.")
    ] = False,
    step: Annotated[int | None, typer.Option(help="Which checkpoint. Default: the latest.")] = None,
    as_json: Json = False,
) -> None:
    """Write a run's model in the Hugging Face layout."""
    from lockstep.display import make_console, print_facts, quieten_libraries
    from lockstep.model.export import export_run

    quieten_libraries()
    facts = export_run(run, to, adapter=adapter, step=step)
    if as_json:
        typer.echo(json.dumps(facts, default=str))
    else:
        print_facts(make_console(), facts)


@app.command()
def chat(
    source: Source,
    system: Annotated[str | None, typer.Option(help="A system message that starts the conversation.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
) -> None:
    """Talk with a model. Reads one turn per line from a pipe, too."""
    from lockstep.sampling import SamplingParams
    from lockstep.sampling.chat import converse

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    converse(_load_engine(source), params, system)


def _load_engine(source: str, batch: int = 1) -> LocalEngine:
    from lockstep.display import make_console, quieten_libraries

    path = Path(source).expanduser()
    if not path.exists() and (("/" in source and path.parent.is_dir()) or source.count("/") > 1):
        raise ValueError(f"there is no run or model {source}")  # sooner than the Hub would say so
    with make_console(stderr=True).status(f"loading {source}"):
        from lockstep.sampling.local import LocalEngine

        quieten_libraries()
        return LocalEngine.load(path if path.exists() else source, batch_size=batch)


@app.command()
def generate(
    source: Source,
    prompts: Annotated[Path, typer.Option(help="Text, one prompt per line; or .jsonl rows with prompt or messages.")],
    out: Annotated[Path | None, typer.Option(help="Write the rows here instead of printing them.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    batch: Annotated[int, typer.Option(help="Prompts computed at once.", min=1)] = 8,
    seed: Annotated[int, typer.Option(help="For a temperature above 0: the same seed, the same answers.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Text prompts as they are, without the chat template.")] = False,
) -> None:
    """Answer a file of prompts: JSONL rows with prompt, completion and finish_reason."""
    from lockstep.display import track_progress
    from lockstep.sampling import SamplingParams
    from lockstep.sampling.prompts import answer_prompts, open_output, read_prompts

    rows = read_prompts(prompts)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with open_output(out) as file:
        answers = answer_prompts(_load_engine(source, batch), rows, params, batch, raw=raw)
        for answer in track_progress(answers, "generating", total=len(rows)):
            file.write(json.dumps(answer, ensure_ascii=False) + "\n")
            file.flush()


@app.command("eval")
def evaluate(
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="RUN|MODEL...", help="Run directories, model folders or Hub ids.")
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="The rows: a file, folder, glob or Hub id.")] = None,
    split: Annotated[str | None, typer.Option(help="Instead: the run's own validation or test rows.")] = None,
    metrics: Annotated[
        str, typer.Option(help="Of loss, perplexity, exact_match, numeric, rouge, bertscore; with commas.")
    ] = "loss",
    base: Annotated[bool, typer.Option("--base", help="Also the model that the run started from.")] = False,
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="Also an OpenAI-compatible server.")] = None,
    endpoint_model: Annotated[str | None, typer.Option(help="Which of the server's models.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first rows.", min=1)] = None,
    sample: Annotated[int | None, typer.Option(help="So many rows at random, by --seed.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="For --sample, and for a temperature above 0.")] = 0,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    batch: Annotated[int, typer.Option(help="Answers computed at once.", min=1)] = 8,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a row for the loss.", min=2)] = None,
    system: Annotated[str | None, typer.Option(help="A system message for every row.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts as they are, without the chat template.")] = False,
    encoder: Annotated[str | None, typer.Option(help="Of bertscore: a model folder or a Hub id.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: evals/<name>-<date>-<time>.")] = None,
    as_json: Json = False,
) -> None:
    """Measure models on held-out rows, side by side: loss, and scores of their answers."""
    from lockstep.scoreboard import evaluate_and_show

    given = {"data": data, "split": split, "base": base, "endpoint": endpoint, "endpoint_model": endpoint_model}
    options: dict[str, Any] = {}
    options |= {"limit": limit, "sample": sample, "seed": seed, "max_tokens": max_tokens, "temperature": temperature}
    options |= {"batch_size": batch, "max_length": max_length, "system": system, "raw": raw, "encoder": encoder}
    evaluate_and_show(sources or [], metrics.split(","), out, as_json=as_json, **given, **options)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the runs are.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    from lockstep.display import make_console, runs_table
    from lockstep.rundir import find_runs

    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    rows = [_run_row(run) for run in find_runs(folder)]
    if as_json:
        typer.echo(json.dumps(rows))
    elif rows:
        make_console().print(runs_table(rows))
    else:
        typer.echo(f"no runs in {folder}")


def _run_row(run: RunDir) -> dict[str, Any]:
    from lockstep.launch.local import is_running, read_handle
    from lockstep.rundir import FINISHED_STATES

    status = run.status()
    state = str(status.get("state"))
    if state not in FINISHED_STATES and read_handle(run.path) is not None and not is_running(run.path):
        state = "lost"  # its processes are gone and nobody was there to say so
    keys = ("step", "total_steps", "loss", "validation_loss", "tokens_per_s")
    since = status.get("started_at") or run.config_path.stat().st_mtime
    row = {"name": run.path.resolve().name, "run_dir": str(run.path), "state": state}
    return row | {key: status.get(key) for key in keys} | {"age_s": time.time() - float(since)}


@app.command()
def plot(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN", help="One or several run directories.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the PNG and the HTML page.")] = Path("plots"),
) -> None:
    """Draw the curves of one or several runs into a PNG and a self-contained HTML page."""
    from lockstep.plot import plot_runs

    for path in plot_runs(run_dirs, out):
        typer.echo(path)


@app.command()
def demo(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to keep the run. Default: runs/demo-<date>-<time>.")
    ] = None,
    procs: Annotated[int, typer.Option(help="Processes to train on.", min=1)] = 2,
) -> None:
    """Train a small chat model for a few minutes: its answers before and after."""
    from lockstep.demo import main as run_demo

    raise typer.Exit(run_demo(directory=directory, procs=procs) or 0)


if __name__ == "__main__":
    main()
