"""A run directory in an object store, by fsspec's memory and by files: what is there can be gone on with, always."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config import ConfigError, resolve_config
from lockstep.launch.run_store import RunStore
from lockstep.rundir import MANIFEST, RunDir

fsspec = pytest.importorskip("fsspec")


def new_run(path: Path) -> RunDir:
    config = resolve_config({"model": "org/model", "data": {"train": "org/data"}})
    return RunDir.create(path, config)


def save(run: RunDir, step: int) -> None:
    (run.begin_checkpoint(step) / "rank-0.safetensors").write_bytes(b"weights %d" % step)
    run.commit_checkpoint(step, {"progress": {"step": step}})
    run.log_event("checkpoint", step=step)


@pytest.fixture(params=["memory", "file"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}-store/run" if request.param == "memory" else f"file://{tmp_path}/store/run"


def test_a_run_goes_on_elsewhere(address, tmp_path):
    run = new_run(tmp_path / "a")
    run.log_metrics({"step": 1, "loss": 2.0})
    save(run, 1)
    (run.checkpoints / "writing-step-2").mkdir()
    (run.checkpoints / "writing-step-2" / "half").write_text("x")
    RunStore(address).keep(run.path)
    assert RunStore(address).restore(tmp_path / "b") == 1
    there = RunDir(tmp_path / "b", owner=True)
    assert there.config() == run.config()
    point = there.resume_point()
    assert point is not None
    assert (point.step, (point.path / "rank-0.safetensors").read_bytes()) == (1, b"weights 1")
    assert [record["loss"] for record in there.metrics()] == [2.0]
    assert [path.name for path in there.checkpoints.iterdir()] == ["step-1"]


def test_nothing_is_there_yet(address, tmp_path):
    assert RunStore(address).restore(tmp_path / "a") is None
    assert not (tmp_path / "a").exists()


def test_a_run_that_is_here_is_not_overwritten(address, tmp_path):
    run = new_run(tmp_path / "a")
    store = RunStore(address)
    store.keep(run.path)
    save(run, 3)
    assert store.restore(run.path) is None
    assert run.list_checkpoints()[-1].step == 3


def test_old_checkpoints_go_and_results_come(address, tmp_path):
    run, store = new_run(tmp_path / "a"), RunStore(address)
    for step in (1, 2, 3):
        save(run, step)
        store.keep(run.path)
        run.prune_checkpoints(keep_last=1, keep_best=0)
    (run.export / "model").mkdir(parents=True)
    (run.export / "model" / "model.safetensors").write_bytes(b"m")
    run.write_status(state="completed")
    store.finish(run.path)
    RunStore(address).restore(tmp_path / "b")
    there = RunDir(tmp_path / "b")
    assert [checkpoint.step for checkpoint in there.list_checkpoints()] == [3]
    assert (there.export / "model" / "model.safetensors").read_bytes() == b"m"
    assert there.status()["state"] == "completed"


@pytest.mark.parametrize("lost", [MANIFEST, "rank-0.safetensors"])
def test_a_checkpoint_that_was_not_copied_whole_does_not_count(lost, address, tmp_path, monkeypatch):
    run, store = new_run(tmp_path / "a"), RunStore(address)
    save(run, 1)
    store.keep(run.path)
    save(run, 2)
    files, _ = fsspec.core.url_to_fs(address)
    put = type(files).put_file

    def fail_at_one(self, local, remote, **options):
        if str(remote).endswith(f"step-2/{lost}"):
            raise OSError("the connection is gone")
        return put(self, local, remote, **options)

    monkeypatch.setattr(type(files), "put_file", fail_at_one)
    with pytest.raises(OSError, match="gone"):
        store.keep(run.path)
    monkeypatch.undo()
    assert RunStore(address).restore(tmp_path / "b") == 1
    point = RunDir(tmp_path / "b", owner=True).resume_point()
    assert point is not None
    assert point.step == 1
    store.keep(run.path)  # the next attempt completes it
    assert RunStore(address).restore(tmp_path / "c") == 2


@pytest.mark.parametrize("address", ["nothing://bucket/x", "s3://bucket/x"])
def test_an_address_that_nobody_knows(address):
    if address.startswith("s3") and pytest.importorskip("importlib.util").find_spec("s3fs"):
        pytest.skip("s3fs is installed")
    with pytest.raises(ConfigError, match=f"run_store {address}: "):
        RunStore(address)
