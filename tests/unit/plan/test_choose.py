"""`parallel: auto`: which layout is taken, what is written down of it, and when it is chosen again."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config import ConfigError, ParallelConfig, RunConfig, load_config, resolve_config
from lockstep.config.parallel import Degrees
from lockstep.plan.choose import choose_layout
from lockstep.plan.description import ModelDescription
from lockstep.plan.hardware import parse_cluster
from lockstep.plan.search import PlanTask, search
from lockstep.plan.trace import describe_model
from lockstep.plan.work import Options, StepRows
from lockstep.rundir import RunDir
from lockstep.train import foresee
from lockstep.train.worker import is_of
from tests.tiny import digest_weights, run_lockstep, write_config, write_model
from tests.unit.plan.test_plan import config_of, write_folder

AUTO: dict[str, Any] = {"parallel": "auto"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("choose") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelDescription:
    return describe_model(config_of(folder), "bf16", compiled=False)


def task_on(model: ModelDescription, cluster: str, **changes: Any) -> PlanTask:
    return PlanTask(model, StepRows(64 * 512, 512, 512.0), Options(), parse_cluster(cluster), 4096, **changes)


def test_the_word_stands_for_a_layout_to_be_chosen(folder: Path) -> None:
    config = config_of(folder, **AUTO)
    assert config.parallel == ParallelConfig(auto=True)
    assert RunConfig.model_validate({**config.model_dump(mode="json"), "parallel": "auto"}) == config
    assert config.parallel.degrees(6) == Degrees(shard=6)  # until it is chosen
    assert not config.parallel.chosen_for(6)
    assert resolve_config(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"auto": True, "tensor": 2}, "auto chooses the layout: leave tensor out"),
        ({"auto": True, "backend": "deepspeed"}, "auto is for backend torch"),
        ({"auto": True, "compression": "bf16"}, "compression bf16 is for replicate alone"),
        ("automatic", "parallel: automatic is no layout: write auto"),
        (4, "parallel: 4 is no layout: write auto"),
        ("FULL_SHARD", r"write parallel: \{shard: FULL_SHARD\}"),
    ],
)
def test_what_does_not_go_with_it(folder: Path, section: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        config_of(folder, parallel=section)


def test_it_is_the_first_of_the_search(folder: Path, model: ModelDescription) -> None:
    task = task_on(model, "h100:8")
    found = choose_layout(
        config_of(folder, launch={"procs": 8}, batch={"samples": 64, "micro_batch_tokens": 4096}, **AUTO), task
    )
    fastest = min(plan.time.total for plan in search(task, exhaustive=True) if plan.budget == 4096)
    assert found.plan.time.total <= fastest * 1.02
    assert found.config.parallel.chosen_for(8)
    assert found.config.parallel.degrees(8) == found.plan.layout.degrees
    assert f"{found.plan.layout} on h100:8x1, the fastest of" in found.why
    again = resolve_config(yaml.safe_load(found.config.to_yaml()))
    assert again == found.config  # as the run directory keeps it
    assert again.parallel.degrees(4) == Degrees(shard=4)  # with other ranks it is chosen again


def test_what_the_configuration_forbids_is_not_chosen(folder: Path, model: ModelDescription) -> None:
    """Few rows leave no other way than to split each one; then each of these takes a way out."""
    few = {"samples": 2, "micro_batch_tokens": 512}
    task = replace(task_on(model, "h100:4"), rows=StepRows(2 * 512, 512, 512.0), budget=512)
    config = config_of(folder, launch={"procs": 4}, batch=few, **AUTO)

    def degrees(config: RunConfig, task: PlanTask = task, **options: Any) -> Degrees:
        return choose_layout(config, task, **options).plan.layout.degrees

    assert degrees(config).data <= 2
    assert degrees(config, num_rows=1).data == 1
    rounded = config_of(folder, launch={"procs": 4}, batch=few, optim={"stochastic_rounding": True}, **AUTO)
    assert degrees(rounded).tensor == 1
    without = replace(task, model=replace(model, refuses={"tensor": "no plan", "context": "no", "pipeline": "no"}))
    for impossible in (lambda: degrees(config, without), lambda: degrees(config, has_images=True)):
        with pytest.raises(ConfigError, match="parallel auto: no layout of 4 ranks"):
            impossible()


def test_where_nothing_fits_the_smallest_is_named(folder: Path, model: ModelDescription) -> None:
    task = task_on(model, "l4:2")
    small = replace(task.cluster, device=replace(task.cluster.device, memory_gib=0.605))
    found = choose_layout(config_of(folder, launch={"procs": 2}, **AUTO), replace(task, cluster=small))
    assert found.plan.fits == "no"
    assert "none of them fits" in found.why


def test_a_run_writes_down_what_it_took(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("WORLD_SIZE", "4")
    settings = {"algorithm": {"kind": "grpo", "reward": "length", "max_tokens": 64}}
    asked = config_of(folder, launch={"procs": 4, "device": "cpu"}, batch={"samples": 8}, **settings, **AUTO)
    run = RunDir.create(tmp_path / "run", asked)
    taken = foresee.settle(asked, run, [None] * 64, False)
    assert taken.parallel.chosen_for(4)
    assert RunDir(run.path).config() == taken
    assert run.status()["layout"] == taken.parallel.degrees(4).name
    assert next(e["message"] for e in run.events() if e["event"] == "layout").startswith("parallel auto: ")
    assert foresee.settle(taken, run, [], False) == taken  # a run that goes on keeps it
    assert is_of(taken, asked)  # by hand, with the same file
    assert not is_of(taken, asked.model_copy(update={"seed": 3}))
    path = run.newest_config_path
    assert load_config(path, ["parallel=auto"]).parallel == asked.parallel  # told to choose again
    by_hand = load_config(path, ["parallel.replicate=1", "parallel.shard=2", "parallel.tensor=2"]).parallel
    assert (by_hand.auto, by_hand.shard, by_hand.tensor) == (False, 2, 2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert foresee.settle(asked, run, [], False) == asked  # nothing to choose
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(foresee, "choose", lambda *_, **__: 1 / 0)
    usual = foresee.settle(asked, run, [None] * 64, False)  # no plan: the layout that is usual
    assert usual.parallel.degrees(4) == Degrees(shard=4)
    assert "as there is no plan" in run.events()[-1]["message"]


@pytest.mark.slow
def test_ranks_take_it_and_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the run that has the same layout by hand; a resume takes it as it was written down."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_model(tmp_path / "model")
    for name in ("auto", "hand"):
        (tmp_path / name).mkdir()
    changes: dict[str, Any] = {"launch": {"procs": 2}, "checkpoint": {"every_steps": 4}}
    auto, run = (
        write_config(tmp_path / "auto", source, parallel="auto", **changes),
        RunDir(tmp_path / "run", owner=True),
    )
    code, _, said = run_lockstep("train", auto, "--run-dir", run.path)
    assert code == 0, said
    assert "parallel auto: " in said + (tmp_path / "run" / "events.jsonl").read_text()
    taken = run.config().parallel
    assert taken.chosen_for(2)
    sizes = taken.degrees(2)._asdict() | {"keep_parameters": taken.keep_parameters}
    by_hand = write_config(tmp_path / "hand", source, parallel=sizes, **changes)
    code, _, said = run_lockstep("train", by_hand, "--run-dir", tmp_path / "same")
    assert code == 0, said
    assert digest_weights(run.path / "export" / "model") == digest_weights(tmp_path / "same" / "export" / "model")
    run.write_status(state="interrupted")
    shutil.rmtree(run.path / "checkpoints" / "step-12")
    before = digest_weights(run.path / "export" / "model")
    shutil.rmtree(run.path / "export")
    code, _, said = run_lockstep("train", "--resume", run.path)
    assert code == 0, said
    assert digest_weights(run.path / "export" / "model") == before
    assert [e["event"] for e in run.events()].count("layout") == 1
