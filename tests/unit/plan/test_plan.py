"""Plans: a described model against the real one, memory and time that move as they must, search, advice, bad input."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.config import ConfigError, Degrees, RunConfig, resolve_config
from lockstep.plan.beside import beside_plan
from lockstep.plan.description import ModelDescription, ParameterShape, chunk, read_description
from lockstep.plan.estimate import with_recomputation
from lockstep.plan.from_config import TextLengths, assumed_rows, described, layout_of, measured_rows, task_of
from lockstep.plan.hardware import (
    DEVICES,
    AttentionTime,
    Calibration,
    Calibrations,
    ProductTime,
    fit_two,
    parse_cluster,
    rates_of,
    read_hardware,
)
from lockstep.plan.memory import persistent_bytes, plan_memory
from lockstep.plan.search import PlanTask, advise, best_budget, search
from lockstep.plan.time import plan_time
from lockstep.plan.trace import describe_model
from lockstep.plan.work import Options, RankLayout, StepRows, Workload
from lockstep.rundir import RunDir
from lockstep.train.foresee import judge, lengths_of
from lockstep.train.worker import report_failure
from lockstep.types import Completion, Datum

ROOT = Path(__file__).resolve().parents[3]
ONE = RankLayout(Degrees())


def write_folder(folder: Path, **changes: Any) -> Path:
    """A model's configuration alone: no weights, no tokenizer."""
    shape = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 64,
        "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


def config_of(folder: Path, **sections: Any) -> RunConfig:
    model = {"path": str(folder), "compile": False, **sections.pop("model", {})}
    data = {"train": ["rows.jsonl"], "max_length": 512}
    return resolve_config({"model": model, "data": data, "batch": {"samples": 64}, **sections})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("plan") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelDescription:
    return describe_model(config_of(folder), "bf16", compiled=False)


@pytest.fixture(scope="module")
def task(model: ModelDescription) -> PlanTask:
    return PlanTask(model, StepRows(64 * 512, 512, 512.0), Options(), parse_cluster("h100:8"), 4096)


def test_a_described_model_has_the_parameters_of_the_real_one(folder: Path, model: ModelDescription) -> None:
    import transformers

    real = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    assert model.parameters == sum(p.numel() for p in real.parameters()) == model.trained
    assert len(model.layers) == 4
    assert len(model.kinds) == 1
    (attention,) = {kind.attention for kind in model.kinds}
    assert attention == (4, 2, 16, None)
    products = [(p.inner, p.columns) for p in model.kinds[0].products]
    assert sorted(products) == sorted([(64, 64), (64, 32), (64, 32), (64, 64), (64, 160), (64, 160), (160, 64)])
    assert read_description(json.loads(json.dumps(asdict(model)))) == model


def test_what_a_layer_saves_is_what_its_operations_need(model: ModelDescription) -> None:
    """Counted by hand for Llama in bf16: norms save their input, its float32 copy, the normed value twice and a root;
    attention what it reads and gives; the MLP the gate before and after its function, the other half, their product."""
    hidden, width, keys = 64, 160, 32
    norms = 2 * (2 + 4 + 2 + 2) * hidden - 2 * 2 * hidden + 2 * 4
    attention = 2 * (2 * hidden + 2 * keys) + 4 * 4
    mlp = 4 * 2 * width
    saved = model.kinds[0].costs.saved_bytes()
    assert abs(saved - (norms + attention + mlp)) <= 2 * 2 * hidden + 64  # the tables of positions are shared


def test_adapters_freeze_the_rest(folder: Path) -> None:
    adapted = describe_model(config_of(folder, lora={"rank": 4}), "bf16", compiled=False)
    per_layer = sum(4 * (a + b) for a, b in [(64, 64), (64, 32), (64, 32), (64, 64), (64, 160), (64, 160), (160, 64)])
    assert adapted.trained == 4 * per_layer
    assert {p.held_bytes for p in adapted.all_parameters() if not p.trained} == {2}
    assert not adapted.head_trained


def test_recomputation_derived_is_recomputation_traced(folder: Path, model: ModelDescription) -> None:
    settings = config_of(folder, model={"activation_checkpointing": "full"})
    traced = describe_model(settings, "bf16", compiled=False)
    work = Workload(1, 4096, 4096, 4096 * 256.0)
    for one, other in ((with_recomputation(model, True), traced), (model, with_recomputation(traced, False))):
        found = [plan_memory(m, ONE, work, Options()).allocated for m in (one, other)]
        assert found[0] == pytest.approx(found[1], rel=0.02)
    assert plan_memory(traced, ONE, work, Options()).allocated < plan_memory(model, ONE, work, Options()).allocated


@pytest.mark.slow
def test_a_compiled_layer_saves_less_than_an_eager_one(folder: Path, model: ModelDescription) -> None:
    compiled = describe_model(config_of(folder), "bf16", compiled=True)
    assert 0.4 < compiled.kinds[0].costs.saved_bytes() / model.kinds[0].costs.saved_bytes() < 0.8
    assert compiled.kinds[0].products == model.kinds[0].products


def test_parts_of_a_parameter_are_the_whole_together() -> None:
    parameter = ParameterShape("p", (10, 6), True, split_dim=0)
    assert [chunk(10, place, 4) for place in range(4)] == [3, 3, 3, 1]
    assert sum(parameter.part((t, 2), (s, 3)) for t in range(2) for s in range(3)) == 60


@pytest.mark.parametrize(
    "degrees", [Degrees(), Degrees(2), Degrees(1, 2), Degrees(1, 1, 2), Degrees(1, 1, 1, 2), Degrees(1, 2, 2, 2)]
)
def test_weights_over_ranks_add_up(model: ModelDescription, degrees: Degrees) -> None:
    layout = RankLayout(degrees)
    total = sum(
        persistent_bytes(model, layout, stage=stage, place=place, tensor=tensor)["weights"]
        for stage in range(degrees.pipeline)
        for place in range(layout.sharding_ranks)
        for tensor in range(degrees.tensor)
    )
    replicated = sum(p.numel for p in model.all_parameters() if p.split_dim is None) * (degrees.tensor - 1)
    assert total == 4 * (model.parameters + replicated)


def test_more_of_everything_takes_more(model: ModelDescription) -> None:
    def planned(work: Workload, layout: RankLayout = ONE) -> tuple[float, float]:
        cluster = replace(parse_cluster("h100:8"), per_node=layout.degrees.num_ranks)
        memory = plan_memory(model, layout, work, Options()).allocated
        return memory, plan_time(model, layout, work, Options(), cluster).total

    base = Workload(1, 4096, 4096, 4096 * 256.0)
    for other in (
        replace(base, tokens=8192, targets=8192, pairs=8192 * 256.0),
        replace(base, micro_batches=2),
        replace(base, linear=False, reference="copy", reference_passes=1),
    ):
        (memory, time), (less, shorter) = planned(other), planned(base)
        assert memory > less
        assert time >= shorter
    sharded, replicated = planned(base, RankLayout(Degrees(1, 8))), planned(base, RankLayout(Degrees(8)))
    assert sharded[0] < replicated[0]


def test_a_stage_holds_the_micro_batches_that_are_in_flight(model: ModelDescription) -> None:
    work = Workload(8, 4096, 4096, 4096 * 256.0)

    def activations(schedule: str, stage: int) -> float:
        layout = RankLayout(Degrees(pipeline=2), schedule=schedule)
        parts = plan_memory(model, layout, work, Options(), stage=stage).parts
        return sum(size for name, size in parts.items() if name.startswith("activations") and "in work" not in name)

    # The first of two stages holds two of the eight micro-batches until the first one comes back; gpipe holds all.
    assert activations("gpipe", 0) == pytest.approx(4 * activations("1f1b", 0))
    assert activations("gpipe", 1) > 4 * activations("1f1b", 1)


def test_every_figure_has_its_error_and_parts_add_up(task: PlanTask) -> None:
    plan = task.plan(RankLayout(Degrees(1, 2, 2, 2)))
    tree = plan.as_json()
    assert tree["memory_error"] > 0
    assert tree["time_error"] > 0
    assert tree["errors_from"]
    for rank in tree["memory"]:
        assert sum(rank["parts_gib"].values()) == pytest.approx(rank["reserved_gib"])
    assert sum(tree["step_parts_s"].values()) == pytest.approx(tree["step_s"])
    assert set(tree["traffic_bytes"]) == {"shard", "tensor", "pipeline"}
    assert "±" in plan.verdict()


def test_search_finds_what_trying_everything_finds(task: PlanTask) -> None:
    for cluster in ("h100:8", "l4:4x2", "a100-40:2"):
        here = replace(task, cluster=parse_cluster(cluster))
        quick, whole = search(here), search(here, exhaustive=True)
        assert quick[0].time.total <= whole[0].time.total * 1.001
        assert [p.time.total for p in quick] != []
        assert all(p.fits == "yes" and p.layout.degrees.num_ranks == here.cluster.num_ranks for p in quick)


def test_advice_makes_it_fit(model: ModelDescription) -> None:
    task = PlanTask(model, StepRows(64 * 512, 512, 512.0), Options(), parse_cluster("l4"), 16384)
    needed = task.plan(ONE).worst.allocated / 2**30
    small = replace(DEVICES["l4"], memory_gib=0.6 + 0.7 * needed)  # 0.6: what the driver takes
    cluster = replace(parse_cluster("l4"), device=small)
    task = replace(task, cluster=cluster)
    plan = task.plan(ONE)
    assert plan.fits == "no"
    assert "does not fit: needs" in plan.verdict()
    advice = advise(task, plan)
    assert 1 <= len(advice) <= 3
    assert advice[0].plan.fits == "yes"
    assert advice[0].plan.worst.reserved < plan.worst.reserved
    assert best_budget(task, ONE).budget < 16384
    with pytest.raises(ConfigError, match="not even 512 tokens"):
        best_budget(replace(task, cluster=replace(cluster, device=replace(small, memory_gib=0.61))), ONE)


def test_rows_are_measured_or_assumed(folder: Path) -> None:
    config = config_of(folder, algorithm={"kind": "dpo"})
    pairs = [[TextLengths(100, (50, 150), 200)] * 4]
    rows = measured_rows(config, pairs, 7, 8)
    assert (rows.step_tokens, rows.longest, rows.steps) == (1200, 300, 7)
    assert rows.targets_share == pytest.approx(200 / 300)
    assert rows.keys_per_token == pytest.approx(400 / 300)
    assert rows.reference == "copy"
    assert not rows.linear
    assumed = assumed_rows(config_of(folder))
    assert assumed.step_tokens == 64 * 512
    assert assumed.assumed
    work = assumed.work(RankLayout(Degrees(2)), 4096)
    assert (work.micro_batches, work.tokens) == (4, 4096)


def test_sampling_takes_memory_and_time(folder: Path) -> None:
    grpo = {"kind": "grpo", "reward": "length", "max_tokens": 128}
    config = config_of(folder, algorithm=grpo, batch={"samples": 8})
    cluster = parse_cluster("h100")
    plan = task_of(config, cluster, assumed_rows(config)).plan(layout_of(config, cluster))
    assert plan.worst.parts["KV cache and graphs"] > 0
    assert plan.time.parts["sampling"] > 0
    apart = config_of(folder, algorithm=grpo, batch={"samples": 8}, rollouts={"engines": 2})
    divided = task_of(apart, cluster, assumed_rows(apart)).plan(layout_of(apart, cluster))
    assert "sampling" not in divided.time.parts
    assert "KV cache and graphs" not in divided.memory[0].parts
    engine = divided.memory[-1]
    assert engine.rank == "a GPU of an engine"
    assert engine.parts["weights"] == 2 * divided.model.parameters
    length = -(-(112 + 128) // 64) * 64  # of a prompt and its answer, in whole blocks
    cache = 8 * 8 // 2 * length * 4 * 2 * 2 * 16 * 2  # sequences, tokens, layers, keys and values, heads, size, bytes
    assert engine.parts["KV cache and graphs"] == pytest.approx(cache + 0.07 * 2**30)
    assert "engines have GPUs of their own" in divided.rows.assumed


def test_a_description_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = described(config_of(folder), "bf16", compiled=False)
    monkeypatch.setattr("lockstep.plan.trace.describe_model", None)
    assert described(config_of(folder), "bf16", compiled=False) == found
    with pytest.raises(TypeError):  # another model is traced
        described(config_of(folder, lora={"rank": 2}), "bf16", compiled=False)


@pytest.mark.parametrize("share", [0.7, 1.02, 3.0])
def test_at_the_door(folder: Path, tmp_path: Path, share: float) -> None:
    """Refused, warned of, or noted, by how much of the memory that a run needs is there."""
    config = config_of(folder, batch={"samples": 64, "micro_batch_tokens": 16384})
    rows = [Datum([1] * 256, [Completion([2] * 256, [1.0] * 256)])] * 64
    cluster = parse_cluster("l4")
    needed = task_of(config, cluster, measured_rows(config, [[lengths_of(r) for r in rows]], 1, 1)).plan(ONE)
    gib = 0.6 + share * needed.worst.reserved / 2**30
    cluster = replace(cluster, device=replace(cluster.device, memory_gib=gib))
    run = RunDir.create(tmp_path / "run", config)
    refused = judge(config, cluster, run, rows)["refused"]
    assert bool(refused) == (share < 1)
    if refused:
        assert "does not fit: needs" in refused
        assert "What would help: " in refused
        relaxed = config.model_copy(update={"launch": config.launch.model_copy(update={"check_memory": False})})
        assert judge(relaxed, cluster, run, rows)["refused"] is None
    warnings = [e["message"] for e in run.events() if e["event"] == "warning"]
    assert bool(warnings) == (share < 2)
    planned = run.status()["planned"]
    assert planned["memory_gib"] == pytest.approx(needed.worst.allocated / 2**30)
    assert planned["largest_gib"] == pytest.approx(needed.largest_gib())


def test_the_micro_batch_that_fits(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, batch={"samples": 64, "micro_batch_tokens": "auto"})
    assert config.batch.fit_memory
    assert config.batch.micro_batch_tokens == 4096
    assert resolve_config(yaml.safe_load(config.to_yaml())) == config
    rows = [Datum([1] * 256, [Completion([2] * 256, [1.0] * 256)])] * 64
    run, cluster = RunDir.create(tmp_path / "run", config), parse_cluster("l4")
    assert judge(config, cluster, run, rows)["budget"] == 32768  # all of a step
    whole = run.status()["planned"]["memory_gib"]
    small = replace(cluster, device=replace(cluster.device, memory_gib=0.6 + 0.6 * whole))
    budget = judge(config, small, run, rows)["budget"]
    assert 512 <= budget < 32768
    assert any(f"micro_batch_tokens: {budget:,}" in event.get("message", "") for event in run.events())
    none = replace(cluster, device=replace(cluster.device, memory_gib=0.61))
    assert "not even 512 tokens" in judge(config, none, run, rows)["refused"]


def test_runs_show_what_was_planned(folder: Path, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs" / "one", config_of(folder))
    planned = {"memory_gib": 30.0, "memory_error": 0.04, "step_s": 0.5, "time_error": 0.15}
    run.write_status(state="completed", planned=planned, memory_gib=31.5)
    for step, seconds in enumerate((9.0, 3.0, 0.4, 0.6, 0.6), start=1):
        run.log_metrics({"step": step, "split": "train", "loss": 1.0, "step_time_s": seconds})
    shown = CliRunner().invoke(app, ["runs", str(tmp_path / "runs")]).stdout
    assert "memory planned 30 GiB ± 4%, measured 31.5 (+5.0%)" in " ".join(shown.split())
    assert "step planned 0.5 s ± 15%, measured 0.6 (+20.0%)" in " ".join(shown.split())
    (row,) = json.loads(CliRunner().invoke(app, ["runs", str(tmp_path / "runs"), "--json"]).stdout)
    assert row["planned"] == planned
    assert row["measured"] == {"memory_gib": 31.5, "step_s": 0.6}
    drawn = CliRunner().invoke(app, ["plot", str(run.path), "--out", str(tmp_path)])
    assert "one: memory planned 30 GiB ± 4%, measured 31.5 (+5.0%); step" in (tmp_path / "one.html").read_text(), drawn
    assert beside_plan({"memory_gib": "30", "step_s": None}, {}) == beside_plan(None, {"step_s": 1.0}) == ""


def test_out_of_memory_says_what_was_planned(folder: Path, tmp_path: Path) -> None:
    import torch

    run = RunDir.create(tmp_path / "run", config_of(folder))
    planned = {"memory_gib": 30.0, "memory_error": 0.04, "step_s": 0.5, "time_error": 0.15}
    run.write_status(planned={**planned, "largest_gib": {"activations: mlp": 12.345, "optimizer": 9.0}})
    said = tmp_path / "said"
    with said.open("w") as terminal:
        error = (
            "CUDA out of memory. 1.0 GiB is free. If reserved but unallocated memory is large try this (https://x.org)"
        )
        report_failure(run, 0, torch.OutOfMemoryError(error), terminal)
    for message in (run.status()["error"], said.read_text()):
        assert (
            "CUDA out of memory. 1.0 GiB is free; the plan was 30 GiB ± 4%, most of it for activations: mlp" in message
        )
        assert "mlp 12.3, optimizer 9. Lower" in message
        assert "batch.micro_batch_tokens" in message


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("h1000:8", "unknown GPU 'h1000': did you mean h100"),
        ("h100:8x", "names no hardware"),
        ("h100:0", "no cluster"),
        ("h100:8x2@carrier-pigeon", "unknown network"),
        ("", "names no hardware"),
    ],
)
def test_hardware_that_is_none(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_cluster(text)


def test_own_hardware(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    entry = "{memory_gib: 48, product_tflops: 200, memory_gb_per_s: 900, link_gb_per_s: 26}"
    path.write_text(f"devices: {{Mine: {entry}}}\nnetworks: {{lan: {{gb_per_s: 1, latency_us: 50}}}}", encoding="utf-8")
    cluster = parse_cluster("mine:4x2@lan", read_hardware(path))
    assert (cluster.num_ranks, cluster.device.memory_gib, cluster.network.bytes_per_s) == (8, 48, 1e9)
    for text, error in (
        ("devices: {mine: {memory_gib: 48}}", "devices.mine.product_tflops is missing"),
        (f"devices: {{mine: {entry.replace('48', 'yes')}}}", "must be a positive number"),
        ("gpus: {}", "expected devices"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=error):
            read_hardware(path)


def test_layouts_that_cannot_be(task: PlanTask) -> None:
    for degrees, error in (
        (Degrees(1, 1, 8), "does not divide the model's 4 query heads"),
        (Degrees(1, 1, 1, 8), "more than the model's 4 layers"),
        (Degrees(1, 4), "has 4 ranks"),
    ):
        with pytest.raises(ConfigError, match=error):
            task.plan(RankLayout(degrees))


def test_a_model_that_cannot_be_traced_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def forward(self: Any, hidden: Any) -> Any:
        return hidden * float(hidden.sum())

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    with pytest.raises(ConfigError, match="no plan for LlamaForCausalLM: LlamaDecoderLayer cannot be traced"):
        describe_model(config_of(write_folder(tmp_path / "odd")), "bf16", compiled=False)


def test_two_rates_are_found_again() -> None:
    points = [(x, y, 3e-9 * x + 2e-12 * y) for x, y in ((1e3, 1e6), (2e3, 8e6), (5e3, 1e5))]
    assert fit_two(points) == pytest.approx((3e-9, 2e-12))
    assert fit_two([(1.0, 1.0, 1.0), (1.0, 2.0, 2.0)]) == pytest.approx((0.0, 1.0), abs=0.1)


def test_a_calibration_is_kept(tmp_path: Path) -> None:
    from lockstep.plan.calibrate import calibrate

    found = calibrate("cpu", seconds=1, collectives=False)
    kept = Calibrations(tmp_path)
    kept.write(found)
    assert kept.read("cpu") == found
    assert kept.read("other") is None
    rates = rates_of(replace(parse_cluster("h100"), calibration=found))
    assert rates.calibrated
    assert 1e8 < rates.product_flops < 1e14


def test_a_plan_takes_the_rates_that_collectives_have_here(task: PlanTask) -> None:
    """Inside a machine; between machines it is the network's."""
    measured = {"all_reduce": 1e9, "all_gather": 2e9, "reduce_scatter": 4e9, "all_to_all": 8e9}
    timed = Calibration("cpu", 1.0, 0.0, (ProductTime(512, 512, 512, 1.0),), (), 1e15, 1e15, 1e-9, 1e9)
    attention = (AttentionTime(4, 32, 128, 2, 1e-9, 1e-9), AttentionTime(4, 32, 256, 1, 1e-9, 1e-9))

    def seconds(degrees: Degrees, cluster: str, axis: str) -> tuple[float, float]:
        """(how much less it takes at twice the rate: latency stays; bytes)."""
        layout, spent = RankLayout(degrees, ranks_per_node=parse_cluster(cluster).per_node), []
        for times in (1, 2):
            rates = {kind: times * rate for kind, rate in measured.items()}
            calibration = replace(timed, collectives=rates, attention=attention)
            time = replace(task, cluster=replace(parse_cluster(cluster), calibration=calibration)).plan(layout).time
            spent.append(time.parts.get(f"communication: {axis}", 0.0) + time.hidden.get(axis, 0.0))
        return spent[0] - spent[1], time.traffic[axis]

    for degrees, axis, rate in (
        (Degrees(replicate=2), "replicate", 1e9),
        (Degrees(tensor=2), "tensor", 1e9),
        (Degrees(shard=2), "shard", 2 / (1 / 2e9 + 1 / 4e9)),
    ):
        saved, sent = seconds(degrees, "h100:2", axis)
        assert saved == pytest.approx(sent / rate / 2, rel=1e-6)
    assert seconds(Degrees(replicate=2), "h100:1x2", "replicate")[0] == 0


@pytest.mark.slow
def test_collectives_are_timed_between_real_processes() -> None:
    import torch

    from lockstep.plan.collective_rates import measure_collectives

    found = measure_collectives(torch.device("cpu"), timeout_s=240.0)
    assert found.keys() == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert all(1e5 < rate < 1e12 for rate in found.values()), found


def test_the_command_plans_without_weights_and_rows(folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"  # which are where the run will be
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {{path: {folder}, compile: false}}\ndata: {{train: [{rows}], max_length: 512}}\n", encoding="utf-8"
    )
    command = ["plan", str(config), "--on", "h100:2", "--json", "--price", "2", "--page", str(tmp_path / "p.html")]
    result = CliRunner().invoke(app, [*command, "optim.max_steps=100", "--search", "3"])
    assert result.exit_code == 0, result.output
    tree = json.loads(result.stdout.strip().splitlines()[-1])
    assert tree["fits"] == "yes"
    assert tree["cost"] > 0
    assert "data.max_length 512" in tree["assumed"]
    assert 1 <= len(tree["search"]) <= 3
    assert "±" in (tmp_path / "p.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_what_an_h200_measured() -> None:
    """The errors that docs/plan.md publishes."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import plan as benchmark

    data = json.loads((ROOT / "benchmarks" / "plan_h200.json").read_text(encoding="utf-8"))
    errors: dict[str, list[float]] = {"memory": [], "reserved": [], "time": []}
    for _, found in benchmark.comparisons(data):
        for kind, (predicted, measured) in found.items():
            errors[kind].append(abs(predicted / measured - 1))
    assert len(errors["memory"]) >= 20
    for kind, (middle, worst) in {"memory": (0.03, 0.08), "reserved": (0.03, 0.08), "time": (0.10, 0.25)}.items():
        values = sorted(errors[kind])
        assert values[len(values) // 2] <= middle, (kind, values)
        assert values[-1] <= worst, (kind, values)


def test_a_quantised_base_and_other_optimizers_hold_less(folder: Path, model: ModelDescription) -> None:
    work = Workload(1, 4096, 4096, 4096 * 256.0)
    held = {
        kind: plan_memory(model, ONE, work, Options(optimizer=kind)).parts["optimizer"] / model.trained
        for kind in ("adamw", "adamw_8bit", "muon", "adafactor")
    }
    outside = sum(p.numel for p in model.rest if p.trained) / model.trained
    assert held == pytest.approx({"adamw": 8, "adamw_8bit": 2.08, "muon": 4 + 4 * outside, "adafactor": 0.08})


@pytest.mark.parametrize("held", [{"quantization": "nf4"}, {"precision": "fp8_base"}])
def test_a_quantised_base_holds_what_the_real_one_does(tmp_path: Path, held: dict[str, str]) -> None:
    import torch
    import transformers

    from lockstep.backend.build import settle_dtypes
    from lockstep.model.load import build_model

    shaped = write_folder(tmp_path / "model")
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(shaped)).save_pretrained(
        shaped
    )
    settings = config_of(shaped, lora={"rank": 4}, model=held)
    real = build_model(settings.model, settings.lora, "bf16", with_weights=True)
    settle_dtypes(real, torch.bfloat16)
    counted = sum(t.nbytes for t in [*real.parameters(), *real.buffers()])
    described = describe_model(settings, "bf16", compiled=False)
    assert persistent_bytes(described, ONE)["weights"] + described.buffers == counted
    assert described.refuses["tensor"] == "quantised matrices are not split over ranks"
    whole = describe_model(config_of(shaped, lora={"rank": 4}), "bf16", compiled=False)
    sizes = [sorted((p.inner, p.columns) for p in model.kinds[0].products) for model in (described, whole)]
    assert sizes[0] == sizes[1]


def test_attention_that_no_kernel_computes_has_a_plan_that_is_less_sure(tmp_path: Path) -> None:
    """Bounded scores are in memory, in each layer and for each two tokens of a document; dropout keeps none."""
    gemma = {
        "attn_logit_softcapping": 50.0,
        "head_dim": 16,
        "sliding_window": 64,
        "architectures": ["Gemma2ForCausalLM"],
    }
    bounded = write_folder(tmp_path / "gemma", model_type="gemma2", **gemma)
    for folder, in_memory in ((bounded, True), (write_folder(tmp_path / "dropout", attention_dropout=0.1), False)):
        model = describe_model(config_of(folder), "bf16", compiled=False)
        assert {kind.plain_attention for kind in model.kinds} == {in_memory}
        assert model.kinds[0].attention[:3] == (4, 2, 16)  # type: ignore[index]
        work = Workload(1, 4096, 4096, 4096 * 256.0)
        short, long = (
            plan_memory(model, ONE, replace(work, pairs=4096.0 * n), Options()).allocated for n in (256, 2048)
        )
        assert (long > short) == in_memory
        task = PlanTask(model, StepRows(64 * 512, 512, 512.0), Options(), parse_cluster("h100"), 4096)
        assert task.plan(ONE).errors.why == (
            "attention over one document after another: no such model was compared with a GPU"
        )
        assert task.plan(ONE).errors.memory > 0.1
        full = with_recomputation(model, True)
        assert plan_memory(full, ONE, work, Options()).allocated < plan_memory(model, ONE, work, Options()).allocated
