"""What a pool of processes asks of a cluster, what its nodes have, and what of it fits. Pure: must not know Ray."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.config import PoolConfig

Amounts = Mapping[str, float]
_NAMED_NODES = 4  # more are counted, alike ones together


@dataclass(frozen=True)
class Node:
    name: str
    total: Amounts
    free: Amounts


def bundle_of(pool: PoolConfig) -> dict[str, float]:
    """What one process needs."""
    wanted = {"CPU": pool.cpus, "GPU": pool.gpus or 0.0, **pool.resources}
    return {name: amount for name, amount in wanted.items() if amount > 0}


def num_fitting(bundle: Amounts, strategy: str, nodes: Sequence[Amounts], most: int) -> int:
    """How many of `most` such processes the nodes have room for."""
    rooms = [min((math.floor(node.get(k, 0.0) / v + 1e-9) for k, v in bundle.items()), default=most) for node in nodes]
    if strategy == "STRICT_PACK":
        found = max(rooms, default=0)
    elif strategy == "STRICT_SPREAD":
        found = sum(room >= 1 for room in rooms)
    else:
        found = sum(rooms)
    return min(found, most)


def explain(pool: PoolConfig, nodes: Sequence[Node], waited_s: float) -> str:
    """Why there was no room: what was asked, what there is, what would fit."""
    bundle, procs = bundle_of(pool), pool.procs or 0
    free = num_fitting(bundle, pool.strategy, [node.free for node in nodes], procs)
    idle = num_fitting(bundle, pool.strategy, [node.total for node in nodes], procs)
    asked = f"{procs} x {_say(bundle)} with strategy {pool.strategy}"
    if idle < procs:
        fits = f"Room for {free} is free now, and the whole cluster has room for {idle}: ask for less, or add nodes"
    elif free < procs:
        fits = f"Room for {free} is free now, and for {idle} once others are done: wait for them, or ask for less"
    else:
        fits = "By now there is room: start again"
    return (
        f"the cluster had no room for the {pool.pool} pool within {waited_s:.0f} s. Asked: {asked}. "
        f"There: {_say_nodes(nodes, bundle)}. {fits}"
    )


def _say_nodes(nodes: Sequence[Node], bundle: Amounts) -> str:
    if not nodes:
        return "no nodes"
    names = list(dict.fromkeys(["CPU", *bundle]))
    told = [(node.name, _say_node(node, names)) for node in nodes]
    if len(told) <= _NAMED_NODES:
        return "; ".join(f"{name} has {text}" for name, text in told)
    return "; ".join(f"{count} nodes with {text}" for text, count in Counter(text for _, text in told).items())


def _say_node(node: Node, names: Sequence[str]) -> str:
    parts = [f"{name} {node.total.get(name, 0):g} ({node.free.get(name, 0):g} free)" for name in names]
    return ", ".join(parts)


def _say(amounts: Amounts) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in amounts.items()) or "nothing"
