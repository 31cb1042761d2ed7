"""What is sampled at a temperature is learned at it: log-probs of engine and trainer, gradients, and a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from equivalence.layouts import spawn
from equivalence.plain import FAMILIES, keep_float64
from equivalence.policy_plain import make_groups, plain_policy_loss, sampled_answers, scale_of_groups
from equivalence.preference_plain import gradients_of
from equivalence.test_preference import assert_same_step

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig, load_config
from lockstep.parallel.group import ProcessGroup
from lockstep.rollouts.source import ColocatedEngine
from lockstep.rundir import RunDir
from lockstep.train.run import run as train
from lockstep.types import Completion, Datum, LossSpec, SamplingParams

PROMPTS = [[10, 20, 30, 40, 50], [11], [9, 8, 7, 6, 5, 4, 3, 9, 8]]
SHAPE: dict[str, Any] = {**FAMILIES["llama"]().to_diff_dict(), "head_dim": 8, "initializer_range": 0.3}
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "granite": lambda: transformers.GraniteConfig(**SHAPE, logits_scaling=3.0),
    # Low enough to bend most logits.
    "gemma3 with a cap": lambda: transformers.Gemma3TextConfig(**SHAPE, final_logit_softcapping=2.0),
}
every_temperature = pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float64)
    return keep_float64(model)


def backend_of(name: str, group: ProcessGroup | None = None, **options: Any) -> TorchBackend:
    group = group or ProcessGroup(0, 1, torch.device("cpu"))
    return TorchBackend(build(name), micro_batch_tokens=40, precision="fp64", group=group, **options)


def sample_and_measure(backend: TorchBackend, temperature: float) -> list[tuple[float, float]]:
    """(sampler's, trainer's) log-prob of every token of a few answers. All ranks."""
    group = backend.group
    shards = group.degrees.shard * group.degrees.tensor
    engine = ColocatedEngine(backend.lend_model, tiny.build_tokenizer(), group.gather_objects, shards=shards)
    params = SamplingParams(max_tokens=9, temperature=temperature, top_k=40, seed=5, num_samples=3, logprobs=True)
    groups = engine.sample(PROMPTS, params)
    batch = [
        Datum(prompt, [Completion(answer.tokens, [1.0] * len(answer.tokens)) for answer in answers])
        for prompt, answers in zip(PROMPTS, groups, strict=True)
    ]
    sampled = [value for answers in groups for answer in answers for value in answer.logprobs or ()]
    trained = [value for rows in backend.forward(batch) for row in rows for value in row]
    return list(zip(sampled, trained, strict=True))


def furthest(pairs: list[tuple[float, float]]) -> float:
    return max(abs(sampled - trained) for sampled, trained in pairs)


@every_temperature
@pytest.mark.parametrize("name", MODELS)
def test_trainer_and_sampler_agree_at_any_temperature(name: str, temperature: float) -> None:
    assert furthest(sample_and_measure(backend_of(name, temperature=temperature), temperature)) < 1e-10
    if temperature != 1:  # so far apart they are where the trainer does not know
        assert furthest(sample_and_measure(backend_of(name), temperature)) > 0.01


def measure_split(out: Path) -> None:
    torch.set_num_threads(1)
    parallel = ParallelConfig(tensor=2)
    group = join_group("cpu", parallel, timeout_s=60)
    found = {
        (name, temperature): sample_and_measure(
            backend_of(name, group, parallel=parallel, temperature=temperature), temperature
        )
        for name, temperature in (("llama", 0.7), ("granite", 1.3))
    }
    if group.rank == 0:
        torch.save(found, out)
    group.leave()


def test_they_agree_where_the_vocabulary_is_split(tmp_path: Path) -> None:
    spawn(2, measure_split, tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    assert [furthest(pairs) < 1e-10 for pairs in found.values()] == [True, True]


@every_temperature
@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_those_of_logits_over_the_temperature(name: str, temperature: float) -> None:
    model, batch = build(name), make_groups()
    options = {"entropy_coefficient": 0.3, "kl_coefficient": 0.1, "clip_high": 0.4}
    plain = plain_policy_loss(sampled_answers(model, batch, temperature=temperature), options, "token")
    loss = LossSpec("policy_gradient", scale_of_groups(batch, "token"), options)
    expected = plain.detach(), gradients_of(model, plain)
    assert_same_step(backend_of(name, temperature=temperature), batch, loss, expected)


def test_the_reference_is_at_the_temperature_too() -> None:
    batch = make_groups()
    cold, plain = (backend_of("llama", reference="copy", temperature=t) for t in (0.7, 1.0))
    assert cold.forward(batch, reference=True) == cold.forward(batch) != plain.forward(batch, reference=True)


@every_temperature
def test_a_run_learns_at_the_temperature_that_it_samples_at(tmp_path: Path, temperature: float) -> None:
    model = tiny.write_model(tmp_path / "model", num_hidden_layers=2, initializer_range=0.2)
    rows = [json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    reward = {"name": "length", "options": {"most": 4, "unit": "characters", "soft": 12}}
    algorithm = {"kind": "grpo", "reward": reward, "group_size": 4, "max_tokens": 12, "temperature": temperature}
    config = load_config(
        tiny.write_config(tmp_path, model, algorithm={**algorithm, "kl_coefficient": 0.05}, optim={"max_steps": 2})
    )
    run = RunDir.create(tmp_path / "run", config)
    train(run.path)
    records = [record for record in run.metrics() if "sampler_trainer_logprob_diff" in record]
    assert len(records) == 2
    for record in records:
        assert 0 < record["sampler_trainer_logprob_diff"] < 1e-5
    assert records[0]["kl"] == pytest.approx(0, abs=1e-9)
