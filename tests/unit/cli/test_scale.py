"""What `lockstep scale` reads from the records of runs, and the report it writes."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.cli.scale import measure, parse_sizes
from lockstep.config import ConfigError, ParallelConfig
from lockstep.reports.scaling import Flow, find_straggler, flow_row, read_size, size_row, write_report


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {"split": "train", "step": step, "tokens": 100, "step_time_s": 0.5, "memory_gib": 1.0, **changes}


def test_sizes_are_numbers_in_order():
    assert parse_sizes("4,1,2,2") == [1, 2, 4]
    with pytest.raises(ValueError, match="give numbers with commas"):
        parse_sizes("1,two")
    with pytest.raises(ValueError, match="at least one process"):
        parse_sizes("0,1")


def test_the_first_step_warms_up_and_efficiency_is_against_the_smallest():
    one = read_size(1, "one rank", [record(1, step_time_s=9.0), record(2), record(3)], None)
    assert (one.tokens_per_s, one.efficiency, one.wait_s, one.flows) == (200.0, 1.0, None, ())
    many = [record(1, step_time_s=9.0), record(2, step_time_s=0.2), record(3, step_time_s=0.2)]
    four = read_size(4, "shard 4", many, one)
    assert four.efficiency == pytest.approx(500 / 200 / 4)
    two = read_size(2, "shard 2", [record(1), record(2)], None)
    assert read_size(4, "shard 4", many, two).efficiency == pytest.approx(500 / 200 / 2)


def test_what_was_planned_stands_beside_what_was_measured(tmp_path):
    one = read_size(1, "one rank", [record(1), record(2)], None, (250.0, 0.6))
    assert (one.planned_tokens_per_s, one.planned_error, one.planned_efficiency) == (250.0, 0.6, 1.0)
    two = read_size(2, "shard 2", [record(1), record(2)], one, (400.0, 0.6))
    assert (two.efficiency, two.planned_efficiency) == (0.5, pytest.approx(0.8))
    four = read_size(4, "shard 4", [record(1), record(2)], one)  # no plan for this one
    assert four.planned_efficiency is None
    assert [size_row(size)[3:5] for size in (one, two, four)] == [["100%", "100%"], ["50%", "80%"], ["25%", "-"]]
    _, document = write_report([one, two, four], "planned", tmp_path)
    assert document.read_text().count("planned") > 3


def test_traffic_is_shown_beside_the_least():
    keys = {"traffic/shard/all_gather": 210.0, "traffic_least/shard/all_gather": 200.0, "traffic/world/all_reduce": 8.0}
    size = read_size(2, "shard 2", [record(1), record(2, **keys, wait_s=0.1, token_balance=1.25)], None)
    assert size.flows == (
        Flow("shard", "all_gather", 210.0, 200.0),
        Flow("world", "all_reduce", 8.0, None),
    )
    assert (size.wait_s, size.balance, size.sent_bytes) == (0.1, 1.25, 218.0)
    assert flow_row(size.flows[0]) == ["shard", "all-gather", "210 B", "200 B", "+5.00%"]
    assert flow_row(size.flows[1])[3:] == ["-", "-"]


def test_a_straggler_is_slow_in_most_steps():
    slow, other, none = record(1, straggler=3), record(1, straggler=1), record(1)
    assert find_straggler([slow, slow, none]) == 3
    assert find_straggler([slow, other, none]) is None
    assert find_straggler([slow, slow, other, other]) is None


def test_the_report_names_the_straggler_and_escapes_its_title(tmp_path):
    keys = {"traffic/shard/all_gather": 3 * 2**20, "traffic_least/shard/all_gather": 3 * 2**20, "straggler": 1}
    one = read_size(1, "one rank", [record(1), record(2)], None)
    two = read_size(2, "shard 2", [record(1), record(2, **keys)], one)
    picture, document = write_report([one, two], "a <b> run", tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = document.read_text()
    assert "rank 1 computes clearly longer" in text
    assert "a &lt;b&gt; run" in text
    assert "<b>" not in text
    assert "3 MiB" in text
    assert text.count("<svg") == 4
    assert "Sent by rank 0 in a step (MiB)" in text
    assert "http-equiv" not in text


def test_sizes_that_do_not_fit_the_layout_are_refused_before_any_run(tmp_path):
    class Settings:
        parallel = ParallelConfig(tensor=2)

    with pytest.raises(ConfigError, match="--procs 1 does not go with this configuration"):
        measure(Settings(), [1, 2], 3, tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
