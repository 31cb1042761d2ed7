"""Rewards: how good a sampled answer is, and environments that answer back. A part of its own, because a reward is the
user's code as often as ours: it runs in processes of its own, with a deadline, and may fail without harm to a run.

Stands on the configuration and on `evaluation.metrics` alone. Must not know models, tokens or training.
"""

from lockstep.rollouts.rewards.reward import Attempt, Environment, Outcome, Turn

__all__ = ["Attempt", "Environment", "Outcome", "Turn"]
