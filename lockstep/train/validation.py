"""Validation during training: the loss of held-out rows, and scores of answers generated to them. All ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.config import DpoConfig, KtoConfig, RunConfig
from lockstep.config.reference import estimates_kl
from lockstep.train.preference_data import (
    count_chosen_tokens,
    discount_length,
    label_options,
    mean_scores,
    mismatch,
    pair_options,
)
from lockstep.train.reference import REFERENCE
from lockstep.types import Datum, Logprobs, LossSpec, Metrics, Prompt, SamplingParams, TextCompletion, TrainingBackend

# Rows handed to the backend at once: enough to balance ranks, few enough for memory.
_ROWS_AT_ONCE = 256


def mean_loss(backend: TrainingBackend, data: Sequence[Datum]) -> float:
    """Per supervised token, weighted. All ranks."""
    total = weight = 0.0
    for batch in _chunks(data, _ROWS_AT_ONCE):
        for datum, logprobs in zip(batch, backend.forward(batch), strict=True):
            for completion, row in zip(datum.completions, logprobs, strict=True):
                total -= sum(float(w) * lp for w, lp in zip(completion.weights, row, strict=True))
            weight += datum.total_weight
    if weight == 0:
        raise ValueError(f"nothing to measure in {len(data)} validation rows: their weights add up to zero")
    return total / weight


@dataclass(frozen=True)
class AnswerScores:
    """Prompts from validation rows, how they are answered, and how the answers are scored."""

    prompts: Sequence[Prompt]
    references: Sequence[str]
    sample: Callable[[Sequence[Prompt], SamplingParams], list[list[TextCompletion]]]
    score: Callable[[Sequence[str], Sequence[str]], Metrics]
    max_tokens: int
    keep: Callable[[int, Sequence[str]], None] = lambda step, answers: None
    """Called with the step and all answers, for people to read."""

    def measure(self, step: int) -> Metrics:
        """All ranks."""
        answers = self.sample(self.prompts, SamplingParams(max_tokens=self.max_tokens, temperature=0.0))
        num_truncated = sum(answer.finish_reason == "length" for (answer,) in answers)
        texts = [answer.text for (answer,) in answers]
        self.keep(step, texts)
        return {**self.score(texts, self.references), "answers_cut": num_truncated / len(answers)}


def last_answer(datum: Datum) -> tuple[list[int], list[int]]:
    """(everything before the last answer of a row, that answer), as tokens."""
    completion = datum.completions[0]
    learned = [weight != 0 for weight in completion.weights]
    stop = len(learned) - learned[::-1].index(True)
    start = stop
    while start > 0 and learned[start - 1]:
        start -= 1
    tokens = [int(token) for token in completion.tokens]
    return [*map(int, datum.prompt), *tokens[:start]], tokens[start:stop]


def preference_loss(config: RunConfig, backend: TrainingBackend, data: Sequence[Datum]) -> tuple[float, Metrics]:
    """(mean loss, mean scores). A loss over a whole batch sees as many rows at once as in training. All ranks."""
    from lockstep.algorithms.losses import LOSSES, lacks_reference  # here, because it needs torch, and loops do not

    algorithm = config.algorithm
    assert isinstance(algorithm, (DpoConfig, KtoConfig))
    spec = validation_loss(algorithm, data)
    whole = LOSSES[spec.kind].is_separable(spec.options) and not estimates_kl(algorithm)
    total, sums = 0.0, dict[str, float]()
    for rows in _chunks(data, _ROWS_AT_ONCE if whole else config.batch.samples_per_step or 16):
        batch = discount_length(rows, algorithm.ld_alpha) if isinstance(algorithm, DpoConfig) else rows
        options = dict(spec.options)
        if isinstance(algorithm, KtoConfig) and estimates_kl(algorithm):
            options["kl"] = estimate_kl(backend, batch, config.data.max_length)
        loss = LossSpec(spec.kind, spec.scale, options)
        reference = backend.forward(batch, reference=True) if lacks_reference(loss, batch) else None
        value, metrics = apply_loss(loss, batch, backend.forward(batch), reference)
        total += value
        sums = {name: sums.get(name, 0.0) + number for name, number in metrics.items()}
    return total, mean_scores(sums, len(data))


def validation_loss(algorithm: DpoConfig | KtoConfig, data: Sequence[Datum]) -> LossSpec:
    """As in training, over all rows, without WPO: its weights need more than the tokens' log-probs."""
    if isinstance(algorithm, KtoConfig):
        return LossSpec("kto", 1.0 / len(data), label_options(algorithm))
    options = {**pair_options(algorithm, count_chosen_tokens(data)), "wpo": False}
    return LossSpec("preference", 1.0 / len(data), options)


def estimate_kl(backend: TrainingBackend, batch: Sequence[Datum], max_length: int) -> float:
    """KL from the reference, estimated from answers behind prompts that they do not belong to. All ranks.

    At least zero; zero for a batch in which all prompts are the same.
    """
    mixed = mismatch(batch, max_length)
    if not mixed:
        return 0.0
    sums = [_weighted_sum(mixed, backend.forward(mixed, reference=is_reference)) for is_reference in (False, True)]
    return max((sums[0] - sums[1]) / len(mixed), 0.0)


def _weighted_sum(batch: Sequence[Datum], logprobs: Sequence[Logprobs]) -> float:
    rows = [(c, row) for datum, own in zip(batch, logprobs, strict=True) for c, row in zip(datum.completions, own)]
    return float(sum(np.dot(np.asarray(c.weights, dtype=float), row) for c, row in rows))


def apply_loss(
    loss: LossSpec, batch: Sequence[Datum], policy: Sequence[Logprobs], reference: Sequence[Logprobs] | None
) -> tuple[float, Metrics]:
    """The loss of these log-probs, and its metrics as sums over rows."""
    import torch  # here, because a loop of supervised fine-tuning needs none

    from lockstep.algorithms.losses import LOSSES, LossInputs

    columns: dict[str, list[np.ndarray]] = {}
    number = 0
    for i, datum in enumerate(batch):
        for j, completion in enumerate(datum.completions):
            targets = np.flatnonzero(completion.weights)
            values = {**completion.values, **({} if reference is None else {REFERENCE: reference[i][j]})}
            own = {"logprobs": policy[i][j], "weights": completion.weights, **values}
            for name, column in own.items():
                columns.setdefault(name, []).append(np.asarray(column, dtype=np.float64)[targets])
            columns.setdefault("completions", []).append(np.full(len(targets), number))
            number += 1
    tensors = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
    inputs = LossInputs(
        tensors.pop("weights"),
        loss.scale,
        options=loss.options,
        completions=tensors.pop("completions").long(),
        num_completions=number,
        values={name: column for name, column in tensors.items() if name != "logprobs"},
    )
    value, metrics = LOSSES[loss.kind].fn(tensors["logprobs"], inputs)
    return float(value), {name: float(metric) for name, metric in metrics.items()}


def _chunks(data: Sequence[Datum], size: int) -> Iterator[Sequence[Datum]]:
    for start in range(0, len(data), size):
        yield data[start : start + size]
