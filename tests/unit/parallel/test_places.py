"""Which part each rank has: of the batch, of the results, of the random numbers, of the layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from lockstep.config.parallel import AXES, Degrees
from lockstep.parallel import pipeline
from lockstep.parallel.group import ProcessGroup

UNEVEN = Degrees(replicate=2, shard=3, tensor=2, context=2, pipeline=2)


class Mesh:
    """A rank's place along each axis."""

    def __init__(self, places: dict[str, int]) -> None:
        self.places = places

    def get_local_rank(self, axis: str) -> int:
        return self.places[axis]


def every_rank(degrees: Degrees) -> Iterator[tuple[dict[str, int], ProcessGroup]]:
    ranges = [range(getattr(degrees, axis)) for axis in AXES]
    for rank, numbers in enumerate(itertools.product(*ranges)):
        places = dict(zip(AXES, numbers, strict=True))
        mesh = Mesh(places)
        yield places, ProcessGroup(rank, degrees.num_ranks, torch.device("cpu"), degrees, mesh)  # type: ignore[arg-type]


def test_every_part_of_a_batch_belongs_to_one_place_of_replicas_and_shards() -> None:
    parts: dict[int, set[tuple[int, int]]] = {}
    for places, group in every_rank(UNEVEN):
        parts.setdefault(group.data_rank, set()).add((places["replicate"], places["shard"]))
    assert sorted(parts) == list(range(UNEVEN.data)) == list(range(6))
    assert all(len(owners) == 1 for owners in parts.values())


def test_results_count_once_for_each_part_of_a_batch_and_of_its_tokens() -> None:
    counting = [(group.data_rank, places["context"]) for places, group in every_rank(UNEVEN) if group.counts]
    assert sorted(counting) == list(itertools.product(range(6), range(2)))
    assert all(places["pipeline"] == 1 for places, group in every_rank(UNEVEN) if group.counts)


def test_tensor_ranks_alone_share_their_dropout() -> None:
    sharing: dict[int, list[dict[str, int]]] = {}
    for places, group in every_rank(UNEVEN):
        sharing.setdefault(group.dropout_rank, []).append({k: v for k, v in places.items() if k != "tensor"})
    assert len(sharing) == UNEVEN.num_ranks // UNEVEN.tensor
    assert all(first == second for first, second in sharing.values())


def test_without_other_axes_the_dropout_is_that_of_the_data_rank() -> None:
    for _, group in every_rank(Degrees(replicate=2, shard=2, tensor=2, context=1, pipeline=1)):
        assert group.dropout_rank == group.data_rank


@pytest.mark.parametrize(
    ("costs", "head", "num_stages", "sizes"),
    [
        ([1.0] * 8, 0.0, 2, [4, 4]),
        ([1.0] * 8, 2.0, 2, [5, 3]),  # the head is with the last
        ([1.0] * 8, 4.0, 4, [2, 3, 2, 1]),
        ([5.0, 1.0, 1.0, 1.0], 0.0, 2, [1, 3]),
    ],
)
def test_the_dearest_stage_is_as_cheap_as_can_be(
    costs: list[float], head: float, num_stages: int, sizes: list[int]
) -> None:
    stages = pipeline.cut(costs, head, num_stages)
    assert [i for stage in stages for i in stage] == list(range(len(costs)))
    dearest = max(sum(costs[i] for i in s) + head * (n == num_stages - 1) for n, s in enumerate(stages))
    wanted = list(itertools.accumulate(sizes, initial=0))
    best = max(sum(costs[a:b]) + head * (n == num_stages - 1) for n, (a, b) in enumerate(itertools.pairwise(wanted)))
    assert dearest == best


def test_a_schedule_has_the_number_of_micro_batches_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Schedule:
        def __init__(self, stage: object, n_microbatches: int, **options: object) -> None:
            self.number = n_microbatches

        def step(self, *arguments: object, **options: object) -> None:
            made.append(self.number)

    monkeypatch.setattr(pipeline, "_SINGLE", {"gpipe": Schedule})
    monkeypatch.setattr(pipeline, "PipelineStage", lambda *arguments, **options: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    stages = pipeline.Pipeline({0: torch.nn.Identity()}, 1, "gpipe", None, torch.device("cpu"))  # type: ignore[arg-type]
    for number in (3, 2, 3):
        stages.forward_backward(number, torch.zeros(1, 8, 4))
    assert made == [3, 2, 3]
