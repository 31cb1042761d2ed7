"""A small Kubernetes API server over HTTP: objects, dry runs, labels, rights, logs, and what a Job controller makes.

It answers as the API's documents say, with the status objects and messages of a real one. `run_containers` starts the
command of each pod as a process of this machine, as a kubelet would.
"""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Manifest = dict[str, Any]
_CORE = {"pods", "configmaps", "persistentvolumeclaims"}
_KNOWN = {
    "batch/v1": {"jobs"},
    "jobset.x-k8s.io/v1alpha2": {"jobsets"},
    "trainer.kubeflow.org/v1alpha1": {"trainjobs"},
    "ray.io/v1": {"rayjobs"},
}


class FakeCluster:
    """Its objects by (plural, namespace, name); what it allows and knows can be changed at any time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[tuple[str, str, str], Manifest] = {}
        self.logs: dict[str, list[str]] = {}
        self.namespaces = {"default", "team"}
        self.known = copy.deepcopy(_KNOWN)
        self.forbidden: set[tuple[str, str]] = set()
        self.is_down = False
        self.lost_answers = 0  # of the next calls that create something: done, and answered with a failure
        self.prunes: set[str] = set()  # fields of a spec that an older version does not know
        self.makes_pods = True
        self.runs_containers = False
        self.calls: list[str] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.RLock()
        self._clock = time.time_ns()

    # --- what tests do ------------------------------------------------------------------------------------------------

    def write_kubeconfig(self, port: int, namespace: str = "team") -> Path:
        path = self.folder / "kubeconfig"
        cluster = {"server": f"http://127.0.0.1:{port}"}
        context = {"cluster": "here", "user": "me", "namespace": namespace}
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "here",
                    "clusters": [{"name": "here", "cluster": cluster}],
                    "contexts": [{"name": "here", "context": context}],
                    "users": [{"name": "me", "user": {"token": "secret"}}],
                }
            )
        )
        return path

    def only(self, plural: str) -> Manifest:
        (found,) = [found for (kind, _, _), found in self.objects.items() if kind == plural]
        return found

    def all(self, plural: str) -> list[Manifest]:
        return [found for (kind, _, _), found in self.objects.items() if kind == plural]

    def set_pod(self, **status: Any) -> None:
        self.only("pods")["status"] = status

    def end_workload(self, plural: str, kind: str, reason: str = "", message: str = "") -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        self.only(plural)["status"] = {"conditions": [condition]}

    def print_line(self, line: str, pod: str | None = None) -> None:
        name = pod or self.only("pods")["metadata"]["name"]
        with self._lock:
            self._clock = max(self._clock + 1, time.time_ns())
            seconds, nanoseconds = divmod(self._clock, 10**9)
            when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{nanoseconds:09d}Z"
            self.logs.setdefault(name, []).append(f"{when} {line}")

    # --- what the server does -----------------------------------------------------------------------------------------

    def create(self, plural: str, namespace: str, body: Manifest, *, dry_run: bool) -> tuple[int, Manifest]:
        name = body["metadata"]["name"]
        if (plural, namespace, name) in self.objects:
            return 409, failure(409, "AlreadyExists", f'{plural} "{name}" already exists')
        made = copy.deepcopy(body)
        for field in self.prunes:
            made.get("spec", {}).pop(field, None)
        made["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": namespace, "creationTimestamp": now()}
        if not dry_run:
            self.objects[plural, namespace, name] = made
            if plural in ("jobs", "jobsets") and self.makes_pods and not made["spec"].get("suspend"):
                self._make_pods(plural, namespace, made)
        return 201, made

    def delete(self, plural: str, namespace: str, name: str) -> tuple[int, Manifest]:
        found = self.objects.pop((plural, namespace, name), None)
        if found is None:
            return 404, failure(404, "NotFound", f'{plural} "{name}" not found')
        for key, owned in list(self.objects.items()):
            owners = [owner["uid"] for owner in owned["metadata"].get("ownerReferences", ())]
            if found["metadata"]["uid"] in owners:
                self._end_process(key[2])
                self.objects.pop(key, None)
        self._end_process(name)
        return 200, found

    def _make_pods(self, plural: str, namespace: str, workload: Manifest) -> None:
        spec = workload["spec"]
        jobs = [spec] if plural == "jobs" else [job["template"]["spec"] for job in spec["replicatedJobs"]]
        for job in jobs:
            for index in range(job["completions"]):
                name = f"{workload['metadata']['name']}-{index}"
                about = copy.deepcopy(job["template"]["metadata"])
                about["annotations"] = {"batch.kubernetes.io/job-completion-index": str(index)}
                about |= {"name": name, "namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
                about["ownerReferences"] = [{"uid": workload["metadata"]["uid"]}]
                pod = {
                    "metadata": about,
                    "spec": copy.deepcopy(job["template"]["spec"]),
                    "status": {"phase": "Pending"},
                }
                self.objects["pods", namespace, name] = pod
                if self.runs_containers:
                    threading.Thread(target=self._run_container, args=(pod, plural), daemon=True).start()

    def _run_container(self, pod: Manifest, plural: str) -> None:
        container, name = pod["spec"]["containers"][0], pod["metadata"]["name"]
        source = next(v["configMap"]["name"] for v in pod["spec"]["volumes"] if "configMap" in v)
        deadline = time.monotonic() + 60
        while ("configmaps", pod["metadata"]["namespace"], source) not in self.objects:
            assert time.monotonic() < deadline, "there is no ConfigMap"
            time.sleep(0.05)
        config = self.folder / f"{name}.yaml"
        config.write_text(self.objects["configmaps", pod["metadata"]["namespace"], source]["data"]["config.yaml"])
        command = [str(config) if part == "/etc/lockstep/config.yaml" else part for part in container["command"]]
        process = subprocess.Popen(
            [sys.executable, *command[1:]],
            env={**os.environ, **self._variables(pod)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._processes[name] = process
        pod["status"] = {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}
        assert process.stdout is not None
        for line in process.stdout:
            self.print_line(line.decode().rstrip("\n"), name)
        code = process.wait()
        ended = {"exitCode": code if code >= 0 else 128 - code, "reason": "Error" if code else "Completed"}
        phase = "Failed" if code else "Succeeded"
        pod["status"] = {"phase": phase, "containerStatuses": [{"state": {"terminated": ended}}]}
        self._end_job(plural, pod, code)

    def _variables(self, pod: Manifest) -> dict[str, str]:
        variables = {}
        for entry in pod["spec"]["containers"][0]["env"]:
            if "value" in entry:
                variables[entry["name"]] = entry["value"]
            elif "fieldRef" in entry.get("valueFrom", {}):
                key = re.search(r"'(.*)'", entry["valueFrom"]["fieldRef"]["fieldPath"])
                assert key
                variables[entry["name"]] = pod["metadata"]["annotations"][key[1]]
        if variables.get("PET_NNODES") != "1":  # pods have names; processes of one machine have not
            variables["PET_MASTER_ADDR"] = "127.0.0.1"
        return {name: value for name, value in variables.items() if name not in ("HOME", "USER")}

    def _end_job(self, plural: str, pod: Manifest, code: int) -> None:
        owner = pod["metadata"]["ownerReferences"][0]["uid"]
        workload = next((w for w in self.all(plural) if w["metadata"]["uid"] == owner), None)
        pods = [p for p in self.all("pods") if p["metadata"]["ownerReferences"][0]["uid"] == owner]
        if workload is None:
            return
        done = "Complete" if plural == "jobs" else "Completed"
        if code:
            condition = {
                "type": "Failed",
                "status": "True",
                "reason": "PodFailurePolicy",
                "message": f"exit code {code}",
            }
            workload["status"] = {"conditions": [condition]}
        elif all(p["status"]["phase"] == "Succeeded" for p in pods):
            workload["status"] = {"conditions": [{"type": done, "status": "True"}]}

    def terminate(self, pod: str) -> None:
        """What a kubelet does first to a pod that must go."""
        self._processes[pod].send_signal(signal.SIGTERM)

    def _end_process(self, pod: str) -> None:
        process = self._processes.pop(pod, None)
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def failure(code: int, reason: str, message: str) -> Manifest:
    about = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**about, "message": message, "reason": reason, "code": code}


class Handler(BaseHTTPRequestHandler):
    cluster: FakeCluster
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("get")

    def do_POST(self) -> None:
        self._answer("create")

    def do_DELETE(self) -> None:
        self._answer("delete")

    def _answer(self, verb: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        code, reply = self._reply(verb, url.path, query, body)
        text = reply if isinstance(reply, str) else json.dumps(reply)
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(reply, str) else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _reply(self, verb: str, path: str, query: dict[str, str], body: Manifest) -> tuple[int, Manifest | str]:
        cluster = self.cluster
        if cluster.is_down:
            return 503, failure(503, "ServiceUnavailable", "apiserver not ready")
        if self.headers.get("Authorization") != "Bearer secret":
            return 401, failure(401, "Unauthorized", "Unauthorized")
        match = re.fullmatch(
            r"/(?:api/v1|apis/(?P<group>[^/]+/[^/]+))/namespaces/(?P<ns>[^/]+)/(?P<plural>\w+)"
            r"(?:/(?P<name>[^/]+)(?P<sub>/log)?)?",
            path,
        )
        if match is None:
            return 404, "404 page not found\n"
        group, namespace, plural, name = match["group"], match["ns"], match["plural"], match["name"]
        if plural not in (_CORE if group is None else cluster.known.get(group, set())):
            return 404, "404 page not found\n"
        verb = "list" if verb == "get" and name is None else verb
        cluster.calls.append(f"{verb} {plural}" + (" dry" if query.get("dryRun") else ""))
        if (verb, plural) in cluster.forbidden:
            said = f'{plural} is forbidden: User "me" cannot {verb} resource "{plural}" in the namespace "{namespace}"'
            return 403, failure(403, "Forbidden", said)
        if namespace not in cluster.namespaces:
            return 404, failure(404, "NotFound", f'namespaces "{namespace}" not found')
        if match["sub"]:
            return self._log(name, query.get("sinceSeconds"))
        if verb == "create":
            answer = cluster.create(plural, namespace, body, dry_run="dryRun" in query)
            if cluster.lost_answers and "dryRun" not in query:
                cluster.lost_answers -= 1
                return 504, failure(504, "Timeout", "request did not complete within the allotted timeout")
            return answer
        if verb == "delete":
            return cluster.delete(plural, namespace, name)
        if verb == "list":
            return 200, {"items": self._selected(plural, namespace, query.get("labelSelector", ""))}
        found = cluster.objects.get((plural, namespace, name))
        if found is None:
            return 404, failure(404, "NotFound", f'{plural} "{name}" not found')
        return 200, found

    def _log(self, pod: str, since_s: str | None) -> tuple[int, Manifest | str]:
        lines = self.cluster.logs.get(pod)
        if lines is not None and since_s is not None:
            first = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - int(since_s)))
            lines = [line for line in lines if line >= first]
        if lines is None:
            said = f'container "node" in pod "{pod}" is waiting to start: ContainerCreating'
            return 400, failure(400, "BadRequest", said)
        return 200, "".join(f"{line}\n" for line in lines)

    def _selected(self, plural: str, namespace: str, selector: str) -> list[Manifest]:
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        found = [o for (kind, ns, _), o in self.cluster.objects.items() if kind == plural and ns == namespace]
        return [o for o in found if wanted.items() <= o["metadata"].get("labels", {}).items()]


@contextmanager
def serve_cluster(folder: Path) -> Iterator[tuple[FakeCluster, Path]]:
    """The cluster, and a kubeconfig that leads to it."""
    cluster = FakeCluster(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"cluster": cluster}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield cluster, cluster.write_kubeconfig(server.server_address[1])
    finally:
        cluster.close()
        server.shutdown()
        server.server_close()
        thread.join(10)
