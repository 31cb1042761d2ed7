"""Sequences that come at any time, that were partial elsewhere, that live through new weights: in float64 to 1e-10."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import build_model, build_tokenizer

from lockstep.config import LoraConfig
from lockstep.inference.continuous_engine import ContinuousEngine
from lockstep.inference.decoder import Decoder
from lockstep.inference.engine import LocalEngine
from lockstep.inference.hf_generate import GenerateFacts
from lockstep.model.load import apply_weights
from lockstep.model.lora import add_lora
from lockstep.types import PartialCompletion, SamplingParams, TextCompletion

PROMPTS = [[10, 20, 30, 40, 50], [11], [12, 13], [9, 8, 7, 6, 5, 4, 3, 9, 8, 7], [11, 12, 13, 14]]
PARAMS = SamplingParams(max_tokens=14, temperature=1.0, seed=3, num_samples=2, logprobs=True)


def make_engine(seed: int = 0, **options: Any) -> LocalEngine:
    return LocalEngine(build_model(seed=seed).double(), build_tokenizer(), **options)


ENGINE = make_engine(batch_size=16)
WHOLE = ENGINE.sample(PROMPTS, PARAMS)


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    return build_model(seed=seed).double().state_dict()


def finish(engine: ContinuousEngine) -> None:
    while engine.has_work:
        engine.advance()


def logprobs_of(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return [logits[place, token].item() for place, token in enumerate(tokens)]


def assert_alike(found: list[list[TextCompletion]], expected: list[list[TextCompletion]]) -> None:
    for answers, others in zip(found, expected, strict=True):
        for answer, other in zip(answers, others, strict=True):
            assert (answer.tokens, answer.text, answer.finish_reason) == (other.tokens, other.text, other.finish_reason)
            assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-10, rel=0)


def cut(answer: TextCompletion, length: int, version: int = 0) -> PartialCompletion | None:
    if length == 0:
        return None
    return PartialCompletion(
        answer.tokens[:length], (answer.logprobs or ())[:length], (version,) * min(length, len(answer.tokens))
    )


# --- partial completions --------------------------------------------------------------------------------------------


def test_an_answer_cut_at_any_place_goes_on_as_it_would_have() -> None:
    engine = make_engine(batch_size=3)
    whole = engine.sample(PROMPTS, PARAMS)
    for length in range(PARAMS.max_tokens + 1):
        partial = [[cut(answer, length + sample) for sample, answer in enumerate(group)] for group in whole]
        assert_alike(engine.sample(PROMPTS, PARAMS, partial=partial), whole)


@given(st.lists(st.integers(0, 14), min_size=10, max_size=10), st.integers(1, 7))
@settings(deadline=None, max_examples=25)
def test_some_partial_and_some_not_in_any_number_of_slots(lengths: list[int], num_slots: int) -> None:
    engine = LocalEngine(ENGINE.model, ENGINE.tokenizer, batch_size=num_slots)
    partial = [[cut(answer, lengths[2 * p + s]) for s, answer in enumerate(group)] for p, group in enumerate(WHOLE)]
    assert_alike(engine.sample(PROMPTS, PARAMS, partial=partial), WHOLE)


def test_a_partial_completion_stops_at_its_stop_text_and_keeps_what_it_was_given() -> None:
    text = WHOLE[0][0].text
    assert len(text) > 6
    params = replace(PARAMS, num_samples=1, stop=(text[5:7],))
    ((whole,),) = ENGINE.sample(PROMPTS[:1], params)
    assert whole.finish_reason == "stop"
    for length in range(1, len(whole.tokens) + 1):
        ((found,),) = ENGINE.sample(PROMPTS[:1], params, partial=[[cut(whole, length)]])
        assert (found.tokens, found.text, found.finish_reason) == (whole.tokens, whole.text, "stop")
    marked = PartialCompletion(whole.tokens[:2], (-1.5, -2.5), (0, 0))
    ((found,),) = ENGINE.sample(PROMPTS[:1], params, partial=[[marked]])
    assert found.logprobs is not None
    assert found.logprobs[:2] == (-1.5, -2.5)


def test_every_token_keeps_the_version_it_came_from() -> None:
    engine = LocalEngine(ENGINE.model, ENGINE.tokenizer)
    engine.version = 5
    partial = [[cut(WHOLE[0][0], 3, version=2), None]]
    ((first, second),) = engine.sample(PROMPTS[:1], PARAMS, [0], partial)
    assert (first.versions, first.version, first.oldest_version) == ((2,) * 3 + (5,) * 11, 5, 2)
    assert (second.versions, second.version, second.oldest_version) == ((), 5, 5)


@pytest.mark.parametrize(
    ("partial", "message"),
    [
        ([[None]], "partial must have 2 entries for each of the 1 prompts"),
        ([[None, PartialCompletion((2, 5), (0.0, 0.0), (0, 0))]], "has 2 tokens and ends after 1"),
    ],
    ids=["too few", "goes on after its end"],
)
def test_partial_completions_must_fit(partial: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ENGINE.sample(PROMPTS[:1], PARAMS, partial=partial)
    with pytest.raises(ValueError, match="2 tokens, 1 log-probs and 2 versions"):
        PartialCompletion((1, 2), (0.0,), (0, 0))


def refuse(engine: LocalEngine) -> None:
    """As if the decoder had refused its model, which transformers' generate takes in batches."""
    engine.decodes = False
    engine.generate_facts = GenerateFacts(row_s=0.01, rows_s=0.02, num_rows=16, min_length=1)


def test_a_model_that_is_not_decoded_step_by_step_goes_on_too() -> None:
    engine = LocalEngine(ENGINE.model, ENGINE.tokenizer)
    refuse(engine)
    params = SamplingParams(max_tokens=8, logprobs=True)
    whole = engine.sample(PROMPTS, params)
    partial = [[cut(group[0], 3 if place % 2 else 0)] for place, group in enumerate(whole)]
    assert_alike(engine.sample(PROMPTS, params, partial=partial), whole)
    done = [[cut(group[0], len(group[0].tokens))] for group in whole]
    assert_alike(engine.sample(PROMPTS, params, partial=done), whole)


# --- at any time ----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=8), st.integers(1, 6), st.booleans()
)
@settings(deadline=None, max_examples=30)
def test_calls_that_come_while_others_are_answered_get_the_same_answers(
    arrivals: list[tuple[int, int]], num_slots: int, has_fixed_batch: bool
) -> None:
    """Each arrival: which prompt, and how many steps after the one before. On a GPU steps have a fixed size."""
    local = LocalEngine(ENGINE.model, ENGINE.tokenizer, batch_size=num_slots, steps_per_read=1 + 2 * has_fixed_batch)
    engine, calls = ContinuousEngine(local), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "has_fixed_batch", has_fixed_batch)
        for place, pause in arrivals:
            for _ in range(pause):
                step(engine)
            calls.append((place, engine.submit([PROMPTS[place]], PARAMS, [place])))
        finish(engine)
    assert not engine.active_calls
    for place, call in calls:
        assert_alike(call.completions(), [WHOLE[place]])


def test_steps_that_are_computed_ahead_are_of_the_weights_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the next steps are launched before the last ones are read: new weights come after both."""
    monkeypatch.setattr(Decoder, "has_fixed_batch", True)
    local = make_engine(batch_size=4, steps_per_read=2)
    engine = ContinuousEngine(local)
    call = engine.submit([PROMPTS[0]], replace(PARAMS, num_samples=1), [0])
    step(engine)
    engine.load_weights(weights_of(1), 1)
    (answer,) = (finish(engine), call.completions()[0])[1]
    assert answer.versions == (0,) * 4 + (1,) * 10
    old, new = (build_model(seed=seed).double() for seed in (0, 1))
    expected = logprobs_of(old, PROMPTS[0], answer.tokens)[:4] + logprobs_of(new, PROMPTS[0], answer.tokens)[4:]
    assert answer.logprobs == pytest.approx(expected, abs=1e-10, rel=0)


def step(engine: ContinuousEngine) -> None:
    """One pass of decoding."""
    engine.slice_s = 0.0
    engine.advance()


def test_a_prompt_is_computed_once_also_for_those_who_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalEngine(ENGINE.model, ENGINE.tokenizer, batch_size=4)
    engine, decoder = ContinuousEngine(local), local.find_decoder()
    assert decoder is not None
    computed: list[int] = []
    prefill = decoder.prefill

    def count(texts: Any, *more: Any) -> Any:
        computed.extend(len(tokens) for _, tokens in texts)
        return prefill(texts, *more)

    monkeypatch.setattr(decoder, "prefill", count)
    calls = [engine.submit([PROMPTS[0]], PARAMS, [0])]
    step(engine)
    calls.append(engine.submit([PROMPTS[0]], PARAMS, [0]))
    finish(engine)
    calls.append(engine.submit([PROMPTS[0]], PARAMS, [0]))
    finish(engine)
    assert computed == [len(PROMPTS[0]) - 1]
    for call in calls:
        assert_alike(call.completions(), [WHOLE[0]])


def test_a_slot_that_was_moved_into_no_longer_holds_what_it_did() -> None:
    """The first ends, the second takes its slots, and then the first's prompt comes again."""
    engine = ContinuousEngine(LocalEngine(ENGINE.model, ENGINE.tokenizer, batch_size=8))
    calls = [(0, engine.submit(PROMPTS[:1], PARAMS, [0]))]
    for _ in range(8):
        step(engine)
    calls.append((3, engine.submit(PROMPTS[3:4], PARAMS, [3])))
    while not calls[0][1].finished:
        step(engine)
    assert not calls[1][1].finished
    calls.append((0, engine.submit(PROMPTS[:1], PARAMS, [0])))
    finish(engine)
    for place, call in calls:
        assert_alike(call.completions(), [WHOLE[place]])


def test_longer_sequences_find_room_while_others_are_active() -> None:
    engine = ContinuousEngine(LocalEngine(ENGINE.model, ENGINE.tokenizer, batch_size=3))
    longer = replace(PARAMS, max_tokens=100)
    calls = [engine.submit(PROMPTS[:1], PARAMS, [0])]
    for _ in range(3):
        step(engine)
    calls.append(engine.submit(PROMPTS[3:4], longer, [3]))
    calls.append(engine.submit(PROMPTS[1:2], PARAMS, [1]))
    finish(engine)
    assert_alike(calls[0].completions(), [WHOLE[0]])
    assert_alike(calls[1].completions(), ENGINE.sample(PROMPTS[3:4], longer, [3]))
    assert_alike(calls[2].completions(), [WHOLE[1]])


def test_where_memory_is_short_the_longer_sequence_waits() -> None:
    per_token = 2 * 2 * 2 * 8 * 8  # layers, keys and values, heads, head size, bytes of float64
    small = LocalEngine(ENGINE.model, ENGINE.tokenizer, batch_size=8, max_cache_bytes=4 * 32 * per_token)
    engine = ContinuousEngine(small)
    longer = replace(PARAMS, max_tokens=90)
    early = [[cut(WHOLE[0][0], 11), None], [None, None]]  # its slot is free long before the others'
    calls = [engine.submit(PROMPTS[:2], PARAMS, [0, 1], early)]
    step(engine)
    calls.append(engine.submit(PROMPTS[3:4], longer, [3]))
    calls.append(engine.submit(PROMPTS[1:2], PARAMS, [1]))
    with pytest.raises(ValueError, match=r"10 tokens and 200 new ones need .* lower max_tokens"):
        engine.submit(PROMPTS[3:4], replace(PARAMS, max_tokens=200), [3])
    finish(engine)
    assert small.cache_bytes <= 4 * 32 * per_token
    assert_alike(calls[0].completions(), WHOLE[:2])
    assert_alike(calls[1].completions(), ENGINE.sample(PROMPTS[3:4], longer, [3]))
    assert_alike(calls[2].completions(), [WHOLE[1]])


@pytest.mark.parametrize("is_cheap", [True, False])
def test_a_cache_for_the_longest_text_to_come_is_made_at_once_where_it_is_cheap(is_cheap: bool) -> None:
    needed = 10 * 128 * 2 * 2 * 2 * 8 * 8  # slots, tokens of a slot, and the bytes of a token as above
    limit = needed if is_cheap else needed - 1
    engine = LocalEngine(ENGINE.model, ENGINE.tokenizer, batch_size=16, min_length=110, min_length_bytes=limit)
    assert_alike(engine.sample(PROMPTS, PARAMS), WHOLE)
    before, longer = engine.cache_bytes, replace(PARAMS, max_tokens=100)
    assert_alike(engine.sample(PROMPTS, longer), ENGINE.sample(PROMPTS, longer))
    assert (engine.cache_bytes == before) == is_cheap


def test_calls_that_draw_differently_do_not_disturb_each_other() -> None:
    engine = ContinuousEngine(LocalEngine(ENGINE.model, ENGINE.tokenizer, batch_size=8))
    ways = [PARAMS, SamplingParams(max_tokens=9, logprobs=True), replace(PARAMS, temperature=0.5, top_k=7), PARAMS]
    calls = []
    for params in ways:
        calls.append(engine.submit(PROMPTS[:2], params, [0, 1]))
        step(engine)
    finish(engine)
    for params, call in zip(ways, calls, strict=True):
        assert_alike(call.completions(), ENGINE.sample(PROMPTS[:2], params, [0, 1]))


def test_a_call_whose_completions_are_complete_is_answered_at_once() -> None:
    engine = ContinuousEngine(ENGINE)
    call = engine.submit(PROMPTS[:1], PARAMS, [0], [[cut(answer, 14) for answer in WHOLE[0]]])
    assert call.finished
    assert not engine.has_work
    assert not engine.active_calls
    assert_alike(call.completions(), WHOLE[:1])


# --- new weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 3, 16])
def test_new_weights_keep_tokens_and_decide_all_that_follow(num_slots: int) -> None:
    local = make_engine(batch_size=num_slots)
    local.version = 4
    old, new = build_model(seed=0).double(), build_model(seed=1).double()
    engine = ContinuousEngine(local)
    call = engine.submit(PROMPTS, PARAMS, range(5))
    for _ in range(5):
        step(engine)
    before = [[sequence.partial() for sequence in group] for group in call.groups]
    engine.load_weights(new.state_dict(), 6)
    finish(engine)
    found = call.completions()
    assert {version for group in found for answer in group for version in answer.versions} == {4, 6}
    for prompt, group, partial in zip(PROMPTS, found, before, strict=True):
        for answer, part in zip(group, partial, strict=True):
            kept = len(part.tokens)
            assert answer.tokens[:kept] == part.tokens
            versions = answer.versions or (answer.version,) * len(answer.tokens)
            assert versions == (4,) * kept + (6,) * (len(answer.tokens) - kept)
            assert answer.oldest_version == (4 if kept else 6)
            expected = logprobs_of(old, prompt, answer.tokens)[:kept] + logprobs_of(new, prompt, answer.tokens)[kept:]
            assert answer.logprobs == pytest.approx(expected, abs=1e-10, rel=0)


def test_after_new_weights_nothing_of_the_old_is_left_in_any_slot() -> None:
    """A slot that held the prompt before must not be what later samples of it are copied from."""
    local = make_engine(batch_size=8)
    engine = ContinuousEngine(local)
    engine.submit(PROMPTS, PARAMS, range(5))
    finish(engine)
    engine.load_weights(weights_of(1), 1)
    call = engine.submit(PROMPTS, PARAMS, range(5))
    finish(engine)
    assert_alike(call.completions(), make_engine(seed=1).sample(PROMPTS, PARAMS))
    assert {(answer.version, answer.versions) for group in call.completions() for answer in group} == {(1, ())}


def test_an_answer_over_two_versions_can_be_cut_and_gone_on_with() -> None:
    local = make_engine(batch_size=4)
    engine = ContinuousEngine(local)
    call = engine.submit(PROMPTS[:1], PARAMS, [0])
    for _ in range(4):
        step(engine)
    engine.load_weights(weights_of(1), 1)
    for _ in range(4):
        step(engine)
    partial = [[sequence.partial() for sequence in call.groups[0]]]
    assert partial[0][0] is not None
    assert partial[0][0].versions == (0, 0, 0, 0, 1, 1, 1, 1)
    finish(engine)
    other = make_engine(seed=1)
    other.version = 1
    found = other.sample(PROMPTS[:1], PARAMS, [0], partial)
    assert_alike(found, call.completions())
    assert [answer.versions for answer in found[0]] == [answer.versions for answer in call.completions()[0]]


def test_adapters_alone_are_new_weights_too() -> None:
    def make_adapted(seed: int) -> Any:
        model = add_lora(build_model().double(), LoraConfig(rank=2, alpha=4)).double()
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.3)
        return model

    engine = ContinuousEngine(LocalEngine(make_adapted(1), build_tokenizer()))
    engine.submit(PROMPTS[:1], PARAMS, [0])
    step(engine)
    other = make_adapted(2)
    engine.load_weights({name: tensor for name, tensor in other.state_dict().items() if "lora_" in name}, 1)
    call = engine.submit(PROMPTS[:1], PARAMS, [0])
    finish(engine)
    assert_alike(call.completions(), LocalEngine(other, build_tokenizer()).sample(PROMPTS[:1], PARAMS, [0]))


def test_weights_that_do_not_fit_change_nothing() -> None:
    engine = ContinuousEngine(make_engine())
    call = engine.submit(PROMPTS, PARAMS, range(5))
    step(engine)
    with pytest.raises(ValueError, match="missing"):
        engine.load_weights(dict(list(weights_of(1).items())[:-1]), 1)
    finish(engine)
    assert_alike(call.completions(), WHOLE)
    assert {answer.version for group in call.completions() for answer in group} == {0}


def test_weights_that_are_no_good_fail_their_calls_and_no_others() -> None:
    engine = ContinuousEngine(make_engine())
    calls = [engine.submit(PROMPTS[:2], PARAMS, [0, 1])]
    step(engine)
    bad = weights_of(0)
    bad["model.layers.1.self_attn.v_proj.weight"][0, 0] = torch.nan
    engine.load_weights(bad, 1)
    assert engine.advance() == calls
    assert "weights hold nan" in str(calls[0].error)
    assert not engine.has_work
    engine.load_weights(weights_of(0), 2)
    call = engine.submit(PROMPTS, PARAMS, range(5))
    finish(engine)
    assert_alike(call.completions(), WHOLE)


def test_a_model_that_is_not_decoded_step_by_step_is_asked_one_call_after_the_other() -> None:
    local = LocalEngine(build_model().double(), ENGINE.tokenizer)
    refuse(local)
    params = SamplingParams(max_tokens=8, logprobs=True)
    expected = local.sample(PROMPTS[:1], params)
    engine = ContinuousEngine(local)
    calls = [engine.submit(PROMPTS[:1], params, [0]), engine.submit(PROMPTS[:1], params, [0])]
    assert engine.active_calls == [], "its tokens have no log-probs before the end"
    assert engine.advance() == calls[:1]
    engine.load_weights(weights_of(1), 7)
    assert engine.advance() == calls[1:]
    assert not engine.has_work
    assert_alike(calls[0].completions(), expected)
    ((answer,),) = calls[1].completions()
    assert answer.version == 7
    assert answer.logprobs == pytest.approx(logprobs_of(local.model, PROMPTS[0], answer.tokens), abs=1e-5)  # theirs


# --- progress for another thread ------------------------------------------------------------------------------------


def test_progress_adds_up_to_the_completions() -> None:
    engine = ContinuousEngine(make_engine(batch_size=3))
    partial: list[list[PartialCompletion | None]] = [[cut(answer, 3) for answer in WHOLE[0]], [None, None]]
    call = engine.submit(PROMPTS[:2], PARAMS, [0, 1], partial, name="first")
    tokens = [[part.tokens if part else () for part in group] for group in partial]
    while not call.finished:
        assert engine.active_calls == [call]
        step(engine)
        for prompt, sample, new in call.take_progress():
            assert new.tokens
            tokens[prompt][sample] += new.tokens
        assert call.take_progress() == []
    assert call.name == "first"
    assert tokens == [[answer.tokens for answer in group] for group in WHOLE[:2]]


def test_weights_are_applied_in_place() -> None:
    local = make_engine()
    model = local.model
    engine = ContinuousEngine(local)
    engine.load_weights(weights_of(1), 3)
    assert (local.model, local.version, engine.version) == (model, 3, 3)
    expected = build_model(seed=0).double()
    apply_weights(expected, weights_of(1))
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)
