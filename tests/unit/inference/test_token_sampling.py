"""The choice of a token against plain Python: the random numbers, the truncations, the inverse of the distribution."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.inference.token_sampling import Truncation, random_streams, sample_tokens, uniforms

NUM_DRAWS = 2000


def grid(count: int = NUM_DRAWS) -> torch.Tensor:
    """Every part of [0, 1) equally often."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def draw(logits: list[float], truncation: Truncation, dtype: torch.dtype = torch.float32) -> list[int]:
    """NUM_DRAWS tokens, from the smallest random number to the largest."""
    rows = torch.tensor(logits, dtype=dtype).expand(NUM_DRAWS, -1)
    return sample_tokens(rows, truncation, grid())[0].tolist()


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def kept_of(probabilities: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """What is drawn from, as SamplingParams says; no two probabilities are equal."""
    ranked = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    if top_k:
        ranked = ranked[:top_k]
    total = sum(probabilities[token] for token in ranked)
    reached, fewest = 0.0, []
    for token in ranked:
        if reached < top_p * total:
            fewest.append(token)
        reached += probabilities[token]
    return {token for token in fewest if probabilities[token] >= min_p * probabilities[ranked[0]]}


# --- random numbers -------------------------------------------------------------------------------------------------


def splitmix(number: int) -> int:
    wrap = 2**64 - 1
    number = (number + 0x9E3779B97F4A7C15) & wrap
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & wrap
    return number ^ (number >> 31)


@given(st.integers(), st.integers(), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_random_number_is_a_function_of_what_it_is_for(seed: int, key: int, sample: int, position: int) -> None:
    stream = splitmix(splitmix(splitmix(seed % 2**64) ^ key % 2**64) ^ sample)
    expected = (splitmix(stream ^ position) >> 11) / 2**53
    found = uniforms(random_streams(seed, [key], [sample]), torch.tensor([position]))
    assert found.item() == expected
    assert 0 <= expected < 1


def test_neighbours_have_nothing_to_do_with_each_other() -> None:
    count = 4000
    numbers = list(range(count))
    zeros = [0] * count
    series = {
        "positions": uniforms(random_streams(0, zeros, zeros), torch.arange(count)),
        "samples": uniforms(random_streams(0, zeros, numbers), torch.zeros(count, dtype=torch.int64)),
        "keys": uniforms(random_streams(0, numbers, zeros), torch.zeros(count, dtype=torch.int64)),
        "seeds": torch.cat([uniforms(random_streams(n, [0], [0]), torch.zeros(1, dtype=torch.int64)) for n in numbers]),
    }
    bound = 4 / math.sqrt(count)  # four standard deviations of a correlation
    names = list(series)
    for name, numbers_of in series.items():
        assert abs(numbers_of.mean() - 0.5) < bound
        assert abs(torch.corrcoef(torch.stack([numbers_of[1:], numbers_of[:-1]]))[0, 1]) < bound
        for other in names[: names.index(name)]:
            assert abs(torch.corrcoef(torch.stack([numbers_of, series[other]]))[0, 1]) < bound


# --- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tokens_come_as_often_as_they_are_likely_in_the_order_of_their_ids(size: int, dtype: torch.dtype) -> None:
    logits = [random.Random(size).gauss(0, 2) for _ in range(size)]
    tokens = draw(logits, Truncation(0.7), dtype)
    assert tokens == sorted(tokens)
    for token, probability in enumerate(softmax([logit / 0.7 for logit in logits])):
        assert tokens.count(token) == pytest.approx(NUM_DRAWS * probability, abs=1.01)


@given(
    st.integers(0, 2**32),
    st.integers(1, 200),
    st.sampled_from([0, 1, 2, 5, 50, 500]),
    st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_truncations_keep_what_they_say(seed: int, size: int, top_k: int, top_p: float, min_p: float) -> None:
    places = list(range(size))
    random.Random(seed).shuffle(places)
    logits = [place * 8 / size for place in places]  # evenly spread: nothing hangs on rounding
    probabilities = softmax(logits)
    kept = kept_of(probabilities, top_k, top_p, min_p)
    rows = torch.tensor(logits, dtype=torch.float64).expand(200, -1)
    tokens, logprobs = sample_tokens(rows, Truncation(1.0, top_k, top_p, min_p), grid(200))
    assert set(tokens.tolist()) <= kept
    likely = {token for token in kept if probabilities[token] > 0.011 * sum(probabilities[t] for t in kept)}
    assert likely <= set(tokens.tolist())
    expected = [math.log(probabilities[token]) for token in tokens.tolist()]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-12)  # of the whole distribution


def test_equals_are_kept_together() -> None:
    assert set(draw([1.0, 3.0, 1.0, 1.0], Truncation(1.0, top_k=2))) == {0, 1, 2, 3}
    assert set(draw([0.0, 2.0, 2.0, -1.0], Truncation(1.0, top_p=0.3))) == {1, 2}


def test_the_likeliest_is_taken_at_temperature_zero_and_measured_at_one() -> None:
    tokens, logprobs = sample_tokens(torch.tensor([[0.0, 2.0, 1.0]]), Truncation(0.0, top_k=1), torch.tensor([0.99]))
    assert tokens.tolist() == [1]
    assert logprobs.tolist() == pytest.approx([math.log(softmax([0.0, 2.0, 1.0])[1])])


def test_the_ends_of_the_unit_interval_never_give_an_impossible_token() -> None:
    """Also where nearly all of the vocabulary has no probability, and where rounding eats the last bit."""
    logits = torch.full((3, 1000), -torch.inf)
    logits[:, [130, 131, 700]] = torch.tensor([0.0, -40.0, -41.0])
    uniform = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, Truncation(1.0), uniform)
    assert set(tokens.tolist()) <= {130, 131, 700}
    assert logprobs.isfinite().all()


def test_rows_do_not_know_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(33, 49152, generator=generator) * 3
    uniform = torch.rand(33, generator=generator, dtype=torch.float64)
    for truncation in (Truncation(1.0), Truncation(0.7, top_k=50, top_p=0.9, min_p=0.01)):
        together = sample_tokens(logits, truncation, uniform)
        for part in (slice(5, 6), slice(3, 20)):
            alone = sample_tokens(logits[part], truncation, uniform[part])
            assert torch.equal(alone[0], together[0][part])
            assert torch.equal(alone[1], together[1][part])
