"""Former names of configuration keys: they still work wherever a configuration comes from, and say so once."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lockstep.config import ConfigError, GrpoConfig, RunConfig, load_config, parse_config, resolve_config
from lockstep.config.renames import RENAMED_KEYS, rename_keys

TREE = {"model": "org/model", "data": {"train": "train.jsonl"}}
OLD = {
    "num_samples": 3,
    "flat_groups": "refill",
    "correction": "sequence",
    "correction_cap": 1.5,
    "max_logprob_gap": 0.7,
}
NEW = {RENAMED_KEYS[old]: value for old, value in OLD.items()}
GRPO = {"kind": "grpo", "reward": "exact"}


def values(config: RunConfig) -> dict[str, object]:
    return {name: getattr(config.algorithm, name) for name in NEW}


def test_every_former_name_is_tried_here():
    assert OLD.keys() == RENAMED_KEYS.keys()
    assert NEW.keys() <= GrpoConfig.model_fields.keys()


def test_former_names_work_in_files_overrides_python_and_configurations_of_old_runs(tmp_path: Path):
    old_run = tmp_path / "config.yaml"
    old_run.write_text(yaml.safe_dump({**TREE, "algorithm": {**GRPO, **OLD}}))
    assert values(load_config(old_run)) == NEW
    overrides = [f"algorithm.{key}={value}" for key, value in OLD.items()]
    assert values(parse_config(yaml.safe_dump({**TREE, "algorithm": GRPO}), overrides=overrides)) == NEW
    assert values(resolve_config({**TREE, "algorithm": {**GRPO, **OLD}})) == NEW
    tree = {**TREE, "model": {"path": "org/model"}, "algorithm": {**GRPO, **OLD}}
    assert values(RunConfig.model_validate(tree)) == NEW
    assert GrpoConfig.model_validate({**GRPO, **OLD}).group_size == 3


def test_an_override_wins_whichever_of_both_names_each_side_uses():
    for in_file, override in (("num_samples", "group_size"), ("group_size", "num_samples")):
        text = yaml.safe_dump({**TREE, "algorithm": {**GRPO, in_file: 4}})
        config = parse_config(text, overrides=[f"algorithm.{override}=6"])
        assert isinstance(config.algorithm, GrpoConfig)
        assert config.algorithm.group_size == 6


def test_a_former_name_beats_a_short_kind_and_a_default_that_depends_on_others():
    tree = {**TREE, "algorithm": {"kind": "dapo", "reward": "exact", "flat_groups": "drop", "correction": "none"}}
    config = resolve_config({**tree, "rollouts": {"engines": 1, "max_staleness": 2}})
    assert values(config)["zero_std_groups"] == "drop"
    assert values(config)["importance_weighting"] == "none"


def test_both_names_at_once_are_refused_with_their_place():
    text = "model: m\ndata: {train: t}\nalgorithm:\n  kind: grpo\n  reward: exact\n  group_size: 4\n  num_samples: 4\n"
    with pytest.raises(ConfigError, match=r"run.yaml:6: algorithm.group_size is also given as algorithm.num_samples"):
        parse_config(text, source="run.yaml")


def test_an_error_about_a_former_name_has_the_place_where_it_was_written():
    text = "model: m\ndata: {train: t}\nalgorithm:\n  kind: grpo\n  reward: exact\n  num_samples: 0\n"
    with pytest.raises(ConfigError, match=r"run.yaml:6: algorithm.group_size"):
        parse_config(text, source="run.yaml")


def test_the_notice_comes_once_in_a_process_with_both_names_and_the_place(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: {train: t}\nalgorithm:\n  kind: grpo\n  reward: exact\n  num_samples: 4\n")
    program = (
        "from lockstep.config import load_config\n"
        f"for _ in range(3): load_config({str(path)!r}, ['algorithm.correction=token'])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert f"{path}:6: algorithm.num_samples is now called algorithm.group_size" in lines[0]
    assert "override 'algorithm.correction=token': algorithm.correction is now called" in lines[1]


def test_current_names_are_silent(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert rename_keys({**GRPO, **NEW}) == {**GRPO, **NEW}
    assert not caplog.records
