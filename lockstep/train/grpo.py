"""Reinforcement learning from rewards (GRPO and its variants): the whole loop, run alike by every rank.

Sample rollouts, score them, compute advantages, update, and sample again from the new weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from lockstep.algorithms.advantages import find_advantages
from lockstep.config import GrpoConfig, RunConfig
from lockstep.data.order import Batches
from lockstep.data.prompts import PromptRow, Prompts
from lockstep.rollouts.batch import (
    LogprobDiff,
    as_data,
    kl_of_rollouts,
    loss_scale,
    measure_logprob_diff,
    split_minibatches,
    with_values,
)
from lockstep.rollouts.buffer import RolloutBatch
from lockstep.rollouts.episode import Group
from lockstep.rollouts.metrics import Updates, describe_groups, measure_staleness, validation_scores, write_samples
from lockstep.rollouts.source import RolloutSource, read_prompt_data
from lockstep.rundir import RunDir
from lockstep.train.checkpoints import Progress
from lockstep.train.reference import choose_reference
from lockstep.train.schedule import learning_rate_at, num_steps
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
from lockstep.types import Datum, LossSpec, Metrics, SamplingParams, Tokenizer, TrainingBackend


def train(inputs: LoopInputs[PromptRow], rollouts: RolloutSource, total: int) -> Progress:
    """From `inputs.progress` to step `total`."""
    config, backend, run, progress = inputs.config, inputs.backend, inputs.run, inputs.progress
    validation, checkpoints, algorithm = inputs.validation, inputs.checkpoints, config.algorithm
    assert isinstance(algorithm, GrpoConfig)
    metrics = MetricsLog(run, config.logging, last_step=progress.step)
    run.write_status(state="running", phase="publishing", step=progress.step, total_steps=total)
    rollouts.start()

    if starts_with_validation(inputs):
        evaluate(config, algorithm, validation, run, metrics, progress, rollouts)

    # Patience is part of the condition: a run resumed from the checkpoint at which it stopped has nothing left to do.
    while progress.step < total and not is_out_of_patience(config, progress):
        checkpoints.poll()
        started = time.perf_counter()
        run.write_status(phase="sampling")
        batch = rollouts.take()
        sampled = time.perf_counter()
        sampling = check_batch(batch, progress.step * algorithm.updates, config.rollouts.max_staleness)
        run.write_status(phase="training")
        rate = learning_rate_at(progress.step, peak=config.learning_rate, num_steps=total, config=config.optim)
        progress.step, progress.cursor = progress.step + 1, batch.last_row
        advantages, learned = learn(config, algorithm, backend, batch.groups, progress, rate)
        if is_due(progress.step, algorithm.reference_sync_steps):
            backend.mix_reference(algorithm.reference_mix)
        run.write_status(phase="publishing")
        rollouts.advance()

        last = progress.step == total
        if last or progress.step % config.logging.every_steps == 0:
            elapsed = time.perf_counter() - started
            record = {
                "learning_rate": rate,
                "epoch": progress.cursor / len(inputs.rows),
                "row_range": [batch.first_row, batch.last_row],
                **learned,
                **sampling,
                **rollouts.metrics(),
                "sample_time_s": sampled - started,
                "step_time_s": elapsed,
                "tokens_per_s": learned.get("tokens", 0) / elapsed,
            }
            metrics.train(progress.step, progress, record, last=last)
        write_samples(run, progress.step, batch.groups, advantages, keep=algorithm.keep_samples)

        evaluates = bool(validation) and (last or is_due(progress.step, config.evaluation.every_steps))
        saves = is_due(progress.step, config.checkpoint.every_steps)
        if evaluates:
            evaluate(config, algorithm, validation, run, metrics, progress, rollouts)
            saves |= bool(config.checkpoint.keep_best) and progress.best_step == progress.step
        if saves:
            run.write_status(phase="checkpointing")
            checkpoints.save(progress, rollouts.save)

    run.write_status(phase="checkpointing", step=progress.step, loss=progress.loss, tokens=progress.tokens)
    checkpoints.save(progress, rollouts.save)
    checkpoints.wait()
    metrics.close()
    return progress


def check_batch(batch: RolloutBatch[Group], version: int, max_staleness: int) -> Metrics:
    """The metrics of a step's rollouts. Raises where every reward failed."""
    _refuse_if_all_failed([*batch.groups, *batch.left_out])
    staleness = measure_staleness(batch.groups, version)
    assert staleness["staleness_max"] <= max_staleness, "the bound on staleness is hard"
    return {**describe_groups(batch.groups, batch.left_out), **staleness, "dropped_stale": float(batch.num_stale)}


def _refuse_if_all_failed(groups: Sequence[Group]) -> None:
    problems = [rollout.outcome.problem for group in groups for rollout in group.rollouts]
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
    """All updates of one step: (the advantages of each group, metrics). All ranks."""
    rewards = [group.rewards for group in groups]
    batch, places = as_data(groups, algorithm)
    if not batch:  # every rollout was truncated, left out, or its reward failed
        return find_advantages(rewards, algorithm.advantage), {"num_updates": 0}
    reference = backend.forward(batch, reference=True) if algorithm.needs_reference else None
    # A single update computes the log-probs from before it in its own forward pass: that saves one.
    kl_in_reward = reference is not None and algorithm.kl_in == "reward"
    old = backend.forward(batch) if algorithm.updates > 1 or kl_in_reward else None
    metrics: Metrics = {}
    if old is not None:
        diff = measure_logprob_diff(batch, old)
        metrics = {"sampler_trainer_logprob_diff": diff.mean, "sampler_trainer_logprob_diff_max": diff.max}
        _stop_if_too_far(config, algorithm, diff, progress.step)
    if reference is not None and old is not None and kl_in_reward:
        divergences = kl_of_rollouts(batch, places, old, reference, algorithm.kl)
        for (group, rollout), divergence in divergences.items():
            rewards[group][rollout] -= algorithm.kl_coefficient * divergence
        metrics["kl"] = sum(divergences.values()) / sum(datum.num_supervised for datum in batch)
    advantages = find_advantages(rewards, algorithm.advantage)
    in_loss = reference if algorithm.kl_in == "loss" else None
    data = with_values(batch, places, advantages, old, in_loss)
    updates = update(config, algorithm, backend, data, progress, learning_rate)
    return advantages, {**metrics, **updates.metrics()}


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
        for minibatch in split_minibatches(batch, algorithm.minibatches):
            loss = LossSpec("policy_gradient", loss_scale(minibatch, algorithm), options)
            result = backend.forward_backward(minibatch, loss)
            if on_policy:
                mean = result.metrics["sampler_trainer_logprob_diff"] / result.num_supervised
                if not _is_near(mean, algorithm):
                    diff = measure_logprob_diff(minibatch, backend.forward(minibatch))
                    _stop_if_too_far(config, algorithm, diff, progress.step)
            optim = backend.optim_step(optim_step(config, learning_rate))
            stop_if_not_finite(minibatch, result, optim, progress.step)
            progress.tokens += result.num_tokens
            updates.add(result, optim)
    if updates.count:
        progress.loss = updates.loss
    return updates


def policy_options(algorithm: GrpoConfig, *, on_policy: bool = False) -> dict[str, object]:
    """Of the loss; a KL that counts in the reward is not in it. `on_policy`: see PolicyGradientOptions."""
    names = ("ratio", "objective", "clip_low", "clip_high", "dual_clip", "kl", "entropy_coefficient")
    options = {name: getattr(algorithm, name) for name in (*names, "importance_weighting", "importance_cap")}
    kl_coefficient = algorithm.kl_coefficient if algorithm.kl_in == "loss" else 0.0
    return {**options, "kl_coefficient": kl_coefficient, "on_policy": on_policy}


def _is_near(diff: float, algorithm: GrpoConfig) -> bool:
    limit = algorithm.max_sampler_trainer_logprob_diff
    return limit is None or diff <= limit


def _stop_if_too_far(config: RunConfig, algorithm: GrpoConfig, diff: LogprobDiff, step: int) -> None:
    if _is_near(diff.mean, algorithm):
        return
    # With stale rollouts, the difference includes the updates since they were sampled.
    steps = "Learn in smaller steps, lower rollouts.max_staleness, use" if config.rollouts.max_staleness else "Use"
    raise Diverged(
        f"at step {step} sampler and trainer differ by {diff.mean:.3g} in a token's log-prob on average (at most "
        f"{diff.max:.3g}, in an answer to {diff.origin}), and algorithm.max_sampler_trainer_logprob_diff is "
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
    rollouts: RolloutSource,
) -> None:
    """The reward of greedy completions of held-out prompts; the highest is the best. All ranks."""
    started, rows = time.perf_counter(), prompts[: config.evaluation.rows]
    params = SamplingParams(max_tokens=algorithm.max_tokens, temperature=0.0, stop=algorithm.stop)
    run.write_status(phase="evaluating")
    groups = rollouts.evaluate(rows, params)
    _refuse_if_all_failed(groups)
    scores = validation_scores(groups)
    assert math.isfinite(scores["reward"])
    note_validation_loss(config, progress, -scores["reward"])
    record = {"rows": len(rows), "time_s": time.perf_counter() - started}
    metrics.validation(progress, record, scores)
    # Rewards are better the higher they are: they are no loss.
    best = None if progress.best_validation_loss is None else -progress.best_validation_loss
    run.write_status(validation_loss=None, best_validation_loss=None, best_reward=best)


def count_steps(config: RunConfig, prompts: Prompts) -> int:
    return num_steps(config, Batches(prompts, config.batch, seed=config.seed, shuffle=config.data.shuffle))  # type: ignore[arg-type]


def describe(config: RunConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """What can be said of a run before it samples."""
    algorithm, data = config.algorithm, read_prompt_data(config, tokenizer)
    assert isinstance(algorithm, GrpoConfig)
    assert config.batch.samples_per_step is not None
    num_prompts = min(config.batch.samples_per_step, len(data.train))
    return {
        "steps": count_steps(config, data.train),
        "prompts": num_prompts,
        "answers": num_prompts * algorithm.group_size,
        "updates": algorithm.num_updates * min(algorithm.minibatches, num_prompts),
        "learning_rate": config.learning_rate,
        "rewards": ", ".join(f"{reward.name} x {reward.weight:g}" for reward in algorithm.reward),
        "reference": str(choose_reference(config, num_rows=len(data.train), num_seen=len(data.train))),
        "train_rows": len(data.train),
        "validation_rows": len(data.validation),
        "longest_prompt": int(data.train.lengths.max()),
        "warnings": data.warnings(),
    }
