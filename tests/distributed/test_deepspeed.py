"""DeepSpeed as a backend on two gloo processes: what is saved, loaded, exported, skipped and lent.

That its steps are the plain ones is in tests/equivalence/test_zero.py.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import spawn
from equivalence.plain import STEP, make_batch, make_model, plain_run, scale_of
from torch.distributed.tensor import DTensor

from lockstep.backend.deepspeed.config import read_config, resolve_ds_config, wanted_precision
from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ConfigError, ParallelConfig
from lockstep.parallel.group import ProcessGroup
from lockstep.types import LossSpec, OptimStep

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")

# Otherwise DeepSpeed keeps parameters as small as these whole, and stage 3 would not be seen.
SPLIT_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
STAGES = (1, 2, 3)
Whole = dict[str, torch.Tensor]


def make_backend(family: str, group: ProcessGroup, *, lora: bool = False, scale: float = 1.0, **settings: Any) -> Any:
    """`scale` makes a model whose trained weights are others than those of a checkpoint."""
    from lockstep.backend.deepspeed.backend import DeepSpeedBackend

    model = make_model(family, lora=lora)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.requires_grad else 1.0)
    settings = {"ds_config": SPLIT_ALL, "precision": "fp32", "micro_batch_tokens": 64, **settings}
    return DeepSpeedBackend(model, group=group, **settings)


def make_torch_backend(family: str, group: ProcessGroup, *, lora: bool = False) -> TorchBackend:
    return TorchBackend(make_model(family, lora=lora), precision="fp32", micro_batch_tokens=64, group=group)


def make_step(backend: Any, seed: int, step: OptimStep = STEP, scale: float | None = None) -> float:
    batch = make_batch(seed)
    backend.forward_backward(batch, LossSpec(scale=scale or scale_of(batch)))
    return backend.optim_step(step).grad_norm


def weights_of(backend: Any) -> Whole:
    if isinstance(backend, TorchBackend):
        found = {name: p.detach() for name, p in backend.parameters().items()}
        return {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in found.items()}
    return {name: backend.pieces.get(p).clone() for name, p in backend.parameters().items()}


def computing_weights_of(backend: Any) -> Whole:
    """What the passes read, which is not what the optimizer holds."""
    found = {}
    for name, parameter in backend.parameters().items():
        with backend.pieces.gathered([parameter]):
            found[name] = parameter.detach().clone()
    return found


# --- bodies of processes: each returns what rank 0 writes -------------------------------------------------------------


def resume(group: ProcessGroup, folder: Path, stage: int, precision: str = "fp32", **settings: Any) -> dict[str, Any]:
    settings = {"zero_stage": stage, "precision": precision, **settings}
    first = make_backend("qwen3", group, **settings)
    make_step(first, 0)
    first.save_state(folder / "state").result()
    group.barrier()
    saved = computing_weights_of(first)
    make_step(first, 1)
    second = make_backend("qwen3", group, scale=1.5, **settings)
    second.load_state(folder / "state", with_optimizer=True)
    loaded = computing_weights_of(second)
    make_step(second, 1)
    third = make_backend("qwen3", group, scale=1.5, **settings)
    third.load_state(folder / "state", with_optimizer=False)
    return {
        "saved": saved,
        "loaded": loaded,
        "loaded alone": computing_weights_of(third),
        "went on": weights_of(first),
        "resumed": weights_of(second),
    }


def move(group: ProcessGroup, folder: Path, stage: int) -> dict[str, Any]:
    """A checkpoint of DeepSpeed read by torch, and the other way round; LoRA."""
    ours, torchs = (
        make_backend("llama", group, lora=True, zero_stage=stage),
        make_torch_backend("llama", group, lora=True),
    )
    for name, backend in {"deepspeed": ours, "torch": torchs}.items():
        make_step(backend, 0)
        backend.save_state(folder / name).result()
        group.barrier()
    from_ours = make_torch_backend("llama", group, lora=True)
    from_ours.load_state(folder / "deepspeed")
    from_torchs = make_backend("llama", group, lora=True, zero_stage=stage, scale=1.5)
    from_torchs.load_state(folder / "torch")
    for backend in (ours, torchs, from_ours, from_torchs):
        make_step(backend, 1)
    found = {"stayed": ours, "stayed in torch": torchs, "to torch": from_ours, "from torch": from_torchs}
    return {name: weights_of(backend) for name, backend in found.items()}


def export(group: ProcessGroup, folder: Path, stage: int) -> dict[str, Any]:
    found = {}
    for lora in (False, True):
        backend = make_backend("qwen3", group, lora=lora, zero_stage=stage)
        make_step(backend, 0)
        make_step(backend, 1)
        backend.export_weights(folder / ("adapter" if lora else "model"))
        found["adapter" if lora else "model"] = weights_of(backend)
    return found


def skip(group: ProcessGroup, folder: Path, stage: int, **settings: Any) -> dict[str, Any]:
    backend = make_backend("llama", group, zero_stage=stage, **settings)
    make_step(backend, 0)
    before = weights_of(backend)
    broken = make_step(backend, 1, scale=math.inf)
    after = weights_of(backend)
    norm = make_step(backend, 1)
    return {"before": before, "after": after, "broken": broken, "norm": norm, "end": weights_of(backend)}


def begin_narrow(group: ProcessGroup, folder: Path, stage: int, precision: str = "bf16") -> dict[str, Any]:
    backend = make_backend("llama", group, zero_stage=stage, precision=precision)
    found: dict[str, Any] = {"held": weights_of(backend), "computing": computing_weights_of(backend)}
    batch = make_batch(0)
    found["loss"] = backend.forward_backward(batch, LossSpec(scale=scale_of(batch))).loss
    results = [backend.optim_step(STEP)]
    while not results[-1].applied and len(results) < 40:  # fp16 begins with a scale that is too large
        backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
        results.append(backend.optim_step(STEP))
    return {**found, "norm": results[-1].grad_norm, "scales": [result.loss_scale for result in results]}


def small_batch(group: ProcessGroup, folder: Path, stage: int) -> dict[str, Any]:
    """One row for two ranks, no clipping to hide a factor: one of them has nothing to compute."""
    backend = make_backend("qwen3", group, zero_stage=stage)
    batch = make_batch(2, rows=1)
    loss = backend.forward_backward(batch, LossSpec(scale=scale_of(batch))).loss
    return {"loss": loss, "norm": backend.optim_step(STEP).grad_norm, "nothing": backend.optim_step(STEP).grad_norm}


def lend(group: ProcessGroup, folder: Path, stage: int) -> dict[str, Any]:
    backend = make_backend("llama", group, zero_stage=stage)
    make_step(backend, 0)
    prompt = torch.tensor([[5, 6, 7, 8]])
    with backend.lend_model() as model:
        answer = model.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist()
    norm = make_step(backend, 1)
    return {"answer": answer, "norm": norm, "weights": weights_of(backend)}


BODIES: dict[str, Callable[..., dict[str, Any]]] = {
    **{f"resume-{s}": functools.partial(resume, stage=s) for s in STAGES},
    **{f"resume-{s}-bf16": functools.partial(resume, stage=s, precision="bf16") for s in STAGES},
    **{f"resume-{s}-offload": functools.partial(resume, stage=s, offload=True) for s in STAGES},
    **{f"move-{s}": functools.partial(move, stage=s) for s in STAGES},
    **{f"export-{s}": functools.partial(export, stage=s) for s in STAGES},
    **{f"skip-{s}": functools.partial(skip, stage=s) for s in STAGES},
    **{f"skip-{s}-bf16": functools.partial(skip, stage=s, precision="bf16") for s in STAGES},
    **{f"skip-{s}-fp16": functools.partial(skip, stage=s, precision="fp16") for s in STAGES},
    **{f"begin-{s}": functools.partial(begin_narrow, stage=s) for s in STAGES},
    **{f"begin-{s}-fp16": functools.partial(begin_narrow, stage=s, precision="fp16") for s in STAGES},
    **{f"small-{s}": functools.partial(small_batch, stage=s) for s in STAGES},
    **{f"lend-{s}": functools.partial(lend, stage=s) for s in STAGES},
}


# Started together, in half a minute; the others are slow.
QUICK = {"resume-1", "resume-3", "export-3", "skip-2", "small-1", "small-2", "lend-2"}


def run_bodies(names: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    group = join_group("cpu", ParallelConfig(), timeout_s=60)
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        group.barrier()
        with torch.backends.mkldnn.flags(enabled=False):  # CPUs that show AMX but forbid it die in its bf16 products
            found = BODIES[name](group, folder / name)
        if group.rank == 0:
            torch.save(found, folder / name / "found.pt")
    group.leave()


def has_fp16() -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_fp16_supported())


class Found:
    """What the bodies found, made by two processes when first asked for; each body has a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting = set(BODIES)

    def __call__(self, name: str) -> dict[str, Any]:
        if name.endswith("-fp16") and not has_fp16():
            pytest.skip("DeepSpeed has no fp16 on this CPU")
        if name in self._waiting:
            names = [other for other in BODIES if (other in QUICK) == (name in QUICK)]
            names = [other for other in names if not other.endswith("-fp16") or has_fp16()]
            self._waiting -= set(names)
            spawn(2, run_bodies, names, self.folder)
        return torch.load(self.folder / name / "found.pt", weights_only=False)


@pytest.fixture(scope="module")
def found_in(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("deepspeed"))


def assert_close(found: Whole, expected: Whole, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float((found[name].detach() - tensor).abs().max()) <= tolerance, name


def assert_equal(found: Whole, expected: Whole) -> None:
    assert_close(found, expected, 0.0)


def stages(body: str, *kinds: str) -> Any:
    """A case for each stage and kind ("bf16", "offload") of a body; slow ones are marked."""
    names = [f"{body}-{stage}{kind}" for kind in ("", *(f"-{kind}" for kind in kinds)) for stage in STAGES]
    return pytest.mark.parametrize(
        "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]
    )


@stages("resume", "bf16", "offload")
def test_a_resumed_run_goes_on_bit_for_bit(found_in: Found, name: str) -> None:
    found = found_in(name)
    assert_equal(found["loaded"], found["saved"])
    assert_equal(found["loaded alone"], found["saved"])
    assert_equal(found["resumed"], found["went on"])
    with pytest.raises(AssertionError):  # the step after the checkpoint is one that can be seen
        assert_equal(found["resumed"], found["saved"])


@stages("move")
def test_a_run_moves_between_deepspeed_and_torch(found_in: Found, name: str) -> None:
    found = found_in(name)
    assert_close(found["to torch"], found["stayed"], 1e-5)
    assert_close(found["from torch"], found["stayed in torch"], 1e-5)


@stages("export")
def test_an_export_is_what_one_process_trains(found_in: Found, name: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    found = found_in(name)
    exported = AutoModelForCausalLM.from_pretrained(found_in.folder / name / "model", dtype=torch.float32)
    assert exported.lm_head.weight is exported.model.embed_tokens.weight  # still tied
    plain = plain_run("qwen3", lora=False, batches=[make_batch(0), make_batch(1)])["weights"]
    assert_equal(dict(exported.named_parameters()), found["model"])
    assert_close(dict(exported.named_parameters()), plain, 1e-5)
    adapted = PeftModel.from_pretrained(
        make_model("qwen3", lora=False).float(), found_in.folder / name / "adapter", is_trainable=True
    )
    assert_equal({n: p for n, p in adapted.named_parameters() if p.requires_grad}, found["adapter"])


@stages("skip", "bf16", "fp16")
def test_a_step_whose_norm_is_not_finite_is_not_applied(found_in: Found, name: str) -> None:
    found = found_in(name)
    assert not math.isfinite(found["broken"])
    assert_equal(found["after"], found["before"])
    assert math.isfinite(found["norm"])
    if not name.endswith(("bf16", "fp16")):  # it left nothing behind either
        plain = plain_run("llama", lora=False, batches=[make_batch(0), make_batch(1)])
        assert_close(found["end"], plain["weights"], 1e-5)


@stages("begin", "fp16")
def test_narrow_training_begins_with_the_weights_the_model_had(found_in: Found, name: str) -> None:
    found = found_in(name)
    narrow = torch.float16 if name.endswith("fp16") else torch.bfloat16
    weights = {name: p.detach().float() for name, p in make_model("llama", lora=False).named_parameters()}
    assert_equal(found["held"], weights)
    assert_equal(found["computing"], {name: p.to(narrow) for name, p in weights.items()})
    plain = plain_run("llama", lora=False, batches=[make_batch(0)])
    assert found["loss"] == pytest.approx(plain["loss"], rel=0.01)
    assert found["norm"] == pytest.approx(plain["norm"], rel=0.02)
    assert (found["scales"][-1] is not None) == (narrow == torch.float16)


@stages("small")
def test_a_rank_without_a_row_adds_nothing(found_in: Found, name: str) -> None:
    found = found_in(name)
    plain = plain_run("qwen3", lora=False, batches=[make_batch(2, rows=1)])
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert found["norm"] == pytest.approx(plain["norm"], rel=1e-5)
    assert found["nothing"] == 0.0


@stages("lend")
def test_a_lent_model_answers_and_training_goes_on(found_in: Found, name: str) -> None:
    found = found_in(name)
    model = make_model("llama", lora=False)
    trained = plain_run("llama", lora=False, batches=[make_batch(0)])["weights"]
    model.load_state_dict(trained, strict=False)
    model.eval()
    expected = model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8, do_sample=False)[0].tolist()
    assert found["answer"] == expected
    end = plain_run("llama", lora=False, batches=[make_batch(0), make_batch(1)])["weights"]
    assert_close(found["weights"], end, 1e-5)


# --- ds_config.json ---------------------------------------------------------------------------------------------------


def test_an_existing_file_is_taken_for_what_it_can_express(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(
        """{
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0, "bf16": {"enabled": "auto"}, "fp16": {"enabled": false},
        "optimizer": "auto", "scheduler": "auto", "wall_clock_breakdown": false,
        "activation_checkpointing": {"profile": false, "cpu_checkpointing": false},
        "zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": "auto",
                              "offload_optimizer": {"device": "cpu", "pin_memory": true}}
        }"""
    )
    settled = resolve_ds_config(read_config(file), precision="bf16", max_grad_norm=1.0)
    assert settled["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert settled["bf16"] == {"enabled": True}
    assert settled["wall_clock_breakdown"] is False
    assert settled["managed_gradient_accumulation"] is False
    assert "optimizer" not in settled
    assert "gradient_clipping" not in settled


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"train_batch_size": 8}, "train_batch_size.*batch.samples"),
        ({"train_micro_batch_size_per_gpu": 8}, "batch.micro_batch_tokens"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"optimizer": {"type": "Adam"}}, "optim"),
        ({"scheduler": {"type": "WarmupLR"}}, "optim.schedule"),
        ({"gradient_clipping": 0.5}, "gradient_clipping 0.5, but optim.max_grad_norm is 1.0"),
        ({"gradient_clipping": 0.0}, "gradient_clipping 0.0, but optim.max_grad_norm is 1.0"),
        ({"prescale_gradients": True}, "sums gradients"),
        ({"tensor_parallel": {"autotp_size": 2}}, "parallel.backend torch"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is true, but model.precision is fp32"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true"),
        ({"zero_optimization": {"stage": 0}}, "stage 0"),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, "overlap_comm"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs stage 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "nvme"),
        ({"activation_checkpointing": {"partition_activations": True}}, "model.activation_checkpointing"),
    ],
)
def test_what_lockstep_decides_is_refused_with_where_to_set_it(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve_ds_config(given, max_grad_norm=1.0)


def test_the_parallel_section_and_the_file_must_agree() -> None:
    assert resolve_ds_config({})["zero_optimization"] == {"stage": 3}
    assert resolve_ds_config({"zero_optimization": {"stage": 1}}, stage=1)["zero_optimization"]["stage"] == 1
    with pytest.raises(ConfigError, match="zero_stage 2"):
        resolve_ds_config({"zero_optimization": {"stage": 1}}, stage=2)
    both = resolve_ds_config({"zero_optimization": {"offload_optimizer": {"pin_memory": True}}}, offload=True)
    assert both["zero_optimization"]["offload_optimizer"] == {"pin_memory": True, "device": "cpu"}
    assert both["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert "offload_param" not in resolve_ds_config({}, stage=2, offload=True)["zero_optimization"]
    assert resolve_ds_config({"gradient_clipping": 0.0}, max_grad_norm=None)  # DeepSpeed's "no clipping"


def test_the_file_decides_a_precision_that_is_left_open() -> None:
    assert wanted_precision({"bf16": {"enabled": True}}, "auto") == "bf16"
    assert wanted_precision({"bf16": {"enabled": "auto"}}, "auto") == "auto"
    assert wanted_precision({"bf16": {"enabled": True}}, "fp32") == "fp32"
    with pytest.raises(ConfigError, match="fp64"):
        resolve_ds_config({}, precision="fp64")


@pytest.mark.parametrize(("content", "told"), [("{", "not JSON"), ("[1]", "list"), (None, "No such file")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: str | None, told: str) -> None:
    file = tmp_path / "ds_config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"ds_config.json.*{told}"):
        read_config(file)
