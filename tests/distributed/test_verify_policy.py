"""`lockstep verify` of runs that sample: the loop's own updates on real ranks, sound and with faults put in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty_worker
import pytest
import tiny
from mutation.cases import write_case

from lockstep.config import ConfigError, RunConfig, load_config
from lockstep.verification import verify
from lockstep.verification.checking import Report

ALL = "replicate=2; shard=2; tensor=2; context=2; shard=2,tensor=2"
LENGTH = {"name": "length", "options": {"most": 4}}
GRPO: dict[str, Any] = {"kind": "grpo", "reward": LENGTH, "group_size": 6, "max_tokens": 24}
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({"num_updates": 3, "minibatches": 2, "temperature": 0.7}, False),
    "reference": (
        {"kl_coefficient": 0.1, "reference_sync_steps": 3, "entropy_coefficient": 0.05, "num_updates": 2},
        False,
    ),
    "adapters": (
        {
            "kl_coefficient": 0.1,
            "kl_in": "reward",
            "advantage": "rloo",
            "importance_weighting": "sequence",
            "minibatches": 2,
        },
        True,
    ),
    "gspo": ({"kind": "gspo", "overlong": "mask", "environment": "calculator", "minibatches": 2}, False),
    "cispo": ({"kind": "cispo", "advantage": "reinforce++", "aggregation": "fixed", "clip_high": 0.2}, False),
}
QUICK = {"plain": "replicate=2", "reference": "shard=2"}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunConfig]:
    model = tiny.write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4)

    def make(name: str) -> RunConfig:
        folder = tmp_path_factory.mktemp(name)
        rows = [{"prompt": f"say {i} and {'again ' * (i % 5)}please", "answer": str(i)} for i in range(20)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings, has_lora = WAYS[name]
        lora = {"lora": {"rank": 3}} if has_lora else {}
        optim = {"learning_rate": 0.003}
        algorithm = {**GRPO, **settings}
        return load_config(
            tiny.write_config(folder, model, algorithm=algorithm, batch={"samples": 5}, optim=optim, **lora)
        )

    return make


@pytest.mark.parametrize("way", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in WAYS])
def test_every_layout_makes_the_updates_of_the_plain_loop(way: str, configs: Callable[[str], RunConfig]) -> None:
    layouts = ALL.replace("context=2; ", "") if way == "reference" else ALL
    report = verify(configs(way), layouts=QUICK.get(way, layouts))
    assert report.passed, [(v.layout.name, v.problem) for v in report.verdicts]
    assert report.tolerance == 1e-10
    check_metrics(report, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", QUICK)
def test_the_quick_ways_pass_on_every_other_layout(way: str, configs: Callable[[str], RunConfig]) -> None:
    layouts = ALL.replace("context=2; ", "") if way == "reference" else ALL
    report = verify(configs(way), layouts=layouts)
    assert report.passed, [(v.layout.name, v.problem) for v in report.verdicts]


def check_metrics(report: Report, way: str) -> None:
    """What is compared is not trivially the same: ratios are not 1, and some are clipped."""
    found = report.metrics
    if way != "cispo":  # one update alone begins with ratios of 1
        assert found["policy_shift"] > 0.01
        assert found["clipped_low"] + found["clipped_high"] > 0
    assert ("kl" in found) == (way == "reference")
    assert ("entropy" in found) == (way == "reference")
    for verdict in report.verdicts:
        assert verdict.metrics == pytest.approx(found, rel=1e-9)
        assert verdict.errors is not None


@pytest.mark.slow
def test_what_a_run_that_samples_cannot_have_is_left_out_and_refused(configs: Callable[[str], RunConfig]) -> None:
    config = configs("reference")
    for layout, why in (
        ("pipeline=2", "grpo samples from the whole model"),
        ("context=2", "entropy_coefficient needs"),
    ):
        with pytest.raises(ConfigError, match=why):
            verify(config, layouts=layout)
    report = verify(config)
    notes = " ".join(report.notes)
    assert "left out: pipeline 2" in notes
    assert "answers, rewards and the sampler's log-probs are made up, 4 to each prompt" in notes
    assert report.passed


CASES = {
    "answers_counted_per_rank": ("plain", "replicate=2", "loss (batch 1, update 1)"),
    "log_probs_of_own_rows_only": ("plain", "replicate=2", "log-probs (batch 1, update 1)"),
    "temperature_forgotten": ("plain", "replicate=2", "log-probs (batch 1, update 1)"),
    "reference_is_the_policy": ("reference", "shard=2", "log-probs of the reference (batch 1, update 1)"),
}


@pytest.mark.parametrize(
    "fault", [f if f == "answers_counted_per_rank" else pytest.param(f, marks=pytest.mark.slow) for f in CASES]
)
def test_a_fault_is_caught_and_named(
    fault: str, configs: Callable[[str], RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    way, layout, said = CASES[fault]
    monkeypatch.setenv("LOCKSTEP_TEST_FAULT", fault)
    monkeypatch.syspath_prepend(Path(faulty_worker.__file__).parent)
    *_, split = verify(configs(way), layouts=layout, worker_module="faulty_worker").verdicts
    assert not split.passed
    assert said in split.problem


def test_every_fault_has_a_case() -> None:
    assert CASES.keys() == faulty_worker.POLICY_FAULTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layout"),
    [("replay", "shard=2,expert=2"), ("hybrid", "shard=2"), ("experts in nf4", "shard=2,expert=2")],
)
def test_replayed_experts_hybrids_and_quantised_experts_make_the_plain_step(
    case: str, layout: str, tmp_path: Path
) -> None:
    """tests/mutation puts faults into each of them, which verify names."""
    report = verify(load_config(write_case(case, tmp_path)), layouts=layout)
    assert report.passed, [(v.layout.name, v.problem) for v in report.verdicts]
    assert len(report.verdicts) == 2
