"""What ranks say to each other, call by call: recorded without sending anything, and compared between ranks.

For simulated ranks (verification/simulation.py): every call of a process group is written down and answered at once.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.group import ProcessGroup
from lockstep.parallel.traffic import COLLECTIVES, AxisNames, num_bytes, sent_share

# Methods of torch's ProcessGroup that receive: (kind, index of the argument that holds all that is exchanged).
_RECEIVING = {"recv": ("recv", 0), "recv_anysource": ("recv", 0), "barrier": ("barrier", 0)}
_PACKAGE = Path(__file__).resolve().parents[1]
# Frames that hand calls on.
_OWN_FILES = {__file__, str(_PACKAGE / "parallel" / "traffic.py")}
_AHEAD = 6  # calls that must agree after a difference for it to be a call left out


class Members(NamedTuple):
    """The ranks of one process group, in its order, and the mesh axis that it is of."""

    axis: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        step = self.ranks[1] - self.ranks[0] if len(self.ranks) > 1 else 1
        if len(self.ranks) > 3 and self.ranks == tuple(range(self.ranks[0], self.ranks[-1] + 1, step)):
            every = "" if step == 1 else f", every {step}th"
            return f"{self.axis} (ranks {self.ranks[0]} to {self.ranks[-1]}{every})"
        return f"{self.axis} (ranks {', '.join(map(str, self.ranks))})"


@dataclass(frozen=True)
class Call:
    """One call. `group` is an index into the record's groups, `peer` the other rank of a send or recv.

    `where`: the line of Lockstep that made it, or that called what made it, and the line that called that.
    """

    kind: str
    group: int
    num_bytes: int
    dtype: str
    where: str
    peer: int | None = None
    parts: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Of an all_to_all of unequal parts: bytes to each rank, and from each."""

    @property
    def content(self) -> tuple[str, int | None, str]:
        """What the ranks of a group must have in common."""
        return self.kind, self.num_bytes if self.parts is None else None, self.dtype

    def __str__(self) -> str:
        return f"{self.kind} of {self.num_bytes:,} bytes ({self.dtype}) at {self.where}"


@dataclass
class Record:
    """What one rank said in a step."""

    rank: int
    groups: list[Members] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def share(self, known: dict[Call, Call]) -> None:
        """Calls that were made before, by whichever rank, are kept once: those of a thousand ranks are mostly alike."""
        self.calls = [known.setdefault(call, call) for call in self.calls]

    def traffic(self) -> dict[tuple[str, str], tuple[int, float, int]]:
        """(axis, kind) -> (calls, bytes that this rank sends in rings, bytes exchanged in the largest call)."""
        found: dict[tuple[str, str], tuple[int, float, int]] = {}
        for call in self.calls:
            group = self.groups[call.group]
            count, sent, largest = found.get((group.axis, call.kind), (0, 0.0, 0))
            own = call.num_bytes * sent_share(call.kind, len(group.ranks)) if call.kind in _SENDING else 0.0
            found[group.axis, call.kind] = (count + 1, sent + own, max(largest, call.num_bytes))
        return found


_SENDING = {kind for kind, _ in COLLECTIVES.values()}


# --- recording --------------------------------------------------------------------------------------------------------


class Recorder:
    """Of one simulated rank. `record` is of the step in progress, which `end_step` closes."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.record = Record(group.rank)
        self._axes = AxisNames(group)
        self._members: dict[tuple[str, str], Members] = {}
        self.arriving: Callable[[Members, Tensor], None] = lambda members, numbers: None
        """Writes what arrives where ranks tell each other numbers (all_to_all)."""

    def end_step(self) -> Record:
        ended, self.record = self.record, Record(self._group.rank)
        return ended

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Calls of any process group return at once, as if all had come. What arrives in tensors is what was there."""
        methods = {**COLLECTIVES, **_RECEIVING}
        names = [name for name in methods if name in vars(dist.ProcessGroup)]
        own = {name: vars(dist.ProcessGroup)[name] for name in names}
        for name in names:
            setattr(dist.ProcessGroup, name, self._answer(*methods[name]))
        try:
            yield
        finally:
            for name, method in own.items():
                setattr(dist.ProcessGroup, name, method)

    def _answer(self, kind: str, exchanged_at: int) -> Callable[..., dist.Work]:
        def call(process_group: dist.ProcessGroup, *arguments: Any, **_options: object) -> dist.Work:
            exchanged = arguments[exchanged_at] if kind != "barrier" else ()
            peer = arguments[1] if kind in ("send", "recv") and len(arguments) > 1 else None
            self.note(kind, exchanged, process_group, peer, _parts(arguments) if kind == "all_to_all" else None)
            if kind == "recv":
                _receive(exchanged)
            if kind == "all_to_all" and isinstance(exchanged, Tensor) and not exchanged.is_floating_point():
                self.arriving(self._members_of(kind, process_group), arguments[0])
            done = torch.futures.Future[Any]()
            done.set_result(arguments[0] if arguments else None)
            return _finished(done)

        return call

    def note(
        self,
        kind: str,
        exchanged: Any,
        process_group: dist.ProcessGroup,
        peer: int | None = None,
        parts: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> None:
        """`peer` as the process group counts its ranks."""
        members = self._members_of(kind, process_group)
        if members not in self.record.groups:
            self.record.groups.append(members)
        other = members.ranks[peer] if peer is not None else None
        number = self.record.groups.index(members)
        call = Call(kind, number, num_bytes(exchanged), _dtype_of(exchanged), _find_caller(), other, parts)
        self.record.calls.append(call)

    def _members_of(self, kind: str, process_group: dist.ProcessGroup) -> Members:
        key = (kind, process_group.group_name)
        if key not in self._members:
            axis = self._axes.of(kind, process_group) or "background"
            self._members[key] = Members(axis, tuple(dist.get_process_group_ranks(process_group)))
        return self._members[key]


def _parts(arguments: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Bytes to and from each rank, of all_to_all(output, input, sizes of output, sizes of input, ...) with sizes."""
    if len(arguments) < 4 or not isinstance(arguments[1], Tensor) or not arguments[3]:
        return None
    row_bytes = arguments[1].itemsize * math.prod(arguments[1].shape[1:])
    received, sent = (tuple(size * row_bytes for size in sizes) for sizes in (arguments[2], arguments[3]))
    return sent, received


def _finished(future: torch.futures.Future[object]) -> dist.Work:
    # What torch's own process group of threads uses; the fake one's calls have no result, which hooks of DDP read.
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work


def _receive(tensors: Sequence[Tensor]) -> None:
    """Integers that arrive are the votes of torch's pipeline stages that shapes are known: they are given."""
    for tensor in tensors:
        if not tensor.is_floating_point() and type(tensor) is Tensor:
            tensor.fill_(1)


def _dtype_of(exchanged: Any) -> str:
    while not isinstance(exchanged, Tensor):
        if not exchanged:
            return "nothing"
        exchanged = exchanged[0]
    return str(exchanged.dtype).removeprefix("torch.")


def _find_caller() -> str:
    """The two innermost lines of Lockstep that lead here, and what of torch they called, if not the call itself."""
    frame: FrameType | None = sys._getframe(2)
    lines: list[str] = []
    via = ""
    while frame is not None and len(lines) < 2:
        name = frame.f_code.co_filename
        if name.startswith(str(_PACKAGE)) and name not in _OWN_FILES:
            lines.append(f"lockstep/{Path(name).relative_to(_PACKAGE)}:{frame.f_lineno}")
        elif not lines and not via and _is_telling(name):
            via = f" ({Path(name).stem.lstrip('_')}.{frame.f_code.co_name})"
        frame = frame.f_back
    first, *others = lines or ["outside of Lockstep"]
    return f"{first}{via}" + "".join(f", called at {line}" for line in others)


def _is_telling(file_name: str) -> bool:
    """Parts of torch that communicate on our behalf."""
    return any(f"torch/distributed/{part}/" in file_name for part in ("fsdp", "pipelining", "tensor"))


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mismatch:
    """A call that one rank makes and another does not. `rank` is the odd one, where several others agree."""

    rank: int
    other: int
    group: Members
    number: int
    """Of the call among those of this group, from 1."""
    call: str
    """As this rank makes it, or as the other does, where this rank leaves it out."""
    problem: str

    def __str__(self) -> str:
        return f"{self.problem} (call {self.number} over {self.group})"


def find_mismatches(records: Sequence[Record]) -> list[Mismatch]:
    """The first of each process group between those of its ranks that were recorded."""
    by_group: dict[Members, dict[int, list[Call]]] = defaultdict(dict)
    pairs: dict[tuple[Members, int, int], dict[str, list[Call]]] = defaultdict(lambda: {"send": [], "recv": []})
    known = {record.rank for record in records}
    for record in records:
        for members in record.groups:
            by_group[members].setdefault(record.rank, [])
        for call in record.calls:
            members = record.groups[call.group]
            if call.peer is None:
                by_group[members][record.rank].append(call)
            elif call.peer in known:
                ends = (record.rank, call.peer) if call.kind == "send" else (call.peer, record.rank)
                pairs[members, *ends][call.kind].append(call)
    for members, said in by_group.items():  # a rank that says nothing to a group that others speak to
        for rank in known & set(members.ranks):
            said.setdefault(rank, [])
    found = [_compare_group(members, said) for members, said in by_group.items()]
    found += [_compare_pair(*place, calls["send"], calls["recv"]) for place, calls in pairs.items()]
    return [mismatch for mismatch in found if mismatch is not None]


def _compare_group(members: Members, said: dict[int, list[Call]]) -> Mismatch | None:
    contents = {rank: tuple(call.content for call in calls) for rank, calls in sorted(said.items())}
    if len(set(contents.values())) <= 1:
        return _compare_parts(members, said)
    # What most ranks say is taken for right; of two, what the first says.
    (usual, _), *_ = Counter(contents.values()).most_common(1)
    right = next(rank for rank, content in contents.items() if content == usual)
    wrong = next(rank for rank, content in contents.items() if content != usual)
    return _explain(members, (wrong, said[wrong]), (right, said[right]))


def _compare_parts(members: Members, said: dict[int, list[Call]]) -> Mismatch | None:
    """What one rank sends to another, of calls that all make: as much as that one expects."""
    for number, calls in enumerate(zip(*said.values(), strict=True), start=1):
        if calls[0].parts is None:
            continue
        parts = {rank: call.parts for rank, call in zip(said, calls, strict=True) if call.parts is not None}
        for (i, sender), (j, receiver) in itertools.permutations([(members.ranks.index(r), r) for r in parts], 2):
            sent, expected = parts[sender][0][j], parts[receiver][1][i]
            if sent != expected:
                call = str(said[sender][number - 1])
                problem = f"rank {sender} sends {sent:,} bytes to rank {receiver}, which expects {expected:,}: {call}"
                return Mismatch(sender, receiver, members, number, call, problem)
    return None


def _explain(members: Members, odd: tuple[int, list[Call]], usual: tuple[int, list[Call]]) -> Mismatch:
    (rank, mine), (other, theirs) = odd, usual
    own, others = ([call.content for call in calls] for calls in (mine, theirs))
    at = next((i for i, pair in enumerate(zip(own, others)) if pair[0] != pair[1]), min(len(own), len(others)))
    if at == len(own) or _continues(own, at, others, at + 1):
        call = str(theirs[at])
        problem = f"rank {rank} leaves out a call that rank {other} makes: {call}"
    elif at == len(others) or _continues(own, at + 1, others, at):
        call = str(mine[at])
        problem = f"rank {rank} makes a call that rank {other} does not: {call}"
    else:
        call = str(mine[at])
        how = "in another order than" if own[at] in others[at : at + _AHEAD] else "differently from"
        problem = f"rank {rank} calls {how} rank {other}: {call}, where rank {other} makes {theirs[at]}"
    return Mismatch(rank, other, members, at + 1, call, problem)


def _continues(first: Sequence[object], i: int, second: Sequence[object], j: int) -> bool:
    """Whether both go on alike from here, for a while or to the end of both."""
    ahead, behind = list(first[i : i + _AHEAD]), list(second[j : j + _AHEAD])
    return ahead == behind


def _compare_pair(members: Members, sender: int, receiver: int, send: list[Call], recv: list[Call]) -> Mismatch | None:
    for number, (sent, received) in enumerate(zip(send, recv), start=1):
        if sent.content[1:] != received.content[1:]:
            problem = f"rank {sender} sends what rank {receiver} does not expect: {sent}, and there {received}"
            return Mismatch(sender, receiver, members, number, str(sent), problem)
    if len(send) > len(recv):
        call = str(send[len(recv)])
        problem = f"rank {sender} sends and rank {receiver} never receives: {call}"
        return Mismatch(sender, receiver, members, len(recv) + 1, call, problem)
    if len(recv) > len(send):
        call = str(recv[len(send)])
        problem = f"rank {receiver} waits for rank {sender}, which never sends: {call}"
        return Mismatch(receiver, sender, members, len(send) + 1, call, problem)
    return None
