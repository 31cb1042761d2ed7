"""Tensor parallelism by the model's own plan: module by module, in the styles that transformers names.

Parameters become DTensors, so that sharding, checkpoints and norms know the whole; modules compute with their local
part, and the collectives between them are explicit here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

Forward = Callable[[Tensor], Tensor]
# The newer name, where torch has it.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def split(modules: Mapping[str, tuple[nn.Module, str]], mesh: DeviceMesh) -> None:
    """Split every module (by name: module, style) over the ranks of `mesh`, in place. All ranks."""
    if problem := plan_problem(modules):
        raise ValueError(f"{problem}: set parallel.tensor to 1")
    done: dict[nn.Parameter, nn.Parameter] = {}
    # Sibling modules (q, k and v; gate and up) read the same input.
    readers = Counter(name.rpartition(".")[0] for name, (_, style) in modules.items() if style == "colwise")
    entrances = {parent: _Entrance(mesh, count) for parent, count in readers.items()}
    for name, (module, style) in modules.items():
        kind, _, width = style.partition(" ")
        parent = name.rpartition(".")[0]
        if style == "sequence_parallel" and parent in readers:
            raise ValueError(
                f"{name} is to be split as {style!r} beside modules that are split by columns: each rank has other "
                "columns there, and no tokens to share; split it as 'replicated_with_grad_allreduce'"
            )
        entrance = entrances.get(parent) or _Entrance(mesh, 1)
        _STYLES[kind](_Splitter(name, mesh, done, entrance, int(width or 0)), module)


def plan_problem(modules: Mapping[str, tuple[nn.Module, str]]) -> str:
    """Why modules cannot be split so, as far as the plan tells; empty: they may."""
    for name, (_, style) in modules.items():
        if style.partition(" ")[0] not in _STYLES:
            return f"{name} is to be split as {style!r}, which is unknown: known are {', '.join(_STYLES)}"
    return ""


class _Entrance:
    """Shared by modules that read the same value: its gradient is then summed over ranks once for all of them."""

    def __init__(self, mesh: DeviceMesh, num_readers: int) -> None:
        self._mesh, self._num_readers = mesh, num_readers
        self._input: Tensor | None = None
        self._entered: Tensor | None = None
        self._num_read = 0

    def enter(self, x: Tensor) -> Tensor:
        if self._num_readers == 1 or torch.compiler.is_compiling():  # compiled code must not depend on the last call
            return Enter.apply(x, self._mesh)
        if self._input is not x:
            self._input, self._entered, self._num_read = x, Enter.apply(x, self._mesh), 0
        entered = self._entered
        assert entered is not None
        self._num_read += 1
        if self._num_read == self._num_readers:
            self._input = self._entered = None  # no reader is left: do not keep it alive
        return entered


class _Splitter:
    """Splits parameters, each once, however many modules share it."""

    def __init__(
        self,
        name: str,
        mesh: DeviceMesh,
        done: dict[nn.Parameter, nn.Parameter],
        entrance: _Entrance,
        width: int = 0,
    ) -> None:
        self.name, self.mesh, self.entrance, self.width, self._done = name, mesh, entrance, width, done

    def parameter(self, module: nn.Module, key: str, dim: int, *, even: bool = True) -> None:
        old = getattr(module, key, None)
        if old is None:
            return
        size = old.shape[dim]
        if even and size % self.mesh.size():
            raise ValueError(
                f"{self.name}.{key} has {size} {'columns' if dim else 'rows'}, which do not split over "
                f"{self.mesh.size()} ranks: parallel.tensor must divide them"
            )
        if old not in self._done:
            # Every rank cuts its own part; the values come from rank 0 later.
            whole = old.detach()
            part = distribute_tensor(whole, self.mesh, [Shard(dim)], src_data_rank=None)
            self._done[old] = nn.Parameter(part, requires_grad=old.requires_grad)
        setattr(module, key, self._done[old])


# --- styles ---------------------------------------------------------------------------------------------------------


def _split_columns(splitter: _Splitter, module: nn.Module) -> None:
    """Each rank computes some of the outputs, from all of the inputs."""
    for number, linear in enumerate(_linears(splitter, module, "lora_B")):
        splitter.parameter(linear, "weight", 0)
        splitter.parameter(linear, "bias", 0)
        # Base layers share their input; each adapter's second half reads its own first half.
        linear.forward = _columns(linear, _Entrance(splitter.mesh, 1) if number else splitter.entrance)


def _split_rows(splitter: _Splitter, module: nn.Module) -> None:
    """Each rank has some of the inputs; outputs are sums over ranks."""
    for linear in _linears(splitter, module, "lora_A"):
        splitter.parameter(linear, "weight", 1)
        linear.forward = _rows(linear, splitter.mesh)


def _split_columns_and_gather(splitter: _Splitter, module: nn.Module) -> None:
    for linear in _linears(splitter, module, "lora_B"):
        splitter.parameter(linear, "weight", 0, even=False)
        splitter.parameter(linear, "bias", 0, even=False)
        columns = _columns(linear, _Entrance(splitter.mesh, 1))
        linear.forward = _then(columns, _gathered(linear.weight.shape[0], splitter.mesh))


def _split_rows_and_inputs(splitter: _Splitter, module: nn.Module) -> None:
    for linear in _linears(splitter, module, "lora_A"):
        splitter.parameter(linear, "weight", 1)
        linear.forward = _then(lambda x: _Cut.apply(x, splitter.mesh, x.ndim - 1), _rows(linear, splitter.mesh))


def _split_vocabulary(splitter: _Splitter, module: nn.Module) -> None:
    # Gemma's rows are scaled once they are found.
    is_scaled = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    if type(module).forward is not nn.Embedding.forward and not is_scaled:
        raise ValueError(f"{splitter.name} is a {type(module).__name__}, whose rows cannot be split over ranks")
    splitter.parameter(module, "weight", 0, even=False)
    module.forward = _lookup(module, splitter.mesh)


def _sum_gradients(splitter: _Splitter, module: nn.Module) -> None:
    """Every rank has the parameters, and sees only its own heads: gradients are sums over ranks."""
    module.forward = _summing(module, splitter.mesh)


def _split_tokens(splitter: _Splitter, module: nn.Module) -> None:
    """Every rank has the parameters and computes some of the tokens of [rows, tokens, ...], which are independent."""
    forward, mesh = _summing(module, splitter.mesh), splitter.mesh
    module.forward = lambda x: _Gather.apply(forward(_Cut.apply(x, mesh, 1)), mesh, x.shape[1], 1)


def _sum_shared_key(splitter: _Splitter, module: nn.Module) -> None:
    """Every rank has the parameters. The last columns go to the heads of each rank as they are, so their gradient is a
    sum over ranks; the others go through a matrix that is split by columns, which sums theirs."""
    own, mesh, width = module.forward, splitter.mesh, splitter.width
    if not width:
        raise ValueError(f"{splitter.name} does not say which of its columns all heads share: set parallel.tensor to 1")

    def forward(x: Tensor) -> Tensor:
        output = own(x)
        rest, shared = output.split([output.shape[-1] - width, width], dim=-1)
        return torch.cat([rest, Enter.apply(shared, mesh)], dim=-1)

    module.forward = forward


def _leave_whole(splitter: _Splitter, module: nn.Module) -> None:
    """Every rank has the parameters, and computes the same."""


_STYLES: dict[str, Callable[[_Splitter, Any], None]] = {
    "colwise": _split_columns,
    "rowwise": _split_rows,
    "colwise_gather_output": _split_columns_and_gather,
    "rowwise_split_input": _split_rows_and_inputs,
    "embedding_rowwise": _split_vocabulary,
    "replicated_with_grad_allreduce": _sum_gradients,
    "sequence_parallel": _split_tokens,
    "mla_kv_a_proj": _sum_shared_key,
    "replicate": _leave_whole,
}


def _linears(splitter: _Splitter, module: nn.Module, adapter: str) -> list[Any]:
    """The linear layer itself; under LoRA the base layer and the half of each adapter that lies on the split side."""
    base = getattr(module, "base_layer", module)
    if not isinstance(base, nn.Linear):
        raise ValueError(f"{splitter.name} is a {type(base).__name__}, which cannot be split over ranks")
    if getattr(module, "lora_variant", None):
        raise ValueError(f"{splitter.name} has DoRA adapters, which cannot be split over ranks: set lora.dora to false")
    return [base, *getattr(module, adapter, {}).values()]


def _columns(linear: nn.Linear, entrance: _Entrance) -> Forward:
    return lambda x: F.linear(entrance.enter(x), local(linear.weight), local(linear.bias))


def _rows(linear: nn.Linear, mesh: DeviceMesh) -> Forward:
    def forward(x: Tensor) -> Tensor:
        total = Leave.apply(F.linear(x, local(linear.weight)), mesh)
        return total if linear.bias is None else total + linear.bias

    return forward


def _summing(module: nn.Module, mesh: DeviceMesh) -> Callable[..., Any]:
    """The module's own forward, whose parameters' gradients are then sums over ranks."""
    forward, registry = module.forward, module._parameters

    def summing(*arguments: Any, **options: Any) -> Any:
        own = dict(registry)
        try:
            registry.update({key: p if p is None else Enter.apply(p, mesh) for key, p in own.items()})
            return forward(*arguments, **options)
        finally:
            registry.update(own)

    return summing


def _lookup(module: Any, mesh: DeviceMesh) -> Forward:
    own, registry = module.forward, module._parameters

    def find(ids: Tensor, rows: Tensor, padding: int | None) -> Tensor:
        """By the module's own code, as if these rows were all."""
        before = registry["weight"], module.padding_idx
        registry["weight"], module.padding_idx = rows, padding
        try:
            found: Tensor = own(ids)
            return found
        finally:
            registry["weight"], module.padding_idx = before

    def forward(ids: Tensor) -> Tensor:
        rows, first = local(module.weight), first_row(module.weight)
        here = ids - first
        mine = (here >= 0) & (here < len(rows))
        # The row of the padding token gets no gradient, as in the whole embedding.
        padding = None if module.padding_idx is None else module.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < len(rows) else None
        found = find(here.clamp(0, max(len(rows) - 1, 0)), rows, padding)
        return Leave.apply(found * mine[..., None].to(found.dtype), mesh)

    return forward


def _gathered(width: int, mesh: DeviceMesh) -> Forward:
    return lambda x: _Gather.apply(x, mesh, width, x.ndim - 1)


def _then(first: Forward, second: Forward) -> Forward:
    return lambda x: second(first(x))


# --- the vocabulary -------------------------------------------------------------------------------------------------


class SplitVocabulary:
    """For a head whose rows are on several ranks: where this rank's part starts, and reductions over the ranks."""

    def __init__(self, weight: DTensor, mesh: DeviceMesh) -> None:
        self.first = first_row(weight)
        self._mesh = mesh

    def enter(self, hidden: Tensor) -> Tensor:
        """The same on every rank; its gradient is a sum over them."""
        return Enter.apply(hidden, self._mesh)

    def sum(self, values: Tensor) -> Tensor:
        return _reduce(values, self._mesh)

    def max(self, values: Tensor) -> Tensor:
        return _reduce(values, self._mesh, dist.ReduceOp.MAX)


def local(tensor: Tensor) -> Tensor:
    """This rank's part; the gradient goes back to the whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(weight: DTensor) -> int:
    """Of this rank's part: DTensor makes equal parts, of which the last ones may be short or empty."""
    mesh = weight.device_mesh
    piece = -(-weight.shape[0] // mesh["tensor"].size())
    return min(mesh.get_local_rank("tensor") * piece, weight.shape[0])


# --- collectives with their gradients -------------------------------------------------------------------------------


class _Context(FunctionCtx):
    mesh: DeviceMesh
    part: tuple[int, int, int]  # dim, start, length
    whole: tuple[DeviceMesh, int, int]  # ranks, size, dim


class Enter(torch.autograd.Function):
    """Identity forward, a sum over ranks backward: for a value that all ranks have and use differently."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return _reduce(gradients[0], ctx.mesh), None


class Leave(torch.autograd.Function):
    """A sum over ranks forward, identity backward."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return _reduce(x, mesh)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    """All ranks' parts along `dim`; backward, this rank's part of the gradient, which all ranks have alike."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, mesh: DeviceMesh, size: int, dim: int) -> Tensor:
        ctx.part = (dim, *_part(size, mesh))
        return _put_together(x, mesh, size, dim)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0].narrow(*ctx.part), None, None, None


class _Cut(torch.autograd.Function):
    """This rank's part of what all have, along `dim`."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
        ctx.whole = (mesh, x.shape[dim], dim)
        return x.narrow(dim, *_part(x.shape[dim], mesh)).contiguous()

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _put_together(gradients[0], *ctx.whole), None, None


def _part(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """(start, length) of this rank's part: equal parts, of which the last ones may be short or empty."""
    part = -(-size // mesh.size())
    start = min(mesh.get_local_rank() * part, size)
    return start, min(part, size - start)


def _reduce(x: Tensor, mesh: DeviceMesh, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, how, group=mesh.get_group())
    return total


def _put_together(x: Tensor, mesh: DeviceMesh, size: int, dim: int) -> Tensor:
    missing = -(-size // mesh.size()) - x.shape[dim]
    filled = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)).contiguous()
    gathered = x.new_empty((mesh.size() * filled.shape[0], *filled.shape[1:]))
    _all_gather(gathered, filled, group=mesh.get_group())
    return torch.cat(gathered.chunk(mesh.size(), dim=0), dim=dim).narrow(dim, 0, size)
