"""Slots and queues over random lengths, without a model; and with one, that a prompt is computed once."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tiny import build_model, build_tokenizer

from lockstep.inference.decoder import Decoder
from lockstep.inference.engine import LocalEngine
from lockstep.inference.scheduler import SlotAdmission, SlotSchedule
from lockstep.rollouts.source import ColocatedEngine
from lockstep.types import SamplingParams


def carry_out(contents: list[Any], admission: SlotAdmission, prompts: list[Any]) -> None:
    """What the admission says, on slots that hold names of prompts instead of keys and values."""
    before = list(contents)
    for source, target in admission.copied:
        contents[target] = before[source]
    for slot, sequence in admission.computed:
        contents[slot] = prompts[sequence]
    for source, target in admission.shared:
        contents[target] = contents[source]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=8),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_every_sequence_runs_once_in_order_on_its_own_prompt(
    groups: list[tuple[int, int]], num_slots: int, random: Any, compacts: bool
) -> None:
    prompts = [name for name, count in groups for _ in range(count)]
    schedule, contents = SlotSchedule(prompts, num_slots), [None] * num_slots
    started: list[int] = []
    while schedule.busy:
        admission = schedule.admit()
        carry_out(contents, admission, prompts)
        started += [sequence for _, sequence in admission.placed]
        assert len(schedule.active) == num_slots or len(started) == len(prompts), "a slot is free and a sequence waits"
        for slot, sequence in schedule.active.items():
            assert contents[slot] == prompts[sequence]
        for slot in random.sample(sorted(schedule.active), random.randint(1, len(schedule.active))):
            schedule.release(slot)
        if compacts:
            for source, target in schedule.compact():
                contents[target] = contents[source]
            if len(started) == len(prompts):
                assert sorted(schedule.active) == list(range(len(schedule.active)))
    assert started == list(range(len(prompts)))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_prompt_of_a_group_is_computed_once(sizes: list[int], num_slots: int, random: Any) -> None:
    prompts = [group for group, size in enumerate(sizes) for _ in range(size)]
    schedule, computed = SlotSchedule(prompts, num_slots), []
    while schedule.busy:
        computed += [prompts[sequence] for _, sequence in schedule.admit().computed]
        for slot in random.sample(sorted(schedule.active), random.randint(1, len(schedule.active))):
            schedule.release(slot)
    assert computed == list(range(len(sizes)))


# --- with a model ---------------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> LocalEngine:
    return LocalEngine(build_model().double(), build_tokenizer(), batch_size=3)


def test_prompts_are_packed_and_computed_once(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.sample([[5]], SamplingParams(max_tokens=1))
    calls: list[list[int]] = []
    prefill = Decoder.prefill

    def count(self: Decoder, prompts: Any, *rest: Any) -> Any:
        calls.append([len(tokens) for _, tokens in prompts if tokens])
        return prefill(self, prompts, *rest)

    monkeypatch.setattr(Decoder, "prefill", count)
    prompts = [[5, 6, 7, 8], [50, 60, 70], [9]]
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=0, num_samples=4)
    engine.sample(prompts, params)
    assert [length for lengths in calls for length in lengths] == [3, 2]
    calls.clear()
    LocalEngine(engine.model, engine.tokenizer, batch_size=12).sample(prompts, params)
    assert calls[-1] == [3, 2]  # one pass for both


def test_long_prompts_are_split_over_passes(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[20 + i] * (4 + i) for i in range(6)]
    params = SamplingParams(max_tokens=4, logprobs=True)
    expected = engine.sample(prompts, params)
    monkeypatch.setattr("lockstep.inference.prefill.MAX_TOKENS", 8)
    assert engine.sample(prompts, params) == expected


def test_a_free_slot_is_filled_at_once(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of 1 to 9 tokens in 3 slots take hardly more steps than a third of their sum, and no step is empty."""
    steps: list[int] = []
    launch = Decoder.launch

    def count(self: Decoder, num_steps: int, batch_size: int, *rest: Any) -> Any:
        steps.append(batch_size)
        return launch(self, num_steps, batch_size, *rest)

    monkeypatch.setattr(Decoder, "launch", count)
    model = build_model(max_position_embeddings=20).double()  # so the prompt's length decides the answer's
    engine = LocalEngine(model, engine.tokenizer, batch_size=3)
    prompts = [[40 + i] * (20 - length) for i, length in enumerate([9, 1, 2, 8, 1, 7, 3, 5])]
    found = engine.sample(prompts, SamplingParams(max_tokens=100, temperature=1.0, seed=1))
    lengths = [len(answer.tokens) for (answer,) in found]
    assert sum(steps) == sum(lengths)  # rows that were computed: none for nobody
    assert len(steps) <= sum(lengths) / 3 + max(lengths)


def test_answers_noticed_late_are_cut(engine: LocalEngine) -> None:
    late = LocalEngine(engine.model, engine.tokenizer, batch_size=3, steps_per_read=5)
    prompts = [[20 + i, 21, 22 + i] for i in range(6)]
    common = engine.sample([prompts[0]], SamplingParams(max_tokens=1))[0][0].tokens[0]
    params = SamplingParams(
        max_tokens=17, temperature=1.0, seed=2, num_samples=3, logprobs=True, stop_tokens=(common, *range(100, 108))
    )
    found = engine.sample(prompts, params)
    assert {answer.finish_reason for answers in found for answer in answers} == {"stop", "length"}
    for answers, others in zip(found, late.sample(prompts, params), strict=True):
        for answer, other in zip(answers, others, strict=True):
            assert (answer.tokens, answer.text, answer.finish_reason) == (other.tokens, other.text, other.finish_reason)
            assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-11)


def test_replicas_of_a_colocated_model_answer_as_one(engine: LocalEngine) -> None:
    prompts = [[20 + i, 21, 22 + i] for i in range(5)]
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=2, num_samples=2)
    shares: dict[int, Any] = {}

    def sample(rank: int) -> Any:
        def gather(mine: Any) -> list[Any]:
            shares[rank] = mine
            return [shares.get(other, [[]] * len(prompts[other::3])) for other in range(3)]

        lent = contextlib.nullcontext(engine.model)
        borrowed = ColocatedEngine(lambda: lent, engine.tokenizer, gather, rank=rank, replicas=3)
        borrowed.version = 4
        return borrowed.sample(prompts, params)

    found = [sample(rank) for rank in range(3)][-1]  # the last one has everybody's share
    expected = engine.sample(prompts, params)
    assert [[a.tokens for a in answers] for answers in found] == [[a.tokens for a in answers] for answers in expected]
    assert {answer.version for answers in found for answer in answers} == {4}


def test_keys_must_be_as_many_as_prompts(engine: LocalEngine) -> None:
    with pytest.raises(ValueError, match="1 keys for 2 prompts"):
        engine.sample([[5], [6]], SamplingParams(max_tokens=1), keys=[3])
    assert engine.sample([], SamplingParams(max_tokens=1)) == []


def test_a_model_on_several_ranks_needs_a_seed(engine: LocalEngine) -> None:
    sharded = LocalEngine(engine.model, engine.tokenizer, sharded=True)
    with pytest.raises(ValueError, match="needs a seed"):
        sharded.sample([[5]], SamplingParams(max_tokens=1, temperature=1.0))


@pytest.mark.parametrize("num_prompts", [0, 2])
@pytest.mark.parametrize("others", [0, 5, 40])
def test_ranks_that_hold_a_model_together_take_equally_many_passes(
    num_prompts: int, others: int, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is played: it says that it takes `others` passes, and as many must be taken here."""
    rounds, passes = [0], [0]

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if op == dist.ReduceOp.SUM:
            tensor += float(rounds[0] < others)
            rounds[0] += 1

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    sharded = LocalEngine(engine.model, engine.tokenizer, sharded=True)
    layer = engine.model.model.layers[0]
    count = layer.register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    found = sharded.sample([[5, 6, 7], [8, 9]][:num_prompts], SamplingParams(max_tokens=4, stop_tokens=()))
    count.remove()
    own = 9 + (1 + max(len(answer.tokens) for (answer,) in found) if found else 0)  # 9 to look at the model
    assert passes[0] == max(own, others)
    assert rounds[0] == passes[0] + 1  # the last round finds that nobody has anything left


def test_the_caller_of_a_seeded_sample_keeps_its_random_state(engine: LocalEngine) -> None:
    state = torch.get_rng_state()
    engine.sample([[5]], SamplingParams(max_tokens=3, temperature=1.0, seed=0))
    assert torch.equal(state, torch.get_rng_state())
