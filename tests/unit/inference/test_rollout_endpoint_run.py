"""A whole run whose answers come from a server: what is published over the folder is what the server samples from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from model_servers import ModelSglang, ModelVllm
from scripted_rollout_servers import ScriptedRolloutServer
from scripted_server import scripted_server

from lockstep.config import ConfigError, RunConfig, load_config
from lockstep.rundir import RunDir
from lockstep.train.run import run as train

REWARD = {"name": "length", "options": {"most": 4, "unit": "characters", "soft": 12}}
WAYS: dict[str, tuple[type[ScriptedRolloutServer], dict[str, Any]]] = {
    "sglang": (ModelSglang, {"algorithm": {"temperature": 0.7}, "rollouts": {"kind": "sglang"}}),
    "vllm": (ModelVllm, {"lora": {"rank": 4}, "rollouts": {"kind": "vllm"}}),
    "ahead": (ModelSglang, {"rollouts": {"kind": "sglang", "max_staleness": 2}, "optim": {"learning_rate": 1e-4}}),
}


def configure(folder: Path, url: str, changes: dict[str, Any]) -> RunConfig:
    model = tiny.write_model(folder / "model", num_hidden_layers=2, initializer_range=0.2)
    for name, count in (("train", 8), ("validation", 2)):
        rows = [json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    algorithm = {"kind": "grpo", "reward": REWARD, "group_size": 4, "max_tokens": 10, **changes.get("algorithm", {})}
    settings = {
        **changes,
        "algorithm": algorithm,
        "rollouts": {"endpoint": url, **changes["rollouts"]},
        "data": {"validation": "validation.jsonl"},
        "optim": {"epochs": 2, **changes.get("optim", {})},
    }
    return load_config(tiny.write_config(folder, model, **settings))


@pytest.mark.parametrize("way", WAYS)
def test_a_run_learns_from_what_a_server_samples(way: str, tmp_path: Path) -> None:
    kind, changes = WAYS[way]
    with scripted_server(kind) as server:
        run = RunDir.create(tmp_path / "run", configure(tmp_path, server.url, changes))
        train(run.path)
        label = next(iter(server.adapters), server.label)
    records = [record for record in run.metrics() if record["split"] == "train"]
    assert run.status()["state"] == "completed"
    assert len(records) == 4
    for record in records:
        # Weights that are not the published ones would be apart by hundredths, as stale tokens are.
        diffs = {key: record.get(key) for key in ("sampler_trainer_logprob_diff", "stale_logprob_diff")}
        assert any(diffs.values()) if way == "ahead" else diffs["sampler_trainer_logprob_diff"]
        assert (diffs["sampler_trainer_logprob_diff"] or 0) < 1e-5
        assert record["staleness_max"] <= (2 if way == "ahead" else 0)
    assert label.startswith("lockstep-4-")
    (published,) = (run.path / "published").iterdir()
    assert published.name == label


def test_a_server_that_loses_its_weights_ends_the_run(tmp_path: Path) -> None:
    """It was restarted: what it would answer with is not what is in training."""

    class Forgetful(ModelSglang):
        def on_generate(self, body: Any) -> tuple[int, Any]:
            if self.label.startswith("lockstep-2-"):
                self.label = "default"
            return super().on_generate(body)

    with scripted_server(Forgetful) as server:
        run = RunDir.create(tmp_path / "run", configure(tmp_path, server.url, WAYS["sglang"][1]))
        with pytest.raises(OSError, match=r"has the weights 'default', and 'lockstep-2-.* were published"):
            train(run.path)


@pytest.mark.parametrize(
    ("rollouts", "temperature", "said"),
    [
        ({"engines": 2}, 1.0, "rollouts has both engines and an endpoint"),
        ({"kind": "vllm"}, 0.7, r"algorithm\.temperature 0\.7 does not go with rollouts\.kind vllm"),
        ({"kind": "other"}, 1.0, r"rollouts\.kind"),
    ],
)
def test_what_does_not_go_with_a_server_is_refused(
    rollouts: dict[str, Any], temperature: float, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        configure(tmp_path, "http://h:1", {"rollouts": rollouts, "algorithm": {"temperature": temperature}})
