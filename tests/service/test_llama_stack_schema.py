"""schemathesis over the paths of Llama Stack: whatever is sent, no answer is a fault of ours or undocumented."""

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
]


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Of a service with one job that has ended and one data set, both called known."""
    with serving(tmp_path_factory.mktemp("schema"), procs="2") as service, Client(service.url) as client:
        client.submit(job(id="known"))
        client.upload("known", [{"prompt": "a", "completion": "b"}])
        assert client.wait("known", timeout_s=300).state == "completed"
        description = schemathesis.openapi.from_url(f"{service.url}/api/openapi.json")
        found = [result.ok() for result in description.get_all_operations()]
        yield [operation for operation in found if operation.path.startswith("/v1")]


modest = settings(
    max_examples=int(os.environ.get("LOCKSTEP_SCHEMA_EXAMPLES", "6")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_every_path_is_described(operations):
    assert len(operations) == 2 * 7 + 3


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_anything_may_be_sent_to_llama_stacks_paths(operations, mode):
    for operation in operations:

        @modest
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS)

        has_input = list(operation.iter_parameters()) or operation.body
        if mode == schemathesis.GenerationMode.POSITIVE or has_input:
            send()


def test_requests_that_name_what_is_there(operations):
    """Random names are never found: these reach the job and the rows."""
    submissions = [operation for operation in operations if operation.path.endswith("supervised-fine-tune")]
    for operation in submissions:

        @modest
        @given(case=operation.as_strategy())
        def send(case: schemathesis.Case) -> None:
            case.body["training_config"].setdefault("data_config", {})
            data = case.body["training_config"]["data_config"] or {"batch_size": 1, "shuffle": True}
            named = {**data, "dataset_id": "known", "data_format": "instruct"}
            case.body["training_config"]["data_config"] = named
            case.call_and_validate(checks=CHECKS)

        send()
    for operation in (operation for operation in operations if "{job_uuid}" in operation.path):
        answer = operation.Case(path_parameters={"job_uuid": "known"}).call()
        assert answer.status_code == 200, operation.path
