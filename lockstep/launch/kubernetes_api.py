"""The Kubernetes API by the official client: plain objects in and out, deadlines on every call, errors as sentences."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError
from lockstep.launch.kubernetes_manifest import LAUNCH_LABEL, Manifest, ResourceType

_TIMEOUT_S = (10.0, 60.0)  # to connect, and to read
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_UNAVAILABLE = (0, 408, 429, 500, 502, 503, 504)


class ClusterSilent(OSError):
    """The API server does not answer, or not now. What it runs goes on."""


class Absent(LookupError):
    """There is no such object."""


class Exists(RuntimeError):
    """An object of that name is there already."""


class Cluster:
    """One namespace of a cluster."""

    def __init__(self, context: str | None, namespace: str | None) -> None:
        client, self._client, default = _connect(context)
        self._core, self._objects = client.CoreV1Api(self._client), client.CustomObjectsApi(self._client)
        self.namespace = namespace or default or "default"

    def create(self, found: ResourceType, body: Manifest, *, dry_run: bool = False) -> Manifest:
        options = {"dry_run": "All"} if dry_run else {}
        with self._sentences(f"create {found.plural}", found):
            made: Manifest = self._objects.create_namespaced_custom_object(
                *self._where(found), body, **options, _request_timeout=_TIMEOUT_S
            )
        return made

    def get(self, found: ResourceType, name: str) -> Manifest:
        with self._sentences(f"get {found.plural}", found):
            read: Manifest = self._objects.get_namespaced_custom_object(
                *self._where(found), name, _request_timeout=_TIMEOUT_S
            )
        return read

    def find(self, found: ResourceType, launch_id: str) -> Manifest | None:
        with self._sentences(f"list {found.plural}", found):
            listed: Manifest = self._objects.list_namespaced_custom_object(
                *self._where(found), label_selector=f"{LAUNCH_LABEL}={launch_id}", _request_timeout=_TIMEOUT_S
            )
        items: list[Manifest] = listed.get("items", [])
        return items[0] if items else None

    def delete(self, found: ResourceType, name: str) -> None:
        """With its pods, which get their grace period. Nothing happens where it is gone."""
        with contextlib.suppress(Absent), self._sentences(f"delete {found.plural}", found):
            self._objects.delete_namespaced_custom_object(
                *self._where(found), name, propagation_policy="Background", _request_timeout=_TIMEOUT_S
            )

    def create_config_map(self, body: Manifest) -> None:
        with self._sentences("create configmaps"):
            self._core.create_namespaced_config_map(self.namespace, body, _request_timeout=_TIMEOUT_S)

    def claim(self, name: str) -> Manifest:
        with self._sentences("get persistentvolumeclaims"):
            reply = self._core.read_namespaced_persistent_volume_claim(
                name, self.namespace, _preload_content=False, _request_timeout=_TIMEOUT_S
            )
            return _read(reply)

    def pods(self, launch_id: str) -> list[Manifest]:
        """The oldest first."""
        with self._sentences("list pods"):
            reply = self._core.list_namespaced_pod(
                self.namespace,
                label_selector=f"{LAUNCH_LABEL}={launch_id}",
                _preload_content=False,
                _request_timeout=_TIMEOUT_S,
            )
            items: list[Manifest] = _read(reply).get("items", [])
        return sorted(items, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))

    def delete_pod_now(self, name: str) -> None:
        with contextlib.suppress(Absent), self._sentences("delete pods"):
            self._core.delete_namespaced_pod(
                name, self.namespace, grace_period_seconds=0, _preload_content=False, _request_timeout=_TIMEOUT_S
            )

    def log(self, pod: Manifest, since_s: int | None = None) -> list[tuple[str, str]]:
        """(time, line) of its first container; empty where that has not started."""
        options: dict[str, object] = {} if since_s is None else {"since_seconds": since_s}
        try:
            with self._sentences("get pods/log"):
                reply = self._core.read_namespaced_pod_log(
                    pod["metadata"]["name"],
                    self.namespace,
                    container=pod["spec"]["containers"][0]["name"],
                    timestamps=True,
                    _preload_content=False,
                    _request_timeout=_TIMEOUT_S,
                    **options,
                )
                text = reply.data.decode(errors="replace")
        except (Absent, _NotStarted):
            return []
        lines = (line.partition(" ") for line in text.split("\n") if line)
        return [(when, line) for when, _, line in lines]

    def _where(self, found: ResourceType) -> tuple[str, str, str, str]:
        return found.group, found.version, self.namespace, found.plural

    @contextlib.contextmanager
    def _sentences(self, action: str, found: ResourceType | None = None) -> Iterator[None]:
        import urllib3
        from kubernetes.client.exceptions import ApiException

        try:
            yield
        except ApiException as error:
            raise self._explain(error, action, found) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            host = self._client.configuration.host
            raise ClusterSilent(f"the API server {host} does not answer: {_innermost(error)}") from error

    def _explain(self, error: Any, action: str, found: ResourceType | None) -> Exception:
        status, said = int(error.status or 0), _message(error)
        where = f"namespace {self.namespace}"
        if status in _UNAVAILABLE:
            return ClusterSilent(f"the API server {self._client.configuration.host} does not answer: {said}")
        if status == 401:
            return ConfigError(f"the cluster does not know who you are: log in again ({said})")
        if status == 403:
            return ConfigError(f"you may not {action} in {where}: ask for a role that allows it ({said})")
        if status == 409:
            return Exists(said)
        if status == 404:
            return self._explain_absent(said, found)
        if status == 400 and "log" in action:
            return _NotStarted(said)
        return ConfigError(f"the cluster refuses to {action}: {said}")

    def _explain_absent(self, said: str, found: ResourceType | None) -> Exception:
        if "namespaces" in said:
            return ConfigError(f"the cluster has no namespace {self.namespace}: make it, or set launch.namespace")
        is_type_missing = "could not find the requested resource" in said or "page not found" in said
        if found is not None and is_type_missing:
            return ConfigError(
                f"the cluster does not know {found.kind} ({found.api_version}): install {found.installs}, or choose "
                "another launch.target"
            )
        return Absent(said)


class _NotStarted(LookupError):
    """A container that has no log yet."""


def _connect(context: str | None) -> tuple[Any, Any, str | None]:
    """The client library, a connection, and the namespace that goes with it."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise ConfigError("launch.kind kubernetes needs its client: pip install 'lockstep[kubernetes]'") from None
    file = os.environ.get("KUBECONFIG") or "~/.kube/config"
    has_file = any(Path(part).expanduser().exists() for part in file.split(os.pathsep) if part)
    try:
        if has_file:
            contexts, active = config.list_kube_config_contexts(config_file=file)
            chosen = next((one for one in contexts if one["name"] == context), active if context is None else None)
            if chosen is None:
                names = ", ".join(one["name"] for one in contexts)
                raise ConfigError(f"launch.context {context} is not in {file}: it has {names}")
            connection = config.new_client_from_config(config_file=file, context=chosen["name"])
            return client, _bounded(connection), chosen["context"].get("namespace")
        if "KUBERNETES_SERVICE_HOST" in os.environ and context is None:
            settings = client.Configuration()
            config.load_incluster_config(client_configuration=settings)
            namespace = _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else None
            return client, _bounded(client.ApiClient(settings)), namespace
    except ConfigError:
        raise
    except Exception as error:  # whatever the client makes of a file that is not one
        raise ConfigError(f"{file} is no kubeconfig that can be used: {_innermost(error)}") from error
    raise ConfigError(f"there is no kubeconfig {file}: set KUBECONFIG, or log in to the cluster first")


def _bounded(connection: Any) -> object:
    """One attempt for each call: whoever polls tries again by itself."""
    connection.configuration.retries = False
    from kubernetes.client import ApiClient

    return ApiClient(connection.configuration)


def _read(reply: Any) -> Manifest:
    value = json.loads(reply.data)
    return value if isinstance(value, dict) else {}


def _message(error: Any) -> str:
    try:
        body = json.loads(error.body or "")
    except ValueError:
        body = str(error.body or "").strip()
    said = body.get("message") if isinstance(body, Mapping) else body
    return " ".join(str(said or error.reason or "no reason given").split())


def _innermost(error: BaseException) -> str:
    while (inner := getattr(error, "reason", None) or error.__cause__) is not None and isinstance(inner, BaseException):
        error = inner
    return " ".join(str(error).split()) or type(error).__name__
