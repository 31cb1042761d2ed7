"""A typed client of the service, for Python and for the command."""

from __future__ import annotations

import codecs
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import httpx

from lockstep.config import RunConfig
from lockstep.config.data import PARTS
from lockstep.rundir import MetricRecord, digest_file
from lockstep.service.schemas import (
    FINISHED,
    ArtifactList,
    ArtifactView,
    CheckpointList,
    CheckpointView,
    ConfigView,
    DatasetList,
    DatasetPreview,
    DatasetView,
    EventList,
    Health,
    JobList,
    JobRequest,
    JobState,
    JobView,
    MetricsPage,
    PlanView,
    SampleList,
    Wire,
)

TOKEN_VARIABLE = "LOCKSTEP_TOKEN"
SERVER_VARIABLE = "LOCKSTEP_SERVER"
DEFAULT_SERVER = "http://127.0.0.1:8322"
_RECONNECT_S = 1.0
_PIECE_BYTES = 1 << 20
W = TypeVar("W", bound=Wire)


class ServiceFault(ValueError):
    """The service refused, or could not be reached. `status` is 0 for the latter."""

    def __init__(self, message: str, status: int = 0, code: str = "unreachable") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Client:
    """`url` and `token` default to $LOCKSTEP_SERVER and $LOCKSTEP_TOKEN. `patience_s`: how long a follower keeps trying
    when the service does not answer, as while it is restarted."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        patience_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = (url or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER).rstrip("/")
        token = token or os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, transport=transport)
        self._patience_s = patience_s

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # --- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, request: JobRequest) -> JobView:
        # A service plans the job first: it takes up to 30 seconds for that (memory_door.py).
        return self._ask(JobView, "POST", "/api/jobs", json=request.model_dump(mode="json"), timeout=120.0)

    def job(self, job_id: str) -> JobView:
        return self._ask(JobView, "GET", f"/api/jobs/{job_id}")

    def jobs(
        self,
        state: JobState | None = None,
        *,
        owner: str | None = None,
        search: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> JobList:
        wanted = {"state": state, "owner": owner, "search": search, "limit": limit, "offset": offset}
        return self._ask(JobList, "GET", "/api/jobs", params={k: v for k, v in wanted.items() if v is not None})

    def cancel(self, job_id: str) -> JobView:
        return self._ask(JobView, "POST", f"/api/jobs/{job_id}/cancel")

    def delete(self, job_id: str) -> None:
        self._send("DELETE", f"/api/jobs/{job_id}", timeout=60.0)

    def wait(self, job_id: str, timeout_s: float | None = None, period_s: float = 0.5) -> JobView:
        """Until it has ended."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (job := self.job(job_id)).state not in FINISHED:
            if deadline is not None and time.monotonic() > deadline:
                raise ServiceFault(f"job {job_id} is still {job.state} after {timeout_s:.0f} s", 0, "timeout")
            time.sleep(period_s)
        return job

    def config(self, job_id: str) -> ConfigView:
        return self._ask(ConfigView, "GET", f"/api/jobs/{job_id}/config")

    # --- what a run writes -------------------------------------------------------------------------------------------

    def logs(
        self, job_id: str, *, follow: bool = False, tail: int | None = None, rank: str | None = None
    ) -> Iterator[str]:
        """Pieces of text: all of it, or the last lines. `follow` goes on until the job has ended, also across a
        restart of the service."""
        params = {key: value for key, value in (("tail", tail), ("rank", rank)) if value is not None}
        if follow:
            yield from (message["text"] for message in self._follow(f"/api/jobs/{job_id}/logs/stream", params))
        elif tail is not None:
            yield self._send("GET", f"/api/jobs/{job_id}/logs", params=params).text
        else:
            yield from self._whole_log(job_id, rank or "0")

    def _whole_log(self, job_id: str, rank: str) -> Iterator[str]:
        name = "launcher.log" if rank == "launcher" else f"rank-{rank}.log"
        if not any(artifact.path == f"logs/{name}" for artifact in self.artifacts(job_id)):
            return  # nothing yet
        try:
            with self._http.stream("GET", f"/api/jobs/{job_id}/artifacts/logs/{name}") as response:
                self._check(response)
                decoder = codecs.getincrementaldecoder("utf-8")("replace")
                for piece in response.iter_bytes():
                    yield decoder.decode(piece)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def metrics(self, job_id: str, *, follow: bool = False) -> Iterator[MetricRecord]:
        if follow:
            yield from map(MetricRecord, self._follow(f"/api/jobs/{job_id}/metrics/stream", {}))
            return
        after = 0
        while True:
            page = self._ask(MetricsPage, "GET", f"/api/jobs/{job_id}/metrics", params={"after": after})
            yield from map(MetricRecord, page.records)
            if page.next == after:
                return
            after = page.next

    def events(self, job_id: str) -> list[dict[str, Any]]:
        return self._ask(EventList, "GET", f"/api/jobs/{job_id}/events").events

    def samples(self, job_id: str) -> list[dict[str, Any]]:
        return self._ask(SampleList, "GET", f"/api/jobs/{job_id}/samples").samples

    def checkpoints(self, job_id: str) -> list[CheckpointView]:
        return self._ask(CheckpointList, "GET", f"/api/jobs/{job_id}/checkpoints").checkpoints

    def artifacts(self, job_id: str) -> list[ArtifactView]:
        return self._ask(ArtifactList, "GET", f"/api/jobs/{job_id}/artifacts").artifacts

    def download(self, job_id: str, path: str, to: Path) -> Path:
        """Into the file `to`, which is there once it is whole. A lost connection is taken up where it broke."""
        part = to.with_name(f".{to.name}.part")
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                self._fetch(f"/api/jobs/{job_id}/artifacts/{path}", file)
            part.replace(to)
        finally:
            part.unlink(missing_ok=True)
        return to

    def _fetch(self, url: str, file: BinaryIO) -> None:
        patience = _Patience(self._patience_s)
        tag = ""
        while True:
            # The rest of the same file, or the whole of another that has taken its place.
            headers = {"Range": f"bytes={file.tell()}-", "If-Range": tag} if file.tell() else {}
            try:
                with self._http.stream("GET", url, headers=headers) as response:
                    self._check(response)
                    tag = response.headers.get("etag", "")
                    if response.status_code == 200:
                        file.seek(0)
                        file.truncate()
                    for piece in response.iter_bytes():
                        file.write(piece)
                        patience.renew()
                    return
            except httpx.HTTPError as error:
                patience.wait_or_raise(self._unreachable(error))

    # --- data sets, plans, the service -------------------------------------------------------------------------------

    def upload(self, name: str, source: Path | Iterable[Mapping[str, object]]) -> DatasetView:
        """A file of JSONL or of one JSON array, or rows. Sent a piece at a time."""
        pieces = _file_pieces(source) if isinstance(source, Path) else _row_pieces(source)
        headers = {"Content-Type": "application/jsonl"}
        return self._ask(DatasetView, "POST", f"/api/datasets/{name}", content=pieces, headers=headers, timeout=900.0)

    def datasets(self) -> list[DatasetView]:
        return self._ask(DatasetList, "GET", "/api/datasets").datasets

    def dataset(self, name: str) -> DatasetView:
        return self._ask(DatasetView, "GET", f"/api/datasets/{name}")

    def preview(self, name: str, model: str | None = None, rows: int = 5) -> DatasetPreview:
        params = {"rows": rows, **({"model": model} if model else {})}
        return self._ask(DatasetPreview, "GET", f"/api/datasets/{name}/preview", params=params, timeout=180.0)

    def delete_dataset(self, name: str) -> None:
        self._send("DELETE", f"/api/datasets/{name}")

    def plan(self, config: dict[str, Any] | str) -> PlanView:
        return self._ask(PlanView, "POST", "/api/plan", json={"config": config}, timeout=180.0)

    def health(self) -> Health:
        return self._ask(Health, "GET", "/api/health")

    # --- HTTP --------------------------------------------------------------------------------------------------------

    def _ask(self, kind: type[W], method: str, path: str, **options: object) -> W:
        return kind.model_validate_json(self._send(method, path, **options).content)

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        self._check(response)
        return response

    def _check(self, response: httpx.Response) -> None:
        if response.status_code < 400:
            return
        response.read()
        try:
            error = response.json()["error"]
            raise ServiceFault(error["message"], response.status_code, error["code"])
        except (KeyError, TypeError, json.JSONDecodeError):
            raise ServiceFault(
                f"{self.url} answered with status {response.status_code}: is it a Lockstep service?",
                response.status_code,
                "error",
            ) from None

    def _unreachable(self, error: Exception) -> ServiceFault:
        return ServiceFault(
            f"cannot reach the service at {self.url} ({type(error).__name__}): start it with lockstep serve, or name "
            f"another with --server or ${SERVER_VARIABLE}"
        )

    def _follow(self, path: str, params: Mapping[str, str | int]) -> Iterator[Any]:
        """Messages of a stream until the one called end; a lost connection is taken up where it broke."""
        last = ""
        patience = _Patience(self._patience_s)
        while True:
            headers = {"Last-Event-ID": last} if last else {}
            try:
                with self._http.stream("GET", path, params=params, headers=headers, timeout=60.0) as response:
                    self._check(response)
                    for number, event, data in _events(response.iter_lines()):
                        patience.renew()
                        if event == "end":
                            return
                        last = number or last
                        yield data
                error: Exception = httpx.RemoteProtocolError("the stream ended early")
            except httpx.HTTPError as broken:
                error = broken
            patience.wait_or_raise(self._unreachable(error))


class _Patience:
    """How long a service may be away before its clients give up."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lost_at: float | None = None

    def renew(self) -> None:
        self._lost_at = None

    def wait_or_raise(self, error: ServiceFault) -> None:
        self._lost_at = self._lost_at or time.monotonic()
        if time.monotonic() - self._lost_at > self._seconds:
            raise error
        time.sleep(_RECONNECT_S)


def _events(lines: Iterator[str]) -> Iterator[tuple[str, str, Any]]:
    """(id, event, data) of each message."""
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if "data" in fields:
                yield fields.get("id", ""), fields.get("event", "message"), json.loads(fields["data"])
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")


def _file_pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _row_pieces(rows: Iterable[Mapping[str, object]]) -> Iterator[bytes]:
    for row in rows:
        yield json.dumps(row, ensure_ascii=False).encode() + b"\n"


def prepare_config(config: RunConfig, client: Client | None, say: Callable[[str], None]) -> dict[str, Any]:
    """The resolved sections, with uploaded files by the names of their data sets. Without a client nothing is sent."""
    tree = config.model_dump(mode="json")
    known = {dataset.name for dataset in client.datasets()} if client is not None else set()
    for part in PARTS:
        for source in tree["data"][part]:
            path = Path(source["path"])
            if client is not None and path.is_file() and path.suffix in (".jsonl", ".json"):
                name = f"{re.sub(r'[^a-zA-Z0-9_]+', '-', path.stem)[:40].strip('-') or 'rows'}-{digest_file(path)[:12]}"
                if name not in known:
                    say(f"uploading {path}")
                    client.upload(name, path)
                    known.add(name)
                source["path"] = f"dataset:{name}"
    return tree
