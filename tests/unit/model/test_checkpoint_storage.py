"""Checkpoints on disk: what is written is read bit for bit, by any tool that knows safetensors, and nothing is run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from lockstep import rundir
from lockstep.config import ConfigError, parse_config
from lockstep.model import checkpoint_storage
from lockstep.model.checkpoint_storage import INDEX, PICKLED_INDEX, read_index, read_tensors, write_tensors
from lockstep.model.pickled_checkpoints import convert_pickled
from lockstep.rundir import MANIFEST, RunDir, damage, digest_file


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.canary),)


def make_tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "model.weight": torch.randn(5, 3, generator=random),
        "model.turned": torch.randn(4, 6, generator=random).t(),
        "model.narrow": torch.randn(7, generator=random).to(torch.bfloat16),
        "model.wide": torch.randn(3, generator=random, dtype=torch.float64),
        "model.empty": torch.zeros(0, 4),
        "optimizer.weight.step": torch.tensor(12.0),
        "rng.1": torch.randint(0, 255, (13,), dtype=torch.uint8, generator=random),
        "flags": torch.tensor([True, False]),
    }


def write_pickled(path: Path, tensors: dict[str, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)


def read_like(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    into = {name: torch.empty_like(value).contiguous() for name, value in tensors.items()}
    read_tensors(path, into)
    return into


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    config = parse_config("name: test\nmodel: org/model\ndata: {train: train.jsonl}\n", directory=tmp_path)
    return RunDir.create(tmp_path / "run", config)


def test_what_is_written_is_read_bit_for_bit(tmp_path):
    tensors = make_tensors()
    write_tensors(tmp_path / "saved", tensors)
    assert_same(read_like(tmp_path / "saved", tensors), tensors)
    assert_same(load_file(tmp_path / "saved" / "rank-0.safetensors"), tensors)  # as other tools see it
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [INDEX, "rank-0.safetensors"]


def test_the_writer_digests_what_it_writes(tmp_path, run, monkeypatch):
    folder = run.begin_checkpoint(4)
    digests = write_tensors(folder, make_tensors())
    assert digests == {"rank-0.safetensors": digest_file(folder / "rank-0.safetensors")}
    read_again: list[str] = []
    monkeypatch.setattr(rundir, "digest_file", lambda path: read_again.append(path.name) or digest_file(path))
    path = run.commit_checkpoint(4, {}, None, digests)
    assert read_again == [INDEX]
    monkeypatch.undo()
    assert damage(path) is None
    (path / "rank-0.safetensors").write_bytes(b"x" + (path / "rank-0.safetensors").read_bytes()[1:])
    assert damage(path) == "rank-0.safetensors does not match its digest"


def test_a_large_state_is_written_as_several_files_at_a_time(tmp_path, run, monkeypatch):
    monkeypatch.setattr(checkpoint_storage, "_FILE_BYTES", 4096)
    monkeypatch.setattr(checkpoint_storage, "_FLUSH_BYTES", 1000)
    tensors = {f"model.{i}": torch.randn(100 * (i + 1), 3) for i in range(8)} | make_tensors()
    folder = run.begin_checkpoint(4)
    digests = write_tensors(folder, tensors)
    names = ["rank-0-2.safetensors", "rank-0-3.safetensors", "rank-0-4.safetensors", "rank-0.safetensors"]
    assert sorted(digests) == names == sorted(path.name for path in folder.glob("*.safetensors"))
    sizes = [(folder / name).stat().st_size for name in names]
    assert max(sizes) < 1.5 * min(sizes)
    assert_same(read_like(folder, tensors), tensors)
    path = run.commit_checkpoint(4, {}, None, digests)
    assert damage(path) is None
    (path / names[1]).unlink()
    assert damage(path) == f"{names[1]} is missing"

    write_tensors(tmp_path / "alone", tensors, one_file=True)
    assert [path.name for path in (tmp_path / "alone").glob("*.safetensors")] == ["rank-0.safetensors"]
    assert_same(read_like(tmp_path / "alone", tensors), tensors)


def test_one_of_several_files_that_cannot_be_written_fails_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_storage, "_FILE_BYTES", 4096)
    write = checkpoint_storage.write_file

    def fill_the_disk(path, pieces):
        if path.name == "rank-0-2.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, pieces)

    monkeypatch.setattr(checkpoint_storage, "write_file", fill_the_disk)
    with pytest.raises(BaseException, match="No space left on device"):
        write_tensors(tmp_path, {f"model.{i}": torch.randn(1000) for i in range(8)})
    assert not (tmp_path / INDEX).exists()


def test_no_file_of_a_checkpoint_is_a_pickle_or_hidden(tmp_path):
    write_tensors(tmp_path / "saved", make_tensors())
    for file in (tmp_path / "saved").iterdir():
        assert not file.name.startswith(".")
        with pytest.raises(Exception), file.open("rb") as stream:  # noqa: B017
            pickle.load(stream)


def break_index(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return apply


def _piece(index: dict[str, Any]) -> dict[str, Any]:
    piece: dict[str, Any] = index["tensors"]["model.weight"]["pieces"][0]
    return piece


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda index: _piece(index).update(file="../../etc/passwd"), "which is no file of a checkpoint"),
        (lambda index: _piece(index).update(file="rank-9.safetensors"), "rank-9.safetensors"),
        (lambda index: _piece(index).update(sizes=[2, 3]), "have 6 of 15 elements"),
        (lambda index: _piece(index).update(sizes=[500, 3]), "outside of the tensor"),
        (lambda index: _piece(index).update(sizes=["5", 3]), "not a list of whole numbers"),
        (lambda index: _piece(index).update(sizes=[5]), "outside of the tensor"),
        (lambda index: index["tensors"]["model.weight"].update(dtype="F64"), "says otherwise"),
        (lambda index: index["tensors"]["model.weight"].update(dtype="pickle"), "not the index of a checkpoint"),
        (lambda index: index["tensors"].update({"model.weight": None}), "not the index of a checkpoint"),
        (lambda index: index.update(tensors=[]), "not the index of a checkpoint"),
        (lambda index: index.update(format="other"), "its format is 'other'"),
    ],
)
def test_an_index_that_is_not_one_is_a_sentence(tmp_path, change, problem):
    tensors = make_tensors()
    write_tensors(tmp_path, tensors)
    break_index(change)(tmp_path)
    with pytest.raises(ValueError, match=problem):
        read_like(tmp_path, tensors)


@pytest.mark.parametrize("name", [INDEX, "rank-0.safetensors"])
def test_a_pickle_in_place_of_a_file_is_not_run(tmp_path, name):
    tensors = make_tensors()
    write_tensors(tmp_path / "saved", tensors)
    (tmp_path / "saved" / name).write_bytes(pickle.dumps(Bomb(tmp_path / "canary")))
    with pytest.raises(ValueError, match=name):
        read_like(tmp_path / "saved", tensors)
    assert not (tmp_path / "canary").exists()


# --- of earlier versions ----------------------------------------------------------------------------------------------


def commit_pickled(run: RunDir, step: int) -> Path:
    folder = run.begin_checkpoint(step)
    write_pickled(folder, make_tensors())
    (folder / "rollouts.json").write_text("{}")
    return run.commit_checkpoint(step, {"cursor": step}, 0.5)


def test_an_old_checkpoint_is_read_only_where_that_was_asked_for(run):
    path = commit_pickled(run, 3)
    with pytest.raises(ValueError, match=r"earlier version .* --allow-pickle"):
        read_index(path)
    assert convert_pickled(run) == [3]
    latest = run.latest_checkpoint()
    assert latest is not None
    assert (latest.step, latest.extra, latest.validation_loss) == (3, {"cursor": 3}, 0.5)
    assert_same(read_like(latest.path, make_tensors()), make_tensors())
    names = ["__0_0.safetensors", INDEX, "manifest.json", "rollouts.json"]
    assert sorted(file.name for file in latest.path.iterdir()) == sorted(names)
    assert convert_pickled(run) == [], "only once"


def recommit(run: RunDir, folder: Path, step: int) -> None:
    """As somebody would who writes the digests as well."""
    (folder / MANIFEST).unlink()
    shutil.move(folder, run.checkpoints / f"writing-step-{step}")
    run.commit_checkpoint(step, {}, None)


def make_bomb(kind: str, canary: Path, good: bytes) -> bytes:
    if kind == "plain":
        return pickle.dumps(Bomb(canary))
    index = pickle.loads(good)
    if kind == "inside":
        index.planner_data = Bomb(canary)
    else:  # torch reads such an entry with the full unpickler
        index.state_dict_metadata["model.weight"] = BytesStorageMetadata()
    return pickle.dumps(index)


@pytest.mark.parametrize("kind", ["plain", "inside", "bytes"])
def test_a_pickle_that_runs_code_is_refused_even_where_pickles_are_allowed(run, tmp_path, kind):
    path = commit_pickled(run, 3)
    good = (path / PICKLED_INDEX).read_bytes()
    (path / PICKLED_INDEX).write_bytes(make_bomb(kind, tmp_path / "canary", good))
    recommit(run, path, 3)
    with pytest.raises(ConfigError, match="made to run code"):
        convert_pickled(run)
    assert not (tmp_path / "canary").exists()


def test_a_piece_that_runs_code_is_refused_even_where_pickles_are_allowed(run, tmp_path):
    path = commit_pickled(run, 3)
    (path / "__0_0.distcp").write_bytes(pickle.dumps(Bomb(tmp_path / "canary")))
    recommit(run, path, 3)
    with pytest.raises(Exception):  # noqa: B017
        convert_pickled(run)
    assert not (tmp_path / "canary").exists()
