"""The loop of reinforcement learning with a fake backend: what is sampled, scored, compared and learned."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
from loops.fake_run import committed, records_of
from loops.grpo_run import FakePolicy, SumScorer, ZeroStdScorer, grpo_config, make_prompts, samples_of, train

from lockstep.algorithms.advantages import find_advantages
from lockstep.backend.fake import FakeBackend
from lockstep.data.prompts import PromptRow, Prompts
from lockstep.rollouts.rewards import Attempt, Outcome, Turn
from lockstep.train.grpo import policy_options
from lockstep.train.steps import Diverged

# --- one step -------------------------------------------------------------------------------------------------------


def test_every_prompt_is_sampled_once_in_an_epoch_with_its_place_as_the_key(tmp_path):
    backend = FakeBackend()
    policy = FakePolicy(backend)
    train(tmp_path / "run", grpo_config(optim={"epochs": 2}), backend, make_prompts(10), policy=policy)
    keys = [keys for keys, _ in policy.requests]
    assert [len(own) for own in keys] == [4, 4, 2, 4, 4, 2]
    assert [key for own in keys for key in own] == list(range(20))
    assert all(params.num_samples == 3 and params.logprobs and params.seed == 0 for _, params in policy.requests)


@pytest.mark.parametrize("baseline", ["grpo", "dr_grpo", "rloo", "reinforce++"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed"])
def test_the_loss_gets_every_side_value_of_the_rollouts(tmp_path, baseline, aggregation):
    backend = FakeBackend()
    config = grpo_config({"advantage": baseline, "aggregation": aggregation}, optim={"max_steps": 1})
    run, _ = train(tmp_path / "run", config, backend, make_prompts(10))
    (call,) = backend.calls_of("forward_backward")
    samples = samples_of(run, 1)
    groups = [samples[i : i + 3] for i in range(0, 12, 3)]
    expected = find_advantages([[row["reward"] for row in group] for group in groups], baseline)
    completions = [c for datum in call.batch for c in datum.completions]
    assert len(call.batch) == 4
    num_tokens = sum(len(c.tokens) for c in completions)
    assert call.argument.scale == {"token": 1 / num_tokens, "sequence": 1 / 12, "fixed": 1 / 48}[aggregation]
    assert call.argument.options == policy_options(config.algorithm, on_policy=True)
    assert backend.calls_of("forward") == [], "a single update computes the old log-probs itself"
    for completion, advantage, row in zip(completions, [a for own in expected for a in own], samples, strict=True):
        assert " ".join(map(str, completion.tokens)) == row["turns"][0]
        assert completion.values["advantages"] == [advantage] * len(completion.tokens)
        assert row["advantage"] == advantage
        weight = 1 / len(completion.tokens) if aggregation == "sequence" else 1.0
        assert completion.weights == [weight] * len(completion.tokens)
        logprobs = [-((20.0 - token) ** 2) / 2 for token in completion.tokens]
        assert "old_logprobs" not in completion.values
        assert list(completion.values["behaviour_logprobs"]) == logprobs


def test_the_policy_learns_what_is_rewarded(tmp_path):
    """Answers of high tokens earn more, and so the weight, which is far above all of them, is drawn less."""
    config = grpo_config({"advantage": "dr_grpo"}, optim={"epochs": 5, "learning_rate": 1e-4})
    run, progress = train(tmp_path / "run", config, backend := FakeBackend(), make_prompts(12))
    assert progress.step == 15
    assert backend.weight > 20.0
    assert progress.loss == records_of(run)[-1]["loss"]


def test_the_numbers_of_a_step(tmp_path):
    backend = FakeBackend()
    run, _ = train(tmp_path / "run", grpo_config(optim={"max_steps": 2}), backend, make_prompts(10))
    for step, record in enumerate(records_of(run), start=1):
        samples = samples_of(run, step)
        rewards = [row["reward"] for row in samples]
        assert record["reward"] == pytest.approx(statistics.fmean(rewards))
        assert record["reward_std"] == pytest.approx(statistics.stdev(rewards))
        assert record["reward_short"] == pytest.approx(statistics.fmean(row["scores"]["short"] for row in samples))
        assert record["completion_length"] == statistics.fmean(row["tokens"] for row in samples)
        assert record["truncated_frac"] == statistics.fmean(row["truncated"] for row in samples) > 0
        assert record["sampler_trainer_logprob_diff"] == record["staleness"] == record["reward_failed"] == 0
        assert record["ratio"] == pytest.approx(1)
        assert record["row_range"] == [4 * (step - 1), 4 * step]
        zero_std = [len({row["reward"] for row in samples[i : i + 3]}) == 1 for i in range(0, 12, 3)]
        assert record["zero_std_groups"] == sum(zero_std)
        assert [row["versions"] for row in samples] == [[step - 1, step - 1]] * 12


def test_several_updates_of_several_minibatches(tmp_path):
    backend = FakeBackend()
    config = grpo_config({"num_updates": 2, "minibatches": 3}, optim={"max_steps": 1}, batch={"samples": 5})
    run, progress = train(tmp_path / "run", config, backend, make_prompts(10))
    calls = backend.calls_of("forward_backward")
    assert [len(call.batch) for call in calls] == [2, 1, 2, 2, 1, 2]
    assert [call.origins for call in calls[:3]] == [call.origins for call in calls[3:]]
    assert [call.step for call in backend.calls_of("optim_step")] == [0, 1, 2, 3, 4, 5]
    assert len(backend.calls_of("forward")) == 1
    for completion in (c for call in calls for datum in call.batch for c in datum.completions):
        assert completion.values["old_logprobs"] == [-((20.0 - token) ** 2) / 2 for token in completion.tokens]
    assert len({call.argument.scale for call in calls}) > 1
    (record,) = records_of(run)
    assert record["num_updates"] == 6
    assert record["sampler_trainer_logprob_diff"] == record["sampler_trainer_logprob_diff_max"] == 0
    assert record["ratio"] != pytest.approx(1)
    assert progress.tokens == record["tokens"]


# --- what is left out -----------------------------------------------------------------------------------------------


def test_rollouts_whose_reward_failed_are_counted_and_not_trained_on(tmp_path):
    backend = FakeBackend()
    run, _ = train(tmp_path / "run", grpo_config(), backend, make_prompts(10), scorer=SumScorer(bad="123"))
    seen = 0
    for call, record in zip(backend.calls_of("forward_backward"), records_of(run), strict=True):
        samples = samples_of(run, record["step"])
        failed = [row for row in samples if row["problem"]]
        assert all(row["problem"] == "the scorer is ill" and row["reward"] is None for row in failed)
        assert record["reward_failed"] == len(failed)
        seen += len(failed)
        texts = [" ".join(map(str, c.tokens)) for datum in call.batch for c in datum.completions]
        assert not any(text[0] in "123" for text in texts)
        rewards = [row["reward"] for row in samples if not row["problem"]]
        assert record["reward"] == pytest.approx(statistics.fmean(rewards))
    assert seen > 5


def test_a_step_of_which_nothing_can_be_scored_ends_the_run_and_says_why(tmp_path):
    with pytest.raises(
        ValueError, match="none of the 12 answers of this step could be scored; the first: the scorer is"
    ):
        train(tmp_path / "run", grpo_config(), FakeBackend(), make_prompts(10), scorer=SumScorer(bad="0123456"))


def test_truncated_rollouts_can_be_masked_and_still_count_in_baselines(tmp_path):
    backend = FakeBackend()
    config = grpo_config({"overlong": "mask", "advantage": "dr_grpo"}, optim={"max_steps": 1})
    run, _ = train(tmp_path / "run", config, backend, make_prompts(10))
    (call,) = backend.calls_of("forward_backward")
    samples = samples_of(run, 1)
    assert any(row["truncated"] for row in samples)
    kept = [row for row in samples if not row["truncated"]]
    completions = [c for datum in call.batch for c in datum.completions]
    assert [" ".join(map(str, c.tokens)) for c in completions] == [row["turns"][0] for row in kept]
    expected = find_advantages([[r["reward"] for r in samples[i : i + 3]] for i in range(0, 12, 3)], "dr_grpo")
    flat = [a for group in expected for a in group]
    assert [c.values["advantages"][0] for c in completions] == [
        a for a, row in zip(flat, samples, strict=True) if not row["truncated"]
    ]
    assert call.argument.scale == 1 / sum(len(c.tokens) for c in completions)


def test_groups_without_spread_are_kept_dropped_or_refilled(tmp_path):
    runs = {}
    for choice in ("keep", "drop", "refill"):
        backend = FakeBackend()
        config = grpo_config(
            {"zero_std_groups": choice}, optim={"max_steps": 2}, data={"shuffle": False, "max_length": 16}
        )
        run, progress = train(tmp_path / choice, config, backend, make_prompts(20), scorer=ZeroStdScorer())
        runs[choice] = (backend, records_of(run), progress)
    sizes = {
        choice: [len(c.batch) for c in backend.calls_of("forward_backward")] for choice, (backend, *_) in runs.items()
    }
    assert sizes["keep"] == [4, 4]
    assert sizes["drop"] == [2, 2]
    assert sizes["refill"] == [4, 4]
    assert runs["keep"][2].cursor == runs["drop"][2].cursor == 8
    assert [r["left_out_groups"] for r in runs["drop"][1]] == [2, 2]
    # Of prompts 0 to 3 two are kept, of 4 and 5 one, and 6 is the fourth; then 7 to 10, 11 and 12, 13 and 14.
    assert [r["row_range"] for r in runs["refill"][1]] == [[0, 7], [7, 15]]
    for record in runs["refill"][1]:
        taken = record["row_range"][1] - record["row_range"][0]
        assert taken == 4 + record["left_out_groups"]
        assert record["zero_std_groups"] == record["left_out_groups"]


class EqualScorer(SumScorer):
    """The same for every answer; other rewards for steps up to `until`, by the number of answers scored."""

    def __init__(self, until: int = 0) -> None:
        super().__init__()
        self._until = until

    def _score(self, text: str) -> Outcome:
        return super()._score(text) if len(self.scored) <= self._until else Outcome(0.25, {"mean": 0.25})


@pytest.mark.parametrize(
    ("steps", "different", "warned_at"),
    [(3, 0, [3]), (12, 0, [10]), (25, 0, [10]), (13, 4, []), (15, 4, [14]), (9, 0, [9])],
)
def test_rewards_that_teach_nothing_are_said_once(tmp_path, steps, different, warned_at):
    config = grpo_config(optim={"max_steps": steps, "epochs": 99}, logging={"tensorboard": False, "every_steps": 7})
    scorer = EqualScorer(until=different * 4 * 3)
    run, _ = train(tmp_path / "run", config, FakeBackend(), make_prompts(20), scorer=scorer)
    warnings = [e for e in run.events() if e["event"] == "warning"]
    assert [e["step"] for e in warnings] == warned_at
    for event in warnings:
        assert "all answers to a prompt have earned the same (on average 0.25)" in event["message"]


def test_refilling_ends(tmp_path):
    class AllFlat(SumScorer):
        def score(self, attempts: Sequence[Attempt]) -> list[Outcome]:
            return [Outcome(0.0) for _ in attempts]

    backend = FakeBackend()
    config = grpo_config({"zero_std_groups": "refill", "max_refills": 2}, optim={"max_steps": 2})
    run, progress = train(tmp_path / "run", config, backend, make_prompts(50), scorer=AllFlat())
    assert backend.calls_of("forward_backward") == backend.calls_of("optim_step") == []
    assert progress.cursor == 2 * 3 * 4
    assert [(r["num_updates"], r["left_out_groups"]) for r in records_of(run)] == [(0, 12), (0, 12)]


# --- distances ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_distance_from_the_reference_counts_in_the_loss_or_in_the_reward(tmp_path, place):
    backend = FakeBackend()
    backend.reference = 20.01
    settings = {"kl_coefficient": 0.5, "kl": "k2", "kl_in": place, "advantage": "dr_grpo"}
    run, _ = train(tmp_path / "run", grpo_config(settings, optim={"max_steps": 1}), backend, make_prompts(10))
    assert [call.reference for call in backend.calls_of("forward")] == ([True] if place == "loss" else [True, False])
    (call,) = backend.calls_of("forward_backward")
    rewards = [row["reward"] for row in samples_of(run, 1)]
    completions = [c for datum in call.batch for c in datum.completions]
    if place == "loss":
        assert call.argument.options["kl_coefficient"] == 0.5
        for c in completions:
            assert c.values["reference_logprobs"] == [-((20.01 - t) ** 2) / 2 for t in c.tokens]
    else:
        assert call.argument.options["kl_coefficient"] == 0
        gains = [[(20.01 - t) ** 2 / 2 - (20.0 - t) ** 2 / 2 for t in c.tokens] for c in completions]
        distances = [sum(gain**2 / 2 for gain in own) for own in gains]
        rewards = [reward - 0.5 * distance for reward, distance in zip(rewards, distances, strict=True)]
        (record,) = records_of(run)
        assert record["kl"] == pytest.approx(sum(distances) / sum(len(c.tokens) for c in completions))
    expected = find_advantages([rewards[i : i + 3] for i in range(0, 12, 3)], "dr_grpo")
    found = [c.values["advantages"][0] for c in completions]
    assert found == pytest.approx([a for group in expected for a in group])


def test_the_reference_follows_the_policy(tmp_path):
    backend = FakeBackend()
    settings = {"kl_coefficient": 0.1, "reference_sync_steps": 2, "reference_mix": 0.5}
    train(tmp_path / "run", grpo_config(settings, optim={"max_steps": 5}), backend, make_prompts(30))
    assert [call.argument for call in backend.calls_of("mix_reference")] == [0.5, 0.5]


def test_a_sampler_that_is_not_the_trainer_ends_the_run(tmp_path):
    backend = FakeBackend()
    with pytest.raises(Diverged) as caught:
        train(tmp_path / "run", grpo_config(), backend, make_prompts(10), policy=FakePolicy(backend, gap=0.3))
    assert "at step 1 sampler and trainer differ by 0.3 in a token's log-prob" in str(caught.value)
    assert backend.calls_of("optim_step") == []
    backend = FakeBackend()
    config = grpo_config({"max_sampler_trainer_logprob_diff": None}, optim={"max_steps": 1})
    run, _ = train(tmp_path / "two", config, backend, make_prompts(10), policy=FakePolicy(backend, gap=0.3))
    assert records_of(run)[0]["sampler_trainer_logprob_diff"] == pytest.approx(0.3)


# --- turns ----------------------------------------------------------------------------------------------------------


def test_an_environment_replies_and_its_tokens_are_not_trained_on(tmp_path):
    backend = FakeBackend()
    policy = FakePolicy(backend)
    config = grpo_config({"environment": "calculator", "max_turns": 3}, optim={"max_steps": 1}, data={"max_length": 64})
    scorer = SumScorer(replies=["90 91", None])
    run, _ = train(tmp_path / "run", config, backend, make_prompts(10), scorer=scorer, policy=policy)
    (call,) = backend.calls_of("forward_backward")
    rows = samples_of(run, 1)
    completions = [c for datum in call.batch for c in datum.completions]
    assert {len(row["turns"]) for row in rows} == {1, 2}
    for completion, row in zip(completions, rows, strict=True):
        first, *more = ([int(word) for word in turn.split()] for turn in row["turns"])
        assert list(completion.tokens) == first + [token for turn in more for token in [90, 91, *turn]]
        assert [bool(w) for w in completion.weights] == [token not in (90, 91) for token in completion.tokens]
        assert row["tokens"] == sum(w != 0 for w in completion.weights)
        assert (len(row["turns"]) == 1) == (len(first) == 4)  # a turn that was cut is the last
    assert len(policy.requests) == 2
    assert policy.requests[1][1].num_samples == 1
    assert len(set(policy.requests[1][0])) == len(policy.requests[1][0])


def test_every_turn_of_every_answer_is_sampled_from_a_stream_of_its_own(tmp_path):
    backend = FakeBackend()
    policy = FakePolicy(backend)
    config = grpo_config({"environment": "calculator"}, optim={"max_steps": 2}, data={"max_length": 64})
    scorer = SumScorer(replies=["90", "91", "92"])
    train(tmp_path / "run", config, backend, make_prompts(10), scorer=scorer, policy=policy)
    keys = [key for own, _ in policy.requests for key in own]
    assert len(policy.requests) == 8
    assert len(set(keys)) == len(keys)


def test_an_episode_without_room_for_another_turn_is_cut(tmp_path):
    config = grpo_config({"environment": "calculator"}, optim={"max_steps": 1}, data={"max_length": 9})
    scorer = SumScorer(replies=["90 91", "90 91", None])
    run, _ = train(tmp_path / "run", config, FakeBackend(), make_prompts(10), scorer=scorer)
    assert all(len(row["turns"]) == 1 and row["truncated"] for row in samples_of(run, 1))


def test_an_environment_that_fails_taints_its_episode(tmp_path):
    class Broken(SumScorer):
        def play(self, attempts: Sequence[Attempt]) -> list[Turn]:
            return [Turn(problem="it broke") if a.answer[0] == "3" else Turn() for a in attempts]

    config = grpo_config({"environment": "calculator"}, optim={"max_steps": 3}, data={"max_length": 64})
    run, _ = train(tmp_path / "run", config, FakeBackend(), make_prompts(10), scorer=Broken())
    rows = [row for step in (1, 2, 3) for row in samples_of(run, step)]
    broken = [row for row in rows if row["problem"] == "it broke"]
    assert broken == [row for row in rows if row["turns"][0][0] == "3" and not row["truncated"]] != []


# --- held-out prompts -----------------------------------------------------------------------------------------------


def test_held_out_prompts_get_one_likeliest_answer_and_the_best_checkpoint_has_the_highest_reward(tmp_path):
    class Scripted(SumScorer):
        rewards = iter([0.1, 0.4, 0.9, 0.2, 0.2])

        def score(self, attempts: Sequence[Attempt]) -> list[Outcome]:
            if attempts[0].row["prompt"].startswith("held"):
                value = next(self.rewards)
                return [Outcome(value) for _ in attempts]
            return super().score(attempts)

    held_out = Prompts([PromptRow(f"v:{i}", (5,), {"prompt": f"held out {i}"}) for i in range(7)])
    backend = FakeBackend()
    policy = FakePolicy(backend)
    config = grpo_config(
        evaluation={"every_steps": 1, "at_start": True, "rows": 5},
        checkpoint={"every_steps": 0, "keep_last": 1},
        optim={"max_steps": 4},
    )
    run, progress = train(
        tmp_path / "run", config, backend, make_prompts(20), held_out, scorer=Scripted(), policy=policy
    )
    assert [r["reward"] for r in records_of(run, "validation")] == [0.1, 0.4, 0.9, 0.2, 0.2]
    assert progress.best_step == 2
    assert committed(run) == [2, 4]
    greedy = [(keys, params) for keys, params in policy.requests if params.temperature == 0]
    assert len(greedy) == 5
    assert all(keys == list(range(5)) and params.num_samples == 1 for keys, params in greedy)
    status = run.status()
    assert (status["best_reward"], status["validation_loss"]) == (0.9, None)
    assert status["validation_scores"]["reward"] == 0.2


# --- samples --------------------------------------------------------------------------------------------------------


def test_only_the_newest_samples_are_kept(tmp_path):
    config = grpo_config({"keep_samples": 3}, optim={"epochs": 3, "max_steps": 12})
    run, _ = train(tmp_path / "run", config, FakeBackend(), make_prompts(20))
    assert sorted(path.name for path in (run.path / "samples").iterdir()) == [
        f"step-{step}.jsonl" for step in (10, 11, 12)
    ]
