"""What a plan takes from the configuration and what it advises: true when followed, and only what can be followed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import ConfigError, Degrees, RunConfig, resolve_config
from lockstep.plan.choose import plan_layout
from lockstep.plan.estimate import RunPlan
from lockstep.plan.from_config import TextLengths, assumed_rows, layout_of, measured_rows, task_of
from lockstep.plan.hardware import Calibrations, GpuCluster, parse_cluster, read_hardware
from lockstep.plan.memory import host_bytes
from lockstep.plan.search import Advice, PlanTask, advise, best_budget, last_resort, search
from lockstep.plan.work import RankLayout

ONE = RankLayout(Degrees())
GRPO = {"kind": "grpo", "reward": "length", "max_tokens": 128}


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape(tmp_path_factory.mktemp("advice"))


def write_shape(place: Path, **changes: int) -> Path:
    shape = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 64,
        "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return place


def config_of(folder: Path, *overrides: str, **sections: Any) -> RunConfig:
    model = {"path": str(folder), "compile": False, **sections.pop("model", {})}
    tree = {"model": model, "data": {"train": ["rows.jsonl"], "max_length": 512}, "batch": {"samples": 64}, **sections}
    return resolve_config(tree, overrides=overrides)


def task_for(config: RunConfig, cluster: GpuCluster) -> PlanTask:
    return task_of(config, cluster, assumed_rows(config))


def plan_for(config: RunConfig, cluster: GpuCluster) -> RunPlan:
    return task_for(config, cluster).plan(layout_of(config, cluster))


def shrunk(cluster: GpuCluster, gib: float) -> GpuCluster:
    """With so much memory for tensors: 0.6 is what drivers take."""
    return replace(cluster, device=replace(cluster.device, memory_gib=0.6 + gib))


# --- the reference ----------------------------------------------------------------------------------------------------


def test_a_preference_run_is_planned_with_the_reference_that_it_takes(folder: Path) -> None:
    """Every row is seen: log-probs are computed once, before the first step, and there is no second copy."""
    config, cluster = config_of(folder, algorithm={"kind": "dpo"}), parse_cluster("h100")
    pairs = [[TextLengths(100, (50, 150), 200)] * 4]
    whole = task_of(config, cluster, measured_rows(config, pairs, 7, 7)).plan(ONE)
    assert whole.rows.reference == "precomputed"
    assert "frozen copies" not in whole.worst.parts
    assert whole.run_s == pytest.approx(7 * (whole.time.total + whole.time.forward_s))
    part = task_of(config, cluster, measured_rows(config, pairs, 3, 7)).plan(ONE)
    assert part.rows.reference == "copy"
    assert part.worst.parts["frozen copies"] == 4 * part.model.parameters
    assert part.time.total > whole.time.total
    other = config_of(folder, algorithm={"kind": "dpo", "reference_model": "other"})
    assert measured_rows(other, pairs, 3, 7).reference == "precomputed"


def test_rows_that_are_not_known_leave_the_reference_open(folder: Path) -> None:
    sure = assumed_rows(config_of(folder, algorithm={"kind": "dpo"}))
    assert (sure.reference, sure.reference_is_assumed) == ("precomputed", False)
    counted = assumed_rows(config_of(folder, algorithm={"kind": "dpo"}, optim={"max_steps": 3}))
    assert (counted.reference, counted.reference_is_assumed) == ("copy", True)
    assert "copy as the reference" in counted.assumed
    asked = assumed_rows(config_of(folder, algorithm={"kind": "dpo", "reference": "copy"}, optim={"max_steps": 3}))
    assert (asked.reference, asked.reference_is_assumed) == ("copy", False)
    labels = assumed_rows(config_of(folder, algorithm={"kind": "kto"}))  # compares answers behind other prompts
    assert (labels.reference, labels.reference_passes, labels.extra_forwards) == ("copy", 2, 1)


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_ranks_that_hold_a_model_together_all_decode_what_it_samples(folder: Path) -> None:
    config, cluster = config_of(folder, algorithm=GRPO, batch={"samples": 8}), parse_cluster("h100:4")
    task = task_for(config, cluster)
    apart, together = (task.plan(RankLayout(Degrees(*degrees))) for degrees in ((4, 1), (1, 4)))
    samplings = [plan.work.sampling for plan in (apart, together)]
    assert [(s.sequences, s.shards) for s in samplings if s is not None] == [(16, 1), (64, 4)]
    cache = {name: plan.worst.parts["KV cache and graphs"] for name, plan in (("a", apart), ("t", together))}
    assert cache["t"] == pytest.approx(4 * (cache["a"] - 0.07 * 2**30))  # and no graphs
    assert together.time.parts["sampling"] > 4 * apart.time.parts["sampling"]
    assert together.errors.time > apart.errors.time
    kept = task.plan(RankLayout(Degrees(1, 4), keep_parameters=True))
    assert kept.time.parts["sampling"] <= together.time.parts["sampling"]


def test_a_cache_takes_half_of_what_is_free_at_most(folder: Path) -> None:
    config = config_of(folder, algorithm={**GRPO, "group_size": 32}, batch={"samples": 8})
    cluster = parse_cluster("l4")
    whole = plan_for(config, cluster)
    needed = whole.worst.parts["KV cache and graphs"] - 0.07 * 2**30
    assert needed == 256 * 256 * 4 * 2 * 2 * 16 * 2  # sequences, tokens, layers, keys and values, heads, size, bytes
    tight = plan_for(config, shrunk(cluster, 0.12))
    assert tight.worst.parts["KV cache and graphs"] - 0.07 * 2**30 < needed
    assert tight.time.parts["sampling"] > whole.time.parts["sampling"]  # in several rounds


def test_a_step_of_several_updates_takes_longer(folder: Path) -> None:
    cluster = parse_cluster("h100")
    once, often = (
        plan_for(config_of(folder, algorithm={**GRPO, "num_updates": count}, batch={"samples": 8}), cluster)
        for count in (1, 4)
    )
    assert often.time.parts["optimizer"] == pytest.approx(4 * once.time.parts["optimizer"])
    assert often.time.parts["products"] == pytest.approx(once.time.parts["products"] * (4 + 1 / 3), rel=0.05)
    assert often.worst.reserved == once.worst.reserved


def test_engines_on_cpus_have_no_gpu(folder: Path) -> None:
    def engines(device: str) -> RunPlan:
        rollouts = {"engines": 2, "device": device}
        config = config_of(folder, algorithm=GRPO, batch={"samples": 8}, rollouts=rollouts)
        return replace(plan_for(config, parse_cluster("h100")), price_per_hour=2.0)

    apart, hosted = engines("auto"), engines("cpu")
    assert (len(apart.memory), apart.num_gpus) == (2, 3)
    assert (len(hosted.memory), hosted.num_gpus) == (1, 1)
    assert "sample on CPUs" in hosted.rows.assumed


# --- search and advice ------------------------------------------------------------------------------------------------


def test_stages_are_given_smaller_micro_batches(tmp_path: Path) -> None:
    """They wait less for small ones: the largest that fits is not the fastest."""
    wide = write_shape(tmp_path, hidden_size=2048, intermediate_size=8192)
    task = task_for(config_of(wide), parse_cluster("h100:2"))
    layout = RankLayout(Degrees(pipeline=2))
    assert best_budget(task, layout).time.total < 0.8 * task.plan(layout, 32768).time.total
    everything = {str(plan.layout): plan.time.total for plan in search(task, exhaustive=True)}
    for plan in search(task):
        assert plan.time.total <= everything[str(plan.layout)] * 1.02


CASES = [
    ("l4", 0.6, ()),
    ("l4", 0.6, ("lora.rank=4",)),
    ("l4", 0.3, ("algorithm.kind=dpo",)),
    ("l4:2", 0.5, ("parallel.replicate=2", "parallel.shard=1")),
    ("l4:2", 0.5, ("parallel.pipeline=2", "parallel.schedule=gpipe")),
    ("l4", 0.9, ("model.precision=fp32",)),
]


@pytest.mark.parametrize(("on", "share", "overrides"), CASES)
def test_advice_is_true_when_it_is_followed(folder: Path, on: str, share: float, overrides: tuple[str, ...]) -> None:
    cluster = parse_cluster(on)
    base = ("batch.micro_batch_tokens=16384", f"launch.procs={cluster.num_ranks}", *overrides)
    cluster = shrunk(cluster, share * plan_for(config_of(folder, *base), cluster).worst.allocated / 2**30)
    task = task_for(config_of(folder, *base), cluster)
    advice = advise(task, task.plan(layout_of(config_of(folder, *base), cluster)))
    assert advice
    for one in advice:
        followed = plan_for(config_of(folder, *base, *one.change.split()), cluster)
        assert (followed.fits == "no") == (one.plan.fits == "no")
        assert followed.worst.reserved == pytest.approx(one.plan.worst.reserved, rel=0.02)
        assert followed.time.total == pytest.approx(one.plan.time.total, rel=0.1)


def test_only_what_can_be_and_helps_is_advised(folder: Path) -> None:
    here = replace(parse_cluster("l4"), device=replace(parse_cluster("l4").device, name="cpu", memory_gib=0.001))
    task = task_for(config_of(folder), here)
    assert task.options.device == "cpu"
    assert not any("offload" in a.change for a in advise(task, task.plan(ONE)))  # it is the host's own memory
    refusing = replace(task_for(config_of(folder), shrunk(parse_cluster("l4"), 0.01)), check=refuse)
    assert advise(refusing, refusing.plan(ONE)) == []
    assert "No other setting makes it fit: train an adapter" in last_resort(refusing, refusing.plan(ONE))
    larger = replace(task_for(config_of(folder), parse_cluster("h100")), budget=16384)
    found: list[Advice] = advise(larger, larger.plan(ONE))
    assert len({(a.plan.time.total, a.plan.worst.reserved) for a in found}) == len(found)


def refuse(change: str) -> None:
    raise ConfigError(change)


def test_where_one_change_is_not_enough_several_are_named(folder: Path) -> None:
    config = config_of(folder, "batch.micro_batch_tokens=16384")
    task = task_for(config, parse_cluster("l4"))
    least = task.plan(ONE, 512, recompute="full").worst.reserved / 2**30
    task = replace(task, cluster=shrunk(task.cluster, least * 1.06))
    (first, *_) = advise(task, task.plan(ONE))
    assert first.change == "model.activation_checkpointing=full batch.micro_batch_tokens=512"
    assert first.plan.fits == "yes"
    assert last_resort(task, task.plan(ONE)) == ""


def test_a_plan_takes_the_micro_batch_that_a_run_would_take(folder: Path) -> None:
    config, cluster = config_of(folder, "batch.micro_batch_tokens=auto"), parse_cluster("h100")
    assert plan_layout(config, task_for(config, cluster), ONE).budget == 32768


def test_a_layout_is_written_as_settings(folder: Path) -> None:
    cluster = parse_cluster("h100:8")
    config = config_of(folder, "launch.procs=8")
    task = task_for(config, cluster)
    for plan in search(task)[:12]:
        again = config_of(folder, "launch.procs=8", *plan.as_overrides().split())
        followed = task_for(again, cluster).plan(layout_of(again, cluster))
        assert followed.layout == plan.layout
        assert followed.budget == plan.budget
        assert followed.worst.reserved == pytest.approx(plan.worst.reserved, rel=0.02)


# --- the host's memory ------------------------------------------------------------------------------------------------


def test_the_host_holds_what_checkpoints_copy_and_what_is_moved_there(folder: Path) -> None:
    config, cluster = config_of(folder, "launch.procs=2"), parse_cluster("h100:2")
    plan = plan_for(config, cluster)
    parameters = plan.model.parameters
    assert plan.host == {"checkpoint staging": 3 * 4 * parameters}
    assert plan.as_json()["host_gib"]["checkpoint staging"] == pytest.approx(12 * parameters / 2**30)
    moved = plan_for(config_of(folder, "launch.procs=2", "parallel.offload=true"), cluster)
    assert moved.host["parameters, gradients and optimizer"] == 4 * 4 * parameters
    assert not moved.worst.parts.keys() & {"weights", "optimizer"}
    assert moved.worst.parts.get("gradients", 0) < plan.worst.parts["gradients"]
    waiting = plan_for(config_of(folder, "launch.procs=2", "checkpoint.asynchronous=false"), cluster)
    assert waiting.host == {}
    activations = plan_for(config_of(folder, "launch.procs=2", "model.activation_offload=true"), cluster)
    assert activations.host["activations"] > 0
    on_host = replace(plan.options, device="cpu")
    assert host_bytes(plan.model, plan.layout, plan.work, on_host) == {}


# --- bad input --------------------------------------------------------------------------------------------------------


def test_ranks_without_rows_have_no_plan(folder: Path) -> None:
    config, cluster = config_of(folder, "launch.procs=128"), parse_cluster("h100:8x16")
    with pytest.raises(ConfigError, match=r"batch\.samples 64 is less than the 128 ranks"):
        layout_of(config, cluster)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"devices: [a, b]", "devices must hold entries"),
        (b"\xff\xfe\x00", "is no text in UTF-8"),
        (
            b"devices: {d: {memory_gib: 0.3, product_tflops: 1, memory_gb_per_s: 1, link_gb_per_s: 1}}",
            "memory_gib 0.3 holds no run",
        ),
    ],
)
def test_a_hardware_file_that_is_none_is_a_sentence(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "own.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=said):
        read_hardware(tmp_path / "own.yaml")


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"device": "cpu"}'])
def test_a_broken_calibration_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpu.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the calibration .* cannot be read .*: remove it, or measure again"):
        Calibrations(tmp_path).read("cpu")
    assert Calibrations(tmp_path).read("other") is None


def test_a_calibration_that_cannot_be_kept_is_not_begun(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written to"):
        Calibrations(tmp_path / "file" / "calibrations").prepare()


def test_zero_bubble_has_no_plan_in_bf16(folder: Path) -> None:
    overrides = ("launch.procs=2", "parallel.pipeline=2", "parallel.schedule=zero_bubble")
    cluster = parse_cluster("h100:2")
    with pytest.raises(ConfigError, match="zero_bubble does not go with bf16"):
        layout_of(config_of(folder, *overrides), cluster)
    assert layout_of(config_of(folder, *overrides, "model.precision=fp32"), cluster).schedule == "zero_bubble"


def test_context_ranks_share_the_tokens_of_a_long_text(folder: Path) -> None:
    overrides = ("launch.procs=2", "parallel.context=2", "data.max_length=4096", "batch.micro_batch_tokens=2048")
    plan = plan_for(config_of(folder, *overrides), parse_cluster("h100:2"))
    assert (plan.work.tokens, plan.work.micro_batches) == (4096, 64)
