"""Reinforcement learning from rewards: the whole loop, top to bottom. Every rank runs it alike, with global batches.

Sample answers, score them, compare them, learn, and sample again from what was learned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from lockstep.algorithms.advantages import find_advantages, is_flat
from lockstep.config import GrpoConfig, RunConfig
from lockstep.data.order import Batches
from lockstep.data.prompts import Prompts
from lockstep.rundir import RunDir
from lockstep.sampling.sampler import SamplingParams
from lockstep.train.metrics import MetricsLog
from lockstep.train.options import policy_options
from lockstep.train.policy_batch import (
    Gap,
    as_data,
    cut_minibatches,
    kl_of_answers,
    loss_scale,
    measure_gap,
    with_values,
)
from lockstep.train.progress import Checkpoints, Progress
from lockstep.train.rollouts import Group, Rollouts
from lockstep.train.samples import write_samples
from lockstep.train.schedule import learning_rate_at
from lockstep.train.steps import (
    Diverged,
    is_due,
    is_out_of_patience,
    note_validation_loss,
    num_steps,
    optim_step,
    stop_if_not_finite,
)
from lockstep.train.tally import Updates, describe_groups, validation_scores
from lockstep.types import Datum, LossSpec, Metrics, TrainingBackend


def train(
    config: RunConfig,
    backend: TrainingBackend,
    prompts: Prompts,
    validation: Prompts,
    run: RunDir,
    checkpoints: Checkpoints,
    progress: Progress,
    rollouts: Rollouts,
) -> Progress:
    """From `progress` to the end. What must survive a kill is in checkpoints and in `progress`, nowhere else."""
    algorithm = config.algorithm
    assert isinstance(algorithm, GrpoConfig)
    batches = Batches(prompts, config.batch, seed=config.seed, shuffle=config.data.shuffle)  # type: ignore[arg-type]
    total = num_steps(config, batches)
    metrics = MetricsLog(run, config.logging, first_step=progress.step + 1 if progress.step else 0)
    run.write_status(state="running", phase="training", step=progress.step, total_steps=total)

    if validation and config.evaluation.at_start and progress.step == 0:
        evaluate(config, algorithm, validation, run, metrics, progress, rollouts)

    # Patience is part of the condition: a run resumed from the checkpoint at which it stopped has nothing left to do.
    while progress.step < total and not is_out_of_patience(config, progress):
        checkpoints.poll()
        started, first_row = time.perf_counter(), progress.cursor
        groups, left_out, progress.cursor = sample_groups(config, algorithm, batches, rollouts, progress.cursor)
        sampled = time.perf_counter()
        rate = learning_rate_at(progress.step, peak=config.learning_rate, num_steps=total, config=config.optim)
        progress.step += 1
        advantages, found = learn(config, algorithm, backend, groups, progress, rate)
        if is_due(progress.step, algorithm.reference_sync_steps):
            backend.mix_reference(algorithm.reference_mix)

        last = progress.step == total
        if last or progress.step % config.logging.every_steps == 0:
            elapsed = time.perf_counter() - started
            record = {
                "learning_rate": rate,
                "epoch": progress.cursor / len(prompts),
                "row_range": [first_row, progress.cursor],
                **found,
                **describe_groups(groups, left_out),
                "staleness": 0,
                "sample_time_s": sampled - started,
                "step_time_s": elapsed,
                "tokens_per_s": found.get("tokens", 0) / elapsed,
            }
            metrics.train(progress.step, progress, record, last=last)
        write_samples(run, progress.step, groups, advantages, keep=algorithm.keep_samples)

        evaluates = bool(validation) and (last or is_due(progress.step, config.evaluation.every_steps))
        saves = is_due(progress.step, config.checkpoint.every_steps)
        if evaluates:
            evaluate(config, algorithm, validation, run, metrics, progress, rollouts)
            saves |= bool(config.checkpoint.keep_best) and progress.best_step == progress.step
        if saves:
            checkpoints.save(progress)

    run.write_status(step=progress.step, loss=progress.loss, tokens=progress.tokens)
    checkpoints.save(progress)
    checkpoints.wait()
    metrics.close()
    return progress


def sampling_params(config: RunConfig, algorithm: GrpoConfig) -> SamplingParams:
    return SamplingParams(
        max_tokens=algorithm.max_tokens,
        temperature=algorithm.temperature,
        top_p=algorithm.top_p,
        top_k=algorithm.top_k,
        min_p=algorithm.min_p,
        stop=algorithm.stop,
        seed=config.seed,
        num_samples=algorithm.num_samples,
        logprobs=True,
    )


def sample_groups(
    config: RunConfig, algorithm: GrpoConfig, batches: Batches, rollouts: Rollouts, cursor: int
) -> tuple[list[Group], list[Group], int]:
    """(groups to learn from, groups that were left out, the cursor after all of them). All ranks.

    A prompt's samples are decided by the seed and its place in the order, so a step can be made again.
    """
    params = sampling_params(config, algorithm)
    kept: list[Group] = []
    left_out: list[Group] = []
    wanted = None
    for _ in range(1 + (algorithm.max_refills if algorithm.flat_groups == "refill" else 0)):
        prompts, _ = batches.batch_at(cursor)
        wanted = len(prompts) if wanted is None else wanted
        prompts = prompts[: wanted - len(kept)]
        keys = range(cursor, cursor + len(prompts))
        cursor += len(prompts)
        for group in rollouts.collect(prompts, keys, params):  # type: ignore[arg-type]
            is_left_out = algorithm.flat_groups != "keep" and is_flat(group.rewards)
            (left_out if is_left_out else kept).append(group)
        if len(kept) == wanted:
            break
    _refuse_if_all_tainted([*kept, *left_out])
    return kept, left_out, cursor


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
    old = backend.forward(batch)
    gap = measure_gap(batch, old)
    _stop_at_gap(gap, algorithm.max_logprob_gap, progress.step)
    reference = backend.forward(batch, reference=True) if algorithm.needs_reference else None
    found: Metrics = {"logprob_gap": gap.mean, "logprob_gap_max": gap.largest}
    if reference is not None and algorithm.kl_in == "reward":
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
    updates, options = Updates(), policy_options(algorithm)
    for _ in range(algorithm.num_updates if batch else 0):
        for part in cut_minibatches(batch, algorithm.minibatches):
            result = backend.forward_backward(part, LossSpec("policy_gradient", loss_scale(part, algorithm), options))
            optim = backend.optim_step(optim_step(config, learning_rate))
            stop_if_not_finite(part, result, optim, progress.step)
            progress.tokens += result.num_tokens
            updates.add(result, optim)
    if updates.count:
        progress.loss = updates.loss
    return updates


def _stop_at_gap(gap: Gap, limit: float | None, step: int) -> None:
    if limit is not None and not gap.mean <= limit:
        raise Diverged(
            f"at step {step} sampler and trainer differ by {gap.mean:.3g} in a token's log-prob on average (at most "
            f"{gap.largest:.3g}, in an answer to {gap.where}), and algorithm.max_logprob_gap is {limit:g}: what is "
            "sampled is not what is trained. Use a higher model.precision, or raise the limit if this is known"
        )


def evaluate(
    config: RunConfig,
    algorithm: GrpoConfig,
    prompts: Prompts,
    run: RunDir,
    metrics: MetricsLog,
    progress: Progress,
    rollouts: Rollouts,
) -> None:
    """The reward of the likeliest answers to held-out prompts. The best is the highest. All ranks."""
    started, rows = time.perf_counter(), prompts[: config.evaluation.rows]
    params = SamplingParams(max_tokens=algorithm.max_tokens, temperature=0.0, stop=algorithm.stop)
    groups = rollouts.collect(rows, range(len(rows)), params)
    _refuse_if_all_tainted(groups)
    scores = validation_scores(groups)
    assert math.isfinite(scores["reward"])
    note_validation_loss(config, progress, -scores["reward"])
    record = {"rows": len(rows), "time_s": time.perf_counter() - started}
    metrics.validation(progress, record, scores)
    # Rewards are better the higher they are: they are no loss.
    best = None if progress.best_validation_loss is None else -progress.best_validation_loss
    run.write_status(validation_loss=None, best_validation_loss=None, best_reward=best)
