"""Reinforcement learning from rewards: the whole loop, top to bottom. Every rank runs it alike, with global batches.

Sample answers, score them, compare them, learn, and sample again from what was learned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from lockstep.algorithms.advantages import find_advantages
from lockstep.config import GrpoConfig, RunConfig
from lockstep.data.prompts import PromptRow
from lockstep.rollouts.batch import (
    Gap,
    as_data,
    cut_minibatches,
    kl_of_answers,
    loss_scale,
    measure_gap,
    with_values,
)
from lockstep.rollouts.buffer import RolloutBatch
from lockstep.rollouts.episode import Group
from lockstep.rollouts.metrics import Updates, describe_groups, measure_staleness, validation_scores, write_samples
from lockstep.rollouts.source import RolloutSource
from lockstep.rundir import RunDir
from lockstep.train.checkpoints import Progress
from lockstep.train.schedule import learning_rate_at
from lockstep.train.steps import (
    Diverged,
    LoopInputs,
    MetricsLog,
    is_due,
    is_out_of_patience,
    note_validation_loss,
    optim_step,
    starts_with_validation,
    stop_if_not_finite,
)
from lockstep.types import Datum, LossSpec, Metrics, SamplingParams, TrainingBackend


def train(inputs: LoopInputs[PromptRow], feed: RolloutSource, total: int) -> Progress:
    """From `inputs.progress` to the end, in `total` steps."""
    config, backend, run, progress = inputs.config, inputs.backend, inputs.run, inputs.progress
    validation, checkpoints, algorithm = inputs.validation, inputs.checkpoints, config.algorithm
    assert isinstance(algorithm, GrpoConfig)
    metrics = MetricsLog(run, config.logging, last_step=progress.step)
    run.write_status(state="running", phase="publishing", step=progress.step, total_steps=total)
    feed.start()

    if starts_with_validation(inputs):
        evaluate(config, algorithm, validation, run, metrics, progress, feed)

    # Patience is part of the condition: a run resumed from the checkpoint at which it stopped has nothing left to do.
    while progress.step < total and not is_out_of_patience(config, progress):
        checkpoints.poll()
        started = time.perf_counter()
        run.write_status(phase="sampling")
        taken = feed.take()
        sampled = time.perf_counter()
        sampling = check_taken(taken, progress.step * algorithm.updates, config.rollouts.max_staleness)
        run.write_status(phase="training")
        rate = learning_rate_at(progress.step, peak=config.learning_rate, num_steps=total, config=config.optim)
        progress.step, progress.cursor = progress.step + 1, taken.last_row
        advantages, found = learn(config, algorithm, backend, taken.groups, progress, rate)
        if is_due(progress.step, algorithm.reference_sync_steps):
            backend.mix_reference(algorithm.reference_mix)
        run.write_status(phase="publishing")
        feed.advance()

        last = progress.step == total
        if last or progress.step % config.logging.every_steps == 0:
            elapsed = time.perf_counter() - started
            record = {
                "learning_rate": rate,
                "epoch": progress.cursor / len(inputs.rows),
                "row_range": [taken.first_row, taken.last_row],
                **found,
                **sampling,
                **feed.facts(),
                "sample_time_s": sampled - started,
                "step_time_s": elapsed,
                "tokens_per_s": found.get("tokens", 0) / elapsed,
            }
            metrics.train(progress.step, progress, record, last=last)
        write_samples(run, progress.step, taken.groups, advantages, keep=algorithm.keep_samples)

        evaluates = bool(validation) and (last or is_due(progress.step, config.evaluation.every_steps))
        saves = is_due(progress.step, config.checkpoint.every_steps)
        if evaluates:
            evaluate(config, algorithm, validation, run, metrics, progress, feed)
            saves |= bool(config.checkpoint.keep_best) and progress.best_step == progress.step
        if saves:
            run.write_status(phase="checkpointing")
            checkpoints.save(progress, feed.save)

    run.write_status(phase="checkpointing", step=progress.step, loss=progress.loss, tokens=progress.tokens)
    checkpoints.save(progress, feed.save)
    checkpoints.wait()
    metrics.close()
    return progress


def check_taken(taken: RolloutBatch[Group], version: int, max_staleness: int) -> Metrics:
    """What a step is to learn from, in numbers; refused where nothing could be scored."""
    _refuse_if_all_tainted([*taken.groups, *taken.left_out])
    staleness = measure_staleness(taken.groups, version)
    assert staleness["staleness_max"] <= max_staleness, "the bound on staleness is hard"
    return {**describe_groups(taken.groups, taken.left_out), **staleness, "dropped_stale": float(taken.num_stale)}


def _refuse_if_all_tainted(groups: Sequence[Group]) -> None:
    problems = [answer.outcome.problem for group in groups for answer in group.answers]
    if problems and None not in problems:
        raise ValueError(f"none of the {len(problems)} answers of this step could be scored; the first: {problems[0]}")


def learn(
    config: RunConfig,
    algorithm: GrpoConfig,
    backend: TrainingBackend,
    groups: Sequence[Group],
    progress: Progress,
    learning_rate: float,
) -> tuple[list[list[float]], Metrics]:
    """All updates of one step: (every answer's advantage, what was measured). All ranks."""
    rewards = [group.rewards for group in groups]
    batch, places = as_data(groups, algorithm)
    if not batch:  # everything was cut, left out or tainted: there is nothing to compute
        return find_advantages(rewards, algorithm.advantage), {"num_updates": 0}
    reference = backend.forward(batch, reference=True) if algorithm.needs_reference else None
    # A single update finds on its way what the log-probs were before it: that saves a pass.
    counts_in_reward = reference is not None and algorithm.kl_in == "reward"
    old = backend.forward(batch) if algorithm.updates > 1 or counts_in_reward else None
    found: Metrics = {}
    if old is not None:
        gap = measure_gap(batch, old)
        found = {"logprob_gap": gap.mean, "logprob_gap_max": gap.largest}
        _stop_at_gap(config, algorithm, gap, progress.step)
    if reference is not None and old is not None and counts_in_reward:
        distances = kl_of_answers(batch, places, old, reference, algorithm.kl)
        for (group, answer), distance in distances.items():
            rewards[group][answer] -= algorithm.kl_coefficient * distance
        found["kl"] = sum(distances.values()) / sum(datum.num_supervised for datum in batch)
    advantages = find_advantages(rewards, algorithm.advantage)
    in_loss = reference if algorithm.kl_in == "loss" else None
    learned = with_values(batch, places, advantages, old, in_loss)
    updates = update(config, algorithm, backend, learned, progress, learning_rate)
    return advantages, {**found, **updates.metrics()}


def update(
    config: RunConfig,
    algorithm: GrpoConfig,
    backend: TrainingBackend,
    batch: Sequence[Datum],
    progress: Progress,
    learning_rate: float,
) -> Updates:
    on_policy = bool(batch) and "old_logprobs" not in batch[0].completions[0].values
    updates, options = Updates(), policy_options(algorithm, on_policy=on_policy)
    for _ in range(algorithm.num_updates if batch else 0):
        for part in cut_minibatches(batch, algorithm.minibatches):
            result = backend.forward_backward(part, LossSpec("policy_gradient", loss_scale(part, algorithm), options))
            if on_policy and not _is_near(result.metrics["logprob_gap"] / result.num_supervised, algorithm):
                _stop_at_gap(config, algorithm, measure_gap(part, backend.forward(part)), progress.step)
            optim = backend.optim_step(optim_step(config, learning_rate))
            stop_if_not_finite(part, result, optim, progress.step)
            progress.tokens += result.num_tokens
            updates.add(result, optim)
    if updates.count:
        progress.loss = updates.loss
    return updates


def policy_options(algorithm: GrpoConfig, *, on_policy: bool = False) -> dict[str, Any]:
    """Of the loss; a KL that counts in the reward is not in it. `on_policy`: see PolicyGradientOptions."""
    names = ("ratio", "objective", "clip_low", "clip_high", "dual_clip", "kl", "entropy_coefficient")
    options = {name: getattr(algorithm, name) for name in (*names, "importance_weighting", "importance_cap")}
    kl_coefficient = algorithm.kl_coefficient if algorithm.kl_in == "loss" else 0.0
    return {**options, "kl_coefficient": kl_coefficient, "on_policy": on_policy}


def _is_near(gap: float, algorithm: GrpoConfig) -> bool:
    return algorithm.max_sampler_trainer_logprob_diff is None or gap <= algorithm.max_sampler_trainer_logprob_diff


def _stop_at_gap(config: RunConfig, algorithm: GrpoConfig, gap: Gap, step: int) -> None:
    if _is_near(gap.mean, algorithm):
        return
    # With old answers, the gap also has what was learned since they were sampled.
    steps = "Learn in smaller steps, lower rollouts.max_staleness, use" if config.rollouts.max_staleness else "Use"
    raise Diverged(
        f"at step {step} sampler and trainer differ by {gap.mean:.3g} in a token's log-prob on average (at most "
        f"{gap.largest:.3g}, in an answer to {gap.where}), and algorithm.max_sampler_trainer_logprob_diff is "
        f"{algorithm.max_sampler_trainer_logprob_diff:g}: what is sampled is not what is trained. "
        f"{steps} a higher model.precision, or raise the limit if this is known"
    )


def evaluate(
    config: RunConfig,
    algorithm: GrpoConfig,
    prompts: Sequence[PromptRow],
    run: RunDir,
    metrics: MetricsLog,
    progress: Progress,
    feed: RolloutSource,
) -> None:
    """The reward of the likeliest answers to held-out prompts. The best is the highest. All ranks."""
    started, rows = time.perf_counter(), prompts[: config.evaluation.rows]
    params = SamplingParams(max_tokens=algorithm.max_tokens, temperature=0.0, stop=algorithm.stop)
    run.write_status(phase="evaluating")
    groups = feed.answer(rows, params)
    _refuse_if_all_tainted(groups)
    scores = validation_scores(groups)
    assert math.isfinite(scores["reward"])
    note_validation_loss(config, progress, -scores["reward"])
    record = {"rows": len(rows), "time_s": time.perf_counter() - started}
    metrics.validation(progress, record, scores)
    # Rewards are better the higher they are: they are no loss.
    best = None if progress.best_validation_loss is None else -progress.best_validation_loss
    run.write_status(validation_loss=None, best_validation_loss=None, best_reward=best)
