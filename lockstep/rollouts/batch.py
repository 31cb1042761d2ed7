"""Scored answers as a batch to learn from: which of them, what each token counts, and against what it is measured.

Pure functions. Must not know backends, samplers or rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from lockstep.algorithms.advantages import scale_of, token_weight
from lockstep.algorithms.policy_gradient import estimate_kl
from lockstep.config import GrpoConfig
from lockstep.rollouts.episode import Answer, Group
from lockstep.types import Completion, Datum, Logprobs

Places = list[tuple[int, list[int]]]
"""For each datum the number of its group, and the numbers of its answers there."""


@dataclass(frozen=True)
class Gap:
    """Between the log-probs of sampler and trainer for the same tokens: how far apart, on average and at most."""

    mean: float
    largest: float
    where: str


def as_data(groups: Sequence[Group], algorithm: GrpoConfig) -> tuple[list[Datum], Places]:
    """One datum for each group, without answers of which nothing can be learned; groups without any are left out."""
    batch, places = [], []
    for number, group in enumerate(groups):
        learned = [i for i, answer in enumerate(group.answers) if _is_learned(answer, algorithm)]
        if learned:
            completions = [_complete(group.answers[i], algorithm.aggregation) for i in learned]
            batch.append(Datum(group.prompt.tokens, completions, group.prompt.origin))
            places.append((number, learned))
    return batch, places


def _is_learned(answer: Answer, algorithm: GrpoConfig) -> bool:
    if answer.outcome.problem is not None or not answer.num_own:
        return False
    return not (answer.is_cut and algorithm.overlong == "mask")


def _complete(answer: Answer, aggregation: str) -> Completion:
    weight = token_weight(aggregation, answer.num_own)
    # What an environment said after the last own token is context of nothing.
    stop = len(answer.own) - answer.own[::-1].index(True)
    weights = [weight if own else 0.0 for own in answer.own[:stop]]
    return Completion(answer.tokens[:stop], weights, {"behaviour_logprobs": answer.logprobs[:stop]})


def measure_gap(batch: Sequence[Datum], trainer: Sequence[Logprobs]) -> Gap:
    mean_sum, count, largest, where = 0.0, 0, 0.0, ""
    for datum, rows in zip(batch, trainer, strict=True):
        for completion, row in zip(datum.completions, rows, strict=True):
            asked = np.flatnonzero(completion.weights)
            own = np.asarray(completion.values["behaviour_logprobs"], dtype=np.float64)[asked]
            gaps = np.abs(np.asarray(row, dtype=np.float64)[asked] - own)
            mean_sum, count = mean_sum + float(gaps.sum()), count + len(gaps)
            # A gap that is no number is as large as can be.
            worst = float(gaps.max()) if np.isfinite(gaps).all() else math.inf
            if worst > largest or not where:
                largest, where = worst, datum.origin
    return Gap(mean_sum / count, largest, where)


def kl_of_answers(
    batch: Sequence[Datum], places: Places, policy: Sequence[Logprobs], reference: Sequence[Logprobs], kind: str
) -> dict[tuple[int, int], float]:
    """How far each answer is from the reference, summed over its tokens: by (group, answer)."""
    found = {}
    for datum, (group, answers), ours, theirs in zip(batch, places, policy, reference, strict=True):
        for completion, answer, mine, known in zip(datum.completions, answers, ours, theirs, strict=True):
            asked = torch.from_numpy(np.flatnonzero(completion.weights))
            policy_row, reference_row = (torch.tensor(row, dtype=torch.float64)[asked] for row in (mine, known))
            found[group, answer] = float(estimate_kl(policy_row, reference_row, kind).sum())
    return found


def with_values(
    batch: Sequence[Datum],
    places: Places,
    advantages: Sequence[Sequence[float]],
    old: Sequence[Logprobs] | None,
    reference: Sequence[Logprobs] | None,
) -> list[Datum]:
    """The data with all that the loss reads. Answers without an advantage have nothing to be compared with, and go."""
    found = []
    for i, (datum, (group, answers)) in enumerate(zip(batch, places, strict=True)):
        completions = []
        for j, answer in enumerate(answers):
            advantage = advantages[group][answer]
            if math.isnan(advantage):
                continue
            completion = datum.completions[j]
            values = {**completion.values, "advantages": [advantage] * len(completion.tokens)}
            if old is not None:
                values["old_logprobs"] = old[i][j]
            if reference is not None:
                values["reference_logprobs"] = reference[i][j]
            completions.append(replace(completion, values=values))
        if completions:
            found.append(replace(datum, completions=completions))
    return found


def cut_minibatches(batch: Sequence[Datum], count: int) -> list[Sequence[Datum]]:
    """Level in prompts, in order; fewer where there are fewer prompts."""
    edges = [round(i * len(batch) / count) for i in range(count + 1)]
    return [batch[start:stop] for start, stop in pairwise(edges) if stop > start]


def loss_scale(batch: Sequence[Datum], algorithm: GrpoConfig) -> float:
    completions = [completion for datum in batch for completion in datum.completions]
    num_tokens = sum(int(np.count_nonzero(completion.weights)) for completion in completions)
    most = algorithm.max_tokens * (algorithm.max_turns if algorithm.environment else 1)
    return scale_of(algorithm.aggregation, num_tokens=num_tokens, num_answers=len(completions), max_tokens=most)
