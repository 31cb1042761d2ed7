"""The API as a client meets it: shapes, paging, streams that resume, downloads in ranges, uploads, dry runs."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml
from fastapi.testclient import TestClient
from service_process import job, tree, wait_for
from tiny import write_rows

from lockstep.cli.options import load_settings
from lockstep.config import ConfigError
from lockstep.rundir import RunDir
from lockstep.service.admission import Allowed
from lockstep.service.app import create_app
from lockstep.service.jobs import JobManager
from lockstep.service.schemas import FINISHED
from lockstep.service.settings import ServiceSettings

ROW = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}


@pytest.fixture
def manager(make_manager: Callable[..., JobManager], tiny_model: Path) -> JobManager:
    return make_manager(allowed=Allowed(read=(tiny_model,)))


@pytest.fixture
def http(manager: JobManager, tmp_path: Path) -> Iterator[TestClient]:
    app = create_app(ServiceSettings(data_dir=tmp_path / "data"), manager)
    with TestClient(app, base_url="http://127.0.0.1:8322", raise_server_exceptions=False) as client:
        yield client


def submit(http: TestClient, behaviour: str = "quick", **fields: Any) -> dict[str, Any]:
    answer = http.post("/api/jobs", json={"config": tree(behaviour), **fields})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def wait(http: TestClient, job_id: str) -> dict[str, Any]:
    def ended() -> dict[str, Any] | None:
        view: dict[str, Any] = http.get(f"/api/jobs/{job_id}").json()
        return view if view["state"] in FINISHED else None

    found: dict[str, Any] = wait_for(ended)
    return found


def messages(text: str) -> list[tuple[str, str, Any]]:
    """(id, event, data) of server-sent events."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields.get("id", ""), fields.get("event", "message"), json.loads(fields["data"])))
    return found


def test_a_body_that_is_not_sent_as_json_is_told_how(http: TestClient):
    body = json.dumps({"config": tree("quick")})
    for kind in ("application/x-www-form-urlencoded", "text/plain", None):  # the first is what curl -d sends
        answer = http.post("/api/jobs", content=body, headers={"Content-Type": kind} if kind else {})
        assert answer.status_code == 422
        assert answer.json()["error"]["message"].endswith("send it with Content-Type: application/json")
    assert http.post("/api/jobs", content="3", headers={"Content-Type": "application/json"}).status_code == 422
    assert http.get("/api/jobs").json()["total"] == 0


def test_a_job_over_http(http: TestClient) -> None:
    view = submit(http, id="mine", name="My job")
    assert (view["id"], view["name"], view["state"]) == ("mine", "My job", "queued")
    assert wait(http, "mine")["state"] == "completed"
    listed = http.get("/api/jobs").json()
    assert (listed["total"], [job["id"] for job in listed["jobs"]]) == (1, ["mine"])
    assert http.get("/api/jobs", params={"state": "failed"}).json()["jobs"] == []
    config = http.get("/api/jobs/mine/config").json()
    assert config["config"] == yaml.safe_load(config["yaml"])
    assert config["config"]["optim"]["learning_rate"] == "auto", "every default is written out"
    assert http.delete("/api/jobs/mine").status_code == 204
    assert http.get("/api/jobs/mine").status_code == 404


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"algorithm": {"kind": "dpo", "loss": "exo_pair"}}, "algorithm.label_smoothing: exo_pair needs more than 0"),
        ({"launch": {"kind": "ray"}}, "launch.kind"),
        ({"parallel": {"tensor": 3}}, "parallel: replicate 1 x shard 1 x tensor 3 = 3 ranks, but the run has 1"),
    ],
)
def test_what_the_command_refuses_is_refused_with_its_sentence(
    http: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], sentence: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find_spec(name, *rest)
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**tree(), **sections}))
    with pytest.raises(ConfigError) as refused:
        load_settings(str(path), None)
    said = str(refused.value)[str(refused.value).index(sentence) :]
    for route in ("/api/jobs", "/api/plan"):
        answer = http.post(route, json={"config": {**tree(), **sections}})
        assert answer.status_code == 422
        assert answer.json()["error"]["code"] == "invalid_config"
        assert answer.json()["error"]["message"].endswith(said)
    assert http.get("/api/jobs").json()["total"] == 0


def test_ray_is_refused_where_it_is_installed_too_because_jobs_run_beside_the_service(http: TestClient) -> None:
    answer = http.post("/api/jobs", json={"config": {**tree(), "launch": {"kind": "ray"}}})
    assert answer.status_code == 422
    assert "launch.kind" in answer.json()["error"]["message"]


def test_former_names_of_keys_are_taken_over_http(http: TestClient) -> None:
    algorithm = {"kind": "grpo", "reward": "exact", "num_samples": 3}
    submit(http, id="old", config={**tree(), "algorithm": algorithm})
    assert http.get("/api/jobs/old/config").json()["config"]["algorithm"]["group_size"] == 3


def test_metrics_of_old_runs_come_under_current_names(http: TestClient, manager: JobManager) -> None:
    submit(http, id="mine")
    wait(http, "mine")
    path = manager.run_dir("mine").path / "metrics.jsonl"
    path.write_text('{"step": 1, "split": "train", "length": 7.0}\n')
    assert http.get("/api/jobs/mine/metrics").json()["records"][0]["completion_length"] == 7.0
    assert messages(http.get("/api/jobs/mine/metrics/stream").text)[0][2]["completion_length"] == 7.0
    assert http.get("/api/jobs/mine").json()["metrics"]["train"]["completion_length"] == 7.0


def test_what_a_run_wrote(http: TestClient) -> None:
    submit(http, id="mine")
    wait(http, "mine")
    lines = [f"line {step} of mine" for step in range(1, 6)]
    assert http.get("/api/jobs/mine/logs").text.splitlines() == lines
    assert http.get("/api/jobs/mine/logs", params={"tail": 2}).text.splitlines() == lines[-2:]
    assert http.get("/api/jobs/mine/logs", params={"rank": "7"}).text == ""
    page = http.get("/api/jobs/mine/metrics").json()
    assert [record["step"] for record in page["records"]] == [1, 2, 3, 4, 5]
    assert http.get("/api/jobs/mine/metrics", params={"after": page["next"]}).json()["records"] == []
    assert http.get("/api/jobs/mine/checkpoints").json() == {"checkpoints": []}
    assert http.get("/api/jobs/mine/events").json() == {"events": []}
    assert http.get("/api/jobs/mine/samples").json() == {"samples": []}


def test_numbers_that_json_does_not_know(http: TestClient, manager: JobManager) -> None:
    submit(http, id="odd")
    wait(http, "odd")
    run = RunDir(manager.run_dir("odd").path, owner=True)
    run.log_metrics({"step": 6, "loss": float("nan"), "grad_norm": float("inf")})
    run.write_status(step=float("nan"))
    assert http.get("/api/jobs/odd/metrics").json()["records"][-1] == {"step": 6, "loss": None, "grad_norm": None}
    assert http.get("/api/jobs/odd").json()["metrics"]["train"]["loss"] is None
    assert '{"step": 6, "loss": null, "grad_norm": null}' in http.get("/api/jobs/odd/metrics/stream").text


def test_artifacts_come_whole_and_in_ranges(http: TestClient) -> None:
    submit(http, id="mine")
    wait(http, "mine")
    listed = {a["path"]: a["bytes"] for a in http.get("/api/jobs/mine/artifacts").json()["artifacts"]}
    assert listed["export/weights.bin"] == 1024
    assert {"config.yaml", "metrics.jsonl", "logs/rank-0.log"} <= listed.keys()
    assert "launch.json" not in listed
    url, weights = "/api/jobs/mine/artifacts/export/weights.bin", bytes(range(256)) * 4
    whole = http.get(url)
    assert whole.content == weights
    assert "attachment" in whole.headers["content-disposition"]
    part = http.get(url, headers={"Range": "bytes=1000-"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (
        206,
        weights[1000:],
        "bytes 1000-1023/1024",
    )
    assert http.get(url, headers={"Range": "bytes=5000-"}).status_code == 416


def test_streams_end_with_the_job_and_resume_where_they_broke(http: TestClient) -> None:
    submit(http, id="mine")
    text = http.get("/api/jobs/mine/logs/stream").text  # returns when the job has ended
    found = messages(text)
    assert found[-1][1:] == ("end", {"state": "completed"})
    printed = "".join(data["text"] for _, event, data in found if event == "message")
    assert printed == "".join(f"line {step} of mine\n" for step in range(1, 6))
    records = messages(http.get("/api/jobs/mine/metrics/stream").text)
    assert [data["step"] for _, event, data in records if event == "message"] == [1, 2, 3, 4, 5]
    later = messages(http.get("/api/jobs/mine/metrics/stream", headers={"Last-Event-ID": records[2][0]}).text)
    assert [data["step"] for _, event, data in later if event == "message"] == [4, 5]
    tail = messages(http.get("/api/jobs/mine/logs/stream", params={"tail": 1}).text)
    assert tail[0][2] == {"text": "line 5 of mine\n"}


def test_a_stream_of_a_job_that_waits_begins_when_it_does(http: TestClient) -> None:
    submit(http, "hangs", id="first", priority=1)
    submit(http, "hangs", id="second", priority=1)
    submit(http, id="last")
    timer = threading.Timer(1.5, lambda: [http.post(f"/api/jobs/{name}/cancel") for name in ("first", "second")])
    timer.start()
    found = messages(http.get("/api/jobs/last/metrics/stream").text)
    assert [data.get("step") for _, _, data in found] == [1, 2, 3, 4, 5, None]


def test_data_sets(http: TestClient) -> None:
    jsonl = "\n".join(json.dumps(ROW) for _ in range(3)) + "\n\n"
    made = http.post("/api/datasets/rows", content=jsonl)
    assert (made.status_code, made.json()["rows"]) == (201, 3)
    again = http.post("/api/datasets/rows", content=json.dumps([ROW] * 3))
    assert again.json() == made.json(), "the same rows, as an array: nothing changes"
    other = http.post("/api/datasets/rows", content=json.dumps([ROW]))
    assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
    assert [d["name"] for d in http.get("/api/datasets").json()["datasets"]] == ["rows"]
    assert http.get("/api/datasets/rows/preview", params={"rows": 2}).json() == {"rows": [ROW, ROW], "sheet": None}
    assert http.delete("/api/datasets/rows").status_code == 204
    assert http.get("/api/datasets/rows").status_code == 404


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b'{"a": 1}\n{"a": \n', "line 2 is not JSON"),
        (b'{"a": 1}\n[1]\n', "row 2 is not an object"),
        (b'[{"a": 1}, 2]', "row 2 is not an object"),
        (b"[1, ", "row 1 is not an object"),
        (b'[{"a": 1}, ', "not JSON"),
        (b'[{"a": 1} {"a": 1}]', "a comma or a closing bracket behind row 1"),
        (b'[{"a": 1}] {}', "something follows the array"),
        (b"[]", "empty"),
        (b"[{}]", "row 1 has no columns"),
        (b'{"a": 1}\n{}\n', "row 2 has no columns"),
        (b"\xff\xfe{}", "line 1 is not JSON"),
        (b'[{"a": ' + b"[" * 100_000, "not JSON"),
        (b'{"a": ' + b"[" * 100_000, "not JSON"),
        (b"prompt,completion\na,b\n", "line 1 is not JSON"),
    ],
)
def test_rows_that_are_none(http: TestClient, manager: JobManager, body: bytes, problem: str) -> None:
    answer = http.post("/api/datasets/rows", content=body)
    assert (answer.status_code, problem in answer.json()["error"]["message"]) == (422, True), answer.text
    assert manager.datasets.list() == []
    assert list(manager.data_dir.uploads.iterdir()) == list(manager.data_dir.datasets.iterdir()) == []


def test_a_plan_says_what_would_be_trained(http: TestClient, tiny_model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 12)
    http.post("/api/datasets/rows", content=rows.read_bytes())
    config = {"model": str(tiny_model), "data": {"train": "dataset:rows", "max_length": 128}, "batch": {"samples": 4}}
    answer = http.post("/api/plan", json={"config": {**config, "launch": {"device": "cpu"}}})
    assert answer.status_code == 200, answer.text
    plan = answer.json()["plan"]
    assert (plan["steps"], plan["train_rows"], plan["training"]) == (3, 12, "full")
    wrong = http.post("/api/plan", json={"config": {**config, "batch": {"samples": 0}}})
    assert (wrong.status_code, "batch.samples" in wrong.json()["error"]["message"]) == (422, True)
    http.post("/api/datasets/pairs", content=json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    pairs = http.post("/api/plan", json={"config": {**config, "data": {"train": "dataset:pairs", "max_length": 128}}})
    assert pairs.status_code == 422
    assert "preference" in pairs.json()["error"]["message"]


@pytest.mark.slow
def test_a_preview_shows_what_would_be_learned(http: TestClient, tiny_model: Path) -> None:
    http.post("/api/datasets/rows", content=json.dumps([ROW] * 3))
    found = http.get("/api/datasets/rows/preview", params={"model": str(tiny_model), "rows": 1}).json()
    assert found["rows"] == [ROW]
    assert found["sheet"]["summary"]["train_rows"] == 3
    assert any(token["learned"] for token in found["sheet"]["examples"][0]["versions"][0])


def test_errors_have_one_shape(http: TestClient) -> None:
    asked = {
        404: http.get("/api/jobs/none"),
        405: http.put("/api/jobs"),
        409: None,
        422: http.post("/api/jobs", json={"config": {}, "priority": "high"}),
    }
    submit(http, id="mine")
    asked[409] = http.post("/api/jobs", json={"id": "mine", "config": tree("slow")})
    for status, answer in asked.items():
        assert answer is not None
        assert answer.status_code == status
        assert set(answer.json()) == {"error"}
        assert set(answer.json()["error"]) == {"code", "message"}
    assert "priority" in asked[422].json()["error"]["message"]  # type: ignore[union-attr]


def test_health_and_prometheus(http: TestClient) -> None:
    submit(http, "hangs", id="mine", name='quo"te\\')
    wait_for(lambda: http.get("/api/jobs/mine").json()["state"] == "running")
    health = http.get("/api/health").json()
    assert (health["status"], health["procs"], health["free"], health["jobs"]) == ("ok", 2, 1, {"running": 1})
    http.request("BREW", "/api/jobs")
    text = http.get("/metrics").text
    assert 'lockstep_http_answers_total{method="other",status="405"} 1' in text
    assert 'lockstep_jobs{state="running"} 1' in text
    assert 'lockstep_job_step{job="mine",name="quo\\"te\\\\"} 0' in text
    for line in text.splitlines():
        assert line.startswith("#") or float(line.rsplit(" ", 1)[1]) >= 0


def test_a_name_is_what_one_sees(http: TestClient) -> None:
    for name in ("exe\u202egnp", "red \x1b[31m", "two\nlines", "zero\u200bwidth"):
        for request in ({"config": tree("quick"), "name": name}, {"config": {**tree("quick"), "name": name}}):
            answer = http.post("/api/jobs", json=request)
            assert answer.status_code == 422
            assert answer.json()["error"]["message"].startswith("name: it holds the letter '\\")
    assert http.get("/api/jobs").json() == {"jobs": [], "total": 0, "counts": {}}


def test_a_thousand_jobs_are_searched_and_counted_in_pages(manager: JobManager, tmp_path: Path) -> None:
    http = TestClient(create_app(ServiceSettings(data_dir=tmp_path / "data"), manager), base_url="http://127.0.0.1")
    known = manager.store.get(manager.submit(job(id="first", name="Needle")).id)  # nothing is ever started here
    engine = sa.create_engine(manager.data_dir.database)  # one by one they would take their time
    table = sa.Table("lockstep_jobs", sa.MetaData(), autoload_with=engine)
    with engine.begin() as connection:
        row = connection.execute(sa.select(table)).one()._asdict()
        del row["number"]
        connection.execute(table.insert(), [row | {"id": f"job-{i}", "name": f"haystack {i}"} for i in range(1000)])
    manager.store.change(known, state="failed")
    page = http.get("/api/jobs", params={"limit": 50, "offset": 950, "search": "HAY stack"}).json()
    assert ([job["id"] for job in page["jobs"]][-1], len(page["jobs"])) == ("job-0", 50)
    assert (page["total"], page["counts"]) == (1000, {"queued": 1000})
    found = http.get("/api/jobs", params={"search": "needle", "state": "queued"}).json()
    assert (found["jobs"], found["total"], found["counts"]) == ([], 0, {"failed": 1})
    assert http.get("/api/jobs").json()["counts"] == {"queued": 1000, "failed": 1}
    assert http.get("/api/jobs", params={"search": "x" * 201}).status_code == 422


def test_pages_of_a_queue_know_the_place_of_each_job(http: TestClient, manager: JobManager) -> None:
    for name in ("first", "second"):
        submit(http, "hangs", id=name, priority=9)
    wait_for(lambda: manager.num_free() == 0)
    for number in range(50):
        manager.submit(job(id=f"job-{number:04}", priority=number % 3))
    page = http.get("/api/jobs", params={"limit": 20, "offset": 20, "state": "queued"}).json()
    assert (page["total"], len(page["jobs"])) == (50, 20)
    places = {job["id"]: job["queue_position"] for job in page["jobs"]}
    assert places["job-0029"] == 1 + len([number for number in range(29) if number % 3 == 2])
    assert http.get("/api/jobs/job-0029").json()["queue_position"] == places["job-0029"]
