"""Scores beside samples (the model's own log-probs and the likeliest tokens), and calls that somebody gives up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import build_model, build_tokenizer

from lockstep.inference.continuous_engine import ContinuousEngine
from lockstep.inference.engine import LocalEngine
from lockstep.inference.sequence import SequenceOptions
from lockstep.types import SamplingParams

MODEL = build_model().double().eval()
PROMPT = [10, 20, 30, 40, 50]
WARM = SamplingParams(max_tokens=8, temperature=0.7, seed=1)
GREEDY = SamplingParams(max_tokens=8)


def make_engine(batch_size: int = 4, **changes: Any) -> ContinuousEngine:
    return ContinuousEngine(LocalEngine(MODEL, build_tokenizer(), batch_size, **changes))


def finish(engine: ContinuousEngine) -> None:
    while engine.has_work:
        engine.advance()


def all_logprobs(tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return MODEL(torch.tensor([tokens])).logits[0].log_softmax(-1)


def assert_scores(scores: Any, tokens: list[int], start: int, num_top: int) -> None:
    expected = all_logprobs(tokens)
    for place, found in enumerate(scores, start=start):
        own = expected[place - 1]
        values, ids = own.topk(num_top)
        assert found.logprob == pytest.approx(own[tokens[place]].item(), abs=1e-10)
        assert [token for token, _ in found.top] == ids.tolist()
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-10)


def test_tokens_are_scored_as_the_model_scores_them_whatever_the_temperature() -> None:
    engine = make_engine()
    calls = [
        (engine.submit([PROMPT], params, options=SequenceOptions(num_top=num_top)), num_top)
        for params, num_top in ((WARM, 3), (GREEDY, 0), (WARM, 20))
    ]
    plain = engine.submit([PROMPT], WARM)
    finish(engine)
    for call, num_top in calls:
        (sequence,) = call.sequences
        assert_scores(sequence.scores, [*PROMPT, *sequence.sampled], len(PROMPT), num_top)
        assert len(sequence.scores) == len(sequence.sampled)
    assert not plain.sequences[0].scores
    assert plain.sequences[0].sampled == calls[0][0].sequences[0].sampled


def test_a_prompt_is_scored_also_where_nothing_is_sampled_and_where_it_is_in_the_cache() -> None:
    engine = make_engine()
    only = SequenceOptions(num_top=2, prompt_scores=True, score_only=True)
    both = SequenceOptions(num_top=2, prompt_scores=True)
    calls = [engine.submit([PROMPT, [7]], GREEDY, options=way) for way in (only, both, SequenceOptions(), only)]
    finish(engine)
    for call, way in zip(calls, (only, both, SequenceOptions(), only), strict=True):
        long, short = call.sequences
        assert len(long.prompt_scores) == (len(PROMPT) - 1 if way.prompt_scores else 0)
        assert_scores(long.prompt_scores, PROMPT, 1, 2)
        assert not short.prompt_scores
        assert bool(long.sampled) != way.score_only
        assert long.finished
        assert call.completions()[0][0].finish_reason == "length"


def test_a_call_that_is_given_up_frees_its_slots_and_leaves_the_others_alone() -> None:
    engine = make_engine(batch_size=2)
    engine.slice_s = 0.0
    long = SamplingParams(max_tokens=200, temperature=1.0, seed=5)
    calls = [engine.submit([PROMPT], long) for _ in range(2)]
    waiting = engine.submit([PROMPT], WARM)
    last = engine.submit([[7, 8]], WARM)
    for _ in range(3):
        engine.advance()
    engine.cancel(calls[0])
    engine.cancel(waiting)
    engine.advance()
    assert len(last.sequences[0].sampled) == 1  # it has the slot
    engine.cancel(calls[1])
    finish(engine)
    assert len(calls[0].sequences[0].sampled) == 3
    assert not waiting.sequences[0].sampled
    ((alone,),) = LocalEngine(MODEL, build_tokenizer()).sample([[7, 8]], WARM)
    assert last.completions()[0][0] == alone


def test_text_is_taken_while_it_grows() -> None:
    engine = make_engine()
    engine.slice_s = 0.0
    call = engine.submit([PROMPT], WARM, options=SequenceOptions(streams=True))
    (sequence,) = call.sequences
    pieces = []
    while engine.has_work:
        engine.advance()
        pieces.append(sequence.take_text())
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == call.completions()[0][0].text


def test_after_a_failure_later_calls_start_afresh() -> None:
    engine = make_engine()
    engine.slice_s = 0.0
    lost = engine.submit([PROMPT], WARM)
    engine.advance()
    assert engine.reset(RuntimeError("out of memory")) == [lost]
    assert isinstance(lost.error, RuntimeError)
    later = engine.submit([PROMPT], WARM)
    finish(engine)
    ((alone,),) = LocalEngine(MODEL, build_tokenizer()).sample([PROMPT], WARM)
    assert later.completions()[0][0] == alone
