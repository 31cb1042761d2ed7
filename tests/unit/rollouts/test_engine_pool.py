"""The pool over engines on threads: completions are the same whichever engine is lost; only verified weights serve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from thread_engines import (
    KEYS,
    MODELS,
    PARAMS,
    PATIENCE_S,
    PROMPTS,
    ThreadEngine,
    Town,
    assert_alike,
    expected_of,
    weights_of,
)
from tiny import build_tokenizer

from lockstep.config import parse_config
from lockstep.inference.engine import LocalEngine
from lockstep.processes.worker import Reply, WorkerDied, WorkerFailed
from lockstep.rollouts.engines import pool
from lockstep.rollouts.engines.pool import EnginePool, EnginesLost
from lockstep.rollouts.engines.worker import EngineHandler
from lockstep.rundir import RunDir
from lockstep.types import PartialCompletion


@pytest.fixture
def towns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Town]]:
    monkeypatch.setattr("lockstep.inference.continuous_engine.ContinuousEngine.slice_s", 0.0)  # one step at a time
    made: list[Town] = []

    def make(*arguments: Any, **options: Any) -> Town:
        made.append(Town(*arguments, **options))
        return made[-1]

    yield make
    for town in made:
        town.pool.close()
        assert all(engine.is_ended for engine in town.engines), "an engine is left"


def test_engines_together_answer_as_one(towns: Callable[..., Town]) -> None:
    town = towns(2)
    town.publish(1)
    assert_alike(town.sample(1), expected_of(1))
    assert [len(engine.seen) for engine in town.engines] == [1, 1]
    town.publish(2)
    assert_alike(town.sample(2), expected_of(2))
    assert [fields["version"] for fields in town.fields_of("weights_published", 2)] == [1, 2]
    assert town.fields_of("weights_published")[0]["engines"] == ["engine-0", "engine-1"]
    assert not town.fields_of("engine_lost")
    assert town.pool.num_serving == 2
    assert town.pool.sample([], PARAMS, [], versions=(2, 2)) == []


def test_many_threads_ask_at_once(towns: Callable[..., Town]) -> None:
    town, expected = towns(2), expected_of(1)
    town.publish(1)

    def ask(place: int) -> Any:
        return town.pool.sample([PROMPTS[place]], PARAMS, [place], versions=(1, 1))

    waits = [town.in_background(lambda place=number % 5: (place, ask(place))) for number in range(20)]
    for wait in waits:
        place, found = wait()
        assert_alike(found, [expected[place]])
    assert min(len(engine.seen) for engine in town.engines) >= 5, "one engine had nearly everything to do"


# --- engines that are lost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_engine_is_named_and_replaced_and_its_completions_come_from_another(
    how: str, towns: Callable[..., Town]
) -> None:
    town = towns(2, step_pause_s=0.02)
    town.publish(1)
    wait = town.in_background(lambda: town.sample(1))
    first = town.engines[0]
    town.wait_until(lambda: first.num_works > 2)
    if how == "killed":
        first.kill()
    else:
        first.gate.clear()
    assert_alike(wait(), expected_of(1))
    (lost,) = town.fields_of("engine_lost", 1)
    assert lost["engine"] == first.name
    assert ("killed" if how == "killed" else "did not reply to a ping within 0.6 s") in lost["reason"]
    town.wait_until(lambda: town.pool.num_serving == 2)
    assert first.is_ended
    assert len(town.engines) == 3
    assert_alike(town.sample(1), expected_of(1))
    assert len(town.engines[2].seen) == 1, "the new one serves too"


def test_what_was_lost_begins_anew_or_goes_on(towns: Callable[..., Town]) -> None:
    for keeps_partials in (False, True):
        town = towns(2, step_pause_s=0.02, keeps_partials=keeps_partials)
        town.publish(1)
        progress: list[Any] = []
        wait = town.in_background(lambda town=town, seen=progress: town.sample(1, on_progress=seen.append))
        first = town.engines[0]
        town.wait_until(lambda first=first, seen=progress: first.num_works > 8 and seen)
        first.kill()
        assert_alike(wait(), expected_of(1))
        again = [body for engine in town.engines for body in engine.seen][2:]
        partial = [entry for body in again for group in body["partial"] or () for entry in group if entry]
        assert bool(partial) == keeps_partials, "tokens that were reported"
        last = [[entry and entry.tokens for entry in group] for group in progress[-1]]
        assert last == [[answer.tokens for answer in group] for group in expected_of(1)]


def test_what_a_lost_engine_says_later_is_never_used(towns: Callable[..., Town]) -> None:
    town = towns(2, step_pause_s=0.02)
    town.publish(1)
    wait = town.in_background(lambda: town.sample(1))
    first = town.engines[0]
    town.wait_until(lambda: first.num_works > 2)
    first.is_zombie = first.spoil_answers = True
    first.gate.clear()
    assert town.fields_of("engine_lost", 1)
    first.gate.set()
    assert_alike(wait(), expected_of(1))
    town.wait_until(lambda: first.num_pending == 0)
    assert_alike(town.sample(1), expected_of(1))
    first.close()


def test_a_reply_of_an_engine_that_has_just_failed_is_ignored(towns: Callable[..., Town]) -> None:
    """Between its failure and its removal: the lock is held meanwhile."""
    town = towns(1, step_pause_s=0.02)
    town.publish(1)
    wait = town.in_background(lambda: town.sample(1))
    town.wait_until(lambda: town.pool.calls)
    with town.pool.supervisor.changed:
        (call,) = town.pool.calls.values()
        (engine,) = town.pool.supervisor.engines
        engine.health.failed("lost its memory")
        town.pool.end_call(call, engine, Reply({"made": "up"}), None)
    assert_alike(wait(), expected_of(1))
    assert town.fields_of("engine_lost", 1) == [{"engine": "engine-0", "reason": "lost its memory"}]


def test_a_short_stop_changes_nothing(towns: Callable[..., Town]) -> None:
    town = towns(2, step_pause_s=0.01, deadline_s=PATIENCE_S)
    town.publish(1)
    wait = town.in_background(lambda: town.sample(1))
    first = town.engines[0]
    town.wait_until(lambda: first.num_works > 2)
    first.gate.clear()
    town.wait_until(lambda: town.pool.num_serving == 1)  # a suspect gets nothing new
    first.gate.set()
    assert_alike(wait(), expected_of(1))
    town.wait_until(lambda: town.pool.num_serving == 2)
    assert not town.fields_of("engine_lost")
    assert len(town.engines) == 2


def test_when_nobody_is_left_everybody_who_waits_hears_why(towns: Callable[..., Town]) -> None:
    town = towns(2, max_replacements=1, step_pause_s=0.02)
    town.publish(1)
    wait = town.in_background(lambda: town.sample(1))
    killed: list[ThreadEngine] = []
    while len(killed) < 3:
        town.wait_until(lambda: len(town.engines) > len(killed))
        engine = town.engines[len(killed)]
        town.wait_until(lambda engine=engine: engine.seen or len(killed) == 2)
        engine.kill()
        killed.append(engine)
    with pytest.raises(
        EnginesLost, match=r"no engine is left: engine-0 \(number 1\) engine-0 .*; engine-1 \(number 1\)"
    ):
        wait()
    with pytest.raises(EnginesLost):
        town.publish(2)
    assert len(town.fields_of("engine_lost", 3)) == 3


def test_an_engine_that_cannot_start_is_tried_a_few_times() -> None:
    starts: list[str] = []

    def fail(name: str) -> ThreadEngine:
        starts.append(name)
        raise WorkerDied(name, f"{name} ended with exit code 3: no such model")

    settings: dict[str, Any] = {"check_interval_s": 0.05, "deadline_s": 1.0, "start_timeout_s": PATIENCE_S}
    pool = EnginePool(fail, 2, **settings, max_replacements=50, on_event=lambda *_, **__: None, keeps_partials=False)
    try:
        with pytest.raises(EnginesLost, match=r"engine-1 \(number 3\) engine-1 ended with exit code 3: no such model"):
            pool.publish(0, weights_of(0))
    finally:
        pool.close()
    assert sorted(starts) == ["engine-0"] * 3 + ["engine-1"] * 3


# --- new weights ----------------------------------------------------------------------------------------------------


def corrupt(times: int) -> Callable[[str, dict[str, Any]], None]:
    """Changes a byte of the first buckets, as many as this."""
    left = [times]

    def spoil(method: str, tensors: dict[str, Any]) -> None:
        if method == "bucket" and left[0]:
            left[0] -= 1
            tensors["content"] = tensors["content"].clone()
            tensors["content"][5000] ^= 1

    return spoil


def test_a_bucket_that_was_changed_once_is_named_and_sent_again(towns: Callable[..., Town]) -> None:
    town = towns(2)
    town.publish(1)
    town.engines[1].spoil = corrupt(times=1)
    town.publish(2)
    (rejected,) = town.fields_of("bucket_rejected", 1)
    assert (rejected["engine"], rejected["version"]) == (town.engines[1].name, 2)
    assert "embed_tokens.weight of version 2 has the digest" in rejected["reason"]
    assert not town.fields_of("engine_lost")
    assert_alike(town.sample(2), expected_of(2))
    assert [len(engine.seen) for engine in town.engines] == [1, 1]


def test_an_engine_that_never_gets_its_weights_never_serves(towns: Callable[..., Town]) -> None:
    town = towns(2)
    town.publish(1)
    town.engines[1].spoil = corrupt(times=100)
    town.spoils = [corrupt(times=100), corrupt(times=0)]  # of the one that replaces it, and of the next
    town.publish(2)
    assert_alike(town.sample(2), expected_of(2))
    town.wait_until(lambda: town.pool.num_serving == 2)
    assert_alike(town.sample(2), expected_of(2))
    assert town.engines[1].seen == town.engines[2].seen == []
    assert len(town.engines[3].seen) == 1
    reasons = [fields["reason"] for fields in town.fields_of("engine_lost", 2)]
    assert len(reasons) == 2
    assert all("refused the weights twice: model.embed_tokens.weight" in reason for reason in reasons)
    assert len(town.fields_of("bucket_rejected", 4)) == 4


def test_an_engine_lost_while_weights_are_sent_does_not_hold_up_the_others(towns: Callable[..., Town]) -> None:
    town = towns(2)
    town.publish(1)
    last = town.engines[1]
    last.spoil = lambda method, tensors: last.gate.clear() if method == "bucket" else None
    town.publish(2)
    published = town.fields_of("weights_published", 2)[-1]
    assert published["engines"] == [town.engines[0].name]
    assert town.fields_of("engine_lost", 1)[0]["engine"] == last.name
    assert_alike(town.sample(2), expected_of(2))
    town.wait_until(lambda: town.pool.num_serving == 2)
    assert_alike(town.sample(2), expected_of(2))


def test_partial_completions_survive_new_weights(towns: Callable[..., Town]) -> None:
    town = towns(2, step_pause_s=0.02, keeps_partials=True)
    town.publish(1)
    progress: list[list[list[PartialCompletion | None]]] = []
    wait = town.in_background(lambda: town.sample(1, on_progress=progress.append))
    town.wait_until(lambda: min(engine.num_works for engine in town.engines) > 4)
    town.publish(2)
    found = wait()
    assert {version for group in found for answer in group for version in answer.versions} == {1, 2}
    for group, before in zip(found, expected_of(1), strict=True):
        for answer, other in zip(group, before, strict=True):
            old = sum(version == 1 for version in answer.versions)
            assert answer.tokens[:old] == other.tokens[:old]
            assert list(answer.versions) == sorted(answer.versions)
    assert progress
    for drafts in progress:
        for group, answers in zip(drafts, found, strict=True):
            for draft, answer in zip(group, answers, strict=True):
                if draft is not None:
                    assert draft.tokens == answer.tokens[: len(draft.tokens)]


def test_a_replacement_gets_the_newest_weights(towns: Callable[..., Town]) -> None:
    town = towns(1)
    town.publish(1)
    town.publish(2)
    town.engines[0].kill()
    assert_alike(town.sample(2), expected_of(2))
    assert len(town.engines) == 2


def test_versions_do_not_go_back(towns: Callable[..., Town]) -> None:
    town = towns(2)
    town.publish(3)
    with pytest.raises(ValueError, match="version 2 is older than 3, which is published"):
        town.publish(2)
    with pytest.raises(ValueError, match="version 3 is published already, with other weights"):
        town.pool.publish(3, weights_of(2))
    town.publish(3)
    with pytest.raises(ValueError, match="versions 1 to 2 are requested, and engines have 3 already"):
        town.pool.sample(PROMPTS, PARAMS, KEYS, versions=(1, 2))
    assert_alike(town.pool.sample(PROMPTS, PARAMS, KEYS, versions=(1, 9)), expected_of(3))


def test_a_request_for_a_later_version_waits_for_it(towns: Callable[..., Town]) -> None:
    town = towns(2)
    town.publish(1)
    wait = town.in_background(lambda: town.sample(2))
    assert not any(engine.seen for engine in town.engines)
    town.publish(2)
    assert_alike(wait(), expected_of(2))


def test_an_engine_refuses_what_it_has_no_weights_for() -> None:
    handler = EngineHandler(LocalEngine(deepcopy(MODELS[0]), build_tokenizer()))
    body = {"prompts": PROMPTS[:1], "params": {}, "keys": [0], "partial": None, "call": "a", "versions": [0, 9]}
    with pytest.raises(ValueError, match="this engine has no weights yet, and versions 0 to 9 are accepted"):
        handler.methods["sample"](body, {})
    assert handler.immediate["ping"]({}, {})["version"] is None


# --- the caller's own mistakes, and the end -------------------------------------------------------------------------


def test_a_request_that_cannot_be_answered_is_the_callers_alone(towns: Callable[..., Town]) -> None:
    town = towns(2)
    town.publish(1)
    with pytest.raises(WorkerFailed, match="a prompt of 600 tokens: the model takes 512 at most"):
        town.pool.sample([[5] * 600], PARAMS, [0], versions=(1, 1))
    with pytest.raises(ValueError, match="1 keys for 2 prompts"):
        town.pool.sample(PROMPTS[:2], PARAMS, [0], versions=(1, 1))
    with pytest.raises(ValueError, match="partial must have 2 entries"):
        town.pool.sample(PROMPTS[:2], PARAMS, [0, 1], versions=(1, 1), partial=[[None]])
    assert_alike(town.sample(1), expected_of(1))
    assert not town.fields_of("engine_lost")


def test_closing_ends_those_who_wait(towns: Callable[..., Town]) -> None:
    town = towns(2, step_pause_s=0.05)
    town.publish(1)
    wait = town.in_background(lambda: town.sample(1))
    town.wait_until(lambda: town.engines[0].num_works)
    town.pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        wait()
    with pytest.raises(RuntimeError, match="closed"):
        town.publish(2)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("engine")]


def test_a_failing_event_handler_ends_the_pool_and_not_only_its_thread(towns: Callable[..., Town]) -> None:
    def fail(kind: str, **fields: Any) -> None:
        raise OSError("the disk is full")

    town = towns(1, on_event=fail)
    with pytest.raises(RuntimeError, match="the supervision of engines failed: the disk is full"):
        town.publish(1)


def test_a_slow_way_of_an_engine_is_told_once(towns: Callable[..., Town]) -> None:
    town = towns(2)
    town.publish(1)
    engine = town.engines[1]
    engine.slow.append("decoding steps are not captured")
    assert town.fields_of("engine_slow", 1) == [{"engine": engine.name, "message": "decoding steps are not captured"}]
    engine.slow.append("nor compiled")
    told = [fields["message"] for fields in town.fields_of("engine_slow", 2)]
    assert told == ["decoding steps are not captured", "nor compiled"]


def test_every_compilation_of_an_engine_and_of_its_replacement_is_told_once(towns: Callable[..., Town]) -> None:
    town = towns(1)
    town.publish(1)
    town.engines[0].compiled.append(4.0)
    town.fields_of("engine_compiled", 1)
    town.engines[0].compiled.append(2.0)
    town.fields_of("engine_compiled", 2)
    town.engines[0].kill()
    town.wait_until(lambda: len(town.engines) == 2)
    town.engines[1].compiled.append(3.0)
    told = [(fields["engine"], fields["seconds"]) for fields in town.fields_of("engine_compiled", 3)]
    assert told == [("engine-0", 4.0), ("engine-0", 2.0), ("engine-0", 3.0)]


def test_slow_ways_of_engines_are_in_the_events_and_the_status_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(pool, "EnginePool", lambda *_, **options: given.update(options))
    config = parse_config(
        "model: x\ndata: {train: a}\nalgorithm: {kind: grpo, reward: [{name: numeric}]}\nrollouts: {engines: 1}"
    )
    run = RunDir.create(tmp_path / "run", config)
    pool.start_engines(config, run, precision="fp32", choose_device=lambda device: "cpu")
    given["on_event"]("engine_slow", engine="engine-0", message="steps are not captured")
    for engine, seconds in (("engine-0", 12.5), ("engine-1", 3.0), ("engine-0", 0.5)):
        given["on_event"]("engine_compiled", engine=engine, seconds=seconds)
    given["on_event"]("weights_published", version=3)
    slow, *compiled, published = run.events()
    assert [(event["event"], event["engine"]) for event in compiled] == [
        ("compiled", "engine-0"),
        ("compiled", "engine-1"),
        ("compiled", "engine-0"),
    ]
    assert run.status()["engine_compilations"] == {
        "engine-0": {"count": 2, "seconds": 13.0},
        "engine-1": {"count": 1, "seconds": 3.0},
    }
    assert (slow["event"], slow["kind"], slow["message"]) == ("warning", "slow", "engine-0: steps are not captured")
    assert (published["event"], published["version"]) == ("weights_published", 3)
    assert run.status()["slow"] == ["engine-0: steps are not captured"]
