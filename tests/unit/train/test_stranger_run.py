"""The run directory of a stranger: every file of it may be a pickle that runs code, and none is run."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file

import lockstep
from lockstep.cli.options import convert_checkpoints
from lockstep.cli.runs import runs, samples
from lockstep.config import ConfigError, load_config
from lockstep.evaluation.models import EvalModel
from lockstep.launch.start import reopen, result_of
from lockstep.model.export import export_run, load_run
from lockstep.rundir import MANIFEST, RunDir
from lockstep.service.run_files import list_artifacts, list_checkpoints, list_records, traceback_of
from lockstep.train.run import run as train_run

KINDS = ("sft", "dpo", "grpo")
PACKAGE = Path(lockstep.__file__).parent


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.canary),)


def as_pickle(canary: Path) -> bytes:
    return pickle.dumps(Bomb(canary))


def as_torch(canary: Path) -> bytes:
    file = io.BytesIO()
    torch.save(Bomb(canary), file)
    return file.getvalue()


def as_numpy(canary: Path) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Bomb(canary)], dtype=object), allow_pickle=True)
    return file.getvalue()


def as_yaml(canary: Path) -> bytes:
    return f"!!python/object/apply:os.mkdir ['{canary}']".encode()


def as_jsonl(canary: Path) -> bytes:
    """Lines that are JSON, but not objects, around one that is not."""
    return b'null\n[]\n""\n7\n' + as_pickle(canary) + b"\n"


WRITERS = (as_pickle, as_torch, as_numpy, as_yaml, as_jsonl)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return


def make_run(folder: Path, model: Path, kind: str) -> RunDir:
    """Of three steps, stopped after the second: there is something left to do."""
    rows = {
        "sft": [{"prompt": f"say {n}", "completion": f"it is {n}"} for n in range(12)],
        "dpo": [{"prompt": f"say {n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(12)],
        "grpo": [{"prompt": f"say {n}"} for n in range(12)],
    }
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[kind]))
    settings: dict[str, Any] = {
        "algorithm": {"kind": kind},
        "lora": {"rank": 2},
        "optim": {"max_steps": 3},
        "checkpoint": {"every_steps": 2, "keep_best": 0},
    }
    if kind == "grpo":
        settings["algorithm"] |= {
            "reward": [{"name": "length", "options": {"most": 4}}],
            "group_size": 2,
            "max_tokens": 4,
        }
        settings["batch"] = {"samples": 2}
    run = RunDir.create(folder / "run", load_config(tiny.write_config(folder, model, **settings)))
    train_run(run.path)
    shutil.rmtree(run.checkpoints / "step-3")
    (run.path / "logs" / "rank-0.error.json").write_text('{"time": 1, "rank": 0, "message": "x", "exit_code": 1}')
    return run


def replace(file: Path, content: bytes) -> None:
    """As somebody does who also signs the manifest of a checkpoint anew."""
    file.write_bytes(content)
    folder = file.parent
    if folder.name.startswith("step-") and file.name != MANIFEST and (folder / MANIFEST).exists():
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).unlink()
        writing = folder.rename(folder.with_name(f"writing-{folder.name}"))
        assert writing.exists()
        RunDir(folder.parent.parent, owner=True).commit_checkpoint(manifest["step"], manifest["extra"], None)


def look(run: RunDir) -> None:
    """What commands and the service read of a run."""
    runs(run.path, as_json=True)
    result_of(run)
    run.metrics()
    run.events()
    run.failures()
    list_artifacts(run)
    list_checkpoints(run)
    traceback_of(run)
    for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl"):
        list_records(run.path / name, 10)
    if (run.path / "samples").exists():
        samples(run.path, limit=8)


ACTIONS: dict[str, Callable[[RunDir], object]] = {
    "resume": lambda run: train_run(run.path),
    "export": lambda run: export_run(run.path, run.path.parent / "exported"),
    "chat": load_run,
    "eval": lambda run: EvalModel("run", str(run.path)).fingerprint(),
    "look": look,
}


def problem_of(act: Callable[[RunDir], object], run: RunDir) -> Exception | None:
    """What a command prints as one sentence; anything else is a traceback, and fails the test."""
    try:
        act(run)
    except (ValueError, OSError) as error:
        return error
    return None


def try_all(run: RunDir, file: str, content: bytes, canary: Path, folder: Path) -> list[str]:
    """What each action said against it."""
    told = []
    for name, act in ACTIONS.items():
        shutil.rmtree(folder, ignore_errors=True)
        copy = RunDir(shutil.copytree(run.path, folder / "run"), owner=True)
        replace(copy.path / file, content)
        error = problem_of(act, copy)
        assert not isinstance(error, UnicodeError), f"{name} with {file}: {error!r}"
        if error is not None:
            assert str(error), f"{name} with {file}: {error!r}"
            told.append(f"{name}: {error}")
        assert not canary.exists(), f"{name} ran the code in {file}"
    return told


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_file_of_a_run_is_unpickled(tmp_path: Path, tiny_model: Path, kind: str) -> None:
    run = make_run(tmp_path, tiny_model, kind)
    files = sorted(str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file())
    assert {"config.yaml", "status.json", "checkpoints/step-2/index.json"} <= set(files)
    for number, file in enumerate(files):
        is_tensors = "checkpoints" in file
        for write in WRITERS if is_tensors else (WRITERS[0], WRITERS[1 + number % (len(WRITERS) - 1)]):
            told = try_all(run, file, write(tmp_path / "canary"), tmp_path / "canary", tmp_path / "copy")
            if file.endswith(("config.yaml", "index.json", ".safetensors")) and "export" not in file:
                assert any(line.startswith("resume") for line in told), f"{file} was taken for what it is not"


# --- and one's own, from before ---------------------------------------------------------------------------------------


def write_as_before(run: RunDir, step: int) -> None:
    """The checkpoint as version 0.1 wrote it."""
    folder = run.checkpoints / f"step-{step}"
    manifest = json.loads((folder / MANIFEST).read_text())
    tensors = load_file(folder / "rank-0.safetensors")
    shutil.rmtree(folder)
    dcp.save(tensors, checkpoint_id=run.begin_checkpoint(step), no_dist=True)
    run.commit_checkpoint(step, manifest["extra"], manifest["validation_loss"])


@pytest.mark.slow
def test_a_run_of_version_0_1_goes_on_once_its_pickles_are_allowed(tmp_path: Path, tiny_model: Path) -> None:
    run = make_run(tmp_path, tiny_model, "sft")
    whole = tiny.digest_weights(run.export / "adapter")
    write_as_before(run, 2)
    for act in (train_run, export_run):
        with pytest.raises(ValueError, match=r"a pickle for its index.*--allow-pickle"):
            act(run.path)
    convert_checkpoints(run.path)
    train_run(run.path)
    assert [event["step"] for event in run.events() if event["event"] == "resumed"] == [2]
    assert tiny.digest_weights(run.export / "adapter") == whole


@pytest.mark.slow
def test_a_run_without_a_sound_checkpoint_starts_over_only_when_asked(tmp_path: Path, tiny_model: Path) -> None:
    run = make_run(tmp_path, tiny_model, "sft")
    whole = tiny.digest_weights(run.export / "adapter")
    (run.checkpoints / "step-2" / "rank-0.safetensors").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"no checkpoint that can be used.*--start-over"):
            train_run(run.path)
    reopen(run.path, start_over=True)
    train_run(run.path)
    assert [event["event"] for event in run.events() if event["event"] in ("resumed", "started_over")] == [
        "started_over"
    ]
    assert tiny.digest_weights(run.export / "adapter") == whole


def test_the_bombs_go_off(tmp_path: Path) -> None:
    """A test of the test."""
    pickle.loads(as_pickle(tmp_path / "one"))
    torch.load(io.BytesIO(as_torch(tmp_path / "two")), weights_only=False)
    np.load(io.BytesIO(as_numpy(tmp_path / "three")), allow_pickle=True)
    yaml.unsafe_load(as_yaml(tmp_path / "four"))
    assert {path.name for path in tmp_path.iterdir()} >= {"one", "two", "three", "four"}


# Where an unpickler may be called, and why what it reads is not from outside.
ALLOWED = {
    "processes/pool.py": "between a process and the children that it has started, over their own connection",
    "rollouts/source.py": "of what was pickled in the line before, to see whether it can be",
    "model/pickled_checkpoints.py": "with --allow-pickle: the classes of torch's index only, and weights_only",
}
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


UNPICKLING = {f"{module}.{name}" for module in UNPICKLERS for name in ("load", "loads", "Unpickler", "open")}
UNPICKLING |= {"torch.load", "dcp.load", "dcp.FileSystemReader", "yaml.unsafe_load", "yaml.full_load"}


def unpicklers_in(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in UNPICKLING:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
        elif isinstance(node, ast.ImportFrom) and node.module in UNPICKLERS:
            found.append(f"from {node.module} import")
    return found


def test_nothing_else_in_the_package_unpickles() -> None:
    """`dcp.load` is safe only with a reader whose index holds tensors alone: everything else torch unpickles."""
    allowed = {*ALLOWED, "model/checkpoint_storage.py"}
    found = {str(p.relative_to(PACKAGE)): calls for p in PACKAGE.rglob("*.py") if (calls := unpicklers_in(p))}
    assert set(found) == allowed, found
    assert found["model/checkpoint_storage.py"] == ["dcp.load"]
