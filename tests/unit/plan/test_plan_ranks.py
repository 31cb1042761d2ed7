"""Plans of ranks beside ranks that are simulated: parameters and the sizes of what is sent exactly, peaks nearly."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from equivalence.mixtures import FAMILIES
from equivalence.plain import make_model
from equivalence.simulated import Case, build
from equivalence.test_layouts import LAYOUTS as DENSE_LAYOUTS
from equivalence.test_mixtures import LAYOUTS as MIXTURE_LAYOUTS

from lockstep.config import ConfigError, Degrees, LoraConfig, ParallelConfig, RunConfig, resolve_config
from lockstep.model.lora import add_lora
from lockstep.parallel.expected_traffic import Sizes, Unit
from lockstep.plan.description import ModelDescription
from lockstep.plan.estimate import check_layout, with_divided_experts
from lockstep.plan.from_config import TextLengths, measured_rows
from lockstep.plan.hardware import parse_cluster
from lockstep.plan.memory import persistent_bytes, plan_memory
from lockstep.plan.search import PlanTask, legal_layouts, search
from lockstep.plan.trace import describe_model
from lockstep.plan.traffic import rank_sizes
from lockstep.plan.work import Options, RankLayout, StepRows
from lockstep.verification.fake_rank import fake_rank
from lockstep.verification.simulation import SimulatedBackend, make_rows, simulate

LORA = 8  # a rank of whole 16 bytes, which torch's grouped products want


def describe(family: str, lora: bool, folder: Path) -> ModelDescription:
    build(Case(family, lora=False, budget=96)).config.save_pretrained(folder)
    tree: dict[str, Any] = {"model": {"path": str(folder)}, "data": {"train": ["rows"]}}
    if lora:
        tree["lora"] = {"rank": LORA}
    return describe_model(resolve_config(tree), "bf16", compiled=False)


def build_adapted(family: str, lora: bool) -> Any:
    model = build(Case(family, lora=False, budget=96)) if family in FAMILIES else make_model(family, lora=False)
    return add_lora(model, LoraConfig(rank=LORA)) if lora else model


def plain(sizes: Sizes) -> dict[str, Any]:
    """What least_traffic reads."""
    found = {f.name: getattr(sizes, f.name) for f in fields(sizes) if f.name not in ("norm_axes", "tied_bytes")}

    def unit(part: Unit) -> tuple[float, int]:
        return part.parameters, part.trained

    return {
        **found,
        "layers": [unit(u) for u in sizes.layers],
        "rest": unit(sizes.rest),
        "experts": unit(sizes.experts),
    }


def check_layout_of(family: str, lora: bool, num_ranks: int, parallel: ParallelConfig, folder: Path) -> None:
    """Every rank as it is built for real, on a device without contents."""
    model, degrees = describe(family, lora, folder), parallel.degrees(num_ranks)
    layout = RankLayout(degrees, schedule=parallel.schedule, keep_parameters=parallel.keep_parameters)
    heard: list[Any] = []
    for rank in range(num_ranks):
        with fake_rank(rank, degrees, heard) as fake:
            backend = SimulatedBackend(
                build_adapted(family, lora), fake, micro_batch_tokens=96, precision="bf16", parallel=parallel
            )
            at = {axis: fake.group.place(axis) for axis in ("pipeline", "tensor", "shard", "context")}
            measured = backend.sizes
            held = sum(_local_bytes(p) for p in {id(p): p for p in backend.policy.parameters()}.values())
        place = {
            "stage": at["pipeline"],
            "tensor": at["tensor"],
            "place": at["shard"] * degrees.context + at["context"],
        }
        assert persistent_bytes(model, layout, **place)["weights"] == held, place
        assert measured is not None
        assert plain(rank_sizes(model, layout, at["pipeline"], at["tensor"])) == plain(measured), place


def _local_bytes(parameter: Any) -> int:
    own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(own.numel() * own.element_size())


def test_a_plan_knows_what_ranks_with_a_part_of_the_experts_hold_and_send(tmp_path: Path) -> None:
    check_layout_of("qwen3_moe", True, *MIXTURE_LAYOUTS["expert-2"], tmp_path)


EVERY = [
    *(("mixtral", False, name, *layout) for name, layout in MIXTURE_LAYOUTS.items()),
    *(("qwen3_moe", True, name, *layout) for name, layout in MIXTURE_LAYOUTS.items()),
    *(("deepseek_v3", False, name, *MIXTURE_LAYOUTS[name]) for name in ("context-2", "expert-2-context-2")),
    *(("qwen3", False, name, *layout) for name, layout in DENSE_LAYOUTS.items() if layout[0] > 1),
    *(("llama", True, name, *layout) for name, layout in DENSE_LAYOUTS.items() if layout[0] > 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lora", "num_ranks", "parallel"), [(*e[:2], *e[3:]) for e in EVERY], ids=str)
def test_a_plan_knows_what_every_rank_holds_and_sends(
    family: str, lora: bool, num_ranks: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    check_layout_of(family, lora, num_ranks, parallel, tmp_path)


# --- the peak of a step -----------------------------------------------------------------------------------------------

DENSE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 256,
    "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {
    **DENSE, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 128,
    "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32,
}  # fmt: skip
BOUNDED = {
    **DENSE, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0,
    "head_dim": 32, "sliding_window": 64, "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
SINKS = {
    **DENSE, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 8,
    "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 128, "intermediate_size": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
FULL = {"activation_checkpointing": "full"}
PEAKS: dict[str, tuple[dict[str, Any], int, dict[str, Any], dict[str, Any], float]] = {
    # shape, ranks, parallel, model, within which share
    "one rank": (DENSE, 1, {}, {}, 0.03),
    "recomputed": (DENSE, 1, {}, FULL, 0.08),
    "shard": (DENSE, 4, {"shard": 4}, {}, 0.10),
    "tensor": (DENSE, 2, {"tensor": 2}, {}, 0.03),
    "context": (DENSE, 2, {"context": 2}, {}, 0.05),
    "pipeline": (DENSE, 2, {"pipeline": 2}, {}, 0.10),
    "mixture": (MIXTURE, 1, {}, {}, 0.04),
    "mixture, shard": (MIXTURE, 2, {"shard": 2}, {}, 0.11),
    "mixture, tensor": (MIXTURE, 2, {"shard": 1, "tensor": 2}, {}, 0.04),
    "experts": (MIXTURE, 2, {"shard": 2, "expert": 2}, {}, 0.07),
    "experts, all apart": (MIXTURE, 4, {"shard": 4, "expert": 4}, {}, 0.05),
    "experts of replicas": (MIXTURE, 2, {"replicate": 2, "shard": 1, "expert": 2}, {}, 0.07),
    "bounded scores": (BOUNDED, 1, {}, {}, 0.09),
    "bounded scores, recomputed": (BOUNDED, 1, {}, FULL, 0.05),
    "sinks": (SINKS, 1, {}, {}, 0.12),
    "sinks, experts": (SINKS, 2, {"shard": 2, "expert": 2}, {}, 0.15),
    "experts, recomputed": (MIXTURE, 2, {"shard": 2, "expert": 2}, FULL, 0.18),
}


def config_of(shape: dict[str, Any], folder: Path, num_ranks: int, parallel: Any, model: Any) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(shape))
    return resolve_config(
        {
            "model": {"path": str(folder), "precision": "bf16", "compile": False, **model},
            "data": {"train": ["rows"], "max_length": 512},
            "batch": {"samples": 16, "micro_batch_tokens": 2048},
            "parallel": parallel,
            "launch": {"device": "cuda", "procs": num_ranks},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", PEAKS)
def test_the_peak_of_a_step_is_near_that_of_every_allocation_of_the_real_code(case: str, tmp_path: Path) -> None:
    """On tensors without contents, with attention as a CPU computes it: the plan's is a GPU's, which keeps less."""
    shape, num_ranks, parallel, settings, share = PEAKS[case]
    config = config_of(shape, tmp_path, num_ranks, parallel, settings)
    simulated = max(simulate(config, num_ranks, num_processes=0).ranks, key=lambda r: sum(r.peak_bytes.values()))
    lengths = [TextLengths(len(r.prompt), tuple(len(c.tokens) for c in r.completions), r.num_supervised)
               for r in make_rows(config)]  # fmt: skip
    layout = RankLayout(config.parallel.degrees(num_ranks))
    model = describe_model(config, "bf16", compiled=False)
    if layout.degrees.expert * layout.degrees.tensor > 1:
        model = with_divided_experts(model)
    work = measured_rows(config, [lengths], 1, 1).work(layout, 2048)
    stages = range(layout.degrees.pipeline)
    ranks = [plan_memory(model, layout, work, Options(device="cpu"), stage=stage) for stage in stages]
    planned, peak = max(ranks, key=lambda rank: rank.allocated), simulated.peak_bytes
    assert planned.parts["weights"] == pytest.approx(peak["weights"], abs=256)  # and frequencies of positions
    assert planned.parts["optimizer"] == pytest.approx(peak["optimizer"], abs=1024)  # and counts of steps
    assert planned.allocated == pytest.approx(sum(peak.values()), rel=share)


def test_divided_experts_in_a_plan(tmp_path: Path) -> None:
    model = describe_model(config_of(MIXTURE, tmp_path, 1, {}, {}), "bf16", compiled=False)
    task = PlanTask(model, StepRows(64 * 512, 512, 512.0), Options(), parse_cluster("h100:4"), 4096)
    plain_plan, divided = (task.plan(RankLayout(Degrees(shard=4, expert=n))) for n in (1, 4))
    assert divided.time.traffic["shard"] < plain_plan.time.traffic["shard"]  # experts are not gathered
    assert divided.time.traffic["expert"] > 0
    assert divided.time.parts["communication: expert"] > 0
    assert str(divided.layout) == "shard 4, experts over 4"
    assert divided.worst.parts["weights"] == plain_plan.worst.parts["weights"]
    assert divided.worst.parts["communication"] < plain_plan.worst.parts["communication"]
    for degrees, error in (
        (Degrees(shard=4, expert=3), "parallel.expert 3 x parallel.tensor 1 does not divide the model's 8 experts"),
        (Degrees(tensor=3), "parallel.expert 1 x parallel.tensor 3 does not divide"),
    ):
        with pytest.raises(ConfigError, match=error):
            check_layout(model, RankLayout(degrees), parse_cluster(f"h100:{degrees.num_ranks}"))
    found = {plan.layout.degrees for plan in search(task)}
    assert {Degrees(shard=4, expert=n) for n in (1, 2, 4)} <= found
    assert {Degrees(replicate=4, expert=2), Degrees(shard=2, tensor=2, expert=2)} <= found
    for degrees in found:  # as a configuration has it
        assert ParallelConfig(**degrees._asdict()).degrees(4) == degrees


def test_a_model_without_experts_has_none_to_divide(tmp_path: Path) -> None:
    model = describe_model(config_of(DENSE, tmp_path, 1, {}, {}), "bf16", compiled=False)
    with pytest.raises(ConfigError, match=r"has no experts in stacked matrices .*: set parallel.expert to 1"):
        check_layout(model, RankLayout(Degrees(shard=2, expert=2)), parse_cluster("h100:2"))
    task = PlanTask(model, StepRows(64 * 512, 512, 512.0), Options(), parse_cluster("h100:2"), 4096)
    assert {layout.degrees.expert for layout in legal_layouts(task)} == {1}
