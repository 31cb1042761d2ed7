"""The algorithm section for reinforcement learning: rewards in all their spellings, short names, what is refused."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
from test_config_algorithm import algorithm_of, explain, parse

from lockstep.algorithms.advantages import AGGREGATIONS, BASELINES
from lockstep.algorithms.policy_gradient import PolicyGradientOptions
from lockstep.config import GrpoConfig, RunConfig
from lockstep.config.grpo import SHORT_GRPO
from lockstep.train.grpo import policy_options

GRPO = "kind: grpo; reward: exact"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("reward: numeric", [("numeric", 1.0, {})]),
        ("reward: [numeric, my_rewards:polite]", [("numeric", 1.0, {}), ("my_rewards:polite", 1.0, {})]),
        ("reward: {numeric: 1.0, format: 0.2}", [("numeric", 1.0, {}), ("format", 0.2, {})]),
        ("reward: {name: regex, options: {pattern: a}}", [("regex", 1.0, {"pattern": "a"})]),
        (
            "reward: [exact, {name: regex, weight: 0.5, options: {pattern: a}}]",
            [("exact", 1.0, {}), ("regex", 0.5, {"pattern": "a"})],
        ),
    ],
)
def test_rewards_are_a_name_a_list_weights_or_entries(given, expected):
    algorithm = algorithm_of(f"kind: grpo; {given}")
    assert isinstance(algorithm, GrpoConfig)
    assert [(reward.name, reward.weight, reward.options) for reward in algorithm.reward] == expected


@pytest.mark.parametrize("name", SHORT_GRPO)
def test_short_names_are_grpo_with_the_settings_of_a_paper(name):
    algorithm = algorithm_of(f'kind: "{name}"; reward: exact')
    assert algorithm.kind == "grpo"
    for key, value in SHORT_GRPO[name].items():
        assert getattr(algorithm, key) == value
    assert algorithm_of(f'kind: "{name}"; reward: exact; group_size: 4; clip_high: 0.5').clip_high == 0.5


def test_a_run_can_be_turned_into_grpo_from_the_command_line():
    algorithm = algorithm_of("", "algorithm.kind=dapo", "algorithm.reward=numeric")
    assert (algorithm.zero_std_groups, algorithm.reward[0].name) == ("refill", "numeric")


def test_the_resolved_configuration_reads_as_itself():
    config = parse("kind: gspo; reward: {numeric: 1.0, format: 0.2}")
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_choices_and_defaults_are_those_of_the_algorithms():
    fields = GrpoConfig.model_fields
    choices = {name: set(get_args(fields[name].annotation)) for name in ("advantage", "aggregation")}
    assert choices == {
        "advantage": set(BASELINES),
        "aggregation": set(AGGREGATIONS),
    }
    known = get_type_hints(PolicyGradientOptions)
    for name in ("ratio", "objective", "kl", "importance_weighting"):
        assert set(get_args(fields[name].annotation)) == set(get_args(known[name])), name
    assert PolicyGradientOptions(**policy_options(algorithm_of(GRPO))) == PolicyGradientOptions()


def test_a_distance_in_the_reward_is_none_of_the_losss_business():
    assert policy_options(algorithm_of(f"{GRPO}; kl_coefficient: 0.1"))["kl_coefficient"] == 0.1
    assert policy_options(algorithm_of(f"{GRPO}; kl_coefficient: 0.1; kl_in: reward"))["kl_coefficient"] == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("kind: grpo", "algorithm.reward is missing"),
        ("kind: grpo; reward: []", "algorithm.reward"),
        ("kind: grpo; reward: [exact, exact]", "algorithm.reward names exact twice"),
        ("kind: grpo; reward: {exact: 0.0}", "algorithm.reward has no weight but 0"),
        ("kind: grpo; reward: environment", "algorithm.reward environment needs an environment"),
        ("kind: grpo; reward: {name: regex, pattern: a}", "unknown key 'algorithm.reward.pattern'"),
        (f"{GRPO}; temperature: 0.0", "run.yaml:6: algorithm.temperature: Input should be greater than 0"),
        (f"{GRPO}; group_size: 1", "algorithm.group_size 1 leaves nothing to compare with"),
        (f"{GRPO}; beta: 0.1", "it is a setting of kind dpo and kto, and this is grpo"),
        (f"{GRPO}; reference: copy", "algorithm.reference is given, but kl_coefficient is 0"),
        (f"{GRPO}; reference_sync_steps: 3", "algorithm.reference_sync_steps is given, but kl_coefficient is 0"),
        (f"{GRPO}; kl_coefficient: 0.1; reference: none", "algorithm.reference is none, but kl_coefficient needs one"),
        (f"{GRPO}; kl_coefficient: 0.1; reference: adapter_off", "needs a lora section"),
        (f"{GRPO}; max_tokens: 2048", "algorithm.max_tokens 2048 leaves no room for a prompt in data.max_length 2048"),
        (f"{GRPO}; minibatches: 17", "algorithm.minibatches 17 is more than the prompts of a step (16)"),
    ],
)
def test_what_means_nothing_is_refused_by_name(given, words):
    assert words in explain(given)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("batch.tokens=4096", "batch.tokens is not for grpo"),
        ("parallel.pipeline=2", "parallel.pipeline is not for grpo"),
    ],
)
def test_what_other_sections_may_not_say(override, words):
    assert words in explain(GRPO, override)


def test_metrics_of_answers_are_not_for_rewards():
    words = explain(GRPO, "evaluation.metrics=[rouge]", "data.validation=v.jsonl")
    assert "evaluation.metrics is not for grpo" in words


def test_one_sample_of_each_prompt_is_enough_where_the_whole_batch_is_the_baseline():
    assert algorithm_of(f"{GRPO}; group_size: 1; advantage: reinforce++").group_size == 1


# --- rollouts -------------------------------------------------------------------------------------------------------


def test_without_engines_the_processes_that_train_sample_in_turns():
    rollouts = parse(GRPO).rollouts
    assert (rollouts.engines, rollouts.max_staleness) == (0, 0)
    assert parse("").rollouts == rollouts


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollouts.max_staleness=2"], "rollouts.max_staleness 2 needs engines that sample while others train"),
        (["rollouts.engines=-1"], "rollouts.engines: Input should be greater than or equal to 0"),
        (["rollouts.max_staleness=-1"], "rollouts.max_staleness: Input should be greater than or equal to 0"),
        (["rollouts.deadline_s=0"], "rollouts.deadline_s: Input should be greater than 0"),
        (["rollouts.engine=2"], "unknown key 'rollouts.engine'"),
        (
            ["rollouts.engines=1", "rollouts.max_staleness=3", "algorithm.num_updates=2", "algorithm.minibatches=2"],
            "rollouts.max_staleness 3 is less than the 4 optimizer steps of a step",
        ),
    ],
)
def test_a_bound_on_staleness_that_cannot_be_is_refused(overrides, words):
    assert words in explain(GRPO, *overrides)


def test_a_bound_of_a_whole_step_and_more_is_taken():
    updates = ["algorithm.num_updates=2", "algorithm.minibatches=2"]
    for bound in (0, 4, 7):
        assert parse(GRPO, "rollouts.engines=1", f"rollouts.max_staleness={bound}", *updates).rollouts.engines == 1


def test_only_what_samples_has_rollouts():
    assert "rollouts is for algorithm grpo" in explain("kind: dpo", "rollouts.engines=2")


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_answers_of_older_weights_are_corrected_unless_the_configuration_says_otherwise(kind):
    ahead = ["rollouts.engines=2", "rollouts.max_staleness=2"]
    given = f"kind: {kind}; reward: exact"
    assert algorithm_of(given).importance_weighting == "none"
    assert algorithm_of(given, "rollouts.engines=2").importance_weighting == "none"
    assert algorithm_of(given, *ahead).importance_weighting == "token"
    assert algorithm_of(given, *ahead, "algorithm.importance_weighting=none").importance_weighting == "none"
    config = parse(given, *ahead)
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
