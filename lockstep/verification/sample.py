"""The rows that are verified on: the first batches of a run, cut short, their tokens numbered anew.

Every rank takes them as training does. Must not know models, layouts or ranks.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config import ConfigError, GrpoConfig, RunConfig
from lockstep.data import Batches, compile_data
from lockstep.data.prompts import PromptRow, Prompts
from lockstep.model.load import load_run_tokenizer
from lockstep.rollouts.episode import Answer, Group
from lockstep.rollouts.parts import read_prompt_data
from lockstep.rollouts.rewards.reward import Outcome
from lockstep.train.preference_data import rows_to_learn
from lockstep.types import Completion, Datum, Logprobs

NUM_BATCHES = 2
MAX_ROWS = 16  # of each batch
MAX_TOKENS = 64  # of each prompt with one answer: half of them prompt
REFERENCE = "reference_logprobs"


@dataclass(frozen=True)
class SampleBatch:
    """One batch as training takes it: all its rows by name, the cursor after it, and the rows to compute."""

    names: tuple[str, ...]
    cursor: int
    data: list[Datum]


def compile_rows(config: RunConfig, on_progress: Callable[[Any], None] | None = None) -> Any:
    """The training rows as a loop is given them, from the cache if they were compiled before.

    Prompts get answers that are made up.
    """
    tokenizer = load_run_tokenizer(config)
    if isinstance(config.algorithm, GrpoConfig):
        return SyntheticGroups(read_prompt_data(config, tokenizer).train, config)
    compiled = compile_data(
        config.data,
        tokenizer,
        seed=config.seed,
        timeout_s=config.launch.timeout_s,
        on_progress=on_progress,
    )
    return rows_to_learn(config, compiled).train


def take_batches(rows: Sequence[Datum], config: RunConfig) -> list[SampleBatch]:
    """From the run's own cursor."""
    batches = Batches(rows, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    taken, cursor = [], 0
    for _ in range(NUM_BATCHES):
        batch, cursor = batches.batch_at(cursor)
        taken.append(make_sample_batch(batch, cursor))
    return taken


def make_sample_batch(batch: Sequence[Datum], cursor: int) -> SampleBatch:
    return SampleBatch(tuple(datum.origin for datum in batch), cursor, [shorten(datum) for datum in batch[:MAX_ROWS]])


def shorten(datum: Datum, max_tokens: int = MAX_TOKENS) -> Datum:
    """The end of the prompt, and of each completion a piece that begins just before what is learned of it.

    Or just before the answers of a pair part, where the pieces would otherwise be the same.
    """
    half = max_tokens // 2
    learned = [next((i for i, weight in enumerate(c.weights) if weight), 0) for c in datum.completions]
    pieces = [_piece(c, first - 2, half) for c, first in zip(datum.completions, learned, strict=True)]
    if len({tuple(piece.tokens) for piece in pieces}) < len(pieces):
        parting = _num_alike(datum.completions)
        pieces = [_piece(c, parting - 2, half) for c in datum.completions]
    return Datum([int(t) for t in datum.prompt[-half:]], pieces, datum.origin)


def _piece(completion: Completion, start: int, size: int) -> Completion:
    piece = slice(max(start, 0), max(start, 0) + size)
    values = {name: [float(value) for value in column[piece]] for name, column in completion.values.items()}
    tokens, weights = completion.tokens[piece], completion.weights[piece]
    return Completion([int(t) for t in tokens], [float(weight) for weight in weights], values)


def _num_alike(completions: Sequence[Completion]) -> int:
    """Tokens with which all of them begin."""
    columns = list(zip(*(c.tokens for c in completions)))
    return next((place for place, tokens in enumerate(columns) if len(set(tokens)) > 1), len(columns))


def distinct_tokens(batches: Sequence[Sequence[Datum]]) -> list[int]:
    """Every token of the batches, once, ascending: its place is its new number."""
    found: set[int] = set()
    for batch in batches:
        for datum in batch:
            found.update(int(t) for t in datum.prompt)
            for completion in datum.completions:
                found.update(int(t) for t in completion.tokens)
    return sorted(found)


def renumber(batch: Sequence[Datum], tokens: Sequence[int]) -> list[Datum]:
    """Tokens by their places in `tokens`: a small vocabulary in which different tokens stay different.

    A token that is not listed comes from a row that should not be here; it gets a number too, so that the comparison
    can say which row that is.
    """
    places = {token: place for place, token in enumerate(tokens)}

    def number(given: Sequence[int]) -> list[int]:
        return [places.get(int(t), int(t) % len(places)) for t in given]

    return [
        Datum(number(datum.prompt), [replace(c, tokens=number(c.tokens)) for c in datum.completions], datum.origin)
        for datum in batch
    ]


def total_weight(batch: Sequence[Datum]) -> float:
    weight = sum(datum.total_weight for datum in batch)
    if weight == 0:
        raise ConfigError(f"nothing to learn in the first {len(batch)} rows of a batch: their weights add up to zero")
    return weight


def add_reference(batch: Sequence[Datum], logprobs: Sequence[Logprobs]) -> list[Datum]:
    """Rows that bring the log-probs of their reference with them."""
    return [
        replace(
            datum,
            completions=[
                replace(c, values={**c.values, REFERENCE: list(own)})
                for c, own in zip(datum.completions, row, strict=True)
            ],
        )
        for datum, row in zip(batch, logprobs, strict=True)
    ]


def choose_budgets(batches: Sequence[Sequence[Datum]]) -> list[int]:
    """Tokens of a micro-batch, for each batch: several for each rank, and room for two rows in each.

    In the last batch the longer pairs do not fit, and are cut in two.
    """
    budget = 0
    for batch in batches:
        lengths = sorted(_num_tokens_with_one_prompt(datum) for datum in batch)
        budget = max(budget, sum(lengths) // 8, sum(lengths[-2:]))
    if all(len(datum.completions) == 1 for batch in batches for datum in batch):
        return [budget] * len(batches)
    return [*([budget] * (len(batches) - 1)), _cutting_budget(batches[-1])]


def _cutting_budget(batch: Sequence[Datum]) -> int:
    """About half of the pairs are whole; at least one is not, and each answer fits by itself."""
    lengths = [_num_tokens_with_one_prompt(datum) for datum in batch]
    longest_alone = max(len(datum.prompt) + len(c.tokens) for datum in batch for c in datum.completions)
    return max(statistics.median_high(lengths) - 1, longest_alone)


def _num_tokens_with_one_prompt(datum: Datum) -> int:
    return len(datum.prompt) + sum(len(c.tokens) for c in datum.completions)


MAX_ANSWERS = 4  # to a prompt
_MAX_ANSWER_TOKENS = 20  # of an answer
# Every so many answers are cut at max_tokens, and every so many could not be scored.
_CUT, _TAINTED = 5, 7


class SyntheticGroups(Sequence[Any]):
    """Each prompt as a datum whose completions have, besides their tokens, a sampler's log-probs and a reward."""

    def __init__(self, prompts: Prompts, config: RunConfig) -> None:
        assert isinstance(config.algorithm, GrpoConfig)
        self._prompts, self._algorithm, self._seed = prompts, config.algorithm, config.seed
        self.lengths = prompts.lengths

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, place: Any) -> Any:
        prompt = self._prompts[int(place)]
        assert isinstance(prompt, PromptRow)
        count = min(self._algorithm.group_size, MAX_ANSWERS)
        draw = random.Random(f"{self._seed} {prompt.origin}")
        return Datum(prompt.tokens, [self._answer(draw, prompt, number) for number in range(count)], prompt.origin)

    def _answer(self, draw: random.Random, prompt: PromptRow, number: int) -> Completion:
        length = draw.randint(1, min(self._algorithm.max_tokens, _MAX_ANSWER_TOKENS))
        tokens = draw.choices(prompt.tokens, k=length)
        # With an environment, some of the words are not the model's own.
        own = [
            not self._algorithm.environment or place in (0, length - 1) or draw.random() < 0.7
            for place in range(length)
        ]
        mark = draw.randrange(_CUT * _TAINTED) + number  # so that not all answers of a group are alike in this
        return Completion(
            tokens,
            [float(is_own) for is_own in own],
            {
                "behaviour_logprobs": [-draw.uniform(1.0, 4.0) if is_own else 0.0 for is_own in own],
                "reward": [draw.choice((0.0, 0.25, 1.0)) + 0.1 * number] * length,
                "cut": [float(mark % _CUT == 0)] * length,
                "tainted": [float(mark % _TAINTED == 0)] * length,
            },
        )


def as_groups(rows: Sequence[Datum]) -> list[Group]:
    """What a loop would have been given."""
    return [
        Group(PromptRow(datum.origin, tuple(datum.prompt), {}), key, tuple(map(_as_answer, datum.completions)))
        for key, datum in enumerate(rows)
    ]


def _as_answer(completion: Completion) -> Answer:
    values = completion.values
    is_tainted = bool(values["tainted"][0])
    return Answer(
        tokens=tuple(completion.tokens),
        own=tuple(bool(weight) for weight in completion.weights),
        logprobs=tuple(values["behaviour_logprobs"]),
        versions=(0,) * len(completion.tokens),
        turns=("",),
        is_cut=bool(values["cut"][0]),
        outcome=Outcome.tainted("made so") if is_tainted else Outcome(values["reward"][0]),
    )
