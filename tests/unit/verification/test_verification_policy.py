"""The parts of `lockstep verify` that are for sampled answers and need no second process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from equivalence.plain import make_model
from equivalence.policy_plain import make_groups, plain_policy_loss, sampled_answers, scale_of_groups
from equivalence.preference_plain import gradients_of

from lockstep.config import ConfigError, RunConfig, load_config
from lockstep.data.prompts import PromptRow, Prompts
from lockstep.train.grpo import policy_options
from lockstep.types import LossSpec, OptimStep
from lockstep.verification import verify
from lockstep.verification.checking import compare
from lockstep.verification.plain_loop import StepValues
from lockstep.verification.plain_optimizers import PlainOptimizer
from lockstep.verification.plain_policy import PlainPolicy, RecordingBackend, learn_groups, supervised_logprobs
from lockstep.verification.sample import SyntheticGroups, as_groups, compile_rows, renumber, take_batches

STEP = OptimStep(1e-2)
GRPO: dict[str, Any] = {"kind": "grpo", "reward": "numeric", "group_size": 6, "max_tokens": 16}


def configure(folder: Path, model: Path, algorithm: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    rows = [{"prompt": f"what is {i} and {i}", "answer": str(2 * i)} for i in range(12)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_config(tiny.write_config(folder, model, algorithm={**GRPO, **(algorithm or {})}, **changes))


# --- what is learned from -------------------------------------------------------------------------------------------


def test_every_process_makes_the_same_answers(tmp_path: Path, tiny_model: Path) -> None:
    config = configure(tmp_path, tiny_model)
    first, again = (take_batches(compile_rows(config), config) for _ in range(2))
    assert [part.data for part in first] == [part.data for part in again]
    assert [len(part.data) for part in first] == [4, 4]
    answers = [c for part in first for datum in part.data for c in datum.completions]
    assert len(answers) == 8 * 4
    assert len({tuple(answer.tokens) for answer in answers}) > 25
    assert all(1 <= len(answer.tokens) <= 16 for answer in answers)


def test_groups_have_all_that_a_loop_looks_at(tmp_path: Path, tiny_model: Path) -> None:
    config = configure(tmp_path, tiny_model, {"environment": "calculator"})
    prompts = Prompts([PromptRow(f"a:{i}", tuple(range(10 + i)), {}) for i in range(40)])
    groups = as_groups(list(SyntheticGroups(prompts, config)))
    answers = [answer for group in groups for answer in group.rollouts]
    assert [group.prompt.origin for group in groups] == [f"a:{i}" for i in range(40)]
    assert {answer.truncated for answer in answers} == {True, False}
    assert {answer.outcome.problem for answer in answers} == {None, "made up"}
    assert any(not all(answer.sampled) for answer in answers)
    assert all(answer.sampled[0] and answer.sampled[-1] for answer in answers)
    assert all(
        (logprob < 0) == sampled for a in answers for logprob, sampled in zip(a.logprobs, a.sampled, strict=True)
    )
    assert any(len(set(group.rewards)) > 1 for group in groups)


def test_without_an_environment_all_words_are_the_models(tmp_path: Path, tiny_model: Path) -> None:
    prompts = Prompts([PromptRow("a:1", tuple(range(30)), {})])
    (group,) = as_groups(list(SyntheticGroups(prompts, configure(tmp_path, tiny_model))))
    assert all(all(answer.sampled) for answer in group.rollouts)


# --- the plain loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["none", "copy"])
def test_the_plain_backend_learns_as_the_papers_say(
    tmp_path: Path, tiny_model: Path, kind: str, temperature: float
) -> None:
    settings = {
        "temperature": temperature,
        "entropy_coefficient": 0.2,
        "importance_weighting": "token",
        "dual_clip": 1.5,
    }
    config = configure(tmp_path, tiny_model, {**settings, "kl_coefficient": 0.1 if kind == "copy" else 0.0})
    model = make_model("llama", lora=False)
    plain = PlainPolicy(config, model, kind, PlainOptimizer(model, STEP, clip_at_half=False))
    batch, options = make_groups(), policy_options(config.algorithm)  # type: ignore[arg-type]
    found = plain.forward_backward(batch, LossSpec("policy_gradient", scale_of_groups(batch, "token"), options))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = plain_policy_loss(sampled_answers(model, batch, temperature=temperature), options, "token")
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    for name, gradient in gradients_of(model, loss).items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12)
    assert found.num_supervised == sum(datum.num_supervised for datum in batch)


def test_the_reference_stays_and_follows_only_when_it_is_told(tmp_path: Path, tiny_model: Path) -> None:
    config = configure(tmp_path, tiny_model, {"kl_coefficient": 0.1})
    model, batch = make_model("llama", lora=False), make_groups()
    before = make_model("llama", lora=False)
    plain = PlainPolicy(config, model, "copy", PlainOptimizer(model, STEP, clip_at_half=False))
    reference = plain.forward(batch, reference=True)
    untouched = PlainPolicy(config, before, "none", PlainOptimizer(before, STEP, clip_at_half=False))
    assert reference == untouched.forward(batch)
    assert plain.forward(batch) != reference
    plain.forward_backward(batch, LossSpec("policy_gradient", 1.0, policy_options(config.algorithm)))  # type: ignore[arg-type]
    plain.optim_step(STEP)
    assert plain.forward(batch, reference=True) == reference
    plain.mix_reference(1.0)
    assert plain.forward(batch, reference=True) == plain.forward(batch)


def record(config: RunConfig, model: Any) -> RecordingBackend:
    optimizer = PlainOptimizer(model, STEP, clip_at_half=True)
    return RecordingBackend(PlainPolicy(config, model, "none", optimizer), optimizer.snapshot)


def test_every_update_of_a_loop_is_recorded(tmp_path: Path, tiny_model: Path) -> None:
    config = configure(tmp_path, tiny_model, {"num_updates": 3, "minibatches": 2})
    (part, _) = take_batches(compile_rows(config), config)
    rows = renumber(part.data, list(range(97)))
    model = make_model("llama", lora=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first, *others = learn_groups(config, record(config, model), rows)
    assert len(others) == 3  # two passes, in two parts each
    assert len(first.logprobs) == sum(
        len(a.tokens) for g in as_groups(rows) for a in g.rollouts if not a.outcome.problem
    )
    assert [update.logprobs for update in others] == [[], [], []]
    assert first.metrics["policy_shift"] > 0
    assert any(not torch.equal(first.weights[name], before[name]) for name in before)
    norm = torch.stack([g.square().sum() for g in first.gradients.values()]).sum().sqrt()
    assert first.norm == pytest.approx(float(norm))


def test_the_loop_gets_shifted_logprobs_and_exact_ones_are_compared(tmp_path: Path, tiny_model: Path) -> None:
    config = configure(tmp_path, tiny_model)
    recorder, batch = record(config, make_model("llama", lora=False)), make_groups()
    exact = recorder.backend.forward(batch)
    shifted = recorder.forward(batch)
    distances = [abs(a - b) for x, y in zip(exact, shifted) for u, v in zip(x, y) for a, b in zip(u, v)]
    assert 0.2 < max(distances) <= 0.4
    assert recorder.logprobs[False] == supervised_logprobs(exact, batch)


def test_more_or_fewer_updates_than_expected_are_said() -> None:
    step = StepValues((), 0, 1.0, 1.0, [], {}, {}, where="batch 1, update 1")
    errors = compare([step], [step, step], 1e-10)
    assert errors.first == "1 optimizer steps instead of 2"
    assert errors.largest == float("inf")


def test_the_first_difference_is_named_by_its_update() -> None:
    step = StepValues((), 0, 1.0, 1.0, [], {}, {}, where="batch 1, update 2")
    other = StepValues((), 0, 1.5, 1.0, [], {}, {})
    assert compare([other], [step], 1e-10).first == "loss (batch 1, update 2): off by 0.5"


def test_layouts_that_cannot_sample_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    config = configure(tmp_path, tiny_model, {"entropy_coefficient": 0.1})
    with pytest.raises(ConfigError, match=r"pipeline 2 .*: grpo samples from the whole model on each rank"):
        verify(config, layouts="pipeline=2")
    with pytest.raises(ConfigError, match=r"context 2: algorithm\.entropy_coefficient needs all tokens of an answer"):
        verify(config, layouts="context=2")
