"""Reinforcement learning with engines beside the loop: synchronous with the same numbers, or ahead within bounds."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from loops.fake_engines import FakeEngines
from loops.fake_run import records_of, without_times
from loops.grpo_run import SumScorer, ZeroStdScorer, grpo_config, make_prompts, samples_of, train

from lockstep.backend.fake import FakeBackend
from lockstep.config import RunConfig
from lockstep.rollouts.buffer import Buffer, StalenessSchedule
from lockstep.rollouts.episode import Group, Rollout
from lockstep.rollouts.orchestrator import PartialGroup
from lockstep.rollouts.rewards import Outcome
from lockstep.rollouts.source import EngineRollouts
from lockstep.rundir import RunDir
from lockstep.train.grpo import SamplerCheck
from lockstep.train.steps import Diverged
from lockstep.types import PartialCompletion

OF_ENGINES = {"sample_time_s", "buffer", "engines"}


def with_engines(max_staleness: int = 0, algorithm: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    return grpo_config(
        algorithm,
        rollouts={"engines": 2, "max_staleness": max_staleness},
        **{"optim": {"learning_rate": 1e-4}, **changes},
    )


class Releasing(FakeBackend):
    """Releases the completions that engines hold, at a step."""

    def __init__(self, engines: FakeEngines, at_step: int) -> None:
        super().__init__()
        self._engines, self._at_step = engines, at_step

    def optim_step(self, step: Any) -> Any:
        if self.step == self._at_step:
            self._engines.released.set()
        return super().optim_step(step)


def numbers_of(run: RunDir) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in OF_ENGINES} for record in without_times(run.metrics())]


def keys_by_step(run: RunDir, num_steps: int) -> list[list[int]]:
    return [sorted({row["key"] for row in samples_of(run, step)}) for step in range(1, num_steps + 1)]


def test_synchronous_engines_change_nothing(tmp_path):
    settings = {"zero_std_groups": "refill", "num_updates": 2, "minibatches": 2, "kl_coefficient": 0.01}
    others = {"optim": {"epochs": 2, "learning_rate": 1e-4}, "evaluation": {"every_steps": 2, "at_start": True}}
    runs = {}
    for name, engines in (("own", None), ("engines", FakeEngines(pause_s=lambda key: (key * 37 % 5) / 2000))):
        config = with_engines(0, settings, **others)
        backend = FakeBackend()
        arguments = (make_prompts(14), make_prompts(4, "v.jsonl"))
        run, progress = train(tmp_path / name, config, backend, *arguments, scorer=ZeroStdScorer(), engines=engines)
        runs[name] = (
            backend.weight,
            progress,
            numbers_of(run),
            [samples_of(run, n) for n in range(1, progress.step + 1)],
        )
    assert runs["own"] == runs["engines"]


def test_engines_are_asked_for_the_version_that_is_trained_and_no_other(tmp_path):
    engines = FakeEngines()
    config = with_engines(0, {"num_updates": 2}, optim={"max_steps": 3})
    train(tmp_path / "run", config, FakeBackend(), make_prompts(20), engines=engines)
    assert sorted(engines.published) == [0, 2, 4, 6]
    assert sorted(engines.requests) == [([key], (key // 4 * 2, key // 4 * 2)) for key in range(12)]


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_ahead_every_prompt_is_learned_once_and_no_token_is_too_old(tmp_path, max_staleness):
    draw = random.Random(max_staleness)
    pauses = [draw.choice([0, 0, 0, 0.002, 0.01]) for _ in range(80)]
    engines = FakeEngines(pause_s=lambda key: pauses[key % 80])
    config = with_engines(max_staleness, optim={"epochs": 2, "learning_rate": 1e-4})
    run, progress = train(tmp_path / "run", config, FakeBackend(), make_prompts(38), engines=engines)
    learned = [key for keys in keys_by_step(run, progress.step) for key in keys]
    assert sorted(learned) == list(range(76))
    records = records_of(run)
    for record in records:
        rows = samples_of(run, record["step"])
        oldest = record["step"] - 1 - min(row["versions"][0] for row in rows)
        assert oldest == record["staleness_max"] <= max_staleness
        assert 0 <= record["staleness"] <= record["staleness_max"]
        assert record["engines"] == 2
    assert max(record["staleness"] for record in records) > 0, "nothing was ever sampled ahead"


def test_held_out_prompts_are_answered_with_the_weights_of_the_step_alone(tmp_path):
    engines = FakeEngines()
    config = with_engines(
        4,
        {"num_updates": 2},
        evaluation={"every_steps": 2, "at_start": True},
        optim={"max_steps": 5, "learning_rate": 1e-4},
    )
    train(tmp_path / "run", config, FakeBackend(), make_prompts(30), make_prompts(3, "v.jsonl"), engines=engines)
    assert [versions for keys, versions in engines.requests if keys == [0, 1, 2]] == [(0, 0), (4, 4), (8, 8), (10, 10)]


def test_what_is_too_old_is_dropped_counted_and_sampled_again(tmp_path):
    engines = FakeEngines(late={21: 3, 30: 3})
    config = with_engines(2, optim={"epochs": 1, "learning_rate": 1e-4})
    run, progress = train(tmp_path / "run", config, FakeBackend(), make_prompts(40), engines=engines)
    assert sum(record["dropped_stale"] for record in records_of(run)) == 2
    assert [keys for keys, _ in engines.requests].count([21]) == [keys for keys, _ in engines.requests].count([30]) == 2
    learned = [key for keys in keys_by_step(run, progress.step) for key in keys]
    assert sorted(learned) == list(range(40))


def test_what_is_slow_is_waited_for_rather_than_dropped(tmp_path):
    """Prompt 5 waits at its second token until two steps are made: the third is the last that can learn from it."""
    engines = FakeEngines(hold=lambda key, place: key == 5 and place == 1)
    config = with_engines(2, {"max_tokens": 8, "group_size": 4}, optim={"epochs": 1, "learning_rate": 1e-4})
    backend = Releasing(engines, at_step=1)
    run, _ = train(tmp_path / "run", config, backend, make_prompts(40), engines=engines)
    assert 5 in {key for keys in keys_by_step(run, 3) for key in keys}
    assert sum(record["dropped_stale"] for record in records_of(run)) == 0
    assert len(engines.requests) == 40


def test_an_update_changes_the_version_of_later_tokens_only(tmp_path):
    engines = FakeEngines(hold=lambda key, place: key == 5 and place == 1)
    config = with_engines(4, {"max_tokens": 8, "group_size": 4}, optim={"learning_rate": 1e-4})
    backend = Releasing(engines, at_step=1)
    run, progress = train(tmp_path / "run", config, backend, make_prompts(24), engines=engines)
    rows = [row for step in range(1, progress.step + 1) for row in samples_of(run, step)]
    spread = [row["versions"] for row in rows if row["key"] == 5]
    assert any(oldest < newest for oldest, newest in spread)


# --- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("place", [("forward_backward", 3), ("forward_backward", 6), ("optim_step", 8)])
def test_a_killed_run_goes_on_with_all_that_was_sampled(tmp_path, place, max_staleness):
    config = with_engines(
        max_staleness,
        {"zero_std_groups": "refill"},
        checkpoint={"every_steps": 2, "keep_best": 0, "asynchronous": False},
        optim={"epochs": 2, "learning_rate": 1e-4},
    )
    slow = [0.004, 0, 0.001, 0, 0]
    first, second = (FakeEngines(pause_s=lambda key: slow[key % 5]) for _ in range(2))
    broken = FakeBackend(failures={place: RuntimeError("the power went")})
    arguments: dict[str, Any] = {"scorer": ZeroStdScorer()}
    with pytest.raises(RuntimeError, match="the power went"):
        train(tmp_path / "run", config, broken, make_prompts(20), engines=first, **arguments)
    run, progress = train(tmp_path / "run", config, FakeBackend(), make_prompts(20), engines=second, **arguments)
    learned = [key for keys in keys_by_step(run, progress.step) for key in keys]
    assert len(learned) == len(set(learned))
    records = records_of(run)
    ranges = [record["row_range"] for record in records]
    assert all(one[1] == two[0] for one, two in itertools.pairwise(ranges))
    assert progress.cursor == len(learned) + sum(record["left_out_groups"] for record in records), "none is lost"
    assert all(record["staleness_max"] <= max_staleness for record in records_of(run))
    if max_staleness == 0:
        whole = FakeBackend()
        train(tmp_path / "whole", config, whole, make_prompts(20), engines=FakeEngines(), **arguments)
        assert samples_of(run, progress.step) == samples_of(RunDir(tmp_path / "whole"), progress.step)


def test_partial_groups_of_a_checkpoint_are_continued(tmp_path):
    """Prompts 9 and 10 stop in the middle of an answer; the run is killed after the first step."""
    held = {9: 2, 10: 1}
    first = FakeEngines(hold=lambda key, place: held.get(key) == place)
    settings = {"max_tokens": 8, "group_size": 4, "environment": "calculator"}
    config = with_engines(
        2,
        settings,
        data={"max_length": 64},
        checkpoint={"every_steps": 1, "keep_best": 0, "asynchronous": False},
        optim={"max_steps": 5, "learning_rate": 1e-4},
    )
    broken = FakeBackend(failures={("forward_backward", 1): RuntimeError("the power went")})
    scorer = SumScorer(replies=["3 4", None, None, None])
    with pytest.raises(RuntimeError, match="the power went"):
        train(tmp_path / "run", config, broken, make_prompts(30), scorer=scorer, engines=first)
    kept = json.loads((tmp_path / "run/checkpoints/step-1/rollouts.json").read_text())
    assert {"9", "10"} <= kept["partial"].keys()
    partial = {key: group["completions"][0] for key, group in kept["partial"].items() if group.get("completions")}
    tokens = {key: sum(len(entry["tokens"]) for entry in group if entry) for key, group in partial.items()}
    assert tokens["9"] > 0 < tokens["10"]
    second = FakeEngines()
    run, progress = train(tmp_path / "run", config, FakeBackend(), make_prompts(30), scorer=scorer, engines=second)
    assert second.continued[9] == tokens["9"]
    assert second.continued[10] == tokens["10"]
    ready = [key for key, *_ in kept["buffer"]["ready"]]
    assert not set(ready) & {key for keys, _ in second.requests for key in keys}, "what is ready is not sampled again"
    learned = [key for keys in keys_by_step(run, progress.step) for key in keys]
    assert len(learned) == len(set(learned)) == 20
    rows = {(r["key"], r["sample"]): r for step in range(1, 6) for r in samples_of(run, step)}
    whole, _ = train(tmp_path / "w", config, FakeBackend(), make_prompts(30), scorer=scorer, engines=FakeEngines())
    other = {(r["key"], r["sample"]): r for step in range(1, 6) for r in samples_of(whole, step)}
    assert all(rows[place]["turns"] == other[place]["turns"] for place in rows.keys() & other.keys())


# --- fresh and stale tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_updates", [1, 2])
def test_what_was_learned_since_an_answer_was_sampled_ends_no_run(tmp_path, num_updates):
    """Prompt 5 waits, so that later steps have stale tokens, and the weights move far."""
    engines = FakeEngines(hold=lambda key, place: key == 5 and place == 1)
    settings = {"max_tokens": 8, "group_size": 8, "num_updates": num_updates}
    config = with_engines(4, settings, optim={"learning_rate": 0.3})
    backend = Releasing(engines, at_step=num_updates)
    run, progress = train(tmp_path / "run", config, backend, make_prompts(30), engines=engines)
    assert progress.step == 8
    records = records_of(run)
    assert max(record.get("stale_logprob_diff", 0) for record in records) > 0.2
    for record in records:
        assert record.get("sampler_trainer_logprob_diff", 0) < 1e-12
        assert ("stale_logprob_diff" in record) == (record["staleness"] > 0)


@pytest.mark.parametrize("num_updates", [1, 2])
def test_a_sampler_that_is_wrong_ends_a_run_that_learns_from_stale_tokens_too(tmp_path, num_updates):
    engines = FakeEngines(gap=lambda version: 0.3)
    config = with_engines(2, {"max_tokens": 8, "group_size": 8, "num_updates": num_updates})
    with pytest.raises(Diverged, match=r"at step 1 sampler and trainer differ by 0\.3 .* higher model\.precision"):
        train(tmp_path / "run", config, FakeBackend(), make_prompts(30), engines=engines)


def test_few_fresh_tokens_are_added_up_until_their_mean_means_something(tmp_path):
    engines = FakeEngines(gap=lambda version: 0.3 if version == 0 else 0.0)
    config = with_engines(2, {"max_tokens": 1, "group_size": 2}, optim={"max_steps": 4, "learning_rate": 1e-4})
    run, _ = train(tmp_path / "run", config, FakeBackend(), make_prompts(30), engines=engines)
    first = records_of(run)[0]
    assert first["sampler_trainer_logprob_diff"] == pytest.approx(0.3)
    assert first["supervised_tokens"] < SamplerCheck.min_tokens


def test_where_all_tokens_are_stale_fresh_ones_are_sampled_to_compare(tmp_path, monkeypatch):
    """The engines are right at first, and wrong from version 1 on; what a step learns from is always older than it."""
    monkeypatch.setattr(EngineRollouts, "take", _only_stale(EngineRollouts.take))
    engines = FakeEngines(gap=lambda version: 0.3 if version else 0.0)
    config = with_engines(4, {"max_tokens": 8, "group_size": 8}, optim={"max_steps": 40, "learning_rate": 1e-4})
    with pytest.raises(Diverged, match=r"sampler and trainer differ by 0\.3 "):
        train(tmp_path / "run", config, FakeBackend(), make_prompts(160), engines=engines)
    probes = [versions for keys, versions in engines.requests if keys[0] >= 1 << 50]
    first = SamplerCheck.max_steps + 1  # of the steps after the first, whose tokens are fresh
    assert probes[0] == (first, first)
    assert len(probes) < 4


def _only_stale(honest: Any) -> Any:
    versions = itertools.count()

    def take(self: EngineRollouts, *options: Any) -> Any:
        batch, version = honest(self, *options), next(versions)

        def age(rollout: Rollout) -> Rollout:
            return replace(rollout, versions=(max(version - 1, 0),) * len(rollout.tokens))

        return replace(batch, groups=[replace(g, rollouts=tuple(map(age, g.rollouts))) for g in batch.groups])

    return take


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("where", [7, "publish"])
def test_what_the_engines_cannot_do_ends_the_run(tmp_path, where, max_staleness):
    engines = FakeEngines(failures={where: RuntimeError("no engine is left")})
    with pytest.raises(RuntimeError, match="no engine is left"):
        train(tmp_path / "run", with_engines(max_staleness), FakeBackend(), make_prompts(20), engines=engines)


class Ranks:
    """A few threads that are ranks: `share` gives all of them what the first has, and waits for each."""

    def __init__(self, count: int) -> None:
        self._barrier, self._box = threading.Barrier(count, timeout=20), [None]
        self.num_messages = 0

    def share(self, is_first: bool, value: Any) -> Any:
        if is_first:
            self._box[0] = value
            self.num_messages += 1
        self._barrier.wait()
        found = self._box[0]
        self._barrier.wait()
        return found


class SlowOrchestrator:
    def __init__(self, results: Sequence[Any]) -> None:
        self._results = iter(results)

    def take(self, timeout_s: float) -> Any:
        result = next(self._results)
        if isinstance(result, Exception):
            raise result
        return result


class Unportable(RuntimeError):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def take_on_three_ranks(results: Sequence[Any]) -> tuple[list[Any], int]:
    ranks, found = Ranks(3), [None] * 3

    def be_rank(number: int) -> None:
        orchestrator: Any = SlowOrchestrator(results) if number == 0 else None
        source = EngineRollouts(orchestrator, lambda value: ranks.share(number == 0, value), dict, interval_s=1)
        try:
            found[number] = source.take()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=be_rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found, ranks.num_messages


def test_all_ranks_get_what_one_of_them_collects_and_hear_that_it_is_not_there_yet():
    assert take_on_three_ranks([None, None, "groups"]) == (["groups"] * 3, 3)


@pytest.mark.parametrize("error", [ValueError("it broke"), Unportable("this", "that")])
def test_what_goes_wrong_where_groups_are_collected_is_raised_on_every_rank(error):
    found, _ = take_on_three_ranks([None, error])
    assert len(found) == 3
    assert all(str(error) in str(one) for one in found)


# --- written down ---------------------------------------------------------------------------------------------------


def test_a_group_is_read_as_it_was_written_also_where_nobody_knows_its_rewards():
    sound = Rollout(
        (1, 90, 2), (True, False, True), (-0.1, 0.0, -1 / 3), (3, 3, 4), ("a", "b"), False, Outcome(0.1, {"x": 0.1})
    )
    group = Group(make_prompts(8)[7], 7, (sound, replace(sound, outcome=Outcome.failed("it hung"), truncated=True)))
    read = Group.from_json(json.loads(json.dumps(group.to_json())), make_prompts(8).__getitem__)
    assert read.rollouts[0] == group.rollouts[0]
    assert math.isnan(read.rollouts[1].outcome.reward)
    assert read.to_json() == group.to_json()
    assert (read.prompt, read.key, read.oldest_version) == (group.prompt, 7, 3)


def test_rollouts_of_a_run_that_an_earlier_release_began_can_be_read():
    columns = {"tokens": [1, 2], "own": [True, False], "logprobs": [-0.5, 0.0], "versions": [3, 3], "turns": ["a"]}
    outcome = {"reward": 1.0, "scores": {}, "problem": None}
    written = {"key": 7, "answers": [{**columns, "is_cut": True, "outcome": outcome}]}
    group = Group.from_json(written, make_prompts(8).__getitem__)
    assert (group.rollouts[0].sampled, group.rollouts[0].truncated) == ((True, False), True)
    draft = {"tokens": [5], "logprobs": [-1.0], "versions": [3]}
    partial = PartialGroup.from_json({"episodes": [[{**columns, "is_cut": False}]], "drafts": [[draft, None]]})
    assert partial.episodes is not None
    assert partial.episodes[0][0].sampled == [True, False]
    assert partial.completions == [[PartialCompletion((5,), (-1.0,), (3,)), None]]
    entries = {"step": 1, "cursor": 4, "next_key": 6, "begun": [4, 5], "ready": [], "left_out": [], "num_stale": 0}
    assert Buffer.from_json(StalenessSchedule(lambda cursor: 4, 3), entries, dict).retry == {4, 5}
