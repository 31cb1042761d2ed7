"""schemathesis over the OpenAPI description: whatever is sent, no answer is a fault of ours or undocumented."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi import checks
from service_process import job, serving

from lockstep.service.client import Client

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]
KNOWN = {"job_id": "known", "name": "known", "path": "export/weights.bin"}


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of a service with one job that has ended and one data set, both called known."""
    with serving(tmp_path_factory.mktemp("schema"), procs="2") as service, Client(service.url) as client:
        client.submit(job(id="known"))
        client.upload("known", [{"prompt": "a", "completion": "b"}])
        assert client.wait("known", timeout_s=300).state == "completed"
        yield schemathesis.openapi.from_url(f"{service.url}/api/openapi.json")


modest = settings(
    max_examples=int(os.environ.get("LOCKSTEP_SCHEMA_EXAMPLES", "6")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def operations(description: Any) -> list[Any]:
    found = [result.ok() for result in description.get_all_operations()]
    own = [operation for operation in found if operation.path.startswith(("/api", "/metrics"))]
    assert len(own) >= 20
    return own


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_anything_may_be_sent(description: Any, mode: schemathesis.GenerationMode) -> None:
    for operation in operations(description):

        @modest
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS)

        if mode == schemathesis.GenerationMode.POSITIVE or list(operation.iter_parameters()) or operation.body:
            send()


def test_anything_may_be_asked_of_what_is_there(description: Any) -> None:
    for operation in operations(description):
        if "{" not in operation.path or operation.method.upper() == "DELETE":
            continue

        @modest
        @given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            for name in case.path_parameters.keys() & KNOWN.keys():
                case.path_parameters[name] = KNOWN[name]
            case.query.pop("model", None)  # it would be looked for on the Hub
            case.call_and_validate(checks=CHECKS)

        ask()
