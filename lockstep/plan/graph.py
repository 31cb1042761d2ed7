"""One graph of a compiled layer as inductor would run it: what is in memory, what is moved, how many kernels."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# A prime: what has a dimension that it divides is of tokens, and everything else is not.
TOKENS = 1999
# Of our own: what is multiplied comes first, whatever holds the matrix. The others are of backward passes.
OWN_PRODUCTS = {"grouped_mm", "nf4_product", "nf4_grouped_product"}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "addmm_", *OWN_PRODUCTS,
            "grouped_mm_weights", "fp8_input_gradient"}  # fmt: skip


def storage_of(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else -id(node)


def is_of_tokens(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() % TOKENS == 0 and value.numel() > 0


class LayerGraph:
    """One graph as inductor would run it: what kernels of others give or take is in memory, the rest is fused."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.nodes = list(module.graph.nodes)
        self.inputs = [n for n in self.nodes if n.op == "placeholder"]
        (results,) = module.graph.output_node().args
        self.outputs = [n for n in tree_leaves(results) if isinstance(n, torch.fx.Node)]
        self._in_memory = {storage_of(n) for n in self.nodes if self._is_in_memory(n)}

    def _is_in_memory(self, node: torch.fx.Node) -> bool:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            return node.op == "placeholder"
        if _is_extern(node) or node in self.outputs:
            return True
        return any(_is_extern(user) for user in _users_through_views(node))

    def _calls(self) -> Iterator[torch.fx.Node]:
        return (n for n in self.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor))

    def peak(self, frees: frozenset[int] | set[int] = frozenset()) -> float:
        """The most bytes in memory beyond the inputs; those in `frees` are let go after their last use."""
        last: dict[int, int] = {}
        for place, node in enumerate(self.nodes):
            for used in (node, *node.all_input_nodes):
                last[storage_of(used)] = place
        for node in self.outputs:
            last[storage_of(node)] = len(self.nodes)
        given = {storage_of(n) for n in self.inputs}
        ends: dict[int, list[int]] = defaultdict(list)
        sizes: dict[int, int] = {}
        live = most = 0
        for node in self.inputs:
            if id(node) in frees and storage_of(node) not in sizes:
                sizes[storage_of(node)] = node.meta["val"].untyped_storage().nbytes()
                ends[last[storage_of(node)]].append(storage_of(node))
        for place, node in enumerate(self.nodes):
            key = storage_of(node)
            is_new = node.op == "call_function" and key in self._in_memory and key not in sizes and key not in given
            if is_new and is_of_tokens(node):
                sizes[key] = node.meta["val"].untyped_storage().nbytes()
                live += sizes[key]
                ends[last[key]].append(key)
                most = max(most, live)
            live -= sum(sizes[ended] for ended in ends.pop(place, ()))
        return most

    def moved(self) -> float:
        """Bytes that fused kernels write, and read from memory."""
        written = {storage_of(n): n for n in self._calls() if storage_of(n) in self._in_memory and not _is_extern(n)}
        read: dict[int, torch.fx.Node] = {}
        for node in self._calls():
            if not _is_extern(node) and not _is_view(node):
                read |= {storage_of(n): n for n in _bases(node) if storage_of(n) in self._in_memory}
        used = [*written.values(), *read.values()]
        return sum(n.meta["val"].nbytes for n in used if isinstance(n.meta.get("val"), Tensor))

    def kernels(self) -> int:
        externs = sum(_is_extern(n) for n in self._calls())
        fused = len({storage_of(n) for n in self._calls() if storage_of(n) in self._in_memory and not _is_extern(n)})
        return externs + fused

    def products(self) -> list[tuple[int, int, int]]:
        found = []
        for node in self._calls():
            if _name(node) in ("mm", "addmm"):
                left, right = (n.meta["val"] for n in node.all_input_nodes[-2:])
                found.append((left.shape[0], left.shape[1], right.shape[1]))
            elif _name(node) in OWN_PRODUCTS:
                left, result = node.all_input_nodes[0].meta["val"], node.meta["val"]
                found.append((math.prod(left.shape[:-1]), left.shape[-1], result.shape[-1]))
            elif _name(node) in ("bmm", "_grouped_mm"):
                left, right = (n.meta["val"] for n in node.all_input_nodes[:2])
                found.append((math.prod(left.shape[:-1]), left.shape[-1], right.shape[-1]))
        return found

    def attention_inputs(self) -> tuple[Tensor | None, Tensor | None]:
        for node in self.nodes:
            if node.op == "call_function" and ("varlen_attn" in _name(node) or "scaled_dot" in _name(node)):
                query, key = (n.meta["val"] for n in node.all_input_nodes[:2])
                return query, key
        return None, None


def _name(node: torch.fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else str(getattr(node.target, "__name__", node.target))


def _is_extern(node: torch.fx.Node) -> bool:
    name = _name(node)
    if name == "getitem":
        source = node.all_input_nodes[0]
        return source.op == "call_function" and _is_extern(source)
    return name in PRODUCTS or "attn" in name or "attention" in name


_VIEWS = {
    "view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias", "select", "slice",
    "as_strided", "detach", "split", "getitem", "_unsafe_view",
}  # fmt: skip


def _is_view(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and _name(node) in _VIEWS and not _is_extern(node)


def _users_through_views(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    for user in node.users:
        if _is_view(user):
            yield from _users_through_views(user)
        else:
            yield user


def _bases(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    for source in node.all_input_nodes:
        if _is_view(source):
            yield from _bases(source)
        else:
            yield source
