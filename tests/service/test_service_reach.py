"""What a request can reach: no code, no address and no file that the operator did not name, whatever key names it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from service_process import tree

from lockstep.config import ConfigError
from lockstep.service import endpoints
from lockstep.service.admission import Allowed
from lockstep.service.app import create_app
from lockstep.service.endpoints import Endpoints, parse_address
from lockstep.service.errors import Forbidden, ServiceError
from lockstep.service.jobs import JobManager
from lockstep.service.settings import ServiceSettings

ROW = b'{"prompt": "a", "completion": "b"}\n'
MakeManager = Callable[..., JobManager]
GRPO = {"kind": "grpo", "reward": "exact"}


@pytest.fixture
def http(make_manager: MakeManager, tmp_path: Path) -> Iterator[TestClient]:
    app = create_app(ServiceSettings(tmp_path / "data"), make_manager())
    with TestClient(app, base_url="http://localhost:8322", raise_server_exceptions=False) as client:
        yield client


# --- code ------------------------------------------------------------------------------------------------------------


def test_a_model_that_learned_to_write_python_is_not_scored_by_running_it(http: TestClient, tmp_path: Path) -> None:
    """The attack: a first job teaches a model to answer with source text, a second one has the answers executed."""
    source = f"open({str(tmp_path / 'owned')!r}, 'w')"
    http.post("/api/datasets/source", json=[{"prompt": "go", "completion": source}])
    teaching = tree("quick", data={"train": "dataset:source"})
    assert http.post("/api/jobs", json={"id": "teacher", "config": teaching}).status_code == 201
    scored = tree("quick", model="job:teacher", data={"train": "dataset:source"})
    for reward in (
        "builtins:exec",
        [{"name": "builtins:exec"}],
        {"builtins:exec": 1.0},
        "mine:run",
        ["exact", "a.b:c"],
        "reasoning_gym",
    ):
        config = {**scored, "algorithm": {"kind": "grpo", "reward": reward}}
        for path in ("/api/jobs", "/api/plan"):
            answer = http.post(path, json={"config": config})
            assert answer.status_code in (403, 422), (reward, answer.text)
            assert "algorithm.reward" in answer.json()["error"]["message"]
    environment = {**scored, "algorithm": {**GRPO, "environment": "mine:World"}}
    message = http.post("/api/jobs", json={"config": environment}).json()["error"]["message"]
    assert message.startswith("algorithm.environment: mine:World would run code")
    assert "--allow-code" in message
    assert [job["id"] for job in http.get("/api/jobs").json()["jobs"]] == ["teacher"]


def test_llama_stacks_own_settings_are_no_way_around(http: TestClient) -> None:
    http.post("/api/datasets/rows", content=ROW)
    data = {"dataset_id": "rows", "batch_size": 1, "shuffle": False, "data_format": "instruct"}
    for settings in (
        {"algorithm": {"kind": "grpo", "reward": "mine:run"}},
        {"data": {"converter": "mine:convert"}},
        {"model": {"trust_remote_code": True}},
        {"data": {"train": "reasoning_gym:n_queens"}, "algorithm": GRPO},
        {"algorithm": GRPO, "rollouts": {"endpoint": "127.0.0.1:9"}},
        {"data": {"cache_dir": "/tmp/shared"}},
    ):
        body = {
            "job_uuid": "stack",
            "model": "some/model",
            "training_config": {"n_epochs": 1, "data_config": data},
            "provider_config": settings,
        }
        answer = http.post("/v1alpha/post-training/supervised-fine-tune", json=body)
        assert answer.status_code == 403, (settings, answer.text)
    assert http.get("/api/jobs").json()["total"] == 0


def test_with_leave_code_may_be_named_but_not_pythons_own(make_manager: MakeManager) -> None:
    manager = make_manager(allowed=Allowed(code=True))
    manager.admit(tree(algorithm={"kind": "grpo", "reward": "mine:score", "environment": "mine:World"}))
    with pytest.raises(ConfigError, match="builtins is a module of Python itself"):
        manager.admit(tree(algorithm={"kind": "grpo", "reward": "builtins:exec"}))


# --- addresses -------------------------------------------------------------------------------------------------------


ELSEWHERE = [
    "127.0.0.1:9099",
    "http://127.0.0.1:9099",
    "localhost:9099",
    "[::1]:9099",
    "169.254.169.254",
    "http://169.254.169.254/latest/meta-data",
    "http://metadata.google.internal",
    "10.0.0.1:8000",
    "2130706433:80",
    "0x7f000001",
    "evil.example",
    "https://vllm.example:8000",  # the same server, with another scheme
    "http://vllm.example:8001",
    "http://vllm.example",
    "http://vllm.example:8000@evil.example",
    "http://evil.example#@vllm.example:8000",
    "http://evil.example\\@vllm.example:8000",
    "http://vllm.example:8000.evil.example",
    "http://vllm.example:8000/../other",
    "http://vllm.example:8000/admin",
    "http://vllm.example:8000?x=1",
    "http://vllm.example:8000 evil.example",
    "file:///etc/passwd",
    "unix:/run/docker.sock",
]


@pytest.mark.parametrize("address", ELSEWHERE)
def test_jobs_call_only_servers_that_the_operator_named(address: str) -> None:
    for allowed in ([], ["http://vllm.example:8000"]):
        with pytest.raises(Forbidden, match=r"^rollouts\.endpoint: .*--allow-endpoint"):
            Endpoints(allowed).settle(_grpo(address), _text(address))


def test_no_server_is_named_unless_the_operator_says_so(make_manager: MakeManager) -> None:
    manager = make_manager()
    for sections in (
        {"algorithm": GRPO, "rollouts": {"endpoint": "127.0.0.1:9099"}},
        {"launch": {"kind": "ray", "address": "10.0.0.1:6379"}},
    ):
        with pytest.raises(Forbidden, match="--allow-endpoint"):
            manager.admit(tree(**sections))


@pytest.mark.parametrize("address", ["vllm.example:8000", "http://VLLM.example:8000/", "http://vllm.example:8000/v1"])
def test_a_named_server_is_called_by_the_operators_spelling(make_manager: MakeManager, address: str) -> None:
    manager = make_manager(allowed=Allowed(endpoints=("http://vllm.example:8000",)))
    config = manager.admit(tree(algorithm=GRPO, rollouts={"endpoint": address})).config
    assert config.rollouts.endpoint == "http://vllm.example:8000"


def test_a_server_of_this_machine_is_called_where_it_was_named() -> None:
    assert parse_address("localhost:9099") == ("http", "localhost", 9099, "")
    config = _grpo("127.0.0.1:9099")
    assert Endpoints(["http://127.0.0.1:9099"]).settle(config, _text("127.0.0.1:9099")).rollouts.endpoint


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "http://[fe80::1]:80", "0.0.0.0:80", "[::ffff:169.254.169.254]"]
)
def test_no_operator_names_a_place_of_credentials(address: str) -> None:
    with pytest.raises(ConfigError, match="credentials"):
        Endpoints([address])


@pytest.mark.parametrize("found", ["127.0.0.1", "169.254.169.254", "::1", "fd00:ec2::254", "::ffff:127.0.0.1"])
def test_a_name_that_comes_to_mean_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (found, port))]

    monkeypatch.setattr(endpoints.socket, "getaddrinfo", resolve)
    with pytest.raises(Forbidden, match=f"leads to {found}"):
        Endpoints(["vllm.example:8000"]).settle(_grpo("vllm.example:8000"), _text("vllm.example:8000"))


def _grpo(endpoint: str) -> Any:
    from lockstep.config import resolve_config

    return resolve_config(tree(algorithm=GRPO, rollouts={"endpoint": endpoint}))


def _text(address: str) -> Any:
    from lockstep.config.reach import ReachingText

    return ReachingText("rollouts.endpoint", "address", address)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    for folder in (allowed, secret):
        folder.mkdir()
        (folder / "rows.jsonl").write_bytes(ROW)
    return allowed, secret


def test_a_folder_is_not_read_through_a_link_in_it(make_manager: MakeManager, folders: tuple[Path, Path]) -> None:
    allowed, secret = folders
    manager = make_manager(allowed=Allowed(read=(allowed,)))
    inner = allowed / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "back").symlink_to(allowed)  # a circle, and inside
    (inner / "same").symlink_to(allowed / "rows.jsonl")
    manager.admit(tree(data={"train": str(allowed)}))
    for link, target in (("file.jsonl", secret / "rows.jsonl"), ("folder", secret), ("gone", secret / "nothing")):
        (inner / link).symlink_to(target)
        for sections in (
            {"data": {"train": str(allowed)}},
            {"data": {"train": str(allowed / "a" / "*")}},
            {"model": str(allowed / "a")},
            {"evaluation": {"encoder": str(inner)}},
        ):
            with pytest.raises(Forbidden, match="a link in it leads out"):
                manager.admit(tree(**sections))
        (inner / link).unlink()
    (allowed / "second").symlink_to(inner)
    (inner / "out").symlink_to(secret)
    with pytest.raises(Forbidden):
        manager.admit(tree(data={"train": str(allowed / "second")}))


def test_reading_and_writing_are_allowed_apart(make_manager: MakeManager, folders: tuple[Path, Path]) -> None:
    readable, writable = folders
    manager = make_manager(allowed=Allowed(read=(readable,), write=(writable,)))

    def admit(**data: Any) -> Any:
        return manager.admit(tree(data={"train": "some/rows", **data})).config.data

    assert admit(cache_dir=str(writable / "cache")).cache_dir == str(writable / "cache")
    assert admit(cache_dir="root:secret/cache").cache_dir == str(writable / "cache")
    assert admit(train=str(readable)).train[0].path == str(readable)
    (writable / "link").symlink_to(readable)
    for folder in (readable, writable / "link", writable / "..", "/tmp", "~", "relative"):
        with pytest.raises(Forbidden, match=r"^data\.cache_dir: .*--allow-write"):
            admit(cache_dir=str(folder))
    with pytest.raises(Forbidden, match="--allow-path"):
        admit(train=str(writable))


def test_a_folder_around_the_data_directory_does_not_open_it(make_manager: MakeManager, tmp_path: Path) -> None:
    manager = make_manager(allowed=Allowed(read=(tmp_path,), write=(tmp_path,)))
    manager.submit(_request("hers"), owner="ann")
    for inside in ("service.db", "jobs/hers/export", "datasets/hers.jsonl", "jobs", ""):
        with pytest.raises(Forbidden):
            manager.admit(tree(model=str(tmp_path / "data" / inside)), owner="bob")
        with pytest.raises(Forbidden):
            manager.admit(tree(data={"train": "some/rows", "cache_dir": str(tmp_path / "data" / inside)}), owner="bob")
    manager.admit(tree(model="job:hers"), owner="ann")
    manager.admit(tree(data={"train": "some/rows", "cache_dir": str(tmp_path / "cache")}), owner="bob")


def test_a_folder_around_everything_is_read_without_the_rest(make_manager: MakeManager, tmp_path: Path) -> None:
    """A link that leads into the data directory leads out of what may be read."""
    manager = make_manager(allowed=Allowed(read=(tmp_path,)))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows.jsonl").symlink_to(tmp_path / "data" / "service.db")
    with pytest.raises(Forbidden, match="a link in it leads out"):
        manager.admit(tree(data={"train": str(tmp_path / "mine")}))


def test_an_uploaded_data_set_is_rows_and_nothing_else(http: TestClient, tmp_path: Path) -> None:
    http.post("/api/datasets/rows", content=ROW)
    file = str(tmp_path / "data" / "datasets" / "rows.jsonl")
    for sections in (
        {"data": {"train": "dataset:rows", "chat_template": file}},
        {"data": {"train": "dataset:rows", "chat_template": "dataset:rows"}},
        {"data": {"train": "dataset:rows"}, "parallel": {"backend": "deepspeed", "deepspeed_config": file}},
        {"data": {"train": "dataset:rows"}, "model": file},
        {"data": {"train": ["dataset:rows", file.replace("rows", "other")]}},
    ):
        answer = http.post("/api/jobs", json={"config": tree(**sections)})
        assert answer.status_code == 403, (sections, answer.text)


def test_what_a_job_has_written_is_no_template_and_no_settings(make_manager: MakeManager, tmp_path: Path) -> None:
    manager = make_manager()
    manager.submit(_request("mine"))
    written = tmp_path / "data" / "jobs" / "mine" / "export" / "chat_template.jinja"
    written.parent.mkdir(parents=True)
    written.touch()
    manager.admit(tree(model=str(written.parent)))
    with pytest.raises(Forbidden, match=r"data\.chat_template"):
        manager.admit(tree(data={"train": "some/rows", "chat_template": str(written)}))


@pytest.mark.parametrize("name", ["../../secret", "/etc", "..", ".hidden", "a/../b", "a\\b", "x\ny", "file://x"])
@pytest.mark.parametrize("key", ["split", "subset", "revision"])
def test_parts_of_a_data_set_are_names_and_not_paths(make_manager: MakeManager, key: str, name: str) -> None:
    manager = make_manager()
    manager.admit(tree(data={"train": {"path": "some/rows", key: "20220301.en"}}))
    with pytest.raises(ServiceError, match=rf"^data\.train\.{key}: .* is no name"):
        manager.admit(tree(data={"train": {"path": "some/rows", key: name}}))


def test_things_have_names_that_do_not_say_where_they_are(make_manager: MakeManager, tmp_path: Path) -> None:
    roots = [tmp_path / "one" / "shared", tmp_path / "two" / "shared"]
    for root in roots:
        (root / "tiny").mkdir(parents=True)
    manager = make_manager(allowed=Allowed(read=tuple(roots)))
    (manager.data_dir.models / "own").mkdir()
    manager.submit(_request("mine"))
    for name, path in (
        ("job:mine", manager.data_dir.jobs / "mine" / "export"),
        ("job:mine/checkpoints/step-1", manager.data_dir.jobs / "mine" / "checkpoints" / "step-1"),
        ("model:own", manager.data_dir.models / "own"),
        ("root:shared/tiny", roots[0] / "tiny"),
        ("root:shared-2/tiny", roots[1] / "tiny"),
    ):
        assert manager.admit(tree(model=name)).config.model.path == str(path)
        assert manager.admit(tree(model={"path": name})).config.model.path == str(path)
    for name in ("job:other", "job:..", "job:mine/../..", "model:../service.db", "root:shared/../x", "root:none/x"):
        with pytest.raises(ServiceError):
            manager.admit(tree(model=name))


def _request(job_id: str) -> Any:
    from service_process import job

    return job(id=job_id)


# --- when a job is started -------------------------------------------------------------------------------------------


def test_what_is_no_longer_allowed_is_not_started(make_manager: MakeManager, folders: tuple[Path, Path]) -> None:
    from service_process import wait_for

    allowed, secret = folders
    before = make_manager(allowed=Allowed(read=(allowed,), code=True))
    (allowed / "rows.jsonl").unlink()
    configs = {
        "code": tree(algorithm={"kind": "grpo", "reward": "mine:score"}),
        "link": tree(data={"train": str(allowed)}),
        "fine": tree(data={"train": str(allowed)}, evaluation={"at_start": False}),
    }
    from lockstep.service.schemas import FINISHED, JobRequest

    for name, config in configs.items():
        before.submit(JobRequest(id=name, config=config))
    before.cancel("fine")
    before.close()
    (allowed / "rows.jsonl").symlink_to(secret / "rows.jsonl")
    after = make_manager(allowed=Allowed(read=(allowed,)))
    after.start()
    for name, words in (("code", "--allow-code"), ("link", "a link in it leads out")):
        wait_for(lambda name=name: after.get(name).state in FINISHED)
        assert words in after.get(name).reason
        assert not os.path.exists(after.data_dir.jobs / name / "starts.txt")


# --- answers ---------------------------------------------------------------------------------------------------------


def test_places_of_this_machine_have_other_names(make_manager: MakeManager, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    places = make_manager(allowed=Allowed(read=(tmp_path / "shared",))).admission.places
    data = tmp_path / "data"
    for text, shown in (
        (f"see {data}/jobs/mine/logs/rank-0.log.", "see job:mine/logs/rank-0.log."),
        (f'"{data}/datasets/my.rows.jsonl:3"', '"dataset:my.rows:3"'),
        (f"{data}/models/own/config.json", "model:own/config.json"),
        (f"cannot read {tmp_path}/shared.", "cannot read root:shared."),
        (f"path: {tmp_path}/shared/tiny\n", "path: root:shared/tiny\n"),
        (f"{data}/service.db", "data/service.db"),
        (f"{tmp_path}/shared2 /mnt{data}/jobs/x", f"{tmp_path}/shared2 /mnt{data}/jobs/x"),
        (f'File "{Path(__file__).parents[2]}/lockstep/train/run.py"', 'File "lockstep/train/run.py"'),
        (f"{Path.home()}/.cache/x", "~/.cache/x"),
        (f"one\\n{data}/jobs/mine\\n", "one\\njob:mine\\n"),  # a line's end in JSON
        (f"\x1b[31m{data}/jobs/mine\x1b[0m", "\x1b[31mjob:mine\x1b[0m"),
        ("</think> http://a/b /v1/health \N{SNOWMAN}", "</think> http://a/b /v1/health \N{SNOWMAN}"),
    ):
        assert places.hide_text(text) == shown


def test_no_answer_says_where_files_are(make_manager: MakeManager, tmp_path: Path) -> None:
    """Every route that answers a reader, for a job that failed with a traceback and a configuration full of paths."""
    from service_process import wait_for

    shared = tmp_path / "shared"
    (shared / "tiny").mkdir(parents=True)
    manager = make_manager(allowed=Allowed(read=(shared,)))
    app = create_app(ServiceSettings(tmp_path / "data"), manager)
    with TestClient(app, base_url="http://localhost:8322", raise_server_exceptions=False) as http:
        http.post("/api/datasets/mine", content=ROW)
        config = tree("dies", model=str(shared / "tiny"), data={"train": "dataset:mine"})
        shown = http.post("/api/jobs", json={"id": "mine", "config": config}).json()
        assert shown["model"] == "root:shared/tiny"
        wait_for(lambda: http.get("/api/jobs/mine").json()["state"] == "failed")
        run = manager.run_dir("mine")
        (run.path / "samples.jsonl").write_text(f'{{"answer": "{shared}"}}\n')
        routers = [getattr(entry, "original_router", None) for entry in app.routes]
        paths = [route.path for router in routers if router for route in router.routes if "GET" in route.methods]
        texts = ["config.yaml", "status.json", "logs/rank-0.log", "logs/launcher.log"]
        asked = [path.replace("{path:path}", text) for path in paths for text in texts]
        asked = sorted({re.sub(r"\{[^}]*\}", "mine", path) for path in asked})
        assert len(asked) > 25
        for path in asked:
            answer = http.get(path, params={"job_uuid": "mine"})
            assert answer.status_code in (200, 404), (path, answer.text)
            assert str(tmp_path) not in answer.text, path
            assert str(Path(__file__).parents[2]) not in answer.text, path
        assert 'File "lockstep/train/worker.py"' in http.get("/api/jobs/mine").json()["reason"]
        again = http.get("/api/jobs/mine/config").json()["config"]
        assert (again["model"]["path"], again["data"]["train"][0]["path"]) == ("root:shared/tiny", "dataset:mine")
        assert http.post("/api/jobs", json={"config": again}).status_code == 201
        assert http.post("/api/jobs", json={"config": {**again, "model": "/etc"}}).status_code == 403
        text = http.get("/api/jobs/mine/artifacts/config.yaml").text
        assert "path: root:shared/tiny" in text
        assert "path: dataset:mine" in text
