"""Verify catches what it is there for: real faults, put into the ranks by tests/faulty_worker.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import faulty_worker
import pytest
import tiny

from lockstep.config import RunConfig, load_config
from lockstep.verification import verify
from lockstep.verification.checking import Report


class Case(NamedTuple):
    """A fault, a layout that shows it, and a part of what must be said about that layout."""

    fault: str
    layout: str
    said: str
    lora: bool = False


CASES = (
    Case("wrong_divide_factor", "shard=2", "gradient of model.embed_tokens.weight (batch 1)"),
    Case("clipped_per_rank", "shard=2", "weights of model.embed_tokens.weight after the step (batch 1)"),
    Case("cursor_off_by_one", "replicate=2", "cursor after batch 1: 11 instead of 10"),
    Case("missing_tensor_sum_for_lora", "tensor=2", "lora_A.default.weight (batch 1)", lora=True),
    Case("mask_leaks_across_ranks", "context=2", "log-probs (batch 1)"),
    Case("micro_batch_dropped", "replicate=2", "log-probs (batch 1)"),
    Case("tied_weight_not_reduced", "pipeline=2", "gradient of model.embed_tokens.weight (batch 1)"),
    Case("stages_swapped", "pipeline=2,schedule=interleaved", "log-probs (batch 1)"),
    Case("every_rank_the_same_rows", "replicate=2", "log-probs (batch 1)"),
    Case("gradients_not_sent", "replicate=2", "gradient of model.embed_tokens.weight (batch 1)"),
    Case("head_not_reduced", "tensor=2", "changes its logits after the output head"),
    Case("norms_decay", "shard=2", "weights of model.layers.0.input_layernorm.weight after the step (batch 1)"),
    Case("one_replica_strays", "replicate=2", "ranks 0 and 1 disagree about the weights of model.embed_tokens.weight"),
    Case("buffers_not_sent", "replicate=2", "log-probs (batch 1)"),
    Case("moments_lost_at_a_resume", "replicate=2", "weights of model.embed_tokens.weight after the step (batch 2)"),
    Case("clipping_lengthens", "replicate=2", "weights of model.embed_tokens.weight after the step (batch 2)"),
    Case("same_dropout_everywhere", "replicate=2", "dropout: ranks 0 and 1 have other tokens or layers", lora=True),
    Case("evaluation_with_dropout", "replicate=2", "changes its logits after the output head", lora=True),
    Case("rank_refuses", "replicate=2", "rank 1: this rank will not"),
    Case("rank_is_killed", "replicate=2", "rank 1 was ended by signal 9 (SIGKILL)"),
)
QUICK = ("wrong_divide_factor", "clipped_per_rank", "cursor_off_by_one", "same_dropout_everywhere")
# Faults that a single rank has as well.
EVERYWHERE = (
    "cursor_off_by_one",
    "micro_batch_dropped",
    "norms_decay",
    "moments_lost_at_a_resume",
    "clipping_lengthens",
    "evaluation_with_dropout",
)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, RunConfig]:
    """By whether it has LoRA. Tied, so that the tied gradient counts."""
    model = tiny.write_model(tmp_path_factory.mktemp("models") / "tied", num_hidden_layers=4, tie_word_embeddings=True)
    found = {}
    for lora in (False, True):
        settings: dict[str, Any] = {"batch": {"samples": 10}, "optim": {"weight_decay": 0.1}}
        if lora:
            settings["lora"] = {"rank": faulty_worker.LORA_RANK, "dropout": 0.3}
        found[lora] = load_config(tiny.write_config(tmp_path_factory.mktemp("config"), model, **settings))
    return found


def verify_with(config: RunConfig, case: Case, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setenv("LOCKSTEP_TEST_FAULT", case.fault)
    monkeypatch.syspath_prepend(Path(faulty_worker.__file__).parent)
    return verify(config, layouts=case.layout, worker_module="faulty_worker")


@pytest.mark.parametrize(
    "case", [c if c.fault in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES], ids=lambda c: c.fault
)
def test_a_fault_is_caught_and_named(
    case: Case, configs: dict[bool, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = verify_with(configs[case.lora], case, monkeypatch)
    alone, split = report.verdicts
    assert alone.passed == (case.fault not in EVERYWHERE), alone.problem
    assert not report.passed
    assert not split.passed
    assert case.said in split.problem


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_without_a_fault_the_same_layouts_pass(lora: bool, configs: dict[bool, RunConfig]) -> None:
    layouts = "; ".join(dict.fromkeys(case.layout for case in CASES))
    report = verify(configs[lora], layouts=layouts)
    assert report.passed, [(v.layout.name, v.problem) for v in report.verdicts]
    assert len(report.verdicts) == 1 + len({case.layout for case in CASES})
    assert report.tolerance == 1e-10


def test_every_fault_has_a_case() -> None:
    assert {case.fault for case in CASES} == faulty_worker.FAULTS.keys()
