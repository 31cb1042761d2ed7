"""Terminal views that commands share: the live display of a run, its summary, tables, progress bars."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from lockstep.reports.page import format_count, format_duration

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.data import CompileProgress
    from lockstep.rundir import RunDir

T = TypeVar("T")
# Keys of a validation record that are no scores; rewards and log-probs are in the file and in plots.
_NO_SCORES = {"step", "split", "time", "loss", "rows", "time_s"}
_NO_SCORES |= {"chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob"}
# Metrics of a run that samples: (key, label, format).
_SAMPLE_METRICS = (
    ("reward", "reward", ".3f"),
    ("completion_length", "length", ".0f"),
    ("entropy", "entropy", ".2f"),
    ("entropy_estimate", "entropy", ".2f"),
    ("kl", "kl", ".2g"),
    ("sampler_trainer_logprob_diff", "logprob diff", ".1e"),
    ("stale_logprob_diff", "stale diff", ".1e"),
    ("staleness", "staleness", ".2g"),
    ("reward_failed", "rewards failed", ".0f"),
)
# Metrics of any step: (key, label, format).
_STEP_METRICS = (
    ("margin", "margin", ".3f"),
    ("accuracy", "accuracy", ".0%"),
    ("learning_rate", "lr", ".2e"),
    ("grad_norm", "grad", ".3g"),
)
LITERAL: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}  # of Console.print
PLAIN_INTERVAL_S = 2.0
MIN_COMPILE_S = 2.0  # shorter ones are not shown
_PHASES_OF_A_STEP = ("sampling", "training", "publishing", "evaluating", "checkpointing")
POLL_INTERVAL_S = 0.2
_MAX_WARNINGS = 8  # in a summary
STATE_STYLES = {
    "completed": "green",
    "failed": "red",
    "cancelled": "yellow",
    "interrupted": "yellow",
    "running": "cyan",
    "lost": "red",
    "unsupervised": "yellow",
}


class TerminalConsole(Console):
    """Names, rows and answers were written by others: what the terminal would obey in them is shown instead."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        from lockstep.config.text import write_out

        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(write_out(segment.text), segment.style)


def make_console(stderr: bool = False) -> Console:
    """Lines are not wrapped where the output is a file or a pipe."""
    console = TerminalConsole(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=200, no_color=True)


def borderless_table() -> Table:
    return Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)


def track_progress(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """A progress bar on stderr, where stderr is a terminal."""
    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield from progress.track(items, total=total, description=label)


@contextlib.contextmanager
def data_progress() -> Iterator[Callable[[CompileProgress], None]]:
    """A progress bar on stderr; yields the `on_progress` of `compile_data`."""
    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rows]:,} rows"))
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("reading data", total=None, rows=0)

        def show(progress: CompileProgress) -> None:
            label = f"{progress.phase} {progress.split}"
            bar.update(task, completed=progress.done_bytes, total=progress.total_bytes, rows=progress.rows)
            bar.update(task, description=label)

        yield show


def quieten_libraries() -> None:
    """Keep progress bars and hints of transformers and torch out of a command's output."""
    import logging
    import warnings

    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # That layers are compiled and recomputed in part is what was asked for.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")  # PEFT asks by the old name


class JsonlTail:
    """New complete lines of a growing JSONL file, from its end at the time of construction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = []
        for line in whole.splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # a partial line of a killed writer, ended by the next one
                continue
            if isinstance(record, dict):
                records.append(record)
        return records


class RunDisplay:
    """Follows one run. Construct it before the run starts: it shows only what is written afterwards."""

    def __init__(self, run: RunDir, console: Console) -> None:
        self.run = run
        self.console = console
        self.status: dict[str, Any] = {}
        self._metrics = JsonlTail(run.path / "metrics.jsonl")
        self._events = JsonlTail(run.path / "events.jsonl")
        self._train: Mapping[str, Any] = {}  # the latest record
        self._new: list[Mapping[str, Any]] = []  # those of the latest refresh
        self._validation_loss: float | None = None
        self._best = float(run.status().get("best_validation_loss") or "inf")
        self._step_times: deque[float] = deque(maxlen=20)
        self._phase = ""
        self._started = time.monotonic()
        self._last_line = float("-inf")
        self._printed_step: int | None = None
        self._spinner = Spinner("dots")

    def follow(self, is_running: Callable[[], bool]) -> None:
        """Show the run until `is_running` returns False."""
        if not self.console.is_terminal:
            while is_running():
                self.print_plain()
                time.sleep(POLL_INTERVAL_S)
            self.print_plain(final=True)
            return
        with Live(get_renderable=self.render, console=self.console, refresh_per_second=8, transient=True) as live:
            running = True
            while running:
                running = is_running()
                for _, line in self.refresh():
                    live.console.print(line, highlight=False)
                if running:
                    time.sleep(POLL_INTERVAL_S)

    def refresh(self) -> list[tuple[int, Text]]:
        """Read new records; return the lines that stay on the screen, each with its step."""
        from lockstep.rundir import MetricRecord

        self.status = self.run.status()
        lines = []
        self._new = []
        for record in map(MetricRecord, self._metrics.read()):
            if record.get("split", "train") == "validation":
                lines.append((int(record["step"]), self.validation_line(record)))
            else:
                self._train = record
                self._new.append(record)
                if record.get("step_time_s"):
                    self._step_times.append(float(record["step_time_s"]))
        for event in self._events.read():
            line = _event_line(event)
            if line is not None:
                lines.append((int(event.get("step") or 0), line))
        return lines

    def print_plain(self, final: bool = False) -> None:
        from lockstep.rundir import FINISHED_STATES

        first = not self._train
        lines = self.refresh()
        phase = str(self.status.get("phase") or "")
        is_new = phase != self._phase and not (self._train and phase in _PHASES_OF_A_STEP)
        if phase and is_new and self.status.get("state") not in FINISHED_STATES:
            lines.append((-1, Text(phase)))
        self._phase = phase or self._phase
        shown = self._new[:1] if first else []
        due = not shown and time.monotonic() - self._last_line >= PLAIN_INTERVAL_S
        latest = self._train.get("step")
        if (due or final) and latest is not None and latest != self._printed_step and self._train not in shown:
            shown.append(self._train)
        for record in shown:
            facts = "  ".join(f"{label} {value}".strip() for label, value in self._facts(record, plain=True))
            lines.append((int(record["step"]), Text(facts)))
            self._last_line, self._printed_step = time.monotonic(), record["step"]
        for _, line in sorted(lines, key=lambda entry: entry[0]):
            self.console.print(line, highlight=False, soft_wrap=True)

    def validation_line(self, record: Mapping[str, Any]) -> Text:
        """The best loss is the lowest, the best reward the highest."""
        if record.get("loss") is None:
            value, name, shown = -float(record["reward"]), "held-out reward ", f"{record['reward']:.4f}"
        else:
            value = self._validation_loss = float(record["loss"])
            name, shown = "validation loss ", f"{value:.4f}"
        line = Text.assemble(_step_label(record), (name, "bold"), shown)
        if value < self._best and self._best != float("inf"):
            line.append("  best so far", style="green")
        self._best = min(self._best, value)
        scores = {k: v for k, v in record.items() if k not in {*_NO_SCORES, "reward"} and isinstance(v, float)}
        line.append("".join(f"  {name} {value:.3f}" for name, value in scores.items()), style="dim")
        return line

    def _facts(self, train: Mapping[str, Any], plain: bool = False) -> list[tuple[str, str]]:
        """(label, value) of everything known about a step."""
        status = self.status
        total, left = status.get("total_steps"), self._seconds_left()
        facts = [("step", f"{train['step']}" + (f"/{total}" if total else ""))] if plain else []
        if train.get("loss") is not None:
            facts.append(("loss", f"{train['loss']:.4f}"))
        validation = self._validation_loss if self._validation_loss is not None else status.get("validation_loss")
        if validation is not None and not plain:
            facts.append(("validation", f"{validation:.4f}"))
        facts += _sample_facts(train)
        facts += [(label, format(train[key], form)) for key, label, form in _STEP_METRICS if train.get(key) is not None]
        if train.get("tokens_per_s"):
            facts.append(("", f"{format_count(train['tokens_per_s'])} tokens/s"))
        if train.get("memory_gib"):
            facts.append(("", f"{train['memory_gib']:.1f} GiB"))
        if train.get("epoch") is not None:
            facts.append(("epoch", f"{train['epoch']:.2f}"))
        if plain and left is not None:
            facts.append(("", f"{format_duration(left)} left"))
        return facts

    def _seconds_left(self) -> float | None:
        total, step = self.status.get("total_steps"), self._train.get("step")
        if not total or step is None or not self._step_times:
            return None
        return max(total - step, 0) * sum(self._step_times) / len(self._step_times)

    def render(self) -> RenderableType:
        phase = str(self.status.get("phase") or "")
        if not self._train:
            elapsed = format_duration(time.monotonic() - self._started)
            self._spinner.update(text=Text.assemble(phase or "starting", (f"  {elapsed}", "dim")))
            return self._spinner
        total, step, left = self.status.get("total_steps"), int(self._train["step"]), self._seconds_left()
        bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
        bar.add_column(ratio=1)
        for _ in range(3):
            bar.add_column(no_wrap=True, justify="right")
        bar.add_row(
            ProgressBar(
                total=total or None, completed=step, pulse=not total, complete_style="cyan", finished_style="green"
            ),
            Text(f"step {step}" + (f"/{total}" if total else ""), style="bold"),
            Text(f"{100 * step // total} %" if total else ""),
            Text(f"{format_duration(left)} left" if left is not None else "", style="cyan"),
        )
        facts = self._facts(self._train)
        if phase and phase not in ("training", "running"):
            facts.append(("", phase))
        shown = [Text.assemble((f"{label} " if label else "", "dim"), value) for label, value in facts]
        return Group(bar, *_fold(shown, self.console.width))


def _sample_facts(train: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The entropy is estimated where it was not computed; failed rewards are shown only where there are any."""
    facts: dict[str, str] = {}
    for key, label, form in _SAMPLE_METRICS:
        if train.get(key) is not None and (train[key] or key != "reward_failed"):
            facts.setdefault(label, format(train[key], form))
    return list(facts.items())


def _fold(parts: Sequence[Text], width: int, gap: str = "   ") -> list[Text]:
    """As many parts on a line as fit: a narrow terminal breaks between facts, not inside one."""
    lines: list[Text] = []
    for part in parts:
        if lines and len(lines[-1]) + len(gap) + len(part) <= width:
            lines[-1].append(gap).append_text(part)
        else:
            lines.append(part)
    return lines


def _event_line(event: Mapping[str, Any]) -> Text | None:
    step = _step_label(event)
    match event.get("event"):
        case "warning":
            return Text.assemble(step, ("warning: ", "bold yellow"), str(event.get("message", "")))
        case "checkpoint":
            return Text.assemble(step, "checkpoint saved")
        case "compiled" if float(event.get("seconds", 0)) >= MIN_COMPILE_S:
            who = f"{event['engine']} " if "engine" in event else ""
            return Text.assemble(step, f"{who}compiled for {float(event['seconds']):.0f} s")
        case "checkpoint_damaged":
            problem = str(event.get("problem", ""))
            return Text.assemble(step, ("checkpoint damaged: ", "bold yellow"), problem, ", skipped")
        case "reward_process_lost":
            return Text.assemble(("reward process lost: ", "bold yellow"), str(event.get("reason", "")))
        case "reward_failed":
            where = f"{event.get('reason', '')}, for an answer to {event.get('row') or 'a row without a name'}"
            return Text.assemble(("reward failed: ", "bold yellow"), where)
        case "nccl" | "layout":
            return Text(str(event.get("message", "")))
        case "resumed":
            return Text.assemble(step, "resumed")
        case "model" if event.get("trained"):
            return Text.assemble(("trained ", "bold"), str(event["trained"]))
        case "reference":
            return Text.assemble(("reference ", "bold"), f"{event.get('kind')}: {event.get('why')}")
        case "early_stop":
            return Text.assemble(step, "stopped early: the validation loss no longer improves")
    return None


def _step_label(record: Mapping[str, Any]) -> tuple[str, str]:
    return (f"step {record['step']}  " if record.get("step") is not None else "", "dim")


def print_header(console: Console, run: RunDir, config: RunConfig, resumed: bool) -> None:
    lora = config.lora
    method = f"LoRA rank {lora.rank}" if lora else "full fine-tuning"
    if config.algorithm.kind != "sft":
        loss = config.algorithm.loss
        method += f", {config.algorithm.kind}: {loss if isinstance(loss, str) else ' + '.join(loss)}"
    data = ", ".join(_source_name(source.path) for source in config.data.train)
    console.print(f"[bold]{'resuming' if resumed else 'training'}[/] {escape(config.name)}", highlight=False)
    rows = {
        "model": f"{config.model.path}  ({method})",
        "data": data,
        "ranks": f"{config.launch.procs}, device {config.launch.device}",
        "run": str(run.path),
    }
    _print_pairs(console, rows)


def _source_name(path: str) -> str:
    """The last part of a path; a Hub data set's whole name."""
    return Path(path).name if path.startswith("/") else path


def print_summary(console: Console, run: RunDir) -> None:
    """The results of a finished run, and what to do next."""
    status = run.status()
    state = str(status.get("state"))
    console.print(f"[bold {STATE_STYLES.get(state, 'default')}]{state}[/]", highlight=False)
    rows: dict[str, str] = {}
    if status.get("step") is not None:
        rows["steps"] = f"{status['step']}" + (f" of {status['total_steps']}" if status.get("total_steps") else "")
    if status.get("loss") is not None:
        rows["loss"] = f"{status['loss']:.4f}"
    if status.get("validation_loss") is not None:
        best, step = status.get("best_validation_loss"), status.get("best_step")
        shown = f"  (best {best:.4f} at step {step})" if best is not None else ""
        rows["validation"] = f"{status['validation_loss']:.4f}{shown}"
    scores = status.get("validation_scores") or {}
    if "reward" in scores:
        best = status.get("best_reward")
        shown = f"  (best {best:.3f} at step {status.get('best_step')})" if best is not None else ""
        rows["held out"] = f"reward {scores['reward']:.3f}{shown}"
    if "margin" in scores:
        accuracy = f", accuracy {scores['accuracy']:.0%}" if "accuracy" in scores else ""
        rows["held out"] = f"margin {scores['margin']:.3f}{accuracy}"
    if status.get("trained"):
        rows["trained"] = str(status["trained"])
    if status.get("tokens"):
        speed = f", {format_count(status['tokens_per_s'])} per second" if status.get("tokens_per_s") else ""
        rows["tokens"] = f"{format_count(status['tokens'])}{speed}"
    if status.get("started_at"):
        # Before the end there is only the wall clock, which may have been set back.
        elapsed_s = float(status.get("updated_at", time.time())) - float(status["started_at"])
        rows["time"] = format_duration(float(status.get("duration_s") or max(elapsed_s, 0.0)))
        rows["time"] += _where_time_went(status)
    if status.get("export"):
        rows["export"] = str(status["export"])
    if state == "completed" and (better := _better_step(run, status)):
        path = shlex.quote(str(run.path))
        rows["best"] = f"step {better}, the export is of step {status['step']}: lockstep export {path} --step {better}"
    if state == "completed":
        rows["next"] = f"lockstep chat {shlex.quote(str(run.path))}"
    elif not any(failure.get("exit_code") == 2 for failure in run.failures()):
        saved = run.list_checkpoints()
        start = f"from step {saved[-1].step}" if saved else "from the start: there is no checkpoint yet"
        rows["continue"] = f"lockstep train --resume {shlex.quote(str(run.path))}  ({start})"
    _print_pairs(console, rows)
    _print_warnings(console, run)


def _better_step(run: RunDir, status: Mapping[str, Any]) -> int | None:
    """Of a checkpoint that did better on the validation rows than what the run ended with."""
    best = status.get("best_step")
    if best is None or best == status.get("step"):
        return None
    return next((saved.step for saved in run.list_checkpoints() if saved.step == best), None)


def _print_warnings(console: Console, run: RunDir) -> None:
    """Once more: what a run said before its first step has long left the screen."""
    said = [str(event.get("message")) for event in run.events() if event.get("event") == "warning"]
    messages = list(dict.fromkeys(said))
    for message in messages[:_MAX_WARNINGS]:
        console.print(Text.assemble(("warning: ", "bold yellow"), message), **LITERAL)
    if len(messages) > _MAX_WARNINGS:
        console.print(f"and {len(messages) - _MAX_WARNINGS} more in {run.path / 'events.jsonl'}", **LITERAL)


def _where_time_went(status: Mapping[str, Any]) -> str:
    """What took a second or more, longest first."""
    parts = sorted(((s, name) for name, s in (status.get("seconds") or {}).items() if s >= 1), reverse=True)
    shown = [f"{name} {format_duration(seconds)}" for seconds, name in parts]
    compilations = status.get("compilations") or {}
    if compilations.get("seconds", 0) >= 1:
        count = compilations["count"]
        times = "once" if count == 1 else f"{count} times"
        shown.append(f"of these {format_duration(compilations['seconds'])} compiling, {times}")
    engines = status.get("engine_compilations") or {}
    if (longest := max((engine["seconds"] for engine in engines.values()), default=0.0)) >= 1:
        shown.append(f"engines compiled for up to {format_duration(longest)}")
    return f"  ({', '.join(shown)})" if shown else ""


def print_facts(console: Console, facts: Mapping[str, object]) -> None:
    """Any dictionary as aligned lines; nested ones are indented, long lists counted."""
    _print_pairs(console, dict(_flatten(facts)))


def _flatten(facts: Mapping[str, object], indent: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in facts.items():
        label = indent + str(key).replace("_", " ")
        if isinstance(value, Mapping):
            rows += [(label, ""), *_flatten(value, indent + "  ")]
        elif isinstance(value, (list, tuple)):
            rows.append((label, "\n".join(str(v) for v in value) or "none"))
        else:
            rows.append((label, _show(value)))
    return rows


def _show(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _print_pairs(console: Console, rows: Mapping[str, str]) -> None:
    width = max((len(key) for key in rows), default=0)
    if not console.is_terminal:
        for key, value in rows.items():
            console.print(Text(f"  {key:{width}}  {value}".rstrip()), highlight=False, soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for key, value in rows.items():
        grid.add_row(Text("  " + key), Text(value))
    console.print(grid, highlight=False)


def runs_table(rows: Sequence[Mapping[str, Any]], what: str = "run") -> Table:
    table = borderless_table()
    table.add_column(what, no_wrap=True, overflow="ellipsis")
    table.add_column("state", no_wrap=True)
    for name in ("step", "loss", "validation", "tokens/s", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        total = f"/{row['total_steps']}" if row["total_steps"] else ""
        table.add_row(
            Text(row["name"]),
            Text(row["state"], style=STATE_STYLES.get(row["state"], "default")),
            f"{row['step']}{total}" if row["step"] is not None else "-",
            f"{row['loss']:.4f}" if row["loss"] is not None else "-",
            f"{row['validation_loss']:.4f}" if row["validation_loss"] is not None else "-",
            format_count(row["tokens_per_s"]) if row["tokens_per_s"] else "-",
            format_duration(row["age_s"]),
        )
    return table
