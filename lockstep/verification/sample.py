"""The rows that are verified on: the first batches of a run, cut short, their tokens numbered anew.

Every rank takes them as training does. Must not know models, layouts or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config import ConfigError, RunConfig
from lockstep.data import Batches, Rows, compile_data
from lockstep.model.load import load_run_tokenizer
from lockstep.types import Completion, Datum

NUM_BATCHES = 2
MAX_ROWS = 16  # of each batch
MAX_TOKENS = 64  # of each document: half of them prompt


@dataclass(frozen=True)
class Taken:
    """One batch as training takes it: all its rows by name, the cursor after it, and the rows to compute."""

    names: tuple[str, ...]
    cursor: int
    data: list[Datum]


def compile_rows(config: RunConfig, on_progress: Callable[[Any], None] | None = None) -> Rows:
    """The training rows, from the cache if they were compiled before."""
    compiled = compile_data(
        config.data,
        load_run_tokenizer(config),
        seed=config.seed,
        timeout_s=config.launch.timeout_s,
        on_progress=on_progress,
    )
    if compiled.kind != "answers":
        raise ConfigError("data.train holds preferences, and verify computes the loss of answers: name other data")
    return compiled.train


def take_batches(rows: Sequence[Datum], config: RunConfig) -> list[Taken]:
    """From the run's own cursor."""
    batches = Batches(rows, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    taken, cursor = [], 0
    for _ in range(NUM_BATCHES):
        batch, cursor = batches.batch_at(cursor)
        taken.append(make_taken(batch, cursor))
    return taken


def make_taken(batch: Sequence[Datum], cursor: int) -> Taken:
    return Taken(tuple(datum.origin for datum in batch), cursor, [shorten(datum) for datum in batch[:MAX_ROWS]])


def shorten(datum: Datum, max_tokens: int = MAX_TOKENS) -> Datum:
    """The end of the prompt, and of each completion a piece that begins just before what is learned of it."""
    half = max_tokens // 2
    completions = []
    for completion in datum.completions:
        learned = next((i for i, weight in enumerate(completion.weights) if weight), 0)
        piece = slice(max(learned - 2, 0), max(learned - 2, 0) + half)
        completions.append(Completion(list(completion.tokens[piece]), [float(w) for w in completion.weights[piece]]))
    return Datum([int(t) for t in datum.prompt[-half:]], completions, datum.origin)


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


def choose_budget(batches: Sequence[Sequence[Datum]]) -> int:
    """Tokens of a micro-batch: several of them for each rank, and room for two documents in each."""
    budget = 0
    for batch in batches:
        lengths = sorted(len(d.prompt) + len(c.tokens) for d in batch for c in d.completions)
        budget = max(budget, sum(lengths) // 8, sum(lengths[-2:]))
    return budget
