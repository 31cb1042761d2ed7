"""Groups of scored rollouts as data for the loss: which rollouts, the weight of each token, and its side values."""

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
from lockstep.rollouts.episode import Group, Rollout
from lockstep.types import Completion, Datum, Logprobs

Places = list[tuple[int, list[int]]]
"""For each datum the index of its group, and the indices of its completions' rollouts there."""


@dataclass(frozen=True)
class LogprobDiff:
    """|log-prob of the sampler - of the trainer| of the same `count` tokens. `origin`: the row of the largest."""

    count: int
    mean: float
    max: float
    origin: str


def as_data(groups: Sequence[Group], algorithm: GrpoConfig, version: int | None = None) -> tuple[list[Datum], Places]:
    """One datum for each group, without rollouts that cannot be trained on; groups without any others are left out.

    `version`: of the present weights, where rollouts may be older: their tokens are then marked as "fresh" or not.
    """
    batch, places = [], []
    for number, group in enumerate(groups):
        trained = [i for i, rollout in enumerate(group.rollouts) if _is_trained(rollout, algorithm)]
        if trained:
            completions = [_as_completion(group.rollouts[i], algorithm, version) for i in trained]
            batch.append(Datum(group.prompt.tokens, completions, group.prompt.origin))
            places.append((number, trained))
    return batch, places


def _is_trained(rollout: Rollout, algorithm: GrpoConfig) -> bool:
    if rollout.outcome.reward_failed or not rollout.num_sampled:
        return False
    return not (rollout.truncated and algorithm.overlong == "mask")


def _as_completion(rollout: Rollout, algorithm: GrpoConfig, version: int | None) -> Completion:
    weight = token_weight(algorithm.aggregation, rollout.num_sampled)
    # An environment's tokens after the last sampled one are context of nothing.
    stop = len(rollout.sampled) - rollout.sampled[::-1].index(True)
    weights = [weight if sampled else 0.0 for sampled in rollout.sampled[:stop]]
    values: dict[str, Sequence[float]] = {"behaviour_logprobs": rollout.logprobs[:stop]}
    if version is not None:
        # After an older token, the engine's cache still has what the older weights made of it.
        is_fresh = min(rollout.sampled_versions) >= version
        values["fresh"] = [float(is_fresh)] * stop
    routing = rollout.routing if algorithm.router_replay else b""
    return Completion(rollout.tokens[:stop], weights, values, routing)


def count_fresh(batch: Sequence[Datum]) -> int:
    """Tokens to learn that the present weights have sampled."""
    return sum(len(_targets(completion, fresh=True)) for datum in batch for completion in datum.completions)


def _targets(completion: Completion, *, fresh: bool) -> np.ndarray:
    """Places of the tokens to learn, of one kind. Where none is marked, all are fresh."""
    marks = np.asarray(completion.values.get("fresh", np.ones(len(completion.tokens))))
    return np.flatnonzero((np.asarray(completion.weights) != 0) & (marks.astype(bool) == fresh))


def measure_logprob_diff(
    batch: Sequence[Datum], trainer: Sequence[Logprobs], *, fresh: bool = True
) -> LogprobDiff | None:
    """Of fresh tokens, or of stale ones. None: there are none."""
    total, count, largest, origin = 0.0, 0, 0.0, ""
    for datum, rows in zip(batch, trainer, strict=True):
        for completion, row in zip(datum.completions, rows, strict=True):
            targets = _targets(completion, fresh=fresh)
            if not len(targets):
                continue
            sampler = np.asarray(completion.values["behaviour_logprobs"], dtype=np.float64)[targets]
            diffs = np.abs(np.asarray(row, dtype=np.float64)[targets] - sampler)
            total, count = total + float(diffs.sum()), count + len(diffs)
            worst = float(diffs.max()) if np.isfinite(diffs).all() else math.inf
            if worst > largest or not origin:
                largest, origin = worst, datum.origin
    return LogprobDiff(count, total / count, largest, origin) if count else None


def kl_of_rollouts(
    batch: Sequence[Datum], places: Places, policy: Sequence[Logprobs], reference: Sequence[Logprobs], kind: str
) -> dict[tuple[int, int], float]:
    """The KL divergence of each rollout from the reference, summed over its tokens: by (group, rollout)."""
    kl = {}
    for datum, (group, rollouts), *rows in zip(batch, places, policy, reference, strict=True):
        for completion, rollout, *pair in zip(datum.completions, rollouts, *rows, strict=True):
            targets = torch.from_numpy(np.flatnonzero(completion.weights))
            policy_row, reference_row = (torch.tensor(row, dtype=torch.float64)[targets] for row in pair)
            kl[group, rollout] = float(estimate_kl(policy_row, reference_row, kind).sum())
    return kl


def with_values(
    batch: Sequence[Datum],
    places: Places,
    advantages: Sequence[Sequence[float]],
    old: Sequence[Logprobs] | None,
    reference: Sequence[Logprobs] | None,
) -> list[Datum]:
    """The data with all side values that the loss reads, without rollouts that have no advantage."""
    data = []
    for i, (datum, (group, rollouts)) in enumerate(zip(batch, places, strict=True)):
        completions = []
        for j, rollout in enumerate(rollouts):
            advantage = advantages[group][rollout]
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
            data.append(replace(datum, completions=completions))
    return data


def split_minibatches(batch: Sequence[Datum], count: int) -> list[Sequence[Datum]]:
    """In order, with equally many prompts; fewer where there are fewer prompts."""
    edges = [round(i * len(batch) / count) for i in range(count + 1)]
    return [batch[start:stop] for start, stop in pairwise(edges) if stop > start]


def loss_scale(batch: Sequence[Datum], algorithm: GrpoConfig) -> float:
    completions = [completion for datum in batch for completion in datum.completions]
    num_tokens = sum(int(np.count_nonzero(completion.weights)) for completion in completions)
    max_tokens = algorithm.max_tokens * (algorithm.max_turns if algorithm.environment else 1)
    return scale_of(algorithm.aggregation, num_tokens=num_tokens, num_answers=len(completions), max_tokens=max_tokens)
