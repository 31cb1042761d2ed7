"""The rows that are verified on: the first batches of a run, shortened, with new token ids; made-up answers for grpo.

Every rank reads them as training does.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.config import ConfigError, GrpoConfig, RunConfig
from lockstep.data import Batches, CompileProgress, compile_data
from lockstep.data.prompts import PromptRow, Prompts
from lockstep.model.load import load_processor, load_run_tokenizer
from lockstep.rollouts.episode import Group, Rollout
from lockstep.rollouts.rewards import Outcome
from lockstep.rollouts.source import read_prompt_data
from lockstep.train.preference_data import rows_to_learn
from lockstep.types import Completion, Datum, Logprobs

NUM_BATCHES = 2
MAX_ROWS = 16  # of each batch
MAX_TOKENS = 64  # of each prompt with one answer: half of them prompt
REFERENCE = "reference_logprobs"


@dataclass(frozen=True)
class SampleBatch:
    """One batch: the origins of all its rows, the cursor after it, and the shortened rows to compute."""

    names: tuple[str, ...]
    cursor: int
    data: list[Datum]


def compile_rows(config: RunConfig, on_progress: Callable[[CompileProgress], None] | None = None) -> Sequence[Datum]:
    """The training rows as a loop reads them, from the cache if they are in it; prompts get made-up answers."""
    tokenizer = load_run_tokenizer(config)
    if isinstance(config.algorithm, GrpoConfig):
        return SyntheticGroups(read_prompt_data(config, tokenizer).train, config)
    compiled = compile_data(
        config.data,
        tokenizer,
        seed=config.seed,
        timeout_s=config.launch.timeout_s,
        on_progress=on_progress,
        images=load_processor(config.model, tokenizer),
    )
    if compiled.has_images:
        raise ConfigError("lockstep verify does not compute rows with images: verify with rows that have none")
    return rows_to_learn(config, compiled).train


def take_batches(rows: Sequence[Datum], config: RunConfig) -> list[SampleBatch]:
    """From the start of the run, with training's own cursor."""
    batches = Batches(rows, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    batches_read, cursor = [], 0
    for _ in range(NUM_BATCHES):
        batch, cursor = batches.batch_at(cursor)
        batches_read.append(make_sample_batch(batch, cursor))
    return batches_read


def make_sample_batch(batch: Sequence[Datum], cursor: int) -> SampleBatch:
    return SampleBatch(tuple(datum.origin for datum in batch), cursor, [shorten(datum) for datum in batch[:MAX_ROWS]])


def shorten(datum: Datum, max_tokens: int = MAX_TOKENS) -> Datum:
    """The end of the prompt, and of each completion a piece that starts just before its first target token.

    Or just before the completions differ, where the pieces would be equal otherwise.
    """
    half = max_tokens // 2
    first_targets = [next((i for i, weight in enumerate(c.weights) if weight), 0) for c in datum.completions]
    pieces = [_piece(c, first - 2, half) for c, first in zip(datum.completions, first_targets, strict=True)]
    if len({tuple(piece.tokens) for piece in pieces}) < len(pieces):
        prefix = _num_shared_tokens(datum.completions)
        pieces = [_piece(c, prefix - 2, half) for c in datum.completions]
    return Datum([int(t) for t in datum.prompt[-half:]], pieces, datum.origin)


def _piece(completion: Completion, start: int, size: int) -> Completion:
    piece = slice(max(start, 0), max(start, 0) + size)
    values = {name: [float(value) for value in column[piece]] for name, column in completion.values.items()}
    tokens, weights = completion.tokens[piece], completion.weights[piece]
    return Completion([int(t) for t in tokens], [float(weight) for weight in weights], values)


def _num_shared_tokens(completions: Sequence[Completion]) -> int:
    """Length of their common prefix."""
    columns = list(zip(*(c.tokens for c in completions)))
    return next((place for place, tokens in enumerate(columns) if len(set(tokens)) > 1), len(columns))


def distinct_tokens(batches: Sequence[Sequence[Datum]]) -> list[int]:
    """Every token id of the batches, once, ascending: its index is its new id."""
    tokens: set[int] = set()
    for batch in batches:
        for datum in batch:
            tokens.update(int(t) for t in datum.prompt)
            for completion in datum.completions:
                tokens.update(int(t) for t in completion.tokens)
    return sorted(tokens)


def renumber(batch: Sequence[Datum], tokens: Sequence[int]) -> list[Datum]:
    """Tokens by their index in `tokens`: a small vocabulary in which different tokens stay different.

    A token that is not listed comes from a row that should not be here; it gets an id, too, so that the comparison
    can name that row.
    """
    places = {token: place for place, token in enumerate(tokens)}

    def new_ids(old: Sequence[int]) -> list[int]:
        return [places.get(int(t), int(t) % len(places)) for t in old]

    return [
        Datum(new_ids(datum.prompt), [replace(c, tokens=new_ids(c.tokens)) for c in datum.completions], datum.origin)
        for datum in batch
    ]


def total_weight(batch: Sequence[Datum]) -> float:
    weight = sum(datum.total_weight for datum in batch)
    if weight == 0:
        raise ConfigError(f"nothing to learn in the first {len(batch)} rows of a batch: their weights add up to zero")
    return weight


def add_reference(batch: Sequence[Datum], logprobs: Sequence[Logprobs]) -> list[Datum]:
    """Rows with the log-probs of their reference among their side values."""
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
    """Tokens of a micro-batch, for each batch: several micro-batches for each rank, with room for two rows in each.

    In the last batch the longer pairs do not fit, and are split.
    """
    budget = 0
    for batch in batches:
        lengths = sorted(_num_tokens_with_one_prompt(datum) for datum in batch)
        budget = max(budget, sum(lengths) // 8, sum(lengths[-2:]))
    if all(len(datum.completions) == 1 for batch in batches for datum in batch):
        return [budget] * len(batches)
    return [*([budget] * (len(batches) - 1)), _cutting_budget(batches[-1])]


def _cutting_budget(batch: Sequence[Datum]) -> int:
    """About half of the pairs fit; at least one does not, and each answer fits alone."""
    lengths = [_num_tokens_with_one_prompt(datum) for datum in batch]
    longest_alone = max(len(datum.prompt) + len(c.tokens) for datum in batch for c in datum.completions)
    return max(statistics.median_high(lengths) - 1, longest_alone)


def _num_tokens_with_one_prompt(datum: Datum) -> int:
    return len(datum.prompt) + sum(len(c.tokens) for c in datum.completions)


MAX_ANSWERS = 4  # to a prompt
_MAX_ANSWER_TOKENS = 20  # of an answer
# Every fifth answer is truncated at max_tokens, and the reward of every seventh failed.
_TRUNCATED_EVERY, _FAILED_EVERY = 5, 7


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
        draw = random.Random(f"{self._seed} {place}")  # the same wherever the file lies
        return Datum(prompt.tokens, [self._answer(draw, prompt, number) for number in range(count)], prompt.origin)

    def _answer(self, draw: random.Random, prompt: PromptRow, number: int) -> Completion:
        length = draw.randint(1, min(self._algorithm.max_tokens, _MAX_ANSWER_TOKENS))
        tokens = draw.choices(prompt.tokens, k=length)
        # With an environment, some of the tokens are not sampled.
        sampled = [
            not self._algorithm.environment or place in (0, length - 1) or draw.random() < 0.7
            for place in range(length)
        ]
        # With the number, so that the answers of a group differ in this.
        mark = draw.randrange(_TRUNCATED_EVERY * _FAILED_EVERY) + number
        return Completion(
            tokens,
            [float(is_sampled) for is_sampled in sampled],
            {
                "behaviour_logprobs": [-draw.uniform(1.0, 4.0) if is_sampled else 0.0 for is_sampled in sampled],
                "reward": [draw.choice((0.0, 0.25, 1.0)) + 0.1 * number] * length,
                "truncated": [float(mark % _TRUNCATED_EVERY == 0)] * length,
                "reward_failed": [float(mark % _FAILED_EVERY == 0)] * length,
            },
        )


def as_groups(rows: Sequence[Datum]) -> list[Group]:
    """As rollouts would hand them to a loop."""
    return [
        Group(PromptRow(datum.origin, tuple(datum.prompt), {}), key, tuple(map(_as_rollout, datum.completions)))
        for key, datum in enumerate(rows)
    ]


def _as_rollout(completion: Completion) -> Rollout:
    values = completion.values
    reward_failed = bool(values["reward_failed"][0])
    return Rollout(
        tokens=tuple(completion.tokens),
        sampled=tuple(bool(weight) for weight in completion.weights),
        logprobs=tuple(values["behaviour_logprobs"]),
        versions=(0,) * len(completion.tokens),
        turns=("",),
        truncated=bool(values["truncated"][0]),
        outcome=Outcome.failed("made up") if reward_failed else Outcome(values["reward"][0]),
        routing=completion.routing,
    )


def add_routing(rows: Sequence[Datum], num_routers: int, num_experts: int, top_k: int) -> list[Datum]:
    """With made-up choices of experts for every token but the last, the same for a prompt in all its answers."""

    def choose(tokens: Sequence[int]) -> bytes:
        places = np.arange(len(tokens) - 1)
        first = 7 * np.asarray(tokens)[:-1, None] + 3 * places[:, None] + 5 * np.arange(num_routers)  # [T, routers]
        chosen = (first[:, :, None] + np.arange(top_k)) % num_experts
        return chosen.astype(np.uint8 if num_experts < 255 else np.int16).tobytes()

    return [
        replace(d, completions=[replace(c, routing=choose([*d.prompt, *c.tokens])) for c in d.completions])
        for d in rows
    ]
