"""Models whose layers keep more than keys and values, or attend in a way of their own: the engine's log-probs are those
of the model's own forward pass to the last digits in float64, in every slot, group and refill."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from equivalence.families import build, in_float64, tiny_config
from tiny import build_tokenizer

from lockstep.inference.decoder import Decoder
from lockstep.inference.engine import LocalEngine
from lockstep.inference.kv_cache import UnsupportedModelError
from lockstep.inference.scheduler import BatchLimits, ContinuousBatch, SlotSchedule
from lockstep.inference.slot_cache import SlotCache, SlotTensors, StateName, StateShape
from lockstep.types import PartialCompletion, SamplingParams

PROMPTS = [[5, 17, 30, 8, 4, 9, 12, 33, 7, 41], [61, 3], [44], [61, 3, 9, 9]]
QUICK = ["lfm2", "nemotron_h", "gpt_oss"]
OURS = ("lfm2", "gpt_oss", "gemma2", "vaultgemma", "granite_swa", "mimo_v2_flash")  # attend in the fast way
MORE = [
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2_moe", "kimi_linear", "olmo_hybrid", "granitemoehybrid"),
    *("bamba", "jamba", "falcon_h1", "mamba", "mamba2", "falcon_mamba", "zamba", "zamba2", "zaya", "bailing_hybrid"),
    *("gemma2", "vaultgemma", "granite_swa", "mimo_v2_flash", "llama4_text", "deepseek_v32", "inkling_text"),
    *("falcon", "bloom", "mpt", "gptj", "codegen", "biogpt", "stablelm", "gpt_neo", "nemotron", "modernbert-decoder"),
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def assert_as_the_model(model: Any, prompts: Sequence[Sequence[int]], found: Any, temperature: float = 1.0) -> None:
    for prompt, answers in zip(prompts, found, strict=True):
        for answer in answers:
            text = torch.tensor([*prompt, *answer.tokens])
            with torch.no_grad():
                logits = model(input_ids=text[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / temperature).log_softmax(-1).gather(1, text[len(prompt) :, None])[:, 0]
            assert answer.logprobs == pytest.approx(logprobs.tolist(), abs=1e-10, rel=0)


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_logprobs_are_those_of_the_models_own_forward(family: str) -> None:
    """Three slots for twelve samples: prompts are forked, and forked again after the first samples have gone on."""
    said: list[str] = []
    with in_float64():
        engine = LocalEngine(build(family), build_tokenizer(), batch_size=3, report=said.append)
        params = SamplingParams(max_tokens=9, temperature=0.8, seed=5, num_samples=3, logprobs=True)
        found = engine.sample(PROMPTS, params)
        decoder = engine.find_decoder()
        assert decoder is not None, said
        assert decoder.attends or family not in OURS
        assert_as_the_model(engine.model, PROMPTS, found, 0.8)
        assert len({answer.tokens for answer in found[0]}) > 1


def batch_of(engine: LocalEngine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> tuple[Any, Any, Any]:
    decoder = engine.find_decoder()
    assert decoder is not None
    groups = engine.make_sequences(prompts, params)
    batch = ContinuousBatch(decoder, BatchLimits(2))
    batch.add([sequence for group in groups for sequence in group])
    return decoder, batch, groups


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_states_are_computed_anew_with_new_weights(family: str) -> None:
    """What was sampled stays; what comes after it is that of the new weights alone."""
    with in_float64():
        engine = LocalEngine(build(family), build_tokenizer())
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=2, num_samples=2, logprobs=True)
        decoder, batch, groups = batch_of(engine, PROMPTS[:3], params)
        with decoder.in_use():
            for _ in range(3):
                batch.advance()
            with torch.no_grad():
                for parameter in engine.model.parameters():
                    parameter.mul_(1.02)
            batch.set_version(1)
            before = [[sequence.num_sampled for sequence in group] for group in groups]
            while batch.busy:
                batch.advance()
        assert sum(map(sum, before)) > 0
        for prompt, group, counts in zip(PROMPTS[:3], groups, before, strict=True):
            for sequence, count in zip(group, counts, strict=True):
                answer = sequence.completion()
                later = [place >= count for place in range(len(answer.tokens))]
                text = torch.tensor([*prompt, *answer.tokens])
                with torch.no_grad():
                    logits = engine.model(input_ids=text[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
                own = logits.log_softmax(-1).gather(1, text[len(prompt) :, None])[:, 0].tolist()
                for is_later, found, expected in zip(later, answer.logprobs or (), own, strict=True):
                    assert (abs(found - expected) < 1e-10) == is_later


def test_a_part_of_an_answer_goes_on_as_the_whole_did() -> None:
    """Beside samples of the same prompt from its beginning: a state in the middle is not that after the prompt."""
    with in_float64():
        engine = LocalEngine(build("lfm2"), build_tokenizer(), batch_size=2)
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=2, num_samples=4, logprobs=True)
        whole = engine.sample(PROMPTS[:1], params)
        first = whole[0][0]
        part = PartialCompletion(tuple(first.tokens[:3]), tuple((first.logprobs or ())[:3]), (0, 0, 0))
        found = engine.sample(PROMPTS[:1], params, partial=[[part, None, None, None]])
    assert [answer.tokens for answer in found[0]] == [answer.tokens for answer in whole[0]]
    for one, other in zip(found[0], whole[0], strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-12, rel=0)


def test_slots_grow_and_keep_their_states() -> None:
    with in_float64():
        engine = LocalEngine(build("lfm2"), build_tokenizer())
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=2, logprobs=True)
        decoder, batch, groups = batch_of(engine, PROMPTS[:1], params)
        with decoder.in_use():
            for _ in range(3):
                batch.advance()
            long = engine.make_sequences([list(range(20, 70))], params)
            batch.add(long[0])
            while batch.busy:
                batch.advance()
        found = [[sequence.completion() for sequence in group] for group in (*groups, *long)]
        assert_as_the_model(engine.model, [PROMPTS[0], list(range(20, 70))], found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["conv", "recurrent"])
def test_a_state_that_is_not_kept_is_found_out(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every precision alike."""
    torch.manual_seed(0)
    family = "lfm2" if kind == "conv" else "qwen3_next"
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family), dtype=dtype).eval()
    assert Decoder(model).slots.keeps_states
    method = f"update_{kind}_state"
    update = getattr(SlotCache, method)

    def forget(self: SlotCache, state: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = update(self, state, layer_idx, *args, **kwargs)
        if layer_idx == 0:
            update(self, torch.zeros_like(state), layer_idx, *args, **kwargs)
        return found

    monkeypatch.setattr(SlotCache, method, forget)
    with pytest.raises(UnsupportedModelError):
        Decoder(model)


# --- the tensors, and the schedule that knows of them -----------------------------------------------------------------


def make_tensors(num_slots: int = 3) -> SlotTensors:
    shapes = {
        StateName("recurrent", 0): StateShape((2,), torch.float64, grows=False),
        StateName("key", 1): StateShape((1, 1, 2), torch.float64, grows=True),
    }
    return SlotTensors(shapes, num_slots, 4, torch.device("cpu"))


def test_a_fork_is_taken_after_the_prompt_however_far_its_slot_has_gone() -> None:
    tensors = make_tensors()
    state = tensors.states[StateName("recurrent", 0)]
    state[0] = 1.0
    tensors.keep_prompts([0])
    state[0] = 7.0  # steps
    tensors.fork_states([(0, 1), (0, 0)])
    assert state[:, 0].tolist() == [1.0, 1.0, 0.0]
    tensors.keep_prompts([1])
    state[:] = 9.0
    tensors.fork_states([(1, 2)])
    assert state[:, 0].tolist() == [9.0, 9.0, 1.0]
    tensors.keep_prompts([])
    tensors.fork_states([(1, 2)])
    assert state[2, 0] == 9.0
    tensors.begin([2])
    assert state[2, 0] == 0.0


def test_a_move_takes_the_state_of_now_and_larger_tensors_what_was() -> None:
    tensors = make_tensors()
    state, keys = tensors.states[StateName("recurrent", 0)], tensors.tokens[StateName("key", 1)]
    state[:, 0], keys[:, 0, :, 0] = torch.tensor([1.0, 2.0, 3.0]), torch.arange(12.0).reshape(3, 4)
    tensors.keep_prompts([2])
    tensors.move_states([(2, 0)])
    tensors.copy_tokens([(2, 0)], 2)
    assert state[:, 0].tolist() == [3.0, 2.0, 3.0]
    assert keys[0, 0, :, 0].tolist() == [8.0, 9.0, 2.0, 3.0]
    larger = make_tensors(5)
    larger.copy_from(tensors)
    assert larger.states[StateName("recurrent", 0)][:, 0].tolist() == [3.0, 2.0, 3.0, 0.0, 0.0]


def test_a_schedule_with_states_forks_only_prompts_that_are_waited_for() -> None:
    schedule = SlotSchedule(["a", "a", "a", "b"], 2, keeps_states=True)
    first = schedule.admit()
    assert (first.computed, first.shared) == ([(0, 0)], [(0, 1)])
    assert schedule.waited_prompts() == [0]
    schedule.release(1)
    assert schedule.admit().copied == [(0, 1)]
    assert schedule.waited_prompts() == []  # nobody waits for "a", and "b" is in no slot
    schedule.release(0)
    assert schedule.admit().computed == [(0, 3)]
    schedule.add("b")
    assert schedule.waited_prompts() == [0]
    schedule.release(0)
    assert schedule.admit().copied == [(0, 0)]  # the slot itself: from where its prompt ended


def test_a_schedule_with_states_forgets_all_prompts_with_the_weights() -> None:
    """A slot in use is computed anew with what it has sampled: that is not its prompt."""
    schedule = SlotSchedule(["a", "a", "a"], 2, keeps_states=True)
    schedule.admit()
    schedule.waited_prompts()
    schedule.forget_cached()
    schedule.release(1)
    assert schedule.admit().computed == [(1, 2)]


def test_a_partial_sequence_gives_no_prompt_to_others() -> None:
    schedule = SlotSchedule(num_slots=2, keeps_states=True)
    schedule.add("a", partial=True)
    schedule.add("a")
    admission = schedule.admit()
    assert admission.computed == [(0, 0), (1, 1)]
    schedule.add("a")
    assert schedule.waited_prompts() == [1]
