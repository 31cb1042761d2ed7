"""What cannot fit is refused when it is submitted: by a plan that another process makes, within a deadline."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from lockstep.config import ConfigError, RunConfig, resolve_config
from lockstep.service.client import Client, ServiceFault
from lockstep.service.errors import ServiceError
from lockstep.service.memory_door import DEADLINE_S, UNKNOWN, MemoryDoor, judge
from lockstep.service.schemas import JobRequest

BIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def plan_of(weights: float, activations: float, *, fits: str, capacity: float = 79.0) -> dict[str, Any]:
    parts = {"weights": weights, "optimizer": 2 * weights, "activations: mlp": activations}
    rank = {"rank": "the rank", "reserved_gib": sum(parts.values()), "parts_gib": parts}
    advice = [{"change": "parallel.offload=true", "fits": "yes"}, {"change": "model.logits_gib=0.5", "fits": "no"}]
    return {
        "cluster": "h100:1x1", "memory": [rank], "memory_error": 0.04, "capacity_gib": capacity, "fits": fits,
        "verdict": f"does not fit: needs {sum(parts.values()):g} of {capacity:g} GiB", "advice": advice,
    }  # fmt: skip


def config_for(model: str = "some/model", **sections: Any) -> RunConfig:
    return resolve_config({"model": model, "data": {"train": ["rows.jsonl"]}, **sections})


Door = Callable[..., MemoryDoor]


@pytest.fixture
def make_door(tmp_path: Path) -> Door:
    """With a planner that answers with this plan, and writes down that it was asked."""

    def make(plan: dict[str, Any] | None, *, sleep_s: float = 0.0, **options: Any) -> MemoryDoor:
        answer = "" if plan is None else f"print({json.dumps(json.dumps(plan))})"
        script = tmp_path / "planner.py"
        script.write_text(
            f"import sys, time\nopen({str(tmp_path / 'asked')!r}, 'a').write(' '.join(sys.argv[2:]) + '\\n')\n"
            f"time.sleep({sleep_s})\n{answer}\nsys.exit({2 if plan is None else 1})\n"
        )
        settings = {"here": False, "environment": {}, "folder": tmp_path, "command": (sys.executable, str(script))}
        return MemoryDoor("h100", **{**settings, **options})

    return make


def test_what_is_certain_refuses_and_the_rest_warns() -> None:
    refused = judge(plan_of(32.0, 10.0, fits="no")).refused
    assert "needs 96 of 79 GiB on the rank of h100:1x1 before the first row (weights 32, optimizer 64)" in refused
    assert "try parallel.offload=true." in refused
    warned = judge(plan_of(10.0, 60.0, fits="no"))  # fewer or shorter rows would fit
    assert not warned.refused
    assert "with rows of data.max_length tokens, this job does not fit: needs 90 of 79 GiB" in warned.said
    assert judge(plan_of(10.0, 1.0, fits="yes")) == UNKNOWN
    assert judge({**plan_of(32.0, 1.0, fits="no"), "cluster": "cpu:1x1"}) == UNKNOWN


def test_it_is_asked_once(make_door: Door, tmp_path: Path) -> None:
    door = make_door(plan_of(32.0, 1.0, fits="no"))
    for config in (config_for(), config_for(seed=3, name="other")):  # what a plan does not depend on
        with pytest.raises(ServiceError, match="the job cannot fit"):
            door.check(config)
    assert (tmp_path / "asked").read_text() == "--json --no-data --on h100:1x1\n"
    assert door.check(config_for(launch={"check_memory": False})) == UNKNOWN  # let in, and nobody waits for a plan
    assert len((tmp_path / "asked").read_text().splitlines()) == 1
    assert door.check(config_for(launch={"device": "cpu"})) == UNKNOWN


def test_what_is_not_known_is_let_in(make_door: Door, tmp_path: Path) -> None:
    assert make_door(None).check(config_for()) == UNKNOWN  # no plan for this model
    began = time.monotonic()
    assert make_door(plan_of(32.0, 1.0, fits="no"), sleep_s=30.0, deadline_s=0.5).check(config_for()) == UNKNOWN
    assert time.monotonic() - began < 10
    blind = MemoryDoor(None, here=False, environment={}, folder=tmp_path, command=("false",))
    assert blind.check(config_for()) == UNKNOWN


@pytest.mark.parametrize("name", ["h1000", "h100:8"])
def test_names_that_are_none(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=name):
        MemoryDoor(name, here=False, environment={}, folder=tmp_path)


@pytest.mark.slow
def test_the_real_planner_refuses(tmp_path: Path) -> None:
    """7 billion weights, all trained, on an L4: 25 GiB of weights alone."""
    import os

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(BIG))
    door = MemoryDoor("l4", here=False, environment=dict(os.environ), folder=tmp_path, deadline_s=300.0)
    model = {"path": str(tmp_path / "model"), "compile": False}
    with pytest.raises(ServiceError, match=r"needs .* of 21.4 GiB on the rank of l4:1x1"):
        door.check(config_for(model))  # type: ignore[arg-type]
    adapted = config_for(model, lora={"rank": 8})  # type: ignore[arg-type]
    assert not door.check(adapted).refused


def test_a_copy_that_may_not_be_there_refuses_nothing() -> None:
    """Without rows it is not known whether a reference is held beside the model or computed before."""
    plan = plan_of(25.0, 10.0, fits="no")
    plan["memory"][0]["parts_gib"]["frozen copies"] = 25.0
    assert "frozen copies 25" in judge(plan).refused
    assert judge({**plan, "reference_is_assumed": True}).refused == ""


def test_a_client_waits_longer_than_the_door() -> None:
    waits = []

    def answer(request: httpx.Request) -> httpx.Response:
        waits.append(request.extensions["timeout"]["read"])
        return httpx.Response(503, json={"error": {"code": "busy", "message": "busy"}})

    client = Client("http://service", transport=httpx.MockTransport(answer))
    with pytest.raises(ServiceFault):
        client.submit(JobRequest(config={"model": "m"}))
    assert min(waits) > 2 * DEADLINE_S
