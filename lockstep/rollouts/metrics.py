"""What a step of reinforcement learning came to, in numbers: of its answers, and of the updates made from them.

Must not know how either was computed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.algorithms.advantages import is_flat
from lockstep.rollouts.episode import Answer, Group
from lockstep.rundir import RunDir, write_atomically
from lockstep.types import LossResult, Metrics, OptimResult

# What the loss gives as sums over learned tokens.
_SUMS = ("ratio", "clipped_low", "clipped_high", "moved", "correction", "kl", "entropy", "logprob_gap")


@dataclass
class Updates:
    """Sums over the optimizer steps of one step."""

    count: int = 0
    tokens: int = 0
    supervised: int = 0
    memory_gib: float = 0.0
    _losses: list[float] = field(default_factory=list)
    _norms: list[float] = field(default_factory=list)
    _sums: Metrics = field(default_factory=dict)
    _facts: Metrics = field(default_factory=dict)

    def add(self, result: LossResult, optim: OptimResult) -> None:
        self.count += 1
        self.tokens += result.num_tokens
        self.supervised += result.num_supervised
        self.memory_gib = max(self.memory_gib, optim.peak_memory_gib)
        self._losses.append(result.loss)
        self._norms += [optim.grad_norm] if optim.applied else []
        for name, value in result.metrics.items():
            if name in _SUMS:
                self._sums[name] = self._sums.get(name, 0.0) + value
            else:
                self._facts[name] = value

    @property
    def loss(self) -> float:
        return statistics.fmean(self._losses)

    def metrics(self) -> Metrics:
        """Means over updates, and over the tokens that were learned."""
        if not self.count:
            return {"num_updates": 0}
        return {
            **self._facts,
            "loss": self.loss,
            **({"grad_norm": statistics.fmean(self._norms)} if self._norms else {}),
            "num_updates": self.count,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "memory_gib": self.memory_gib,
            **{name: value / self.supervised for name, value in self._sums.items()},
        }


def describe_groups(groups: Sequence[Group], left_out: Sequence[Group]) -> Metrics:
    """Of all groups that were sampled: rewards, lengths, and what was left out. Tainted answers are only counted."""
    every = [*groups, *left_out]
    answers = [answer for group in every for answer in group.answers]
    rewards = [answer.outcome.reward for answer in answers if answer.outcome.problem is None]
    logprobs = [lp for a in answers for lp, own in zip(a.logprobs, a.own, strict=True) if own]
    found = {
        **_mean_scores(answers),
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        **_shape(answers),
        "tainted": float(len(answers) - len(rewards)),
        "flat_groups": float(sum(is_flat(group.rewards) for group in every)),
        "left_out_groups": float(len(left_out)),
    }
    # A sampled token's own surprise is the entropy of the choice it came from, on average.
    return found | ({"entropy_estimate": -statistics.fmean(logprobs)} if logprobs else {})


def measure_staleness(groups: Sequence[Group], version: int) -> Metrics:
    """In optimizer steps, over the tokens that the model sampled: what the weights are older than `version`."""
    ages = [version - own for group in groups for answer in group.answers for own in answer.own_versions]
    if not ages:
        return {"staleness": 0.0, "staleness_max": 0.0}
    return {"staleness": statistics.fmean(ages), "staleness_max": float(max(ages))}


def validation_scores(groups: Sequence[Group]) -> Metrics:
    answers = [answer for group in groups for answer in group.answers]
    tainted = sum(answer.outcome.problem is not None for answer in answers)
    return {**_mean_scores(answers), **_shape(answers), **({"tainted": float(tainted)} if tainted else {})}


def _mean_scores(answers: Sequence[Answer]) -> Metrics:
    """The reward, and where it has several parts each of them."""
    sound = [answer.outcome for answer in answers if answer.outcome.problem is None]
    if not sound:
        return {"reward": math.nan}
    found = {"reward": statistics.fmean(outcome.reward for outcome in sound)}
    names = list(sound[0].scores)
    if len(names) > 1:
        for name in names:
            found[f"reward_{name}"] = statistics.fmean(outcome.scores[name] for outcome in sound)
    return found


def _shape(answers: Sequence[Answer]) -> Metrics:
    found = {
        "length": statistics.fmean(answer.num_own for answer in answers),
        "cut": statistics.fmean(answer.is_cut for answer in answers),
    }
    turns = statistics.fmean(len(answer.turns) for answer in answers)
    return found | ({"turns": turns} if turns > 1 else {})


# Rows in one file: enough to see what happens, however big a step is.
_MAX_ROWS = 512


def write_samples(
    run: RunDir, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]], *, keep: int
) -> None:
    """One line for each answer. Files of the oldest steps go when there are more than `keep`."""
    if not run.owner or keep == 0:
        return
    folder = run.path / "samples"
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps(_describe(step, group, number, own[number]), ensure_ascii=False, default=str)
        for group, own in zip(groups, advantages, strict=True)
        for number in range(len(group.answers))
    ]
    write_atomically(folder / f"step-{step}.jsonl", "".join(line + "\n" for line in lines[:_MAX_ROWS]), durable=False)
    steps = sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.jsonl"))
    for old in steps[:-keep]:
        (folder / f"step-{old}.jsonl").unlink(missing_ok=True)


def _describe(step: int, group: Group, number: int, advantage: float) -> dict[str, object]:
    answer = group.answers[number]
    outcome = answer.outcome
    return {
        "step": step,
        "origin": group.prompt.origin,
        "prompt": group.prompt.fields["prompt"],
        "reference": group.prompt.fields.get("answer"),
        "sample": number,
        "turns": list(answer.turns),
        "reward": _number(outcome.reward),
        "scores": dict(outcome.scores),
        "advantage": _number(advantage),
        "problem": outcome.problem,
        "tokens": answer.num_own,
        "cut": answer.is_cut,
        "key": group.key,
        "versions": [min(answer.versions), max(answer.versions)] if answer.versions else [],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
