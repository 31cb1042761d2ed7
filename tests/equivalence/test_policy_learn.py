"""A whole step of reinforcement learning, from scored answers to new weights: on several ranks as on one, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import everywhere, spawn, whole
from equivalence.plain import STEP, make_model
from equivalence.policy_learn_plain import PlainLearner, engine_settings, make_scored_groups
from equivalence.test_layouts import LAYOUTS
from loops.grpo_run import grpo_config

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import GrpoConfig, ParallelConfig, RunConfig
from lockstep.train.checkpoints import Progress
from lockstep.train.grpo import learn

TOLERANCE = 1e-10
SHARED: dict[str, Any] = {"max_tokens": 16, "max_sampler_trainer_logprob_diff": None, "minibatches": 2}
# What is learned, and whether with LoRA.
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "whitened over the batch": ({"advantage": "reinforce++", "num_updates": 2, "overlong": "mask"}, False),
    "distance in the reward": (
        {"kl_coefficient": 0.3, "kl_in": "reward", "kl": "k2", "ratio": "sequence", "aggregation": "sequence"},
        False,
    ),
    "adapters": (
        {
            "kl_coefficient": 0.2,
            "importance_weighting": "token",
            "aggregation": "fixed",
            "temperature": 1.3,
            "num_updates": 2,
        },
        True,
    ),
    "leave one out": ({"advantage": "rloo", "objective": "cispo", "clip_low": 1.0, "temperature": 0.7}, False),
}
LEARNED_ON = ("one", "ddp-2", "fsdp-2", "tensor-2", "context-2", "ddp-4", "fsdp-4", "hybrid-2x2", "shard-2-tensor-2")
QUICK = ("ddp-2",)


def configure(way: str) -> RunConfig:
    changes = engine_settings({**SHARED, **WAYS[way][0]})
    return grpo_config(changes.pop("algorithm"), data={"max_length": 128}, **changes)


def family_of(way: str) -> tuple[str, bool]:
    return ("llama", True) if WAYS[way][1] else ("qwen3", False)


def steps() -> list[Any]:
    return [make_scored_groups(0), make_scored_groups(1, count=3)]


@lru_cache
def learned_by_hand(way: str) -> dict[str, Any]:
    algorithm = configure(way).algorithm
    assert isinstance(algorithm, GrpoConfig)
    family, lora = family_of(way)
    reference = make_model(family, lora=False) if algorithm.needs_reference else None
    plain = PlainLearner(make_model(family, lora=lora), reference, algorithm)
    for groups in steps():
        plain.learn(groups)
    return {"losses": plain.losses, "weights": {name: p.detach().clone() for name, p in plain.trained.items()}}


class Losses:
    """A backend whose losses are written down."""

    def __init__(self, backend: TorchBackend) -> None:
        self._backend, self.found = backend, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward_backward(self, *given: Any) -> Any:
        result = self._backend.forward_backward(*given)
        self.found.append(result.loss)
        return result


def learn_on(way: str, group: Any, parallel: ParallelConfig) -> dict[str, Any]:
    config = configure(way)
    algorithm = config.algorithm
    assert isinstance(algorithm, GrpoConfig)
    family, lora = family_of(way)
    kind = "none" if not algorithm.needs_reference else "adapter_off" if lora else "copy"
    settings: dict[str, Any] = {"micro_batch_tokens": 40, "precision": "fp64", "temperature": algorithm.temperature}
    backend = TorchBackend(make_model(family, lora=lora), group=group, parallel=parallel, reference=kind, **settings)
    watched, measured = Losses(backend), []
    for number, groups in enumerate(steps(), start=1):
        found = learn(config, algorithm, watched, groups, Progress(step=number), STEP.learning_rate).metrics  # type: ignore[arg-type]
        measured.append(
            {
                name: found[name]
                for name in ("loss", "ratio", "policy_shift", "sampler_trainer_logprob_diff", "grad_norm")
            }
        )
    weights = everywhere({name: whole(p.detach()) for name, p in backend.parameters().items()}, group)
    return {"losses": watched.found, "weights": weights, "measured": measured}


def learn_everything(ways: Sequence[str], parallel: ParallelConfig, out: Path) -> None:
    torch.set_num_threads(1)
    group = join_group("cpu", parallel, timeout_s=60)
    found = {way: learn_on(way, group, parallel) for way in ways}
    assert len(set(map(str, group.gather_objects([found[way]["measured"] for way in ways])))) == 1
    if group.rank == 0:
        torch.save(found, out)
    group.leave()


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    num_ranks, parallel = LAYOUTS[request.param]
    out = tmp_path_factory.mktemp("learned") / "found.pt"
    spawn(num_ranks, learn_everything, list(WAYS), parallel, out)
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize(
    "found",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LEARNED_ON],
    indirect=True,
)
@pytest.mark.parametrize("way", WAYS)
def test_a_layout_learns_what_one_rank_learns_by_hand(found: dict[str, dict[str, Any]], way: str) -> None:
    mine, expected = found[way], learned_by_hand(way)
    assert len(expected["losses"]) == 4 * WAYS[way][0].get("num_updates", 1)
    assert mine["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE, abs=TOLERANCE)
    assert mine["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        difference = float((mine["weights"][name] - tensor).abs().max())
        assert difference <= TOLERANCE, f"weights of {name}: {difference:.3g}"
    assert all(step["policy_shift"] >= 0 and step["sampler_trainer_logprob_diff"] > 0 for step in mine["measured"])
