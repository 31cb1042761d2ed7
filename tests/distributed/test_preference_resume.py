"""Preference runs on real processes: killed and resumed, on the same layout bit for bit, on another one to 1e-10."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from distributed.test_elastic import LAYOUTS, assert_same_result, overrides_for
from ranks import exported, newest_step, run_to_the_end, start_ranks

from lockstep.config import load_config
from lockstep.launch.start import reopen
from lockstep.rundir import RunDir

NUM_STEPS = 10
# How the reference is kept, and whether adapters are trained. The last one follows the policy.
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "adapter_off": ({"kind": "dpo"}, True),
    "precomputed": ({"kind": "dpo", "reference": "precomputed", "loss": ["sigmoid", "aot"]}, False),
    "copy": ({"kind": "dpo", "reference": "copy", "reference_sync_steps": 3, "reference_mix": 0.5}, False),
    "kto": ({"kind": "kto"}, True),
}
CASES = [
    ("ddp-2", "tensor-2", "precomputed"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("fsdp-2", "fsdp-2", "copy"),
            ("pipeline-2", "fsdp-2", "adapter_off"),
            ("fsdp-4", "one", "copy"),
            ("one", "fsdp-3", "copy"),
            ("tensor-2", "context-2", "copy"),
            ("fsdp-2", "pipeline-2", "precomputed"),
            ("ddp-2", "ddp-2", "adapter_off"),
            ("shard-2-tensor-2", "ddp-2", "adapter_off"),
            ("fsdp-2", "ddp-2", "kto"),
            ("one", "one", "kto"),
        ]
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"), vocab_size=289, num_hidden_layers=4)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[str, str], RunDir]:
    """A run that never stopped, made once for each way and layout."""
    made: dict[tuple[str, str], RunDir] = {}

    def get(way: str, layout: str) -> RunDir:
        if (way, layout) not in made:
            made[way, layout] = make_run(tmp_path_factory.mktemp(way), model, layout, way)
            run_to_the_end(made[way, layout], LAYOUTS[layout][0])
        return made[way, layout]

    return get


def write_rows(path: Path, count: int, *, seed: int, labelled: bool) -> None:
    draw = random.Random(seed)
    lines = []
    for i in range(count):
        prompt, chosen, rejected = (" ".join(draw.choices(["red", "one", "cat", "sun"], k=4 + i % 3)) for _ in range(3))
        row: dict[str, Any] = {"prompt": prompt, "chosen": f"{chosen} yes", "rejected": f"{rejected} no"}
        if labelled:
            row = {"prompt": prompt, "completion": row["chosen"], "label": i % 3 > 0}
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))


def make_run(folder: Path, model: Path, layout: str, way: str) -> RunDir:
    algorithm, lora = WAYS[way]
    for name, count, seed in (("train.jsonl", 25, 0), ("validation.jsonl", 4, 1)):
        write_rows(folder / name, count, seed=seed, labelled=algorithm["kind"] == "kto")
    num_ranks, degrees = LAYOUTS[layout]
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "lora": {"rank": 4} if lora else None,
        "data": {"validation": "validation.jsonl"},
        "batch": {"samples": 6},
        "optim": {"epochs": 2, "learning_rate": 0.003},
        "evaluation": {"every_steps": 5},
        "checkpoint": {"every_steps": 2, "keep_best": 0},
        "parallel": {"shard": 1, **degrees},
        "launch": {"procs": num_ranks},
    }
    config = load_config(tiny.write_config(folder, model, **settings), ["model.precision=fp64"])
    return RunDir.create(folder / "run", config)


@pytest.mark.parametrize(("before", "after", "way"), CASES)
def test_a_killed_preference_run_goes_on(
    tmp_path: Path, model: Path, uninterrupted: Callable[[str, str], RunDir], before: str, after: str, way: str
) -> None:
    run = make_run(tmp_path, model, before, way)
    with start_ranks(run, LAYOUTS[before][0]) as ranks:
        caught = ranks.wait_until(lambda: newest_step(run) >= 5 and bool(run.list_checkpoints()))
        assert caught, [failure["message"] for failure in run.failures()]
        ranks.signal(signal.SIGKILL)
        ranks.wait()
    assert newest_step(run) < NUM_STEPS
    if after != before:
        reopen(run.path, overrides_for(after))
    run_to_the_end(run, LAYOUTS[after][0])
    assert [event["event"] for event in run.events()].count("resumed") == 1
    assert_same_result(run, uninterrupted(way, "one"))
    if after == before:
        assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(uninterrupted(way, before)))
    learned = [record["loss"] for record in run.metrics() if record["split"] == "validation"]
    assert learned[-1] < learned[0]  # not so of batches: the last one of an epoch may be a single bad row
