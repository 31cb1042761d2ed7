"""What is exported from a layout is bit for bit what its ranks hold, every tensor of it, and plain tools load it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks  # starts the server that processes are forked from
import tiny
import torch
from equivalence.plain import STEP, make_batch, scale_of
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from lockstep.backend import state
from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import LoraConfig, ParallelConfig
from lockstep.model.lora import add_lora
from lockstep.parallel.group import ProcessGroup
from lockstep.types import LossSpec

LAYOUTS = {
    "pipeline-2": (2, ParallelConfig(pipeline=2)),
    "tensor-2": (2, ParallelConfig(tensor=2)),
    "pipeline-2-interleaved": (2, ParallelConfig(pipeline=2, schedule="interleaved")),
    "fsdp-2": (2, ParallelConfig(shard=2)),
    "context-2": (2, ParallelConfig(context=2)),
    "ddp-2": (2, ParallelConfig(replicate=2, shard=1)),
    "shard-2-tensor-2": (4, ParallelConfig(shard=2, tensor=2)),
    "shard-2-pipeline-2": (4, ParallelConfig(shard=2, pipeline=2)),
    "tensor-2-pipeline-2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "replicate-2-tensor-2": (4, ParallelConfig(replicate=2, shard=1, tensor=2)),
    "hybrid-2x2": (4, ParallelConfig(replicate=2, shard=2)),
}
QUICK = ("pipeline-2-interleaved", "tensor-2", "shard-2-pipeline-2")
KINDS = ("full", "tied", "lora")
# An odd vocabulary: the parts of embedding and head are not equal.
SHAPE: dict[str, Any] = {"vocab_size": 289, "num_hidden_layers": 4}
TOKENS = torch.tensor([[1, 40, 41, 42, 50, 60, 2, 70, 80, 90]])


def base_folder(folder: Path, kind: str) -> Path:
    return folder / ("base-tied" if kind == "tied" else "base")


def load_base(folder: Path, kind: str) -> Any:
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not found["missing_keys"], "nothing may be made up"
    assert not found["unexpected_keys"]
    return model


def make_model(folder: Path, kind: str) -> Any:
    model = load_base(base_folder(folder, kind), kind)
    torch.manual_seed(0)
    return add_lora(model, LoraConfig(rank=4, alpha=8)).double() if kind == "lora" else model


def train_and_export(folder: Path, out: Path, parallel: ParallelConfig) -> None:
    """The body of each process: for each kind two steps, an export, and everything that this rank holds."""
    torch.set_num_threads(1)
    group = join_group("cpu", parallel, timeout_s=60)
    held = {}
    for kind in KINDS:
        model = make_model(folder, kind)
        names = list(model.state_dict())
        backend = TorchBackend(model, precision="fp64", group=group, parallel=parallel, micro_batch_tokens=96)
        for batch in (make_batch(0), make_batch(1, rows=5)):
            backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
            backend.optim_step(STEP)
        backend.export_weights(out / kind)
        gathered = list(state.gather(backend.policy.model, group))
        assert gathered == (names if group.rank == 0 else []), "in the model's own order, on rank 0"
        held[kind] = everything(backend.policy.model, group)
    if group.rank == 0:
        torch.save(held, out / "held.pt")
    group.leave()


def everything(model: Any, group: ProcessGroup) -> dict[str, torch.Tensor]:
    """Every tensor that any rank holds, whole; what several ranks hold must be the same."""
    mine = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
    found: dict[str, torch.Tensor] = {}
    for part in group.gather_objects({name: tensor.clone() for name, tensor in mine.items()}):
        for name, tensor in part.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), f"ranks disagree about {name}"
    return found


def start(num_ranks: int, body: Callable[..., None], *arguments: Any) -> None:
    torch.multiprocessing.start_processes(
        _enter, (num_ranks, ranks.free_port(), body, arguments), nprocs=num_ranks, start_method="forkserver"
    )


def _enter(rank: int, num_ranks: int, port: int, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    body(*arguments)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for kind in ("full", "tied"):
        tiny.write_model(base_folder(folder, kind), **SHAPE, tie_word_embeddings=kind == "tied")
    return folder


@pytest.fixture(scope="module")
def one(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process exports."""
    out = tmp_path_factory.mktemp("one")
    start(1, train_and_export, bases, out, ParallelConfig())
    return out


@pytest.fixture(scope="module")
def exports(request: pytest.FixtureRequest, bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    num_ranks, parallel = LAYOUTS[request.param]
    start(num_ranks, train_and_export, bases, out, parallel)
    return out


every_layout = pytest.mark.parametrize(
    "exports",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
    indirect=True,
)


def written(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def in_the_file(kind: str, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What of a model belongs into its export, under the names it has there."""
    if kind == "lora":
        return {name.replace(".default", ""): tensor for name, tensor in held.items() if "lora_" in name}
    return {name: tensor for name, tensor in held.items() if kind != "tied" or name != "lm_head.weight"}


@every_layout
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_what_the_layout_holds_and_what_one_process_exports(
    exports: Path, one: Path, bases: Path, kind: str
) -> None:
    files, held = written(exports / kind), in_the_file(kind, torch.load(exports / "held.pt")[kind])
    assert sorted(files) == sorted(held)
    for name, tensor in held.items():
        assert files[name].dtype == tensor.dtype == torch.float64
        assert torch.equal(files[name], tensor), f"{name} is not what the ranks hold"
    reference, moved = written(one / kind), 0.0
    assert sorted(files) == sorted(reference)
    for name, tensor in reference.items():
        torch.testing.assert_close(files[name], tensor, rtol=0, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")
    for name, tensor in dict(make_model(bases, kind).state_dict()).items():
        same = in_the_file(kind, {name: tensor})
        moved = max([moved, *(float((files[n] - t).abs().max()) for n, t in same.items())])
    assert moved > 1e-3, "training changed something"


@every_layout
@pytest.mark.parametrize("kind", KINDS)
def test_plain_tools_load_an_export_to_the_same_logits(exports: Path, one: Path, bases: Path, kind: str) -> None:
    found, expected = (logits_of(load(folder / kind, bases, kind)) for folder in (exports, one))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    for file in ("config.json", "generation_config.json") if kind != "lora" else ("adapter_config.json",):
        assert settings_in(exports / kind / file) == settings_in(one / kind / file)


def settings_in(file: Path) -> dict[str, Any]:
    """peft keeps target modules as a set, and writes them in any order."""
    return {
        key: sorted(value) if isinstance(value, list) else value for key, value in json.loads(file.read_text()).items()
    }


def load(folder: Path, bases: Path, kind: str) -> Any:
    if kind != "lora":
        return load_base(folder, kind)
    import peft

    return peft.PeftModel.from_pretrained(load_base(base_folder(bases, kind), kind), folder)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits
