"""Answers that were sampled in a step, kept for people to read: RUN/samples/step-N.jsonl, the newest steps of them.

Only the run directory's owner writes. Must not know how answers were made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from lockstep.rundir import RunDir, write_atomically
from lockstep.train.rollouts import Group

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
