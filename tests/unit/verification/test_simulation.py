"""Ranks that do not exist: what they would send and hold, and faults of one of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from equivalence.plain import make_model
from equivalence.simulated import Case, simulate_ranks
from tiny import write_config, write_model

from lockstep.cli.simulation import parse_ranks
from lockstep.config import ConfigError, ParallelConfig, load_config
from lockstep.parallel.collectives import Call, Members, Record, find_mismatches
from lockstep.verification.simulation import add_partners, choose_ranks, simulate


def test_memory_of_one_rank_is_counted_to_the_byte() -> None:
    (said,) = simulate_ranks(Case("llama", lora=False, budget=96), 1, ParallelConfig())
    peak = said.peak_bytes
    size = sum(p.nbytes for p in make_model("llama", lora=False).parameters())
    assert peak["optimizer"] == 2 * size
    assert peak["weights"] == size + 4 * 8  # and the frequencies of rotary embeddings
    assert peak["activations"] > 0
    assert not dist.is_initialized()
    assert torch.zeros(2).tolist() == [0.0, 0.0]  # tensors have contents again


def skip_on(rank: int, number: int, own: Callable[..., Any]) -> Callable[..., Any]:
    """The call with this number is left out, on this rank."""
    counts: Counter[int] = Counter()

    def all_reduce(*arguments: Any, **options: Any) -> Any:
        counts[dist.get_rank()] += 1
        is_skipped = dist.get_rank() == rank and counts[rank] == number
        return None if is_skipped else own(*arguments, **options)

    return all_reduce


def test_a_rank_that_skips_a_collective_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", skip_on(1, 20, dist.all_reduce))
    ranks = simulate_ranks(
        Case("llama", lora=False, budget=512), 2, ParallelConfig(tensor=2)
    )  # one micro-batch: 15 calls a step
    (found,) = find_mismatches([said.record for said in ranks])
    assert found.rank == 1
    assert found.group.axis == "tensor"
    assert "rank 1 leaves out a call that rank 0 makes: all_reduce of " in str(found)
    assert re.search(r"at lockstep/parallel/tensor.py:\d+, called at lockstep/parallel/tensor.py:\d+", found.call)


def test_a_rank_that_sends_more_rows_than_another_expects_is_named() -> None:
    members, at = Members("expert", (4, 6)), "lockstep/parallel/expert.py:1"

    def record(rank: int, sent: tuple[int, int], received: tuple[int, int]) -> Record:
        call = Call("all_to_all", 0, sum(sent), "float64", at, parts=(sent, received))
        return Record(rank, [members], [call])

    assert find_mismatches([record(4, (8, 16), (8, 24)), record(6, (24, 0), (16, 0))]) == []
    (found,) = find_mismatches([record(4, (8, 16), (8, 24)), record(6, (24, 0), (24, 0))])
    assert "rank 4 sends 16 bytes to rank 6, which expects 24: all_to_all of 24 bytes" in str(found)


def test_calls_that_ranks_make_alike_are_kept_once() -> None:
    known: dict[Call, Call] = {}
    records = [Record(rank, [], [Call("barrier", 0, 0, "nothing", "".join(["here"]))]) for rank in range(2)]
    for record in records:
        record.share(known)
    assert records[0].calls[0] is records[1].calls[0]


def test_a_stage_that_does_not_send_is_named() -> None:
    found = [
        said.record for said in simulate_ranks(Case("llama", lora=False, budget=96), 2, ParallelConfig(pipeline=2))
    ]
    assert find_mismatches(found) == []
    first = found[0]
    place = next(i for i, call in enumerate(first.calls) if call.kind == "send")
    del first.calls[place]
    (mismatch,) = find_mismatches(found)
    assert "rank 1 waits for rank 0, which never sends" in str(mismatch)
    assert "lockstep/parallel/pipeline.py:" in str(mismatch)


def test_every_stage_and_both_ends_of_each_axis_are_chosen() -> None:
    degrees = ParallelConfig(replicate=2, shard=4, tensor=2, pipeline=3).degrees(48)
    assert choose_ranks(degrees) == [0, 1, 6, 8, 16, 32, 33, 38, 40]
    assert choose_ranks(ParallelConfig().degrees(1)) == [0]


def test_ranks_are_simulated_with_those_they_talk_to() -> None:
    degrees = ParallelConfig(replicate=4, shard=8, tensor=8, pipeline=4).degrees(1024)
    # Rank 300: stage 1, replica 0, shard 5, tensor 4.
    assert add_partners(degrees, [300]) == [44, 260, 292, 296, 299, 300, 364, 492, 556]
    two = ParallelConfig(tensor=2).degrees(2)
    assert add_partners(two, [1]) == add_partners(two, [0]) == [0, 1]
    with pytest.raises(ConfigError, match="there is no rank 1024 of 1,024"):
        add_partners(degrees, [1024])


def test_ranks_are_written_as_numbers_and_ranges() -> None:
    assert parse_ranks("0, 17,30-32", 64) == [0, 17, 30, 31, 32]
    assert parse_ranks("all", 3) == [0, 1, 2]
    for wrong in ("", "1,", "a", "-1", "5-3", "64", "60-64", "1.5"):
        with pytest.raises(ConfigError, match="--simulate-ranks"):
            parse_ranks(wrong, 64)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a model, and no weights."""
    folder = tmp_path_factory.mktemp("simulated")
    model = write_model(folder / "model")
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    return write_config(folder, model, batch={"samples": 16, "micro_batch_tokens": 256})


def test_a_configuration_is_simulated_without_weights(config_file: Path) -> None:
    config = load_config(config_file, ["parallel.tensor=2", "parallel.shard=4"])
    found = simulate(config, 8, num_processes=0)
    assert found.passed
    assert [one.rank for one in found.ranks] == [0, 1, 6]
    for one in found.ranks:
        traffic = one.record.traffic()
        sent = {flow: count for flow, (_, count, _) in traffic.items() if count}
        assert sent == pytest.approx(one.expected, rel=1e-12)
        assert one.peak_bytes["optimizer"] == pytest.approx(2 * one.peak_bytes["weights"], rel=0.05)


@pytest.mark.slow
def test_any_of_a_thousand_ranks_that_skips_a_collective_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 4}
    file = write_config(tmp_path, write_model(tmp_path / "model", **sizes), batch={"samples": 32})
    layout = ["parallel.replicate=4", "parallel.shard=8", "parallel.tensor=8", "parallel.pipeline=4"]
    counts: Counter[int] = Counter()
    own = dist.all_reduce

    def all_reduce(*arguments: Any, **options: Any) -> Any:
        rank, members = dist.get_rank(), dist.get_process_group_ranks(options.get("group"))
        counts[rank] += members == list(range(members[0], members[0] + 8))  # over the tensor axis
        # Rank 299 makes the same calls, and was simulated before: this one is in the second step.
        is_skipped = rank == 300 and counts[300] == counts[299] - 5
        counts[300] += is_skipped
        return None if is_skipped else own(*arguments, **options)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    found = simulate(load_config(file, layout), 1024, ranks=[300], num_processes=0)
    (mismatch,) = found.mismatches
    assert (mismatch.rank, mismatch.group) == (300, Members("tensor", tuple(range(296, 304))))
    assert "rank 300 leaves out a call that rank 296 makes: all_reduce of " in str(mismatch)
    assert re.search(r"at lockstep/parallel/\w+.py:\d+", mismatch.call)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "algorithm={kind: dpo}",
        "algorithm={kind: kto}",
        "algorithm={kind: grpo, group_size: 4, max_tokens: 16, num_updates: 2, reward: exact}",
        "model.activation_checkpointing=full",
        "model.activation_checkpointing=selective",
        "optim.kind=muon",
        "lora={rank: 4}",
    ],
)
def test_every_step_is_taken_on_ranks_that_do_not_exist(config_file: Path, change: str) -> None:
    for layout in ("parallel.tensor=2", "parallel.keep_parameters=true"):
        found = simulate(load_config(config_file, [change, layout]), 4, num_processes=0)
        assert found.passed
        for one in found.ranks:
            assert one.record.calls
            assert one.peak_bytes["optimizer"]
            sent = {flow: count for flow, (_, count, _) in one.record.traffic().items() if count}
            assert not one.expected or sent == pytest.approx(one.expected, rel=1e-12)
        assert one.expected or not change.startswith("lora")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["parallel.tensor=3"], "= 6 ranks, but the run has 8"),
        (["batch.samples=4"], "a batch has 4 rows, and 8 ranks have rows of their own"),
        (["model.path=/nowhere"], "model.path /nowhere does not exist"),
        (["parallel.shard=1", "parallel.tensor=8"], "parallel.tensor 8 does not divide"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_sentence(config_file: Path, changes: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        simulate(load_config(config_file, changes), 8, num_processes=0)
    assert not dist.is_initialized()


def test_a_model_that_sees_is_refused(config_file: Path, tmp_path: Path) -> None:
    transformers.Qwen2VLConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a model that sees images is not simulated"):
        simulate(load_config(config_file, [f"model.path={tmp_path}"]), 8, num_processes=0)
