"""FSDP2 over NCCL on one GPU, with compiled and recomputed layers: the plain path's step, within bf16's rounding.

The bound: a gradient's distance from float64's may be at most 1.5 times that of plain transformers in bf16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import Degrees, ParallelConfig
from lockstep.config.parallel import AXES
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Completion, Datum, LossSpec, OptimStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"compile": False},
    "compiled": {"compile": True},
    "recomputed": {"compile": False, "activation_checkpointing": "full"},
    "selective": {"compile": False, "activation_checkpointing": "selective"},
    "offloaded": {"compile": False, "activation_offload": True},
    "compiled and recomputed": {"compile": True, "activation_checkpointing": "full"},
}


class OneSharded(Degrees):
    """One rank that shards all the same, so that FSDP2's own path is taken."""

    @property
    def sharded(self) -> bool:
        return True


@pytest.fixture(scope="module")
def group() -> Iterator[ProcessGroup]:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    mesh = init_device_mesh("cuda", (1,) * len(AXES), mesh_dim_names=AXES)
    yield ProcessGroup(0, 1, torch.device("cuda", 0), OneSharded(), mesh, dist.new_group(backend="gloo"))
    dist.destroy_process_group()


def make_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    # Drawn in float32 whatever is asked for: other dtypes draw other weights.
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to("cuda", dtype)


def make_batch() -> list[Datum]:
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(4096, (count,), generator=generator).tolist()

    return [Datum(draw(9), [Completion(draw(20 + 7 * i), [1.0] * (20 + 7 * i))], f"row {i}") for i in range(12)]


def plain_gradients(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One document at a time through transformers alone; bf16 computes from float32 weights, as ours does."""
    model = make_model(torch.float64 if dtype == torch.float64 else torch.float32)
    batch = make_batch()
    scale = 1 / sum(d.total_weight for d in batch)
    for datum in batch:
        tokens = torch.tensor([*datum.prompt, *datum.completions[0].tokens], device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        every = torch.log_softmax(logits.double(), -1)[:-1].gather(1, tokens[1:, None])[:, 0]
        (-scale * every[len(datum.prompt) - 1 :].sum()).backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    square = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return (square / sum(float(g.square().sum()) for g in exact.values())) ** 0.5


@pytest.mark.parametrize("way", WAYS)
def test_fsdp_on_one_gpu_makes_the_plain_step(
    way: str, group: ProcessGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, model = make_batch(), make_model()
    parallel = ParallelConfig(keep_parameters=way == "plain")
    backend = TorchBackend(model, micro_batch_tokens=256, precision="bf16", group=group, parallel=parallel, **WAYS[way])
    assert all(isinstance(p, DTensor) for p in backend.parameters().values())
    loss = backend.forward_backward(batch, LossSpec(scale=1 / sum(d.total_weight for d in batch))).loss
    found = {name: p.grad.full_tensor().double() for name, p in backend.parameters().items()}
    exact, narrow = plain_gradients(torch.float64), plain_gradients(torch.bfloat16)
    ours, theirs = distance(found, exact), distance(narrow, exact)
    with capsys.disabled():
        print(f"\n{way}: loss {loss:.4f}, gradient {ours:.3e} from float64 (plain transformers in bf16: {theirs:.3e})")
    assert ours <= 1.5 * theirs
    assert backend.optim_step(OptimStep(learning_rate=1e-3, max_grad_norm=1.0)).applied
