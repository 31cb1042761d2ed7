"""The job service in front of a real Slurm: jobs over HTTP become jobs there, outlive the service, can be cancelled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
from distributed.test_slurm import make_run, wait_for
from fastapi.testclient import TestClient
from ranks import exported, newest_step, run_to_the_end
from slurm_cluster import SlurmCluster, cluster_of_this_process, missing_programs

from lockstep.launch.local import launched_processes
from lockstep.rundir import RunDir
from lockstep.service.admission import Allowed
from lockstep.service.app import create_app
from lockstep.service.placement import JobPlacement
from lockstep.service.schemas import FINISHED
from lockstep.service.settings import ServiceSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_programs()), reason=f"there is no {', '.join(missing_programs())}"),
]
ROOM = {"kind": "slurm", "nodes": 2, "procs_per_node": 1, "device": "cpu", "partition": "debug", "time": "30"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with cluster_of_this_process(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def service(tmp_path: Path, tiny_model: Path) -> Callable[[], Any]:
    """A service, which ends with the block; the next one finds its jobs."""
    (tmp_path / "slurm.yaml").write_text(json.dumps({"launch": ROOM}))
    settings = ServiceSettings(
        data_dir=tmp_path / "data",
        cluster=JobPlacement.read(tmp_path / "slurm.yaml"),
        allowed=Allowed(read=(tiny_model, tmp_path)),
    )

    @contextmanager
    def running() -> Iterator[TestClient]:
        with TestClient(create_app(settings), base_url="http://127.0.0.1:8322") as client:
            yield client

    return running


def tree(folder: Path, model: Path, epochs: int) -> dict[str, Any]:
    folder.mkdir()
    run = make_run(folder, model, epochs, {"procs": 2, "device": "cpu"})
    config = run.config().model_dump(mode="json", exclude_defaults=True)
    return {**config, "launch": {"procs": 2, "device": "cpu"}}


def view(http: TestClient, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/api/jobs/{job_id}").json()
    return found


def test_jobs_over_http_run_on_slurm_and_outlive_the_service(
    cluster: SlurmCluster, service: Callable[[], Any], tmp_path: Path, tiny_model: Path
) -> None:
    config, run = tree(tmp_path / "local", tiny_model, 30), RunDir(tmp_path / "data" / "jobs" / "first")
    with service() as http:
        for name in ("first", "second"):
            answer = http.post("/api/jobs", json={"id": name, "config": config})
            assert answer.status_code == 201, answer.text
        wait_for(lambda: newest_step(run) >= 5, "step 5 of the first job")
        assert cluster.query("squeue", "-h", "-o", "%j %P %l %D").splitlines()[0].endswith("debug 30:00 2")
        # Both nodes have four cores, and each job takes one of each: the second one runs beside the first.
        wait_for(lambda: view(http, "second")["state"] == "running", "the second job")
        third = http.post("/api/jobs", json={"id": "third", "config": {**config, "launch": {"procs": 3}}})
        assert third.status_code == 422
        assert "3 processes cannot be shared out" in third.text
    assert launched_processes(run.status()["launch"]), "jobs run on without the service"
    with service() as http:
        assert http.post("/api/jobs/second/cancel").status_code in (200, 202)
        wait_for(lambda: view(http, "second")["state"] == "cancelled", "the end of the second job")
        wait_for(lambda: view(http, "first")["state"] == "completed", "the first job")
    assert cluster.query("squeue", "-h") == ""
    local = RunDir(tmp_path / "local" / "run")
    run_to_the_end(local, 2)
    assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(local))


def test_jobs_of_llama_stack_run_there_too(
    cluster: SlurmCluster, service: Callable[[], Any], tmp_path: Path, tiny_model: Path
) -> None:
    turn = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    data = {"dataset_id": "chat", "batch_size": 2, "shuffle": True, "data_format": "dialog"}
    wanted = {"n_epochs": 1, "max_steps_per_epoch": 2, "data_config": data}
    with service() as http:
        body = (json.dumps({"messages": turn}) + "\n") * 8
        assert http.post("/api/datasets/chat", content=body).status_code == 201
        answer = http.post(
            "/v1/post-training/supervised-fine-tune",
            json={"job_uuid": "one", "model": str(tiny_model), "training_config": wanted},
        )
        assert answer.status_code == 200, answer.text
        found = wait_for(lambda: (job := view(http, "one"))["state"] in FINISHED and job, "the end of the job")
        assert found["state"] == "completed", found["reason"]
        status = http.get("/v1/post-training/job/status", params={"job_uuid": "one"}).json()
        assert status["status"] == "completed"
    run = RunDir(tmp_path / "data" / "jobs" / "one")
    assert run.config().launch.kind == "slurm"
    assert [event["event"] for event in run.events()].count("submitted") == 1


def test_a_job_that_waits_says_why_and_where(
    cluster: SlurmCluster, service: Callable[[], Any], tmp_path: Path, tiny_model: Path
) -> None:
    """Somebody else has the nodes."""
    assert cluster.query("sbatch", "--exclusive", "-N2", "--time=10", "--wrap=sleep 500")
    config = tree(tmp_path / "local", tiny_model, 1)
    with service() as http:
        assert http.get("/api/health").json()["launcher"] == "slurm"
        for name in ("first", "second"):
            http.post("/api/jobs", json={"id": name, "config": config})

        def says() -> str:
            return " ".join(str(view(http, name)["progress"]["phase"]) for name in ("first", "second"))

        wait_for(lambda: "place 1 of 2 in debug" in says() and "place 2 of 2 in debug" in says(), "places in the queue")
        assert view(http, "second")["state"] == "preparing"
        rows = json.loads(tiny.run_lockstep("runs", tmp_path / "data" / "jobs", "--json")[1])
        assert {row["waits"].split(", ")[1] for row in rows} == {"place 1 of 2 in debug", "place 2 of 2 in debug"}
        cluster.query("scancel", "--name=wrap")
        for name in ("first", "second"):
            wait_for(lambda name=name: view(http, name)["state"] == "completed", f"the end of {name}")
