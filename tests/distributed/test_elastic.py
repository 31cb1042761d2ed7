"""A run killed under one layout goes on under another: weights, losses and rows are those of one process that never
stopped. In float64, where 1e-10 is far more than rounding and far less than any mistake.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from equivalence.mixtures import DEEPSEEK
from ranks import exported, newest_step, run_to_the_end, start_ranks
from safetensors.torch import load_file

import lockstep
from lockstep.backend import state
from lockstep.config import ConfigError, Degrees, load_config
from lockstep.config.parallel import AXES
from lockstep.data import compile_data
from lockstep.data.order import Batches
from lockstep.launch import RunHandle
from lockstep.launch.local import HANDLE_FILE
from lockstep.launch.start import reopen
from lockstep.parallel.group import ProcessGroup
from lockstep.processes.tree import start_time
from lockstep.rundir import RunDir, read_jsonl

NUM_ROWS, NUM_STEPS = 50, 10  # two epochs of 12, 12, 12, 12 and 2 rows
TOLERANCE = 1e-10
# Ranks, and the degrees that are not 1.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "fsdp-2": (2, {"shard": 2}),
    "fsdp-3": (3, {"shard": 3}),
    "fsdp-4": (4, {"shard": 4}),
    "ddp-2": (2, {"replicate": 2}),
    "tensor-2": (2, {"tensor": 2}),
    "context-2": (2, {"context": 2}),
    "pipeline-2": (2, {"pipeline": 2}),
    "interleaved-2": (2, {"pipeline": 2, "schedule": "interleaved"}),
    "expert-2": (2, {"shard": 2, "expert": 2}),
    "hybrid-2x2": (4, {"replicate": 2, "shard": 2}),
    "shard-2-tensor-2": (4, {"shard": 2, "tensor": 2}),
    "shard-2-pipeline-2": (4, {"shard": 2, "pipeline": 2}),
    "tensor-2-pipeline-2": (4, {"tensor": 2, "pipeline": 2}),
}
# What is trained: an untied head, a tied one, adapters; experts, and with them the biases of their routers.
TRAINED = ("full", "tied", "lora", "experts")
PAIRS = [
    ("fsdp-2", "tensor-2", "full"),
    ("ddp-2", "pipeline-2", "tied"),
    ("pipeline-2", "one", "lora"),
    *(
        pytest.param(before, after, trained, marks=pytest.mark.slow)
        for before, after, trained in [
            ("fsdp-4", "one", "full"),
            ("fsdp-4", "fsdp-3", "full"),
            ("fsdp-4", "fsdp-2", "lora"),
            ("ddp-2", "fsdp-2", "full"),
            ("tensor-2", "ddp-2", "tied"),
            ("shard-2-tensor-2", "fsdp-2", "lora"),
            ("pipeline-2", "interleaved-2", "lora"),
            ("context-2", "fsdp-4", "tied"),
            ("fsdp-2", "context-2", "full"),
            ("hybrid-2x2", "fsdp-3", "tied"),
            ("shard-2-pipeline-2", "shard-2-tensor-2", "tied"),
            ("tensor-2", "tensor-2-pipeline-2", "full"),
            ("one", "shard-2-pipeline-2", "lora"),
            ("expert-2", "one", "experts"),
            ("fsdp-2", "expert-2", "experts"),
            ("expert-2", "tensor-2", "experts"),
        ]
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An odd vocabulary: not all parts of it are equal."""
    folder = tmp_path_factory.mktemp("models")
    shape = {"vocab_size": 289, "num_hidden_layers": 4}
    untied, tied = (tiny.write_model(folder / str(t), **shape, tie_word_embeddings=t) for t in (False, True))
    return {"full": untied, "tied": tied, "lora": untied, "experts": write_mixture(folder / "mixture")}


def write_mixture(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**{**DEEPSEEK, "vocab_size": 289, "num_hidden_layers": 3})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Callable[[str], RunDir]:
    """One process that never stopped, for each kind of training; made once."""
    made: dict[str, RunDir] = {}

    def get(trained: str) -> RunDir:
        if trained not in made:
            made[trained] = make_run(tmp_path_factory.mktemp(trained), models, "one", trained)
            run_to_the_end(made[trained], 1)
        return made[trained]

    return get


def make_run(folder: Path, models: dict[str, Path], layout: str, trained: str, **changes: Any) -> RunDir:
    tiny.write_rows(folder / "train.jsonl", NUM_ROWS)
    tiny.write_rows(folder / "validation.jsonl", 5, seed=1)
    num_ranks, degrees = LAYOUTS[layout]
    settings: dict[str, Any] = {
        "lora": {"rank": 4} if trained == "lora" else None,
        "data": {"validation": "validation.jsonl"},
        "batch": {"samples": 12},
        "optim": {"epochs": 2, "weight_decay": 0.1},
        "evaluation": {"every_steps": 5},
        "checkpoint": {"every_steps": 2, "keep_best": 0},
        "parallel": {"shard": 1, **degrees},
        "launch": {"procs": num_ranks},
        **changes,
    }
    overrides = ["model.precision=fp64", *["model.router_bias_rate=0.02"] * (trained == "experts")]
    config = load_config(tiny.write_config(folder, models[trained], **settings), overrides)
    return RunDir.create(folder / "run", config)


def overrides_for(layout: str) -> list[str]:
    num_ranks, degrees = LAYOUTS[layout]
    whole = dict.fromkeys((*AXES, "expert"), 1) | {"schedule": "1f1b"} | degrees
    return [f"launch.procs={num_ranks}", *(f"parallel.{key}={value}" for key, value in whole.items())]


def kill_at_step(run: RunDir, step: int) -> None:
    """SIGKILL for every rank as soon as a step is logged and there is a checkpoint."""
    with start_ranks(run, run.config().launch.procs) as ranks:
        caught = ranks.wait_until(lambda: newest_step(run) >= step and bool(run.list_checkpoints()))
        assert caught, [failure["message"] for failure in run.failures()]
        ranks.signal(signal.SIGKILL)
        codes = ranks.wait()
    assert set(codes) == {-signal.SIGKILL}


def assert_same_result(run: RunDir, reference: RunDir) -> None:
    found, expected = (weights_of(exported(r)) for r in (run, reference))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = float((found[name] - tensor).abs().max())
        assert difference <= TOLERANCE * max(1.0, float(tensor.abs().max())), f"{name}: {difference:.3g}"
    for ours, theirs in zip(run.metrics(), reference.metrics(), strict=True):
        assert (ours["step"], ours["split"]) == (theirs["step"], theirs["split"])
        for key in ("loss", "grad_norm", "learning_rate") if ours["split"] == "train" else ("loss",):
            assert ours[key] == pytest.approx(theirs[key], rel=TOLERANCE), f"{key} of step {ours['step']}"
    assert ledger_of(run) == ledger_of(reference)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def ledger_of(run: RunDir) -> list[tuple[int, list[int], int, int]]:
    """(step, rows, their tokens, the supervised ones), for each step once."""
    keys = ("step", "row_range", "tokens", "supervised_tokens")
    return [tuple(record[key] for key in keys) for record in run.metrics() if record["split"] == "train"]  # type: ignore[misc]


@pytest.mark.parametrize(("before", "after", "trained"), PAIRS)
def test_a_run_killed_under_one_layout_goes_on_under_another(
    tmp_path: Path,
    models: dict[str, Path],
    uninterrupted: Callable[[str], RunDir],
    before: str,
    after: str,
    trained: str,
) -> None:
    run = make_run(tmp_path, models, before, trained)
    kill_at_step(run, 5)
    killed_at = newest_step(run)
    reopen(run.path, overrides_for(after))
    run_to_the_end(run, LAYOUTS[after][0])
    (resumed,) = (event["step"] for event in run.events() if event["event"] == "resumed")
    assert 2 <= resumed <= killed_at < NUM_STEPS
    assert_same_result(run, uninterrupted(trained))
    rows_of_step: dict[int, list[int]] = {}
    for record in read_jsonl(run.path / "metrics.jsonl"):  # also what was made before the kill and again after it
        if record["split"] == "train":
            assert rows_of_step.setdefault(record["step"], record["row_range"]) == record["row_range"]


def test_the_ledger_names_every_row_once_in_each_epoch(uninterrupted: Callable[[str], RunDir]) -> None:
    run = uninterrupted("full")
    config = run.config()
    data = compile_data(config.data, tiny.build_tokenizer(), seed=config.seed, timeout_s=60).train
    batches = Batches(data, config.batch, seed=config.seed, shuffle=True)
    ledger, cursor = ledger_of(run), 0
    assert [step for step, *_ in ledger] == list(range(1, NUM_STEPS + 1))
    consumed = []
    for _, (first, last), num_tokens, num_supervised in ledger:
        assert first == cursor, "no row between two batches, and none in both"
        batch, cursor = batches.batch_at(first)
        assert cursor == last
        assert num_tokens == sum(datum.num_tokens for datum in batch)
        assert num_supervised == sum(datum.num_supervised for datum in batch)
        consumed += [datum.origin for datum in batch]
    origins = sorted(datum.origin for datum in data)
    assert len(set(origins)) == NUM_ROWS
    assert sorted(consumed[:NUM_ROWS]) == sorted(consumed[NUM_ROWS:]) == origins


def test_the_command_resumes_on_other_processes(
    tmp_path: Path, models: dict[str, Path], uninterrupted: Callable[[str], RunDir]
) -> None:
    run = make_run(tmp_path, models, "fsdp-2", "full")
    kill_at_step(run, 5)
    code, _, err = tiny.run_lockstep("train", "--resume", run.path, "optim.epochs=3")
    assert code == 2
    assert err.startswith("error: --resume cannot change optim.epochs from 2.0 to 3.0: ")
    code, out, err = tiny.run_lockstep("train", "--resume", run.path, "--procs", 1, "parallel.shard=1")
    assert (code, err) == (0, "")
    assert "1, device cpu" in out, "the header shows what it goes on with"
    assert run.status()["ranks"] == 1
    assert_same_result(run, uninterrupted("full"))


@pytest.mark.slow
def test_a_run_changes_its_layout_more_than_once(
    tmp_path: Path, models: dict[str, Path], uninterrupted: Callable[[str], RunDir]
) -> None:
    run = make_run(tmp_path, models, "fsdp-2", "full")
    kill_at_step(run, 3)
    smaller = "batch.micro_batch_tokens=128"
    for step, overrides in ((5, overrides_for("tensor-2")), (7, [*overrides_for("ddp-2"), smaller])):
        reopen(run.path, overrides)
        kill_at_step(run, step)
    result = lockstep.train(resume=run.path, overrides=overrides_for("context-2"))
    assert result["steps"] == NUM_STEPS
    assert_same_result(run, uninterrupted("full"))
    added = [f"config-{number}.yaml" for number in (2, 3, 4)]
    assert sorted(path.name for path in run.path.glob("config*.yaml")) == [*added, "config.yaml"]
    assert [event["file"] for event in run.events() if event["event"] == "reconfigured"] == added
    assert run.config().parallel.context == 2


# --- what may change ------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path, models: dict[str, Path]) -> RunDir:
    return make_run(tmp_path, models, "fsdp-2", "lora", lora={"rank": 4, "dropout": 0.1})


def test_the_first_configuration_stays_and_the_change_is_recorded(stopped: RunDir) -> None:
    first = stopped.config_path.read_text()
    _, config = reopen(stopped.path, ["launch.procs=4", "parallel.shard=auto", "batch.micro_batch_tokens=512"])
    assert stopped.config_path.read_text() == first
    assert RunDir(stopped.path).config() == config
    assert (config.launch.procs, config.parallel.shard, config.batch.micro_batch_tokens) == (4, "auto", 512)
    (event,) = (e for e in stopped.events() if e["event"] == "reconfigured")
    assert event["changes"] == {
        "batch.micro_batch_tokens": [256, 512],
        "parallel.shard": [2, "auto"],
        "launch.procs": [2, 4],
    }
    (warning,) = (e["message"] for e in stopped.events() if e["event"] == "warning")
    assert "lora.dropout draws other numbers" in warning


def test_a_deadline_has_nothing_to_do_with_dropout(stopped: RunDir) -> None:
    reopen(stopped.path, ["launch.timeout_s=5"])
    assert [event["event"] for event in stopped.events()] == ["reconfigured"]


def test_another_device_does_not_choose_another_precision(tmp_path: Path, models: dict[str, Path]) -> None:
    run = make_run(tmp_path, models, "one", "full")
    first = run.config()
    run.config_path.write_text(first.to_yaml().replace("precision: fp64", "precision: auto"))
    run.write_status(precision="bf16")
    assert reopen(run.path, ["launch.device=auto"])[1].model.precision == "bf16"
    assert run.config().model.precision == "bf16"


def test_a_running_run_is_not_changed(stopped: RunDir) -> None:
    command = subprocess.Popen(["sleep", "60"])
    try:
        handle = RunHandle("local", str(stopped.path), command.pid, start_time(command.pid), "mark")
        (stopped.path / HANDLE_FILE).write_text(handle.to_json())
        with pytest.raises(ConfigError, match="is still running: stop it before you change it"):
            reopen(stopped.path, ["launch.procs=4", "parallel.shard=4"])
    finally:
        command.kill()
        command.wait()
    assert stopped.newest_config_path == stopped.config_path


def test_the_tenth_change_comes_after_the_ninth(stopped: RunDir) -> None:
    for seconds in range(1, 12):
        reopen(stopped.path, [f"launch.timeout_s={seconds}"])
    assert stopped.newest_config_path.name == "config-12.yaml"
    assert RunDir(stopped.path).config().launch.timeout_s == 11


def test_random_numbers_are_only_carried_to_the_same_layout(tmp_path: Path) -> None:
    """Ranks that split matrices must draw alike; those that split rows must not."""
    parameters = {"weight": torch.nn.Parameter(torch.ones(3))}
    optimizer = torch.optim.AdamW(parameters.values())
    parameters["weight"].sum().backward()
    optimizer.step()

    def group(**degrees: int) -> ProcessGroup:
        return ProcessGroup(0, 1, torch.device("cpu"), Degrees(**degrees))

    state.seed_rank(0, 0)
    state.save(tmp_path / "saved", parameters, optimizer, group(shard=2)).result()
    expected = torch.rand(4)
    for layout, carried in ((group(shard=2), True), (group(tensor=2), False), (group(shard=4), False)):
        state.seed_rank(1, 0)
        state.load(tmp_path / "saved", parameters, optimizer, layout)
        assert torch.equal(torch.rand(4), expected) == carried


def test_what_changes_nothing_is_not_recorded(stopped: RunDir) -> None:
    for overrides in ([], ["launch.procs=2", "parallel.shard=2", "batch.samples=12"]):
        run, config = reopen(stopped.path, overrides)
        assert config == stopped.config()
    assert [path.name for path in run.path.glob("config*.yaml")] == ["config.yaml"]
    assert not run.events()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.learning_rate=1", "cannot change optim.learning_rate from 0.01 to 1"),
        ("batch.samples=4", "cannot change batch.samples from 12 to 4"),
        ("batch={samples: 4}", "cannot change batch.samples from 12 to 4"),
        ("model.precision=fp32", "cannot change model.precision"),
        ("seed=7", "cannot change seed from 0 to 7"),
        ("lora=null", "cannot change lora"),
        ("parallel={replicate: 2, shard: 1, compression: bf16}", "cannot change parallel.compression"),
        ("parallel.tensor=3", "x tensor 3"),
        ("launch.procs=3", "but the run has 3"),
        ("batch.micro_batch_tokens=100", "does not fit into batch.micro_batch_tokens"),
        ("parallel.degree=3", "unknown key 'parallel.degree'"),
    ],
)
def test_what_would_change_the_numbers_or_cannot_run_is_refused(stopped: RunDir, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        reopen(stopped.path, [override])
    assert message in str(refused.value)
    assert stopped.newest_config_path == stopped.config_path
    assert not stopped.events()


def test_a_resume_from_python_refuses_too(stopped: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot change seed"):
        lockstep.train(resume=stopped.path, overrides=["seed=1"])
    with pytest.raises(ValueError, match="either a configuration or a run"):
        lockstep.train({"model": "m"}, resume=stopped.path)
    with pytest.raises(ValueError, match="give no run_dir"):
        lockstep.train(resume=stopped.path, run_dir=tmp_path / "other")
