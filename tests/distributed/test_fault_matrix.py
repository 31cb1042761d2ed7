"""Reinforcement learning with engines, hit at every state of its protocol: it ends as if nothing had happened.

Real processes; tests/fault_worker.py puts the fault into them. Seconds from a fault to the record that names its victim
are measured by the records' own clocks: that there are few of them is what is promised.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fault_worker
import pytest
import tiny
from distributed.test_elastic import LAYOUTS
from distributed.test_grpo_resume import REWARD, write_prompts
from fault_worker import NUM_ENGINES, Fault
from ranks import exported, run_to_the_end

from lockstep.config import load_config
from lockstep.launch.launcher import Resources
from lockstep.launch.local import LocalLauncher, launched_processes, read_handle
from lockstep.launch.start import RestartingRun
from lockstep.rundir import RunDir, read_jsonl

NUM_STEPS, STEP_SIZE, NUM_SAMPLES, FAULTY_STEP = 6, 4, 4, 4
NUM_PROMPTS = NUM_STEPS * STEP_SIZE
PROMISED_S = 10.0
PATIENCE_S = 400.0  # against hanging only
SIGNALS, STATES = ("SIGKILL", "SIGSTOP", "delay"), ("generating", "publishing", "training", "checkpointing")
VICTIMS = ("engine-0", "rank 0", "rank 1")
SPOILED = ("corrupted", "corrupted twice")


@dataclass(frozen=True)
class Cell:
    """Ranks are two where one of them is hit, unless `alone`."""

    kind: str
    victim: str
    state: str
    max_staleness: int = 0
    alone: bool = False

    @property
    def hits_rank(self) -> bool:
        return self.victim.startswith("rank")

    @property
    def layout(self) -> str:
        return "ddp-2" if self.hits_rank and not self.alone else "one"

    def __str__(self) -> str:
        parts = [self.kind, self.victim, self.state, *(["alone"] if self.alone else [])]
        return "-".join([*parts, *([f"stale{self.max_staleness}"] if self.max_staleness else [])]).replace(" ", "_")


# Weights go from rank 0 to engines, so only what an engine gets can be spoiled, and only while it is sent.
# An engine writes no checkpoint: it is hit while the ranks write one. It learns nothing: it is hit while they do.
MATRIX = [
    *itertools.starmap(Cell, itertools.product(SIGNALS, VICTIMS, STATES)),
    *(Cell(kind, "engine-0", "publishing") for kind in SPOILED),
]
AHEAD = [
    Cell("SIGKILL", "engine-0", "generating", 2),
    Cell("SIGSTOP", "engine-0", "publishing", 2),
    Cell("corrupted", "engine-0", "publishing", 2),
    Cell("SIGKILL", "rank 1", "training", 2),
    Cell("SIGSTOP", "rank 0", "checkpointing", 2),
    Cell("SIGKILL", "rank 0", "generating", 2),
    Cell("delay", "engine-0", "training", 2),
]
ALONE = [Cell("SIGKILL", "rank 0", "checkpointing", alone=True), Cell("SIGSTOP", "rank 0", "training", alone=True)]
QUICK = [
    Cell("SIGKILL", "engine-0", "generating", 2),
    Cell("corrupted", "engine-0", "publishing"),
    # Ranks that are stopped: tests/unit/train/test_bad_input.py and tests/unit/launch/test_launch_restarts.py.
]
CELLS = [cell if cell in QUICK else pytest.param(cell, marks=pytest.mark.slow) for cell in [*MATRIX, *AHEAD, *ALONE]]


def test_the_cross_section_has_every_fault_that_does_harm() -> None:
    assert set(QUICK) <= {*MATRIX, *AHEAD, *ALONE}
    assert {cell.kind for cell in QUICK} == {"SIGKILL", "corrupted"}


@dataclass
class Seen:
    """What was to be seen while a run was followed, and is not afterwards."""

    launch_ids: set[str] = field(default_factory=set)
    failures: dict[tuple[int, float], dict[str, Any]] = field(default_factory=dict)

    def look(self, run: RunDir) -> None:
        handle = read_handle(run.path)
        self.launch_ids |= {handle.launch_id} if handle is not None else set()
        self.failures |= {(failure["rank"], failure["time"]): failure for failure in run.failures()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2, initializer_range=0.05)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[str], str]:
    """The weights of a run that samples by itself and that nothing happens to, by layout."""
    made: dict[str, str] = {}

    def get(layout: str) -> str:
        if layout not in made:
            run = make_run(tmp_path_factory.mktemp(layout), model, layout, {})
            run_to_the_end(run, LAYOUTS[layout][0])
            made[layout] = tiny.digest_weights(exported(run))
        return made[layout]

    return get


def make_run(folder: Path, model: Path, layout: str, rollouts: dict[str, Any], reward: Any = REWARD) -> RunDir:
    write_prompts(folder / "train.jsonl", NUM_PROMPTS, first=0)
    num_ranks, degrees = LAYOUTS[layout]
    settings: dict[str, Any] = {
        "algorithm": {"kind": "grpo", "reward": reward, "group_size": NUM_SAMPLES, "max_tokens": 12},
        "rollouts": rollouts,
        "batch": {"samples": STEP_SIZE},
        # Where answers are older than what learns from them, it must not move too far between the two.
        "optim": {"epochs": 1, "learning_rate": 0.001 if rollouts.get("max_staleness") else 0.003},
        "checkpoint": {"every_steps": 2, "keep_best": 0},
        "parallel": {"shard": 1, **degrees},
        "launch": {"procs": num_ranks, "timeout_s": 120},
    }
    config = load_config(tiny.write_config(folder, model, **settings), ["model.precision=fp64"])
    return RunDir.create(folder / "run", config)


@pytest.fixture
def faulty_run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Cell], tuple[RunDir, Fault]]:
    def make(cell: Cell) -> tuple[RunDir, Fault]:
        rollouts = {
            "engines": NUM_ENGINES,
            "max_staleness": cell.max_staleness,
            "check_interval_s": 0.5,
            "deadline_s": 2.0,
        }
        run = make_run(tmp_path, model, cell.layout, rollouts)
        fault = Fault(
            cell.kind,
            cell.victim,
            cell.state,
            FAULTY_STEP,
            str(tmp_path / "traces"),
            str(run.checkpoints / "step-2"),
            after_news=cell.max_staleness > 0,
        )
        Path(fault.folder).mkdir()
        environment = {fault_worker.VARIABLE: fault.to_json(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        folders = [str(Path(fault_worker.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
        return run, fault

    return make


def follow(run: RunDir, num_ranks: int) -> Seen:
    """Until the run is completed, over its restarts."""
    launcher = LocalLauncher(worker_module="fault_worker")
    resources = Resources(num_ranks, "cpu")
    lasting = RestartingRun(launcher, launcher.start(run.path, resources), run, resources, max_restarts=2)
    seen, deadline = Seen(), time.monotonic() + PATIENCE_S
    try:
        while (outcome := lasting.poll()).state == "running":
            seen.look(run)
            assert time.monotonic() < deadline, f"the run is still {run.status()}"
            time.sleep(0.1)
    except BaseException:
        lasting.stop()
        raise
    assert outcome.state == "completed", outcome.reason
    return seen


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_run_that_is_hit_ends_as_if_nothing_had_happened(
    cell: Cell, faulty_run: Any, undisturbed: Callable[[str], str]
) -> None:
    run, fault = faulty_run(cell)
    seen = follow(run, LAYOUTS[cell.layout][0])
    assert fault.mark.exists(), "nothing happened"
    happened = json.loads(fault.mark.read_text())
    records = find_records(cell, run, seen, happened)
    for after_s, words in records:
        print(f"{cell}: after {after_s:.2f} s {words}")
    if cell.kind != "delay":
        assert records, (run.events(), seen.failures)
        assert records[0][0] < PROMISED_S
    assert_restarts(cell, run)
    assert_replacement(cell, run, fault, happened)
    assert not processes_of(seen.launch_ids), "a process is left"
    assert_every_token_is_of_verified_weights(run, fault)
    assert_every_prompt_is_learned_once(cell, run)
    if cell.max_staleness and cell.state == "generating" and not cell.hits_rank:
        assert_begun_answers_go_on(fault)
    if not cell.max_staleness:
        assert tiny.digest_weights(exported(run)) == undisturbed(cell.layout)


REWARD_MODULE = """
import contextlib, os, signal
from pathlib import Path
from lockstep.rollouts.rewards.scoring import length

known, happened = length(most=4, unit="characters", soft=12), Path(__file__).with_name("happened")

def killed(text, row):
    if row["prompt"] == "say 9":  # in the third step
        with contextlib.suppress(FileExistsError):
            happened.touch(exist_ok=False)  # one process, of those that score this prompt's answers at the same time
            os.kill(os.getpid(), signal.SIGKILL)
    return known(text, row)
"""


def test_a_reward_process_that_is_killed_changes_nothing(
    tmp_path: Path, model: Path, undisturbed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_that_die.py").write_text(REWARD_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = [{"name": "rewards_that_die:killed"}, REWARD[1]]
    run = make_run(tmp_path, model, "one", {}, reward)
    run_to_the_end(run, 1)
    assert (tmp_path / "happened").exists(), "nothing happened"
    (event,) = [event for event in run.events() if event["event"].startswith("reward")]
    assert event["event"] == "reward_process_lost"
    assert event["row"].endswith(":10")
    assert "was ended by signal 9" in event["reason"]
    assert all(record["reward_failed"] == 0 for record in run.metrics())
    assert tiny.digest_weights(exported(run)) == undisturbed("one")


def find_records(cell: Cell, run: RunDir, seen: Seen, happened: dict[str, Any]) -> list[tuple[float, str]]:
    """(seconds after the fault, words) of what names the victim and the reason, the first of them first."""
    found: list[tuple[float, str]] = []
    for event in run.events():
        names_victim = event.get("engine") == cell.victim or str(event.get("reason")).startswith(cell.victim)
        if event["event"] in ("engine_lost", "bucket_rejected", "rank_stopped", "restarted") and names_victim:
            found.append((event["time"], f"{event['event']}: {event['reason'].splitlines()[0]}"))
    for failure in seen.failures.values():
        if cell.victim in failure["message"]:
            found.append((failure["time"], f"failure: {failure['message']}"))
    later = sorted((at - happened["time"], words) for at, words in found if at >= happened["time"])
    return [(after_s, words) for after_s, words in later if says_why(cell, words)]


def says_why(cell: Cell, words: str) -> bool:
    if cell.kind in SPOILED:
        return "was announced with" in words
    if cell.kind == "SIGKILL":
        return "SIGKILL" in words or f"lost its connection to {cell.victim}, which ended first" in words
    return "was stopped by a signal" in words if cell.hits_rank else "did not reply to a ping within 2 s" in words


def assert_restarts(cell: Cell, run: RunDir) -> None:
    """A rank that is lost costs the steps since the last checkpoint; nothing else costs any."""
    events = run.events()
    restarted = [event for event in events if event["event"] == "restarted"]
    if cell.hits_rank and cell.kind != "delay":
        (event,) = restarted
        told = "was ended by signal 9" if cell.kind == "SIGKILL" else "was stopped by a signal"
        assert event["reason"].startswith(cell.victim)
        assert told in event["reason"]
        # Rank 0 may still give the checkpoint its name, unless it is killed: when it is ended, it first goes on.
        # And while engines sample ahead, ranks learn on.
        may_be_later = cell.state == "checkpointing" and (cell.kind, cell.victim) != ("SIGKILL", "rank 0")
        assert event["step"] in ((2, FAULTY_STEP) if may_be_later or cell.max_staleness else (2,))
    else:
        assert not restarted


def assert_replacement(cell: Cell, run: RunDir, fault: Fault, happened: dict[str, Any]) -> None:
    """Another engine comes in the place of one that is lost, gets the weights of that time and those after, and
    answers."""
    if cell.hits_rank or cell.kind not in ("SIGKILL", "SIGSTOP", "corrupted twice"):
        return
    events = [event for event in run.events() if event.get("engine") == cell.victim]
    assert "engine_lost" in {event["event"] for event in events}
    started = [event["pid"] for event in events if event["event"] == "engine_started"]
    assert happened["pid"] in started[:-1]
    trace = list(read_jsonl(Path(fault.folder) / f"{cell.victim}-{started[-1]}.jsonl"))
    assert NUM_STEPS - 1 in [record.get("version") for record in trace]
    if not cell.max_staleness:  # otherwise all may have been asked of the other engine before
        assert any(FAULTY_STEP in record.get("versions", ()) for record in trace)


def processes_of(launch_ids: set[str]) -> list[int]:
    return [pid for launch_id in launch_ids for pid in launched_processes(launch_id)]


def assert_every_token_is_of_verified_weights(run: RunDir, fault: Fault) -> None:
    """What an engine takes over is what was published to it, and it answers with nothing else. What is learned is
    what was answered."""
    traces = [list(read_jsonl(file)) for file in Path(fault.folder).glob("engine-*.jsonl")]
    published = {
        (record["launch"], record["version"]): record["digest"]
        for record in read_jsonl(Path(fault.folder) / "published.jsonl")
    }
    answered = set()
    for trace in traces:
        taken_over = set()
        for record in trace:
            if "digest" in record:
                assert record["digest"] == published[record["launch"], record["version"]]
                taken_over.add(record["version"])
            else:
                assert set(record["versions"][record["begun"] :]) <= taken_over
                versions = (min(record["versions"]), max(record["versions"]))
                answered.add((record["key"], record["sample"], record["text"], *versions))
    assert {(row["key"], row["sample"], row["turns"][0], *row["versions"]) for row in samples_of(run)} <= answered


def assert_begun_answers_go_on(fault: Fault) -> None:
    """Elsewhere, from the tokens that were reported before their engine was lost."""
    happened = json.loads(fault.mark.read_text())
    others = [
        file for file in Path(fault.folder).glob("engine-*.jsonl") if not file.stem.endswith(f"-{happened['pid']}")
    ]
    assert any(record.get("begun") for file in others for record in read_jsonl(file))


def assert_every_prompt_is_learned_once(cell: Cell, run: RunDir) -> None:
    rows = samples_of(run)
    assert sorted((row["key"], row["sample"]) for row in rows) == [
        (key, sample) for key in range(NUM_PROMPTS) for sample in range(NUM_SAMPLES)
    ]
    for row in rows:
        oldest, newest = row["versions"]
        assert row["step"] - 1 - cell.max_staleness <= oldest <= newest <= row["step"] - 1
    metrics = run.metrics()
    assert [record["step"] for record in metrics] == list(range(1, NUM_STEPS + 1))
    assert all(record["staleness_max"] <= cell.max_staleness for record in metrics)


def samples_of(run: RunDir) -> list[dict[str, Any]]:
    files = (run.path / "samples").glob("step-*.jsonl")
    return [row for file in files for row in read_jsonl(file)]
