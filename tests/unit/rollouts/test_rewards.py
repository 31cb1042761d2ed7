"""Rewards: what the built-in ones give, how the user's own are loaded, and that none of them can harm a run."""

from __future__ import annotations

import math
import os
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.config import ConfigError
from lockstep.processes.pool import MAX_DEATHS
from lockstep.rollouts.environments.calculator import Calculator, calculate
from lockstep.rollouts.rewards import Attempt, Outcome, Turn
from lockstep.rollouts.rewards.scoring import (
    BUILTIN,
    LoadedRewards,
    NamedReward,
    RewardPool,
    RewardSpec,
    load_environment,
    load_reward,
)

MODULE = textwrap.dedent(
    """
    import os, sys, time
    from lockstep.rollouts.rewards import Turn

    if os.path.exists("no_more"):
        os._exit(4)

    def polite(text, row, word="please"):
        print("a reward may print", flush=True)
        return word in text

    def fails(text, row):
        raise KeyError("nothing here")

    def moody(text, row):
        if text == "hang":
            time.sleep(600)
        if text == "die":
            os._exit(3)
        if text == "die once" and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), 9)
        if text in ("nan", "-1e308"):
            return float(text)
        if text == "words":
            return "very good"
        if text == "stubborn":
            import re
            return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))
        return len(text)

    class Guess:
        def reset(self, row):
            self.wanted, self.tries = row["answer"], 0

        def step(self, answer):
            self.tries += 1
            if answer == self.wanted:
                return Turn(reward=1 / self.tries)
            if answer == "die once" and not os.path.exists("played"):
                open("played", "w").close()
                os.kill(os.getpid(), 9)
            if answer == "crash":
                raise RuntimeError("no such guess")
            return Turn(message="no")
    """
)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the working directory."""
    name = f"rewards_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


# --- built in -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "text", "row", "expected"),
    [
        ("exact", {}, " Paris \n", {"answer": "Paris"}, 1),
        ("exact", {}, "paris", {"answer": "Paris"}, 0),
        ("exact", {"ignore_case": True}, "paris", {"answer": "Paris"}, 1),
        ("exact", {"pattern": r"<a>(.*?)</a>"}, "<a>no</a> wait <a>yes</a>", {"answer": "yes"}, 1),
        ("exact", {"pattern": r"<a>(.*?)</a>"}, "yes", {"answer": "yes"}, 0),
        ("exact", {"answer": "city"}, "Paris", {"city": "Paris"}, 1),
        ("exact", {}, "7", {"answer": 7}, 1),
        ("numeric", {}, "so it is 1,800.0 in all", {"answer": "#### 1800"}, 1),
        ("numeric", {}, "I do not know", {"answer": "3"}, 0),
        ("numeric", {"tolerance": 0.1}, "3.05", {"answer": 3}, 1),
        ("numeric", {"tolerance": 0.01}, "3.05", {"answer": 3}, 0),
        ("numeric", {"pattern": r"<a>(.*?)</a>"}, "<a>4</a> and 5", {"answer": 4}, 1),
        ("regex", {"pattern": "(?i)sorry"}, "I am SORRY", {}, 1),
        ("regex", {"pattern": "sorry"}, "fine", {}, 0),
        ("format", {}, "<think>hm\n</think>\n<answer>4</answer>", {}, 1),
        ("format", {}, "<think>hm</think> 4", {}, 0),
        ("format", {"pattern": r"\d+"}, "42", {}, 1),
        ("format", {"pattern": r"\d+"}, "42 of them", {}, 0),
        ("length", {"most": 3}, "one two three", {}, 1),
        ("length", {"most": 3}, "one two three four", {}, 0),
        ("length", {"most": 3, "soft": 3}, "one two three four", {}, 0.75),
        ("length", {"most": 3, "unit": "characters"}, "abc", {}, 1),
        ("length", {"most": 3}, "  ", {}, 0),
        ("length", {"most": 3, "least": 0}, "", {}, 1),
        ("length", {"most": 3, "least": 2}, "one", {}, 0),
    ],
)
def test_built_in_rewards(name, options, text, row, expected):
    assert load_reward(name, options)(text, row) == expected


def test_every_built_in_reward_is_tried_above():
    assert set(BUILTIN) == {"exact", "numeric", "regex", "format", "length", "reasoning_gym"}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("nice", {}, "'nice' is unknown: use exact, numeric, regex, format, length, reasoning_gym, environment, or"),
        ("regex", {"pattern": "("}, "regex does not take these options"),
        ("regex", {}, "regex does not take these options"),
        ("exact", {"pattern": "a"}, "has no group"),
        ("exact", {"colour": 1}, "unexpected keyword argument 'colour'"),
        ("length", {"most": 3, "unit": "pages"}, "unit must be words or characters"),
        ("no_such_module_at_all:f", {}, "no_such_module_at_all cannot be imported (ModuleNotFoundError"),
        ("math:no_such_function", {}, "math has no function no_such_function"),
        (":f", {}, "write module:function"),
    ],
)
def test_what_cannot_be_loaded_says_why(name, options, words):
    with pytest.raises(ConfigError) as caught:
        load_reward(name, options)
    assert words in str(caught.value)


# --- scoring --------------------------------------------------------------------------------------------------------


def score(rewards: list[NamedReward], text: str, row: dict | None = None) -> Outcome:
    return LoadedRewards(RewardSpec(rewards)).score(Attempt(row or {}, [text]))


def test_several_rewards_are_added_with_their_weights(own_module):
    rewards = [
        NamedReward("regex", 2.0, {"pattern": "a"}),
        NamedReward(f"{own_module}:polite", 0.5, {"word": "thanks"}),
        NamedReward("length", 0.0, {"most": 1}),
    ]
    outcome = score(rewards, "thanks, all")
    assert outcome.reward == 2.5
    assert outcome.scores == {"regex": 1, f"{own_module}:polite": 1, "length": 0}
    assert outcome.problem is None


@pytest.mark.parametrize(
    ("function", "text", "problem"),
    [
        ("fails", "x", "failed: KeyError: 'nothing here'"),
        ("moody", "nan", "is nan, which is not a finite number"),
        ("moody", "-1e308", "is -1e+308, and rewards are taken up to 1e+30"),
        ("moody", "words", "failed: TypeError: it returned 'very good', which is not a number"),
    ],
)
def test_a_reward_that_fails_taints_the_answer(own_module, function, text, problem):
    outcome = score([NamedReward("length", options={"most": 3}), NamedReward(f"{own_module}:{function}")], text)
    assert math.isnan(outcome.reward)
    assert outcome.problem == f"reward {own_module}:{function} {problem}"


def test_a_row_without_an_answer_taints_and_is_not_a_zero():
    assert "the row has no 'answer', only 'prompt'" in score([NamedReward("exact")], "x", {"prompt": "?"}).problem
    assert "has no number" in score([NamedReward("numeric")], "3", {"answer": "three"}).problem


# --- environments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("2 + 3 * 4", "14"),
        ("(1 + 2) / -4", "-0.75"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 0", "error: division by zero"),
        ("__import__('os')", "error: use numbers, + - * / and brackets"),
        ("2 ** 999999", "error: use numbers, + - * / and brackets"),
        ("1 +", "error: use numbers, + - * / and brackets"),
        ("9" * 300, "error: the expression is too long"),
        ("True + 1", "error: use numbers, + - * / and brackets"),
    ],
)
def test_the_calculator_works_sums_out_and_nothing_else(expression, expected):
    assert calculate(expression) == expected


def test_the_calculator_answers_requests_and_is_silent_otherwise():
    calculator = Calculator()
    calculator.reset({})
    assert calculator.step("let me see: <calc>17 * 3</calc>") == Turn(message="51")
    assert calculator.step("it is 51") == Turn()
    assert calculator.num_uses == 1


def test_an_episode_is_played_again_from_its_start(own_module):
    scorer = LoadedRewards(RewardSpec([NamedReward("environment")], f"{own_module}:Guess"))
    row = {"answer": "7"}
    assert scorer.play(Attempt(row, ["3"])) == Turn(message="no")
    assert scorer.play(Attempt(row, ["3", "5"])) == Turn(message="no")
    assert scorer.play(Attempt(row, ["3", "5", "7"])).message is None
    assert scorer.score(Attempt(row, ["3", "5", "7"])).reward == pytest.approx(1 / 3)
    assert scorer.score(Attempt(row, ["3", "5"])).reward == 0
    assert scorer.play(Attempt(row, ["crash"])).problem == "the environment failed: RuntimeError: no such guess"


def test_an_unknown_environment_names_the_known_ones():
    with pytest.raises(ConfigError, match="'chess' is unknown: use calculator, or write module:class"):
        load_environment("chess")


# --- processes ------------------------------------------------------------------------------------------------------


def test_answers_come_in_order_and_one_that_hangs_dies_or_fails_is_tainted_alone(own_module, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_TEST_MARK", own_module)
    pool = RewardPool(RewardSpec([NamedReward(f"{own_module}:moody")]), 2, timeout_s=3)
    texts = ["a", "hang", "bb", "die", "ccc", "nan", "stubborn", "dddd"]
    started = time.monotonic()
    try:
        found = pool.score([Attempt({}, [text]) for text in texts])
    finally:
        pool.close()
    assert [o.reward for o in found if o.problem is None] == [1, 2, 3, 4]
    problems = {text: o.problem for text, o in zip(texts, found, strict=True) if o.problem}
    slow = f"reward {own_module}:moody gave no answer within 3 s (algorithm.reward_timeout_s)"
    assert problems["hang"] == problems["stubborn"] == slow
    assert problems["die"].startswith(f"reward {own_module}:moody failed: its process ended each time it was asked")
    assert problems["die"].endswith("ended with exit code 3")
    assert "is nan" in problems["nan"]
    assert time.monotonic() - started < 60
    assert not processes_with(f"LOCKSTEP_TEST_MARK={own_module}")


def test_a_killed_process_costs_no_reward_and_one_that_always_dies_is_named(own_module):
    """What only a kill from outside can be blamed for is asked again; events say both, with the reward and the row."""
    events: list[tuple[str, dict[str, object]]] = []
    spec = RewardSpec([NamedReward("length", 2.0, {"most": 3}), NamedReward(f"{own_module}:moody")])
    pool = RewardPool(spec, 1, timeout_s=60, on_event=lambda kind, **fields: events.append((kind, fields)))
    try:
        once, always, fine = pool.score(
            [Attempt({}, [text], f"rows.jsonl:{line}") for line, text in enumerate(("die once", "die", "ab"), 1)]
        )
    finally:
        pool.close()
    assert (once.reward, once.scores) == (2 + 8, {"length": 1.0, f"{own_module}:moody": 8.0})
    assert fine.reward == 4
    assert always.reward_failed
    lost = [str(fields["row"]) for kind, fields in events if kind == "reward_process_lost"]
    assert sorted(lost) == ["rows.jsonl:1", *["rows.jsonl:2"] * MAX_DEATHS]
    (failure,) = [fields for kind, fields in events if kind == "reward_failed"]
    assert failure["row"] == "rows.jsonl:2"
    assert failure["reward"] == f"reward {own_module}:moody"  # of the two
    assert "ended with exit code 3" in str(failure["reason"])


def test_where_no_process_starts_any_more_the_run_may_be_started_again(own_module):
    """A mistake in a configuration would have shown at the start: this is no ConfigError, which ends a run for good."""
    pool = RewardPool(RewardSpec([NamedReward(f"{own_module}:moody")]), 1, timeout_s=60)
    try:
        pool.start()
        Path("no_more").touch()
        with pytest.raises(RuntimeError, match=r"the process that scores answers did not start again: .* exit code 4"):
            pool.score([Attempt({}, ["die"])])
    finally:
        pool.close()


def test_closing_the_pool_is_no_failure_of_a_reward(own_module):
    events: list[str] = []
    spec = RewardSpec([NamedReward("length", 1.0, {"most": 3}), NamedReward(f"{own_module}:moody")])
    pool = RewardPool(spec, 1, timeout_s=60, on_event=lambda kind, **fields: events.append(kind))
    pool.start()
    with ThreadPoolExecutor(1) as thread:
        scored = thread.submit(pool.score, [Attempt({}, ["hang"])])
        time.sleep(0.3)
        pool.close()
        assert scored.result(timeout=30)[0].reward_failed
    assert not events


def processes_with(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark.encode() in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marked and folder.name != str(os.getpid()):
            found.append(folder.name)
    return found


def test_what_a_reward_prints_does_not_get_among_the_answers(own_module):
    pool = RewardPool(RewardSpec([NamedReward(f"{own_module}:polite")]), 1, timeout_s=20)
    try:
        found = pool.score([Attempt({}, [text]) for text in ("please", "now", "please")])
    finally:
        pool.close()
    assert [outcome.reward for outcome in found] == [1, 0, 1]


def test_episodes_are_played_in_processes_too(own_module):
    pool = RewardPool(RewardSpec([NamedReward("environment")], f"{own_module}:Guess"), 1, timeout_s=20)
    try:
        assert (
            pool.play([Attempt({"answer": "7"}, [answer]) for answer in ("3", "die once")]) == [Turn(message="no")] * 2
        )
        assert pool.score([Attempt({"answer": "7"}, ["7"])])[0].reward == 1
    finally:
        pool.close()


def test_a_reward_that_cannot_be_loaded_shows_before_anything_is_sampled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pool = RewardPool(RewardSpec([NamedReward("no_such_module_at_all:f")]), 1, timeout_s=5)
    with pytest.raises(ConfigError, match="no_such_module_at_all cannot be imported"):
        pool.start()
    pool.close()


# --- reasoning-gym --------------------------------------------------------------------------------------------------


def test_tasks_of_reasoning_gym_give_rows_and_score_them():
    pytest.importorskip("reasoning_gym")
    from lockstep.rollouts.environments.reasoning import is_task, make_rows

    assert is_task("reasoning_gym:chain_sum")
    rows = make_rows("reasoning_gym:chain_sum", {"size": 5, "min_terms": 2, "max_terms": 2}, seed=3)
    assert rows == make_rows("reasoning_gym:chain_sum", {"size": 5, "min_terms": 2, "max_terms": 2}, seed=3)
    assert rows != make_rows("reasoning_gym:chain_sum", {"size": 5, "min_terms": 2, "max_terms": 2, "seed": 4}, seed=3)
    assert len(rows) == 5
    reward = load_reward("reasoning_gym", {})
    assert reward(f"so <answer> {rows[0]['answer']} </answer>", rows[0]) == 1
    assert reward(rows[0]["answer"], rows[0]) == 1
    assert reward("<answer>nothing</answer>", rows[0]) < 0.1
    with pytest.raises(ConfigError, match="reasoning-gym has no such task"):
        make_rows("reasoning_gym:nonsense", {}, seed=0)
    with pytest.raises(ConfigError, match="does not take these options"):
        make_rows("reasoning_gym:chain_sum", {"colour": 1}, seed=0)
    with pytest.raises(ValueError, match="has no 'task'"):
        reward("x", {"prompt": "?"})
