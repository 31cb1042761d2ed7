"""Metrics of a reinforcement-learning step, of its rollouts and of its updates; and the samples file for people."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.algorithms.advantages import has_zero_std
from lockstep.algorithms.policy_gradient import FRESH_DIFF, STALE_DIFF
from lockstep.rollouts.episode import Group, Rollout
from lockstep.rundir import RunDir, write_atomically
from lockstep.types import LossResult, Metrics, OptimResult

# Metrics that the loss returns as sums over supervised tokens.
_SUMS = (
    "ratio", "clipped_low", "clipped_high", "policy_shift", "importance_weight", "kl", "entropy",
    FRESH_DIFF, STALE_DIFF,
)  # fmt: skip


@dataclass
class Updates:
    """Accumulates over the optimizer steps of one step."""

    count: int = 0
    tokens: int = 0
    supervised: int = 0
    fresh: int = 0
    memory_gib: float = 0.0
    asked_to_stop: bool = False
    _losses: list[float] = field(default_factory=list)
    _norms: list[float] = field(default_factory=list)
    _sums: Metrics = field(default_factory=dict)
    _last: Metrics = field(default_factory=dict)

    def add(self, result: LossResult, optim: OptimResult, num_fresh: int) -> None:
        """`num_fresh`: of its tokens to learn, those that the present weights have sampled."""
        self.count += 1
        self.fresh += num_fresh
        self.tokens += result.num_tokens
        self.supervised += result.num_supervised
        self.memory_gib = max(self.memory_gib, optim.peak_memory_gib)
        self.asked_to_stop |= result.asked_to_stop
        self._losses.append(result.loss)
        self._norms += [optim.grad_norm] if optim.applied else []
        for name, value in result.metrics.items():
            if name in _SUMS:
                self._sums[name] = self._sums.get(name, 0.0) + value
            else:
                self._last[name] = value

    @property
    def loss(self) -> float:
        return statistics.fmean(self._losses)

    def metrics(self) -> Metrics:
        """Means over updates, and over supervised tokens."""
        if not self.count:
            return {"num_updates": 0}
        return {
            **self._last,
            "loss": self.loss,
            **({"grad_norm": statistics.fmean(self._norms)} if self._norms else {}),
            "num_updates": self.count,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "memory_gib": self.memory_gib,
            **self._means(),
        }

    def _means(self) -> Metrics:
        counts = {FRESH_DIFF: self.fresh, STALE_DIFF: self.supervised - self.fresh}
        return {
            name: value / count
            for name, value in self._sums.items()
            if (count := counts.get(name, self.supervised))  # without such tokens there is no mean
        }


def describe_groups(groups: Sequence[Group], left_out: Sequence[Group]) -> Metrics:
    """Of all sampled groups: rewards, lengths, and what was left out. Rollouts whose reward failed are only counted."""
    every = [*groups, *left_out]
    rollouts = [rollout for group in every for rollout in group.rollouts]
    rewards = [rollout.outcome.reward for rollout in rollouts if not rollout.outcome.reward_failed]
    logprobs = [lp for r in rollouts for lp, sampled in zip(r.logprobs, r.sampled, strict=True) if sampled]
    metrics = {
        **_mean_scores(rollouts),
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        **_shape(rollouts),
        "reward_failed": float(len(rollouts) - len(rewards)),
        "zero_std_groups": float(sum(has_zero_std(group.rewards) for group in every)),
        "left_out_groups": float(len(left_out)),
    }
    # The mean of -log p over sampled tokens estimates the entropy.
    return metrics | ({"entropy_estimate": -statistics.fmean(logprobs)} if logprobs else {})


class RewardWatch:
    """Notices rewards that do not tell answers apart: nothing is learned from them, and no number is wrong."""

    patience = 10
    """Such steps in a row, before it is said. A run in which all steps were such is told at its end."""

    def __init__(self) -> None:
        self._num_flat = self._num_steps = 0
        self._said = False

    def add(self, advantages: Sequence[Sequence[float]], sampling: Metrics, *, last: bool) -> str | None:
        """One more step, with the metrics of its rollouts. Returns what to say, once."""
        is_flat = not any(math.isfinite(a) and a != 0 for group in advantages for a in group)
        self._num_steps += 1
        self._num_flat = self._num_flat + 1 if is_flat else 0
        if self._said or not (self._num_flat == self.patience or (last and self._num_flat == self._num_steps)):
            return None
        self._said = True
        steps = f"{self._num_flat} steps" if self._num_flat > 1 else "a step"
        cut = sampling["truncated_frac"]
        return (
            f"for {steps} all answers to a prompt have earned the same (on average {sampling['reward']:g}), so their "
            "rewards teach nothing: look at them with lockstep samples, and change the reward, the prompts or "
            "algorithm.temperature" + (f"; {cut:.0%} of them were cut at algorithm.max_tokens" if cut > 0.5 else "")
        )


def measure_staleness(groups: Sequence[Group], version: int) -> Metrics:
    """By how many optimizer steps the weights behind sampled tokens are older than `version`."""
    ages = [version - v for group in groups for rollout in group.rollouts for v in rollout.sampled_versions]
    if not ages:
        return {"staleness": 0.0, "staleness_max": 0.0}
    return {"staleness": statistics.fmean(ages), "staleness_max": float(max(ages))}


def validation_scores(groups: Sequence[Group]) -> Metrics:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    num_failed = sum(rollout.outcome.reward_failed for rollout in rollouts)
    failed = {"reward_failed": float(num_failed)} if num_failed else {}
    return {**_mean_scores(rollouts), **_shape(rollouts), **failed}


def _mean_scores(rollouts: Sequence[Rollout]) -> Metrics:
    """The reward, and each of its parts where it has several."""
    outcomes = [rollout.outcome for rollout in rollouts if not rollout.outcome.reward_failed]
    if not outcomes:
        return {"reward": math.nan}
    metrics = {"reward": statistics.fmean(outcome.reward for outcome in outcomes)}
    names = list(outcomes[0].scores)
    if len(names) > 1:
        for name in names:
            metrics[f"reward_{name}"] = statistics.fmean(outcome.scores[name] for outcome in outcomes)
    return metrics


def _shape(rollouts: Sequence[Rollout]) -> Metrics:
    metrics = {
        "completion_length": statistics.fmean(rollout.num_sampled for rollout in rollouts),
        "truncated_frac": statistics.fmean(rollout.truncated for rollout in rollouts),
    }
    turns = statistics.fmean(len(rollout.turns) for rollout in rollouts)
    return metrics | ({"turns": turns} if turns > 1 else {})


_MAX_ROWS = 512  # of one samples file, however large the step is


def write_samples(
    run: RunDir, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]], *, keep: int
) -> None:
    """One line for each rollout. Only the files of the last `keep` steps are kept."""
    if not run.owner or keep == 0:
        return
    folder = run.path / "samples"
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps(_describe(step, group, number, values[number]), ensure_ascii=False, default=str)
        for group, values in zip(groups, advantages, strict=True)
        for number in range(len(group.rollouts))
    ]
    write_atomically(folder / f"step-{step}.jsonl", "".join(line + "\n" for line in lines[:_MAX_ROWS]), durable=False)
    steps = sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.jsonl"))
    for old in steps[:-keep]:
        (folder / f"step-{old}.jsonl").unlink(missing_ok=True)


def _describe(step: int, group: Group, number: int, advantage: float) -> dict[str, object]:
    rollout = group.rollouts[number]
    outcome = rollout.outcome
    return {
        "step": step,
        "origin": group.prompt.origin,
        "prompt": group.prompt.fields["prompt"],
        "reference": group.prompt.fields.get("answer"),
        "sample": number,
        "turns": list(rollout.turns),
        "reward": _number(outcome.reward),
        "scores": dict(outcome.scores),
        "advantage": _number(advantage),
        "problem": outcome.problem,
        "tokens": rollout.num_sampled,
        "truncated": rollout.truncated,
        "key": group.key,
        "versions": [min(rollout.versions), max(rollout.versions)] if rollout.versions else [],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
