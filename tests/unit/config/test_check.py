"""One check of a configuration, wherever it comes from: the command and Python refuse with the same sentence.

The service's share is in tests/service/test_service_api.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

import lockstep
from lockstep.cli.options import load_settings
from lockstep.config import ConfigError, check_config, parse_config

TREE = {"model": "org/model", "data": {"train": "rows"}}
REFUSED = {
    "loss": (
        {"algorithm": {"kind": "dpo", "loss": "exo_pair"}},
        "algorithm.label_smoothing: exo_pair needs more than 0",
    ),
    "layout": ({"parallel": {"tensor": 3}}, "parallel: replicate 1 x shard 1 x tensor 3 = 3 ranks, but the run has 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_command_and_python_refuse_alike_and_start_nothing(name: str, tmp_path: Path) -> None:
    sections, sentence = REFUSED[name]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**TREE, **sections}))
    messages = []
    for start in (
        lambda: load_settings(str(path), None),
        lambda: lockstep.train(path, run_dir=tmp_path / "run"),
        lambda: lockstep.train({**TREE, **sections}, run_dir=tmp_path / "run"),
    ):
        with pytest.raises(ConfigError) as caught:
            start()
        messages.append(str(caught.value))
    assert all(sentence in message for message in messages)
    assert messages[0] == messages[1]
    assert not (tmp_path / "run").exists()


def test_ray_is_refused_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(yaml.safe_dump({**TREE, "launch": {"kind": "ray"}}))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find_spec(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"launch.kind ray needs Ray: pip install"):
        check_config(config)
    with pytest.raises(ConfigError, match=r"launch.kind ray needs Ray: pip install"):
        lockstep.train(config, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_kind_that_the_caller_cannot_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    config = parse_config(yaml.safe_dump({**TREE, "launch": {"kind": "ray"}}))
    assert check_config(config) is config
    with pytest.raises(ConfigError, match=r"launch.kind is ray, and runs are started here with kind local: set that"):
        check_config(config, launch_kinds=("local",))
