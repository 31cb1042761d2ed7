"""Prompts that are computed in a captured pass, and read where one of their samples has them. On a CPU, with stand-ins
for the kernels; tests/gpu has the kernels themselves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from unit.inference.test_compiled_steps import UncapturedSteps, attend, make_model

import lockstep.inference
from lockstep.inference import prefill
from lockstep.inference.decoder import Decoder
from lockstep.inference.kv_cache import LayerShape, SharedPrompts, prompt_tiles
from lockstep.inference.prefill import PrefillShape, pad_prompts
from lockstep.inference.scheduler import BatchLimits, decode_all
from lockstep.inference.sequence import TokenSequence
from lockstep.model.attention import PackedLayout, packed_attention
from lockstep.types import SamplingParams

CPU = torch.device("cpu")


# --- a pass of rounded size -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 700), min_size=1, max_size=70), st.integers(0, 3))
def test_padding_is_documents_of_its_own(lengths, first):
    prompts = [(first + slot, list(range(10, 10 + length))) for slot, length in enumerate(lengths)]
    shape = PrefillShape.of(prompts)
    (tokens, slots, positions), boundaries = pad_prompts(prompts, shape, capacity=1024)
    total = sum(lengths)
    assert total <= shape.num_tokens <= max((1.5 if total <= 2048 else 1.25) * total, 256)
    assert tokens[:total].tolist() == [token for _, row in prompts for token in row]
    assert slots[:total].tolist() == [slot for slot, row in prompts for _ in row]
    assert positions[:total].tolist() == [place for _, row in prompts for place in range(len(row))]
    assert set(zip(slots[total:].tolist(), positions[total:].tolist(), strict=True)) <= {(first, 1023)}
    documents = boundaries.diff()
    assert boundaries[: len(lengths) + 1].tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert boundaries[-1] == shape.num_tokens == len(tokens)
    assert bool((documents >= 0).all())
    assert int(documents.max()) <= shape.max_length
    assert len(boundaries) == shape.num_boundaries


def test_there_are_few_shapes():
    shapes = {PrefillShape.of([(0, [1] * total)]).num_tokens for total in range(1, 8193)}
    assert len(shapes) < 18
    some = {PrefillShape.of([(0, [1] * 60), (1, [1] * length)]) for length in range(1, 2000)}
    assert len(some) < 12


# --- prompts in one slot --------------------------------------------------------------------------------------------


def test_a_slot_that_others_read_is_copied_to_them_before_it_is_written():
    prompts = SharedPrompts(6, CPU)
    prompts.share([(0, 1, 7), (0, 2, 7), (3, 4, 5)])
    assert [t.tolist() for t in prompts.rows(5)[:3]] == [[0, 0, 0, 0, 3], [0, 7, 7, 0, 5], [7, 7, 7, 5, 5]]
    assert prompts.rows(5)[3].tolist() == [
        [0, 7, 0, 1, 2, *[-1] * 5], [3, 5, 3, 4, *[-1] * 6], [0] * 10,
    ]  # fmt: skip
    assert (prompts.holder(2), prompts.holder(5)) == (0, 5)
    assert prompts.before_write([0, 1]) == [(0, 2, 7)]  # 1 gets another prompt itself
    assert prompts.rows(5)[1].tolist() == [0, 0, 0, 0, 5]
    assert prompts.before_write([4]) == []
    assert prompts.before_write([3]) == []
    prompts.share([(5, 0, 2)])
    grown = SharedPrompts(8, CPU)
    grown.copy_from(prompts)
    assert grown.before_write([5]) == [(5, 0, 2)]
    prompts.clear()
    assert prompts.rows(6)[1].tolist() == [0] * 6


def test_rows_with_one_prompt_read_it_in_tiles_and_a_row_alone_without():
    source_of = dict.fromkeys(range(3, 14), (2, 6)) | {14: (2, 4), 1: (0, 0)}
    (sources, lengths, covered), tiles = prompt_tiles(source_of, 16, 8)
    assert sources[3:15].tolist() == [2] * 12
    assert lengths[3:15].tolist() == [*[6] * 11, 4]
    assert covered.tolist() == [0, 0, *[6] * 12, 0, 0]  # 14 has another length than all others; 0 shares nothing with 1
    assert tiles[:3, :2].tolist() == [[2, 6], [2, 6], [0, 0]]
    assert tiles[:2, 2:].flatten().tolist() == [*range(2, 14), *[-1] * 4]


def attend_by_boundaries(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
) -> Any:
    """As the fused kernel: where documents end it reads from a tensor."""
    boundaries = options.pop("packed_boundaries")
    assert int(boundaries.diff().max()) <= options.pop("packed_max_length")
    lengths = tuple(n for n in boundaries.diff().tolist() if n)
    return packed_attention(module, query, key, value, mask, packed_layout=PackedLayout(lengths), **options)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    stand_in = SimpleNamespace(attend=attend)
    monkeypatch.setitem(__import__("sys").modules, "lockstep.inference.decode_kernel", stand_in)
    monkeypatch.setattr(lockstep.inference, "decode_kernel", stand_in, raising=False)
    monkeypatch.setattr(prefill, "packed_attention", attend_by_boundaries)
    monkeypatch.setattr(prefill, "is_fused", lambda *_: True)
    monkeypatch.setattr(LayerShape, "fuses_prefill", lambda *_: True)
    monkeypatch.setattr(Decoder, "has_fixed_batch", True)


def sequences_of(lengths: list[int], *, seed: int) -> list[TokenSequence]:
    """Three prompts in turn, with answers of many lengths: slots are free at other times, and filled again."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(5, 99) for _ in range(n)] for n in lengths]
    found = []
    for number in range(24):
        params = SamplingParams(draw.randint(1, 12), temperature=1.0)
        prompt = prompts[number // 5 % len(prompts)]
        found.append(TokenSequence(prompt, None, params, frozenset(), params.max_tokens, random_stream=number))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("num_slots", [4, 7])
def test_shared_and_captured_prompts_give_the_same_samples(num_slots: int, as_on_a_gpu: None) -> None:
    model = make_model().double()
    fast, plain = Decoder(model, fuses=False), Decoder(model, fuses=False, graphs=False)
    graphs = CountedSteps()
    fast.graphs, fast.by_kernel = graphs, True  # type: ignore[assignment]
    for seed in range(3):  # a shape is captured when it comes again
        ours, theirs = (sequences_of([9, 1, 30], seed=seed) for _ in range(2))
        decode_all(fast, ours, BatchLimits(num_slots, max_bytes=1 << 30, steps_per_read=3))
        decode_all(plain, theirs, BatchLimits(num_slots, max_bytes=1 << 30, steps_per_read=3))
        for mine, known in zip(ours, theirs, strict=True):
            assert mine.sampled == known.sampled
            assert mine.logprobs == pytest.approx(known.logprobs, abs=1e-10)
    assert graphs.num_prefills > 2


class CountedSteps(UncapturedSteps):
    num_prefills = 0

    def run(self, key: Any, step: Any, state: Any) -> Any:
        self.num_prefills += isinstance(key, PrefillShape)
        return super().run(key, step, state)
