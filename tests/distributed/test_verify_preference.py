"""`lockstep verify` of preference runs: every way to keep a reference, on real ranks, sound and with faults put in."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import faulty_worker
import pytest
import tiny

from lockstep.config import RunConfig, load_config
from lockstep.verification import reduced, verify
from lockstep.verification.checking import Report

ALL = "replicate=2; shard=2; tensor=2; context=2; pipeline=2; pipeline=2,schedule=interleaved"
DPO: dict[str, Any] = {"kind": "dpo", "beta": 0.3}


class Way(NamedTuple):
    """An algorithm, whether with LoRA, and whether rows are labelled instead of paired."""

    algorithm: dict[str, Any]
    lora: bool = False
    labelled: bool = False


WAYS = {
    "adapter_off": Way({**DPO, "loss": {"sigmoid": 1.0, "sft": 0.5}}, lora=True),
    "copy": Way({**DPO, "reference_sync_steps": 3, "reference_mix": 0.4, "wpo": True, "ld_alpha": 0.5}),
    "copy_of_adapters": Way({**DPO, "reference_sync_steps": 1, "loss": "ipo"}, lora=True),
    "precomputed": Way({**DPO, "reference": "precomputed", "loss": ["sigmoid", "aot"]}),
    "precomputed_below_adapters": Way({**DPO, "reference": "precomputed", "divergence": "js"}, lora=True),
    "other_model": Way({**DPO, "loss": "bco_pair", "bco_shift": True}),
    "none": Way({"kind": "simpo"}),
    "kto": Way({"kind": "kto", "reference": "copy"}, labelled=True),
    "kto_from_pairs": Way({"kind": "kto", "undesirable_weight": 2.0}, lora=True),
    "apo": Way({"kind": "kto", "loss": "apo_zero_unpaired", "reference": "precomputed"}, labelled=True),
}
QUICK = {"copy": "shard=2", "kto": "replicate=2"}


class Case(NamedTuple):
    """A fault, the way and layout that show it, and a part of what must be said about that layout."""

    fault: str
    way: str
    layout: str
    said: str
    alone_too: bool = False


CASES = (
    Case("reference_has_adapters", "adapter_off", "shard=2", "log-probs of the reference (batch 1)", alone_too=True),
    Case("sides_swapped_on_one_rank", "adapter_off", "replicate=2", "chosen_reward (batch 1)"),
    Case("pairs_counted_per_rank", "copy", "replicate=2", "loss (batch 1)"),
    Case("statistic_per_micro_batch", "precomputed", "replicate=2", "loss_aot (batch 1)", alone_too=True),
    Case("statistic_per_micro_batch", "other_model", "shard=2", "loss (batch 1)", alone_too=True),
    Case("cut_pairs_taken_for_whole", "copy", "shard=2", "a pair is two completions", alone_too=True),
    Case("answers_see_each_other", "adapter_off", "pipeline=2", "log-probs (batch 1)", alone_too=True),
    Case("reference_follows_on_one_rank_only", "copy", "shard=2", "log-probs of the reference (batch 2)"),
    Case("every_rank_its_own_kl", "kto", "replicate=2", "kl (batch 1)"),
)
QUICK_FAULTS = ("sides_swapped_on_one_rank", "pairs_counted_per_rank")


def write_rows(path: Path, *, labelled: bool) -> None:
    """Answers of one to eight words: pairs that fit into a micro-batch beside pairs that do not."""
    draw = random.Random(0)
    lines = []
    for i in range(24):
        words = [" ".join(draw.choices(["red", "one", "cat", "sun"], k=draw.randint(1, 8))) for _ in range(3)]
        row: dict[str, Any] = {"prompt": words[0], "chosen": f"{words[1]} yes", "rejected": f"{words[2]} no"}
        if labelled:
            row = {"prompt": words[0], "completion": row["chosen"], "label": i % 3 > 0}
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunConfig]:
    models = tmp_path_factory.mktemp("models")
    model = tiny.write_model(models / "model", num_hidden_layers=4)
    other = tiny.write_model(models / "other", num_hidden_layers=5, hidden_size=64, intermediate_size=96)

    def make(name: str) -> RunConfig:
        way = WAYS[name]
        folder = tmp_path_factory.mktemp(name)
        write_rows(folder / "train.jsonl", labelled=way.labelled)
        algorithm = {**way.algorithm, "reference_model": str(other)} if name == "other_model" else way.algorithm
        lora = {"lora": {"rank": 3}} if way.lora else {}
        return load_config(tiny.write_config(folder, model, algorithm=algorithm, batch={"samples": 7}, **lora))

    return make


@pytest.mark.parametrize("way", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in WAYS])
def test_every_layout_makes_the_step_of_the_plain_loop(way: str, configs: Callable[[str], RunConfig]) -> None:
    report = verify(configs(way), layouts=QUICK.get(way, ALL))
    assert report.passed, [(v.layout.name, v.problem) for v in report.verdicts]
    assert report.tolerance == 1e-10
    check_metrics(report, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", QUICK)
def test_the_quick_ways_pass_on_every_other_layout(way: str, configs: Callable[[str], RunConfig]) -> None:
    report = verify(configs(way), layouts=ALL)
    assert report.passed, [(v.layout.name, v.problem) for v in report.verdicts]


def check_metrics(report: Report, way: str) -> None:
    """What is compared is not trivially the same: rewards are there, and not zero."""
    labelled = WAYS[way].algorithm["kind"] == "kto"
    assert report.metrics["chosen_reward"] != 0
    for verdict in report.verdicts:
        assert verdict.errors is not None
        assert verdict.metrics == pytest.approx(report.metrics, rel=1e-9)
        assert verdict.metrics.keys() == report.metrics.keys()
    if labelled:
        assert report.metrics["num_chosen"] + report.metrics["num_rejected"] == 7
        assert (report.metrics["kl"] > 0) == (way != "apo")
    else:
        assert abs(report.metrics["margin"]) > 1e-3
        if way == "precomputed":  # the order of pairs is not the reference's: quantiles say more than pairs
            assert report.metrics["loss_aot"] != pytest.approx(report.metrics["loss_sigmoid"])
        assert 0 <= report.metrics["accuracy"] <= 7


@pytest.mark.parametrize(
    "case",
    [c if c.fault in QUICK_FAULTS else pytest.param(c, marks=pytest.mark.slow) for c in CASES],
    ids=lambda c: f"{c.fault}-{c.way}",
)
def test_a_fault_is_caught_and_named(
    case: Case, configs: Callable[[str], RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, split = verify_with(case.fault, configs(case.way), case.layout, monkeypatch).verdicts
    assert alone.passed != case.alone_too, alone.problem
    assert not split.passed
    assert case.said in split.problem


def test_every_fault_has_a_case() -> None:
    assert {case.fault for case in CASES} == faulty_worker.PREFERENCE_FAULTS.keys()


@pytest.mark.slow
def test_a_model_that_rounds_is_held_to_less(
    configs: Callable[[str], RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that two answers share rounds once where two prompts round twice. That is no fault."""
    monkeypatch.setattr(reduced, "keep_float64", lambda model: None)
    report = verify_with("norms_round", configs("precomputed"), "replicate=2", monkeypatch)
    assert report.passed, [(v.layout.name, v.problem) for v in report.verdicts]
    assert report.tolerance == 1e-6
    assert any("computes a part in float32" in note for note in report.notes)


def verify_with(fault: str, config: RunConfig, layout: str, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setenv("LOCKSTEP_TEST_FAULT", fault)
    monkeypatch.syspath_prepend(Path(faulty_worker.__file__).parent)
    return verify(config, layouts=layout, worker_module="faulty_worker")
