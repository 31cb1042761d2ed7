"""How many steps a run has, and the learning rate of each: pure functions."""

from __future__ import annotations

import math

from lockstep.config import OptimConfig, RunConfig
from lockstep.data.order import Batches


def num_steps(config: RunConfig, batches: Batches) -> int:
    return batches.num_steps(config.optim.epochs, config.optim.max_steps or None)


def warmup_steps(config: OptimConfig, num_steps: int) -> int:
    return config.warmup_steps if config.warmup_steps is not None else round(0.03 * num_steps)


def learning_rate_at(step: int, *, peak: float, num_steps: int, config: OptimConfig) -> float:
    """Of the step that is about to be made, counted from 0. Warm-up is linear and its first step is not zero."""
    warmup = warmup_steps(config, num_steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    floor = config.min_learning_rate_ratio
    return peak * (floor + (1 - floor) * shape)
