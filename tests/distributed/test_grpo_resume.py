"""Reinforcement learning on real processes: killed and resumed, bit for bit on the same layout, to 1e-10 on another."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from distributed.test_elastic import LAYOUTS, TOLERANCE, ledger_of, overrides_for, weights_of
from ranks import exported, newest_step, run_to_the_end, start_ranks

from lockstep.config import ConfigError, load_config
from lockstep.launch.start import reopen
from lockstep.rundir import RunDir

NUM_STEPS = 8
REWARD = [
    {"name": "length", "options": {"most": 4, "unit": "characters", "soft": 12}},
    {"name": "regex", "weight": 0.3, "options": {"pattern": "[a-m]"}},
]
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({"num_updates": 2, "minibatches": 2}, False),
    "reference": ({"kl_coefficient": 0.05, "reference_sync_steps": 3, "entropy_coefficient": 0.01}, False),
    "adapters": ({"kl_coefficient": 0.05, "kl_in": "reward", "advantage": "rloo"}, True),
}
CASES = [
    ("ddp-2", "tensor-2", "adapters"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("one", "one", "reference"),
            ("fsdp-2", "fsdp-2", "reference"),
            ("one", "one", "plain"),
            ("ddp-2", "ddp-2", "plain"),
            ("tensor-2", "fsdp-2", "reference"),
            ("context-2", "one", "plain"),
            ("fsdp-3", "ddp-2", "plain"),
            ("one", "hybrid-2x2", "adapters"),
        ]
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2, initializer_range=0.05)


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


def write_prompts(path: Path, count: int, *, first: int) -> None:
    path.write_text("".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(first, first + count)))


def make_run(folder: Path, model: Path, layout: str, way: str) -> RunDir:
    algorithm, lora = WAYS[way]
    write_prompts(folder / "train.jsonl", 16, first=0)
    write_prompts(folder / "validation.jsonl", 3, first=50)
    num_ranks, degrees = LAYOUTS[layout]
    settings: dict[str, Any] = {
        "algorithm": {"kind": "grpo", "reward": REWARD, "group_size": 4, "max_tokens": 12, **algorithm},
        "lora": {"rank": 4} if lora else None,
        "data": {"validation": "validation.jsonl"},
        "batch": {"samples": 4},
        "optim": {"epochs": 2, "learning_rate": 0.003},
        "evaluation": {"every_steps": 4},
        "checkpoint": {"every_steps": 2, "keep_best": 0},
        "parallel": {"shard": 1, **degrees},
        "launch": {"procs": num_ranks},
    }
    config = load_config(tiny.write_config(folder, model, **settings), ["model.precision=fp64"])
    return RunDir.create(folder / "run", config)


def assert_same_run(run: RunDir, reference: RunDir) -> None:
    for ours, theirs in zip(run.metrics(), reference.metrics(), strict=True):
        assert (ours["step"], ours["split"]) == (theirs["step"], theirs["split"])
        keys = {"reward", "length", *(("loss", "grad_norm") if ours["split"] == "train" else ())}
        for key in keys:
            assert ours[key] == pytest.approx(theirs[key], rel=TOLERANCE, abs=1e-12), f"{key} of step {ours['step']}"
        assert ours.get("sampler_trainer_logprob_diff_max", 0) < 1e-10
    assert ledger_of(run) == ledger_of(reference)
    for step in range(1, NUM_STEPS + 1):
        mine, known = (
            [json.loads(line) for line in (r.path / f"samples/step-{step}.jsonl").read_text().splitlines()]
            for r in (run, reference)
        )
        assert [(row["turns"], row["reward"], row["versions"]) for row in mine] == [
            (row["turns"], row["reward"], row["versions"]) for row in known
        ]
    found, expected = (weights_of(exported(r)) for r in (run, reference))
    for name, tensor in expected.items():
        difference = float((found[name] - tensor).abs().max())
        assert difference <= TOLERANCE * max(1.0, float(tensor.abs().max())), f"{name}: {difference:.3g}"


def kill_in_the_middle(run: RunDir, num_ranks: int) -> None:
    with start_ranks(run, num_ranks) as ranks:
        caught = ranks.wait_until(lambda: newest_step(run) >= 3 and bool(run.list_checkpoints()))
        assert caught, [failure["message"] for failure in run.failures()]
        ranks.signal(signal.SIGKILL)
        ranks.wait()
    assert newest_step(run) < NUM_STEPS


@pytest.mark.parametrize(("before", "after", "way"), CASES)
def test_a_killed_run_goes_on(
    tmp_path: Path, model: Path, uninterrupted: Callable[[str, str], RunDir], before: str, after: str, way: str
) -> None:
    run = make_run(tmp_path, model, before, way)
    kill_in_the_middle(run, LAYOUTS[before][0])
    if after != before:
        reopen(run.path, overrides_for(after))
    run_to_the_end(run, LAYOUTS[after][0])
    assert [event["event"] for event in run.events()].count("resumed") == 1
    assert_same_run(run, uninterrupted(way, "one"))
    if after == before:
        assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(uninterrupted(way, before)))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(0, 2), (1, 0)])
def test_a_killed_run_goes_on_with_other_engines(
    tmp_path: Path, model: Path, uninterrupted: Callable[[str, str], RunDir], before: int, after: int
) -> None:
    run = make_run(tmp_path, model, "one", "plain")
    reopen(run.path, [f"rollouts.engines={before}"])
    kill_in_the_middle(run, 1)
    reopen(run.path, [f"rollouts.engines={after}"])
    run_to_the_end(run, 1)
    assert_same_run(run, uninterrupted("plain", "one"))
    assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(uninterrupted("plain", "one")))


@pytest.mark.parametrize("override", ["rollouts.max_staleness=4", "rollouts.kind=sglang", "algorithm.group_size=2"])
def test_how_samples_are_made_stays(tmp_path: Path, model: Path, override: str) -> None:
    run = make_run(tmp_path, model, "one", "plain")
    with pytest.raises(ConfigError, match=f"cannot change {override.partition('=')[0]} from"):
        reopen(run.path, ["rollouts.engines=1", override])
