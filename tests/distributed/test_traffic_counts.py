"""Bytes on real gloo processes: a known sequence to the byte, every layout's step against theory and against torch's
own dispatcher, which sees whatever is sent."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equivalence.layouts import batches, spawn
from equivalence.mixtures import FAMILIES
from equivalence.plain import STEP, make_model, scale_of
from equivalence.simulated import Case, build, simulate_ranks
from tiny import run_lockstep, write_config, write_model
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig, resolve_config
from lockstep.model.policy import causal_lm
from lockstep.parallel.traffic import Traffic, sent_share
from lockstep.plan.description import ModelDescription
from lockstep.plan.memory import persistent_bytes
from lockstep.plan.trace import describe_model
from lockstep.plan.work import RankLayout
from lockstep.types import LossSpec
from lockstep.verification.assumed_routing import assume_choices

Found = dict[str, Any]
LAYOUTS = {
    "ddp": (2, ParallelConfig(replicate=2, shard=1)),
    "fsdp": (2, ParallelConfig(shard=2)),
    "grad_op": (2, ParallelConfig(shard="grad_op")),
    "tensor": (2, ParallelConfig(tensor=2)),
    "sequence": (2, ParallelConfig(tensor=2)),  # with norms on a part of the tokens
    "context": (2, ParallelConfig(context=2)),
    "pipeline": (2, ParallelConfig(pipeline=2)),
    "experts": (2, ParallelConfig(shard=2, expert=2)),
    "hybrid": (4, ParallelConfig(replicate=2, shard=2)),
    "hybrid_grad_op": (4, ParallelConfig(replicate=2, shard=2, keep_parameters=True)),
}
DENSE = [("llama", False), ("qwen3", True)]
MODELS = {layout: DENSE if layout != "experts" else [("mixtral", False)] for layout in LAYOUTS}
CELLS = [(layout, family) for layout, models in MODELS.items() for family, _ in models]
SMALL = 256  # bytes of norms and losses in a step, which theory leaves out


class DispatcherCount(TorchDispatchMode):
    """Calls of each c10d operator, whoever makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.num_calls[func.name().removeprefix("c10d::").removesuffix("_")] += 1
        return func(*args, **(kwargs or {}))


class Allocations(TorchDispatchMode):
    """The most bytes of floating-point tensors alive at once, beside those that are known before."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._seen = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._live += storage.nbytes()
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._live -= size


# What the dispatcher calls our kinds.
OPERATORS = {
    "all_reduce": {"allreduce"},
    "all_gather": {"_allgather_base", "allgather", "allgather_into_tensor_coalesced"},
    "reduce_scatter": {"_reduce_scatter_base", "reduce_scatter"},
    "all_to_all": {"alltoall_base", "alltoall"},
    "broadcast": {"broadcast"},
    "send": {"send"},
}


def _layouts_of(num_ranks: int, out: Path) -> None:
    """One after the other in the same processes: starting them takes longest."""
    torch.set_num_threads(1)
    found: Found = {}
    for name, (size, parallel) in LAYOUTS.items():
        if size == num_ranks:
            group = join_group("cpu", parallel, timeout_s=60)
            # One token too many fills the pieces of an odd micro-batch: in a large one that is little.
            plan, budget = ("-sequence", 512) if name == "sequence" else ("", 96)
            found[name] = {
                family: _measure_step(family + plan, lora, budget, parallel, group) for family, lora in MODELS[name]
            }
    if num_ranks == 2:
        found["slow rank"] = _measure_slow_rank()
    everybody = group.gather_objects(found)
    if group.rank == 0:
        torch.save(everybody, out)
    group.leave()


def _measure_step(family: str, lora: bool, budget: int, parallel: ParallelConfig, group: Any) -> Found:
    model = build(Case(family, lora, budget))
    precision = precision_of(family)
    backend = TorchBackend(model, micro_batch_tokens=budget, precision=precision, group=group, parallel=parallel)
    assume_choices(model)
    batch, loss = batches()[0], LossSpec(scale=scale_of(batches()[0]))
    stepped: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
    for _ in range(2):  # DDP sends its buckets' order around in the first step
        backend.forward_backward(batch, loss)
        backend.optim_step(STEP)
    with DispatcherCount() as seen:
        result, counts = backend.forward_backward(batch, loss), backend.traffic.current
        backend.optim_step(STEP)
    peak = _peak_bytes(backend, stepped[-1], lambda: (backend.forward_backward(batch, loss), backend.optim_step(STEP)))
    backend.forward_backward(batch, loss)  # of the next step: not counted to this one
    hook.remove()
    return {
        "held": _held_bytes(backend, stepped[-1]),
        "peak": peak,
        "place": _place(group),
        "metrics": result.metrics,
        "calls": dict(counts.num_calls),
        "seen": dict(seen.num_calls),
    }


def precision_of(family: str) -> str:
    """Grouped products of experts are described in bf16."""
    return "bf16" if family in FAMILIES else "fp64"


def _held_bytes(backend: TorchBackend, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Of this rank, between backward and the optimizer's step."""

    def size(tensors: Any) -> int:
        whole = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in whole)

    parameters = {id(p): p for p in backend.policy.parameters()}.values()
    states = [s for state in optimizer.state.values() for name, s in state.items() if name != "step"]
    gradients = size(p.grad for p in parameters)
    return {"weights": size(parameters), "gradients": gradients, "optimizer": size(states)}


def _peak_bytes(backend: TorchBackend, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> int:
    """Of every tensor of this rank in a step."""
    gc.collect()
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [*backend.policy.parameters(), *backend.policy.buffers(), *states]
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in held if isinstance(t, torch.Tensor)]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    with Allocations(tensors) as counted:
        step()
    return sum(sizes.values()) + counted.peak


def _place(group: Any) -> dict[str, int]:
    """Of this rank on the axes that split parameters."""
    places = {axis: group.place(axis) for axis in ("pipeline", "tensor", "shard", "context")}
    shards = places["shard"] * group.degrees.context + places["context"]
    return {"stage": places["pipeline"], "tensor": places["tensor"], "place": shards}


def flows(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    """axis/kind -> bytes."""
    return {name.removeprefix(prefix): count for name, count in metrics.items() if name.startswith(prefix)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank found: layout -> rank -> model -> what came of a step."""
    found: dict[str, list[Any]] = {}
    for num_ranks in sorted({size for size, _ in LAYOUTS.values()}):
        out = tmp_path_factory.mktemp("traffic") / "found.pt"
        spawn(num_ranks, _layouts_of, num_ranks, out)
        everybody: list[Found] = torch.load(out, weights_only=False)
        found |= {name: [rank[name] for rank in everybody] for name in everybody[0]}
    return found


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelDescription]:
    """Each model as a plan knows it, from its configuration alone."""
    found = {}
    for family, lora in {model for models in MODELS.values() for model in models}:
        folder = tmp_path_factory.mktemp("described")
        causal_lm(build(Case(family, lora, 96))).config.save_pretrained(folder)
        tree: dict[str, Any] = {"model": {"path": str(folder)}, "data": {"train": ["rows"]}}
        tree |= {"lora": {"rank": 4, "alpha": 8}} if lora else {}
        found[family] = describe_model(resolve_config(tree), precision_of(family), compiled=False)
    return found


every_cell = pytest.mark.parametrize(("layout", "family"), CELLS)


# Rows to experts depend on how many tokens each rank has: equivalence/test_simulated_traffic.py counts them.
@pytest.mark.parametrize(("layout", "family"), [cell for cell in CELLS if cell[0] != "experts"])
def test_a_step_sends_what_theory_says(ranks: dict[str, list[Any]], layout: str, family: str) -> None:
    for metrics in (rank[family]["metrics"] for rank in ranks[layout]):
        sent, least = flows(metrics, "traffic/"), flows(metrics, "traffic_least/")
        assert least
        for place, count in least.items():
            assert count <= sent[place] <= count * 1.01 + SMALL, place
        assert sum(count for place, count in sent.items() if place not in least) <= SMALL, sent


@pytest.mark.parametrize("layout", ["hybrid", "tensor"])
def test_a_simulated_rank_sends_what_a_real_one_does(ranks: dict[str, list[Any]], layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    (said,) = simulate_ranks(Case("qwen3", lora=True, budget=96), num_ranks, parallel, ranks=(0,))
    found = ranks[layout][0]["qwen3"]
    assert {f"{axis}/{kind}": sent for (axis, kind), sent in said.sent.items()} == flows(found["metrics"], "traffic/")
    assert said.calls == found["calls"]
    if layout == "tensor":  # of FSDP2 storages are filled past the dispatcher, where nobody counts a real rank
        assert sum(said.peak_bytes.values()) == pytest.approx(found["peak"], rel=0.05)


@every_cell
def test_a_plan_counts_what_ranks_hold(
    ranks: dict[str, list[Any]], described: dict[str, ModelDescription], layout: str, family: str
) -> None:
    """Weights, gradients and the optimizer's moments of every rank, to the byte."""
    num_ranks, parallel = LAYOUTS[layout]
    planned = RankLayout(parallel.degrees(num_ranks))
    for rank in ranks[layout]:
        found = rank[family]
        assert persistent_bytes(described[family], planned, **found["place"]) == found["held"], found["place"]


@every_cell
def test_no_collective_goes_unseen(ranks: dict[str, list[Any]], layout: str, family: str) -> None:
    for found in (rank[family] for rank in ranks[layout]):
        ours: dict[str, int] = defaultdict(int)
        for (_, kind), calls in found["calls"].items():
            ours[kind] += calls
        for kind, names in OPERATORS.items():
            assert ours[kind] == sum(found["seen"].get(name, 0) for name in names), kind
        known = {"recv", "recv_any_source", "barrier"}.union(*OPERATORS.values())
        assert found["seen"].keys() <= known, "an operator that nobody counts"


@every_cell
def test_ranks_agree_on_time_memory_and_balance(ranks: dict[str, list[Any]], layout: str, family: str) -> None:
    keys = ("compute_s", "wait_s", "memory_gib_max", "straggler", "token_balance")
    told = [{key: rank[family]["metrics"].get(key) for key in keys} for rank in ranks[layout]]
    assert all(tells == told[0] for tells in told)
    assert told[0]["compute_s"] > 0
    assert told[0]["wait_s"] > 0
    assert told[0]["memory_gib_max"] > 0
    assert (told[0]["token_balance"] is not None) == (LAYOUTS[layout][1].degrees(LAYOUTS[layout][0]).data > 1)


def _measure_slow_rank() -> dict[str, float]:
    """Rank 1 takes its time in forward: it computes longer, and the other waits for its gradients."""
    parallel = ParallelConfig(replicate=2, shard=1)
    group = join_group("cpu", parallel, timeout_s=60)
    model = make_model("llama", lora=False)
    backend = TorchBackend(model, micro_batch_tokens=512, precision="fp64", group=group, parallel=parallel)
    if group.rank == 1:
        model.model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(1.0))
    batch = batches()[0]
    return backend.forward_backward(batch, LossSpec(scale=scale_of(batch))).metrics


def test_a_slow_rank_is_named_and_the_others_wait(ranks: dict[str, list[Any]]) -> None:
    metrics = ranks["slow rank"][0]
    assert metrics["straggler"] == 1
    assert metrics["straggler_compute_s"] >= 1.0
    # Rank 0 waits about as long as rank 1 sleeps; the mean over both is half of that.
    assert metrics["wait_s"] >= 0.3


# --- a known sequence -----------------------------------------------------------------------------------------------


def _sequence_body(out: Path) -> None:
    torch.set_num_threads(1)
    group = join_group("cpu", ParallelConfig(replicate=2, shard=2), timeout_s=60)
    assert group.mesh is not None
    shard, replicate = group.mesh.get_group("shard"), group.mesh.get_group("replicate")
    traffic = Traffic(group)
    own = vars(dist.ProcessGroup)["allreduce"]
    ten, twenty = torch.ones(10, dtype=torch.float64), torch.ones(20, dtype=torch.float64)
    dist.all_reduce(ten, group=shard)  # before: not counted
    with traffic.counting():
        dist.all_reduce(ten, group=shard)
        dist.all_reduce(ten, group=replicate)
        work = dist.all_reduce(ten, group=replicate, async_op=True)
        work.wait()
        dist.all_gather_into_tensor(twenty, ten, group=shard)
        dist.all_gather([torch.empty_like(ten) for _ in range(2)], ten, group=replicate)
        dist.reduce_scatter_tensor(ten, twenty, group=shard)
        dist.all_to_all_single(torch.empty_like(twenty), twenty, group=shard)
        dist.broadcast(ten, group=shard, group_src=0)
        dist.all_reduce(ten)
        if group.place("shard") == 0:
            dist.send(ten, group=shard, group_dst=1)
        else:
            dist.recv(ten, group=shard, group_src=0)
        dist.all_reduce(ten, group=group.background)  # a checkpoint's, not the step's
    dist.all_reduce(ten, group=shard)  # after: not counted
    restored = vars(dist.ProcessGroup)["allreduce"] is own
    everybody = group.gather_objects((dict(traffic.end_step().sent_bytes), restored))
    if group.rank == 0:
        torch.save(everybody, out)
    group.leave()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_known_sequence_is_counted_to_the_byte(tmp_path: Path) -> None:
    spawn(4, _sequence_body, tmp_path / "found.pt")
    for rank, (sent, restored) in enumerate(torch.load(tmp_path / "found.pt", weights_only=False)):
        assert restored
        expected = {
            ("shard", "all_reduce"): 80.0,
            ("replicate", "all_reduce"): 160.0,
            ("shard", "all_gather"): 80.0,
            ("replicate", "all_gather"): 80.0,
            ("shard", "reduce_scatter"): 80.0,
            ("shard", "all_to_all"): 80.0,
            ("shard", "broadcast"): 40.0,
            ("world", "all_reduce"): 80 * sent_share("all_reduce", 4),
        }
        assert sent == expected | ({("shard", "send"): 80.0} if rank % 2 == 0 else {})


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scale_compares_sizes_of_real_runs(tmp_path: Path) -> None:
    config = write_config(tmp_path, write_model(tmp_path / "model"), parallel={"shard": "auto"})
    code, out, err = run_lockstep(
        "scale", config, "--procs", "1,2", "--steps", "3", "--out", tmp_path / "out", "--json"
    )
    assert code == 0, err
    one, two = json.loads(out)["sizes"]
    assert (one["procs"], one["efficiency"], one["flows"], one["layout"]) == (1, 1.0, [], "one rank")
    assert two["layout"] == "shard 2"
    assert two["balance"] >= 1.0
    assert two["wait_s"] > 0
    flows = {(flow["axis"], flow["kind"]): flow for flow in two["flows"]}
    for kind in ("all_gather", "reduce_scatter"):
        flow = flows["shard", kind]
        assert flow["least_bytes"] <= flow["sent_bytes"] <= 1.01 * flow["least_bytes"] + SMALL
    assert (tmp_path / "out" / "scaling.png").exists()
    assert "shard 2" in (tmp_path / "out" / "scaling.html").read_text()
    assert not list((tmp_path / "out").glob("procs-*/checkpoints/step-*"))
