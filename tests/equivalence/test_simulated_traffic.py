"""Bytes of a step three times: by the formula, of simulated ranks, and counted on real ones. All three are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import batches, spawn
from equivalence.plain import STEP, scale_of
from equivalence.simulated import Case, build, simulate_ranks
from equivalence.test_layouts import LAYOUTS as DENSE_LAYOUTS
from equivalence.test_mixtures import LAYOUTS as MIXTURE_LAYOUTS
from equivalence.test_mixtures import REFUSED
from equivalence.test_schedules import LAYOUTS as SCHEDULES

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig
from lockstep.parallel.collectives import find_mismatches
from lockstep.types import LossSpec
from lockstep.verification.assumed_routing import assume_choices
from lockstep.verification.simulation import choose_ranks

Layouts = dict[str, tuple[int, ParallelConfig]]
# Both families, full and LoRA, one micro-batch and several, and what computes in bf16.
DENSE = [
    Case("llama", lora=False, budget=48),
    Case("llama", lora=True, budget=512),
    Case("qwen3", lora=False, budget=96, precision="bf16"),
    Case("qwen3", lora=True, budget=96),
]
SEQUENCE = [Case("llama-sequence", lora=False, budget=48), Case("qwen3-sequence", lora=True, budget=96)]
# One of them has weights of its experts in float32, one has a dense layer, one biases.
MIXTURES = [
    Case("qwen3_moe", lora=True, budget=96),
    Case("mixtral", lora=False, budget=512, precision="bf16"),
    Case("deepseek_v3", lora=False, budget=512),
    Case("gpt_oss", lora=False, budget=512),
]
DEEP_MIXTURES = [Case("mixtral*4", lora=False, budget=96), Case("qwen3_moe*4", lora=True, budget=96)]

DENSE_AND_MORE: Layouts = {name: layout for name, layout in DENSE_LAYOUTS.items() if layout[0] > 1} | {
    "hybrid-grad-op": (4, ParallelConfig(replicate=2, shard=2, keep_parameters=True)),
    "hybrid-tensor-pipeline": (16, ParallelConfig(replicate=2, shard=2, tensor=2, pipeline=2)),
    "context-2-pipeline-2": (4, ParallelConfig(context=2, pipeline=2)),
}


def dense_cases(parallel: ParallelConfig) -> list[Case]:
    return DENSE + (SEQUENCE if parallel.tensor > 1 else [])


def mixture_cases(layout: str) -> list[Case]:
    return [case for case in MIXTURES if case.family not in REFUSED.get(layout, ())]


EVERY = [
    *((f"dense {name}", *layout, dense_cases(layout[1])) for name, layout in DENSE_AND_MORE.items()),
    *((f"mixtures {name}", *layout, mixture_cases(name)) for name, layout in MIXTURE_LAYOUTS.items()),
    *((f"schedule {name}", *layout, DEEP_MIXTURES) for name, layout in SCHEDULES.items()),
]


def check(case: Case, num_ranks: int, parallel: ParallelConfig, ranks: tuple[int, ...] | None = None) -> list[Any]:
    found = simulate_ranks(case, num_ranks, parallel, ranks=ranks)
    assert find_mismatches([said.record for said in found]) == []
    for said in found:
        flows = said.expected.keys() | said.sent.keys()
        wrong = {f: (said.expected.get(f), said.sent.get(f)) for f in flows if not _same(said.expected, said.sent, f)}
        assert not wrong, f"(formula, simulated) of rank {said.record.rank} of {case}: {wrong}"
    return found


def _same(expected: dict[Any, float], sent: dict[Any, float], flow: Any) -> bool:
    return expected.get(flow, 0.0) == pytest.approx(sent.get(flow, 0.0), rel=1e-12)


def test_the_formula_is_what_a_simulated_rank_sends() -> None:
    check(Case("qwen3", lora=False, budget=512), *DENSE_AND_MORE["shard-2-tensor-2"], ranks=(0, 3))


def test_parts_that_a_checkpoint_would_misplace_are_refused() -> None:
    """49 of 97 rows over three ranks: FSDP2 holds 15 on the last, where DTensor (torch 2.13) counts 16."""
    with pytest.raises(ValueError, match=r"the 97 rows of .* cannot be divided over tensor ranks and then shard ranks"):
        simulate_ranks(Case("qwen3", lora=False, budget=512), 6, ParallelConfig(shard=3, tensor=2), ranks=(0, 4))


def count_cases(cases: list[Case], parallel: ParallelConfig, out: Path) -> None:
    """The body of each real process: sent bytes and calls of the second step, by case and rank. Routers choose as they
    are assumed to."""
    torch.set_num_threads(1)
    group = join_group("cpu", parallel, timeout_s=120)
    found: dict[Case, Any] = {}
    for case in cases:
        model, budget, precision = build(case), case.budget, case.precision
        backend = TorchBackend(model, micro_batch_tokens=budget, precision=precision, group=group, parallel=parallel)
        assume_choices(model)  # not before: a backend checks that tokens are computed alike wherever they are
        batch = batches()[0]
        for _ in range(2):
            backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
            counts = backend.traffic.current
            backend.optim_step(STEP)
        found[case] = dict(counts.sent_bytes), dict(counts.num_calls)
    everybody = group.gather_objects(found)
    if group.rank == 0:
        torch.save(everybody, out)
    group.leave()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "cases"),
    [pytest.param(*e[1:], id=e[0]) for e in EVERY],
)
def test_formula_simulation_and_real_ranks_agree_to_the_byte(
    num_ranks: int, parallel: ParallelConfig, cases: list[Case], tmp_path: Path
) -> None:
    if num_ranks > 4:  # of so many, some stand for all, and none are real
        for case in cases:
            check(case, num_ranks, parallel, tuple(choose_ranks(parallel.degrees(num_ranks))))
        return
    spawn(num_ranks, count_cases, cases, parallel, tmp_path / "found.pt")
    everybody = torch.load(tmp_path / "found.pt", weights_only=False)
    for case in cases:
        for rank, said in enumerate(check(case, num_ranks, parallel)):
            sent, calls = everybody[rank][case]
            assert {flow: count for flow, count in sent.items() if count} == said.sent, f"rank {rank} of {case}"
            assert calls == said.calls, f"rank {rank} of {case}"


@pytest.mark.slow
@pytest.mark.parametrize("imbalance", [1.3, 2.0])
def test_experts_that_many_tokens_choose_get_more_rows(imbalance: float) -> None:
    case, layout = Case("qwen3_moe", lora=False, budget=96), MIXTURE_LAYOUTS["expert-2-tensor-2"]
    even = check(case, *layout)
    uneven = check(Case("qwen3_moe", lora=False, budget=96, imbalance=imbalance), *layout)
    first, last = (sum(said.sent["expert", "all_to_all"] for said in found) for found in (even, uneven))
    assert last == pytest.approx(first, rel=0.05)  # together as many rows as before
    assert uneven[0].sent["expert", "all_to_all"] > 1.05 * uneven[3].sent["expert", "all_to_all"]
