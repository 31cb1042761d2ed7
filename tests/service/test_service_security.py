"""What must be refused: strangers, other people's jobs, paths outside, code, floods, slow senders, other sites."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from service_process import HERE, job, serving, tree, wait_for

from lockstep.cli import app as commands
from lockstep.service.access import Tokens, hash_token, make_token
from lockstep.service.admission import Allowed
from lockstep.service.app import create_app
from lockstep.service.client import Client, ServiceFault
from lockstep.service.jobs import JobManager
from lockstep.service.settings import ServiceSettings

PUBLIC = ("/v1/health", "/v1alpha/health")
USERS = {"ann": "submit", "bob": "submit", "eve": "read", "root": "admin"}
ROW = b'{"prompt": "a", "completion": "b"}\n'


@pytest.fixture
def people(make_manager: Callable[..., JobManager], tmp_path: Path) -> Iterator[dict[str, TestClient]]:
    """A client for each user, one with a wrong token and one without any, and the manager behind them."""
    made = {name: make_token(name, role) for name, role in USERS.items()}
    (tmp_path / "tokens").write_text("# who may what\n\n" + "".join(f"{line}\n" for _, line in made.values()))
    settings = ServiceSettings(data_dir=tmp_path / "data", host="0.0.0.0", token_file=tmp_path / "tokens")
    secrets = {name: token for name, (token, _) in made.items()}
    secrets |= {"stranger": "wrong", "nobody": ""}
    app = create_app(settings, make_manager())
    with TestClient(app, base_url="http://train.example", raise_server_exceptions=False):
        yield {
            name: TestClient(
                app, "http://train.example", False, headers={"Authorization": f"Bearer {token}"} if token else {}
            )
            for name, token in secrets.items()
        }


def test_strangers_learn_nothing(people: dict[str, TestClient]) -> None:
    for name in ("stranger", "nobody"):
        for path in ("/api/jobs", "/api/jobs/x", "/api/health", "/metrics", "/api/datasets", "/api/jobs/x/logs/stream"):
            answer = people[name].get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorised"), path
            assert answer.headers["www-authenticate"] == "Bearer"
        assert people[name].post("/api/jobs", json={"config": tree()}).status_code == 401
        assert people[name].post("/api/datasets/rows", content=ROW).status_code == 401
    for header in ("Basic YTpi", "Bearer", "bearer  ", "Bearer \N{SNOWMAN}".encode()):
        assert people["nobody"].get("/api/jobs", headers={"Authorization": header}).status_code == 401


def test_jobs_belong_to_their_owner(people: dict[str, TestClient]) -> None:
    assert people["ann"].post("/api/jobs", json={"id": "hers", "config": tree("hangs")}).json()["owner"] == "ann"
    paths = ("", "/config", "/logs", "/logs/stream", "/metrics", "/events", "/artifacts", "/artifacts/config.yaml")
    for path in paths:
        assert people["bob"].get(f"/api/jobs/hers{path}").status_code == 404, path
    assert people["bob"].post("/api/jobs/hers/cancel").status_code == 404
    assert people["bob"].delete("/api/jobs/hers").status_code == 404
    assert people["bob"].post("/api/jobs", json={"id": "hers", "config": tree("hangs")}).status_code == 409
    for owner in ({}, {"owner": "ann"}):
        assert people["bob"].get("/api/jobs", params=owner).json() == {"jobs": [], "total": 0, "counts": {}}
    assert 'job="hers"' not in people["bob"].get("/metrics").text
    for name in ("ann", "eve", "root"):
        assert people[name].get("/api/jobs/hers").status_code == 200
    for change in (people["eve"].post("/api/jobs/hers/cancel"), people["eve"].delete("/api/jobs/hers")):
        assert change.status_code == 403
    assert people["eve"].post("/api/jobs", json={"config": tree()}).status_code == 403
    assert people["root"].post("/api/jobs/hers/cancel").status_code == 200


def test_reading_starts_and_changes_nothing(people: dict[str, TestClient]) -> None:
    """Every route that is not read with GET, and the one that starts a process though it is."""
    assert people["ann"].post("/api/datasets/rows", content=ROW).status_code == 201
    included = [getattr(entry, "original_router", None) for entry in people["eve"].app.routes]  # type: ignore[attr-defined]
    routes = [route for router in included if router is not None for route in router.routes]
    changing = [(method, route.path) for route in routes for method in route.methods - {"GET", "HEAD", "OPTIONS"}]
    assert len(changing) >= 12
    for method, path in changing:
        path = re.sub(r"\{[^}]*\}", "rows", path)
        assert people["eve"].request(method, path).status_code == 403, (method, path)
        assert people["nobody"].request(method, path).status_code == 401, (method, path)
    assert people["eve"].get("/api/datasets/rows/preview").status_code == 200
    assert people["eve"].get("/api/datasets/rows/preview", params={"model": "some/model"}).status_code == 403
    for route in routes:
        if "GET" in route.methods and route.path.startswith(("/api", "/v1", "/metrics")):
            asked = people["nobody"].get(re.sub(r"\{[^}]*\}", "rows", route.path), params={"job_uuid": "rows"})
            assert asked.status_code == (200 if route.path in PUBLIC else 401), route.path


def test_data_sets_belong_to_their_owner(people: dict[str, TestClient], tmp_path: Path) -> None:
    assert people["ann"].post("/api/datasets/rows", content=ROW).status_code == 201
    uses = {"config": tree(data={"train": "dataset:rows"})}
    assert people["bob"].get("/api/datasets/rows").status_code == 404
    assert people["bob"].get("/api/datasets/rows/preview").status_code == 404
    assert people["bob"].delete("/api/datasets/rows").status_code == 404
    assert people["bob"].post("/api/datasets/rows", content=ROW).status_code == 409
    assert people["bob"].get("/api/datasets").json() == {"datasets": []}
    assert "there is no data set rows" in people["bob"].post("/api/jobs", json=uses).json()["error"]["message"]
    by_path = tree(data={"train": str(tmp_path / "data" / "datasets" / "rows.jsonl")})
    assert people["bob"].post("/api/jobs", json={"config": by_path}).status_code == 403
    assert people["eve"].delete("/api/datasets/rows").status_code == 403
    assert people["ann"].post("/api/jobs", json=uses).status_code == 201


def test_another_job_may_be_built_on_only_by_who_owns_it(people: dict[str, TestClient], tmp_path: Path) -> None:
    people["ann"].post("/api/jobs", json={"id": "hers", "config": tree()})
    export = {"config": tree(model=str(tmp_path / "data" / "jobs" / "hers" / "export"))}
    assert people["bob"].post("/api/jobs", json=export).status_code == 403
    assert people["ann"].post("/api/jobs", json=export).status_code == 201
    around = {"config": tree(model=str(tmp_path / "data" / "jobs" / "hers" / ".." / ".." / "service.db"))}
    assert people["ann"].post("/api/jobs", json=around).status_code == 403


def test_a_token_that_is_taken_out_is_out_at_once(people: dict[str, TestClient], tmp_path: Path) -> None:
    assert people["ann"].get("/api/jobs").status_code == 200
    lines = [line for line in (tmp_path / "tokens").read_text().splitlines() if not line.startswith("ann")]
    (tmp_path / "tokens").write_text("\n".join(lines))
    assert people["ann"].get("/api/jobs").status_code == 401
    assert people["bob"].get("/api/jobs").status_code == 200


def test_tokens_are_stored_by_their_hash(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(commands, ["token", "ann", "--role", "admin"])
    token = result.stderr.split()[-1]
    assert result.stdout == f"ann admin {hash_token(token)}\n"
    assert token not in result.stdout
    (tmp_path / "tokens").write_text(result.stdout)
    caller = Tokens(tmp_path / "tokens").find(token)
    assert caller is not None
    assert (caller.name, caller.role) == ("ann", "admin")
    (tmp_path / "tokens").write_text("ann owner " + "0" * 64)
    with pytest.raises(ValueError, match="tokens:1: expected NAME ROLE HASH"):
        Tokens(tmp_path / "tokens")


@pytest.fixture
def local(make_manager: Callable[..., JobManager], tmp_path: Path) -> Iterator[TestClient]:
    settings = ServiceSettings(tmp_path / "data", max_upload_mb=1, max_datasets=2, max_body_bytes=300_000)
    app = create_app(settings, make_manager(max_upload_mb=1, max_datasets=2))
    with TestClient(app, base_url="http://localhost:8322", raise_server_exceptions=False) as client:
        yield client


def test_other_machines_need_a_token_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without --token-file everybody who reaches the port"):
        ServiceSettings(tmp_path, host="0.0.0.0")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8322", "", "[::2]"])
def test_other_names_for_this_machine_are_refused(local: TestClient, host: str) -> None:
    assert local.get("/api/jobs", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8322", "[::1]:8322", "LOCALHOST:1"])
def test_names_of_this_machine_are_taken(local: TestClient, host: str) -> None:
    assert local.get("/api/jobs", headers={"Host": host}).status_code == 200


def test_pages_of_other_sites_change_nothing(local: TestClient) -> None:
    body = json.dumps({"config": tree()})
    for origin in ("http://evil.example", "null", "http://localhost:9999"):
        headers = {"Origin": origin, "Content-Type": "application/json"}
        assert local.post("/api/jobs", content=body, headers=headers).status_code == 403
        assert local.post("/api/datasets/rows", content=ROW, headers=headers).status_code == 403
        assert local.delete("/api/jobs/x", headers=headers).status_code == 403
    assert (
        local.post("/api/jobs", json={"config": tree()}, headers={"Origin": "http://localhost:8322"}).status_code == 201
    )


def test_every_answer_has_its_headers(local: TestClient) -> None:
    for path in ("/", "/api/jobs", "/nothing", "/api/jobs/none"):
        headers = local.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "server" not in headers
    assert local.get("/api/jobs").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "/etc/passwd"},
        {"model": "../../etc"},
        {"model": "~/secret"},
        {"data": {"train": "/etc/passwd"}},
        {"data": {"train": ["dataset:rows", "/etc/*.conf"]}},
        {"data": {"train": {"path": "./rows.jsonl"}}},
        {"data": {"train": "dataset:rows", "validation": "/proc/self/environ"}},
        {"data": {"train": "dataset:rows", "chat_template": "/etc/passwd"}},
        {"data": {"train": "dataset:rows", "cache_dir": "/tmp/cache"}},
        {"data": {"train": "file:///etc/passwd"}},
        {"data": {"train": "https://evil.example/rows.jsonl"}},
        {"data": {"train": "dataset:../service"}},
        {"data": {"train": "dataset:rows", "converter": "os:system"}},
        {"data": {"train": [{"path": "dataset:rows", "converter": "os:system"}]}},
        {"model": {"path": "some/model", "trust_remote_code": True}},
        {"parallel": {"backend": "deepspeed", "deepspeed_config": "/etc/passwd"}},
        {"evaluation": {"encoder": "/etc"}},
        {"model": "a\0b"},
        {"model": "/" + "x" * 5000},
        {"model": "x" * 5000},
        {"name": "\ud800"},
    ],
)
def test_configurations_stay_inside(local: TestClient, changes: dict[str, Any]) -> None:
    def send(path: str, config: dict[str, Any]) -> Any:
        """By hand: the client's own encoder refuses half of a character."""
        body = json.dumps({"config": config})
        return local.post(path, content=body, headers={"Content-Type": "application/json"})

    local.post("/api/datasets/rows", content=ROW)
    good = tree(data={"train": "dataset:rows"})
    assert send("/api/jobs", good).status_code == 201
    for path in ("/api/jobs", "/api/plan"):
        answer = send(path, {**good, **changes})
        assert answer.status_code in (403, 422), (changes, answer.text)
    assert local.get("/api/jobs").json()["total"] == 1


def test_links_do_not_lead_outside(make_manager: Callable[..., JobManager], tmp_path: Path) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    for folder in (allowed, secret):
        folder.mkdir()
        (folder / "rows.jsonl").write_bytes(ROW)
    (allowed / "inner").mkdir()
    (allowed / "way-out").symlink_to(secret)
    (allowed / "linked.jsonl").symlink_to(secret / "rows.jsonl")
    manager = make_manager(allowed=Allowed(read=(allowed,)))
    manager.admit(tree(data={"train": str(allowed / "rows.jsonl")}))
    for path in ("way-out/rows.jsonl", "linked.jsonl", "*.jsonl", "../secret/rows.jsonl", "way-out/*"):
        with pytest.raises(ValueError, match="not in a folder that this service may read"):
            manager.admit(tree(data={"train": f"{allowed}/{path}"}))
    manager.admit(tree(evaluation={"encoder": str(allowed / "inner")}))
    with pytest.raises(ValueError, match=r"evaluation\.encoder: .* is not in a folder"):
        manager.admit(tree(evaluation={"encoder": str(allowed / "way-out")}))


def test_code_runs_only_where_the_operator_allows_it(make_manager: Callable[..., JobManager]) -> None:
    manager = make_manager(allowed=Allowed(code=True))
    manager.admit(tree(model={"path": "some/model", "trust_remote_code": True}))
    manager.admit(tree(data={"train": "some/rows", "converter": "mine:convert"}))


OUTSIDE = [
    "../../service.db",
    "..%2f..%2fservice.db",
    "%2e%2e/%2e%2e/service.db",
    "logs/../../../service.db",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "link/passwd",
    "launch.json",
    ".launch.lock",
    "checkpoints/.hidden",
    "checkpoints/step-1/..",
    "checkpoints/step-1/.",
    "checkpoints/writing-step-2/.metadata",
    "logs",
    "nothing",
    "a%00b",
    "x" * 5000,
]


def test_artifacts_stay_inside(local: TestClient, tmp_path: Path) -> None:
    local.post("/api/jobs", json={"id": "mine", "config": tree()})
    wait_for(lambda: local.get("/api/jobs/mine").json()["state"] == "completed")
    (tmp_path / "data" / "jobs" / "mine" / "link").symlink_to("/etc")
    (tmp_path / "data" / "jobs" / "mine" / "linked").symlink_to("/etc/passwd")
    for part in ("step-1/.metadata", "writing-step-2/.metadata", ".hidden"):
        file = tmp_path / "data" / "jobs" / "mine" / "checkpoints" / part
        file.parent.mkdir(exist_ok=True)
        file.write_text("index")
    whole = ("config.yaml", "checkpoints/step-1/.metadata")  # of a committed checkpoint everything is given out
    assert [local.get(f"/api/jobs/mine/artifacts/{name}").status_code for name in whole] == [200, 200]
    for path in OUTSIDE:
        answer = local.get(f"/api/jobs/mine/artifacts/{path}")
        assert answer.status_code == 404, (path, answer.text[:200])
    listed = [artifact["path"] for artifact in local.get("/api/jobs/mine/artifacts").json()["artifacts"]]
    assert not [name for name in listed if name.startswith(("link", "."))]
    assert [name for name in listed if name.startswith("checkpoints/") and "/." in name] == [whole[1]]


def test_uploads_are_bounded_in_size_and_number(local: TestClient, tmp_path: Path) -> None:
    assert local.post("/api/datasets/big", content=ROW * 40_000).status_code == 413

    def without_length() -> Iterator[bytes]:
        for _ in range(2000):
            yield ROW * 1000

    for path in ("/api/datasets/big", "/api/jobs"):
        answer = local.post(path, content=without_length(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 413, path
    assert local.post("/api/jobs", json={"config": {"name": "x" * 400_000}}).status_code == 413
    assert list((tmp_path / "data" / "uploads").iterdir()) == []
    for name in ("one", "two"):
        assert local.post(f"/api/datasets/{name}", content=ROW).status_code == 201
    assert local.post("/api/datasets/three", content=ROW).status_code == 413
    assert local.post("/api/datasets/.hidden", content=ROW).status_code == 422
    assert local.post("/api/datasets/..%2fx", content=ROW).status_code in (404, 405, 422)


def test_costly_configurations_are_refused(local: TestClient) -> None:
    def send(config: str) -> Any:
        return local.post("/api/jobs", json={"config": config})

    assert send("model: some/model\ndata: {train: some/rows}").status_code == 201
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
    )
    assert "aliases" in send(bomb).json()["error"]["message"]
    assert "nested too deeply" in send("[" * 5000).json()["error"]["message"]
    assert send("x" * 200_000).status_code == 413
    for config in ("- " * 20_000, "{" * 5000, "\0", "? [a]: b", "a: b: c", "!!python/object/apply:os.system [ls]"):
        assert send(config).status_code == 422, config[:30]


def test_slow_senders_are_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path, idle_timeout_s="0.5", upload_timeout_s="2.0", body_timeout_s="1.0") as service:
        for path in ("/api/datasets/rows", "/api/jobs"):
            with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                connection.sendall(head.encode() + b"Content-Length: 1000\r\n\r\n{")
                assert b" 408 " in connection.recv(200).split(b"\r\n")[0], path
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
            connection.sendall(b"POST /api/datasets/rows HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
            began = time.monotonic()
            connection.settimeout(0.2)
            answer = b""
            while not answer and time.monotonic() - began < 30:  # a byte now and then does not help
                connection.sendall(b" ")
                try:
                    answer = connection.recv(200)
                except TimeoutError:
                    continue
            assert b" 408 " in answer
        with Client(service.url) as client:
            assert client.datasets() == []
        assert list((tmp_path / "data" / "uploads").iterdir()) == []


def test_secrets_stay_out_of_logs(tmp_path: Path) -> None:
    token, line = make_token("ann", "submit")
    (tmp_path / "tokens").write_text(line)
    with serving(tmp_path, token_file=str(tmp_path / "tokens")) as service:
        with Client(service.url, token) as client:
            client.submit(job(id="mine"))
            client.wait("mine", timeout_s=300)
            with pytest.raises(ServiceFault, match="unknown key"):
                client.plan({"passwort": "hunter2"})
        with Client(service.url, "wrong-token") as client, pytest.raises(ServiceFault) as caught:
            client.health()
        written = service.log() + str(caught.value)
        for path in (tmp_path / "data").rglob("*"):
            if path.is_file():
                written += path.read_bytes().decode(errors="replace")
        for secret in (token, line.split()[-1], "wrong-token", "hunter2"):
            assert secret not in written


def test_the_service_never_loads_torch() -> None:
    program = "import sys, lockstep.service.app; print(*{'torch', 'transformers', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=HERE)
    assert result.stdout.strip() == ""
