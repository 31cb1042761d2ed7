"""Reinforcement learning from rewards (GRPO and its variants): the whole loop, run alike by every rank.

Sample rollouts, score them, compute advantages, update, and sample again from the new weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.algorithms.advantages import find_advantages
from lockstep.algorithms.policy_gradient import FRESH_DIFF, STALE_DIFF
from lockstep.config import GrpoConfig, RunConfig
from lockstep.config.reference import choose_reference
from lockstep.data.order import Batches
from lockstep.data.prompts import PromptRow, Prompts
from lockstep.rollouts.batch import (
    LogprobDiff,
    as_data,
    count_fresh,
    kl_of_rollouts,
    loss_scale,
    measure_logprob_diff,
    split_minibatches,
    with_values,
)
from lockstep.rollouts.buffer import RolloutBatch
from lockstep.rollouts.episode import Group
from lockstep.rollouts.metrics import (
    RewardWatch,
    Updates,
    describe_groups,
    measure_staleness,
    validation_scores,
    write_samples,
)
from lockstep.rollouts.source import RolloutSource, read_prompt_data
from lockstep.rundir import RunDir
from lockstep.train.checkpoints import Progress
from lockstep.train.schedule import learning_rate_at, num_steps
from lockstep.train.steps import (
    Diverged,
    LoopInputs,
    MetricsLog,
    interrupted_after,
    is_due,
    is_out_of_patience,
    note_validation_loss,
    optim_step,
    starts_with_validation,
    stop_if_not_finite,
)
from lockstep.types import Completion, Datum, Logprobs, LossSpec, Metrics, SamplingParams, Tokenizer, TrainingBackend

_PROBE_PROMPTS, _PROBE_TOKENS = 8, 32


def train(inputs: LoopInputs[PromptRow], rollouts: RolloutSource, total: int) -> Progress:
    """From `inputs.progress` to step `total`."""
    config, backend, run, progress = inputs.config, inputs.backend, inputs.run, inputs.progress
    validation, checkpoints, algorithm = inputs.validation, inputs.checkpoints, config.algorithm
    assert isinstance(algorithm, GrpoConfig)
    metrics = MetricsLog(run, config.logging, last_step=progress.step)
    check, watch = SamplerCheck(algorithm, config.rollouts.max_staleness), RewardWatch()
    run.write_status(state="running", phase="publishing", step=progress.step, total_steps=total)
    rollouts.start()

    if starts_with_validation(inputs):
        evaluate(config, algorithm, validation, run, metrics, progress, rollouts)

    ended, stops = time.perf_counter(), False
    # Patience is part of the condition: a run resumed from the checkpoint at which it stopped has nothing left to do.
    while progress.step < total and not is_out_of_patience(config, progress) and not stops:
        inputs.begin_step()
        started = time.perf_counter()
        run.write_status(phase="sampling")
        batch = rollouts.take(inputs.asked_to_stop)
        if batch is None:  # asked to stop while engines sample: this step can be sampled again
            stops = True
            break
        sampled = time.perf_counter()
        sampling = check_batch(batch, progress.step * algorithm.updates, config.rollouts.max_staleness)
        run.write_status(phase="training")
        rate = learning_rate_at(progress.step, peak=config.learning_rate, num_steps=total, config=config.optim)
        progress.step, progress.cursor = progress.step + 1, batch.last_row
        probed = probe(check, backend, rollouts, batch.groups, progress.step) if check.is_overdue() else {}
        advantages, learned, stops = learn(config, algorithm, backend, batch.groups, progress, rate, check)
        if is_due(progress.step, algorithm.reference_sync_steps):
            backend.mix_reference(algorithm.reference_mix)
        run.write_status(phase="publishing")
        rollouts.advance()

        last = progress.step == total
        if message := watch.add(advantages, sampling, last=last):
            run.log_event("warning", step=progress.step, kind="rewards", message=message)
        if last or progress.step % config.logging.every_steps == 0:
            now = time.perf_counter()
            # Engines that sample ahead do so during evaluations and checkpoints, too: all of that time is in the rate.
            since = ended if config.rollouts.max_staleness else started
            record = {
                "learning_rate": rate,
                "epoch": progress.cursor / len(inputs.rows),
                "row_range": [batch.first_row, batch.last_row],
                **probed,
                **learned,
                **sampling,
                **rollouts.metrics(),
                "sample_time_s": sampled - started,
                "step_time_s": now - started,
                "tokens_per_s": learned.get("tokens", 0) / (now - since),
            }
            metrics.train(progress.step, progress, record, last=last)
        ended = time.perf_counter()
        write_samples(run, progress.step, batch.groups, advantages, keep=algorithm.keep_samples)

        evaluate_and_save(inputs, metrics, rollouts, last=last)

    run.write_status(phase="checkpointing", step=progress.step, loss=progress.loss, tokens=progress.tokens)
    checkpoints.save(progress, rollouts.save)
    metrics.close()
    if stops and progress.step < total and not is_out_of_patience(config, progress):
        checkpoints.wait()
        raise interrupted_after(progress)
    return progress


def evaluate_and_save(
    inputs: LoopInputs[PromptRow], metrics: MetricsLog, rollouts: RolloutSource, *, last: bool
) -> None:
    """After a step: validation and a checkpoint where they are due. All ranks."""
    config, progress = inputs.config, inputs.progress
    algorithm = config.algorithm
    assert isinstance(algorithm, GrpoConfig)
    evaluates = bool(inputs.validation) and (last or is_due(progress.step, config.evaluation.every_steps))
    saves = is_due(progress.step, config.checkpoint.every_steps)
    if evaluates:
        evaluate(config, algorithm, inputs.validation, inputs.run, metrics, progress, rollouts)
        saves |= bool(config.checkpoint.keep_best) and progress.best_step == progress.step
    if saves:
        inputs.run.write_status(phase="checkpointing")
        inputs.checkpoints.save(progress, rollouts.save)


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


class Learned(NamedTuple):
    """`advantages` of each group. `asked_to_stop`: whether a rank was when it computed the updates."""

    advantages: list[list[float]]
    metrics: Metrics
    asked_to_stop: bool


def learn(
    config: RunConfig,
    algorithm: GrpoConfig,
    backend: TrainingBackend,
    groups: Sequence[Group],
    progress: Progress,
    learning_rate: float,
    check: SamplerCheck | None = None,
) -> Learned:
    """All updates of one step. All ranks."""
    check = check or SamplerCheck(algorithm, config.rollouts.max_staleness)
    rewards = [group.rewards for group in groups]
    version = (progress.step - 1) * algorithm.updates
    batch, places = as_data(groups, algorithm, version if config.rollouts.max_staleness else None)
    if not batch:  # every rollout was truncated, left out, or its reward failed
        return Learned(find_advantages(rewards, algorithm.advantage), {"num_updates": 0}, False)
    reference = backend.forward(batch, reference=True) if algorithm.needs_reference else None
    # A single update computes the log-probs from before it in its own forward pass: that saves one.
    kl_in_reward = reference is not None and algorithm.kl_in == "reward"
    old = backend.forward(batch) if algorithm.updates > 1 or kl_in_reward else None
    metrics: Metrics = {}
    if old is not None:
        metrics = check.compare(batch, old, progress.step)
    if reference is not None and old is not None and kl_in_reward:
        divergences = kl_of_rollouts(batch, places, old, reference, algorithm.kl)
        for (group, rollout), divergence in divergences.items():
            rewards[group][rollout] -= algorithm.kl_coefficient * divergence
        metrics["kl"] = sum(divergences.values()) / sum(datum.num_supervised for datum in batch)
    advantages = find_advantages(rewards, algorithm.advantage)
    in_loss = reference if algorithm.kl_in == "loss" else None
    data = with_values(batch, places, advantages, old, in_loss)
    updates = update(config, algorithm, backend, data, progress, learning_rate, check)
    return Learned(advantages, {**metrics, **updates.metrics()}, updates.asked_to_stop)


def update(
    config: RunConfig,
    algorithm: GrpoConfig,
    backend: TrainingBackend,
    batch: Sequence[Datum],
    progress: Progress,
    learning_rate: float,
    check: SamplerCheck,
) -> Updates:
    on_policy = bool(batch) and "old_logprobs" not in batch[0].completions[0].values
    options = policy_options(algorithm, on_policy=on_policy)
    if on_policy and config.rollouts.max_staleness:
        options["stale_apart"] = True
    updates = Updates()
    for _ in range(algorithm.num_updates if batch else 0):
        for minibatch in split_minibatches(batch, algorithm.minibatches):
            loss = LossSpec("policy_gradient", loss_scale(minibatch, algorithm), options)
            result, num_fresh = backend.forward_backward(minibatch, loss), count_fresh(minibatch)
            if on_policy and check.is_too_far(result.metrics[FRESH_DIFF], num_fresh):
                raise check.diverged(measure_logprob_diff(minibatch, backend.forward(minibatch)), progress.step)
            optim = backend.optim_step(optim_step(config, learning_rate))
            stop_if_not_finite(minibatch, result, optim, progress.step)
            progress.tokens += result.num_tokens
            updates.add(result, optim, num_fresh)
    if updates.count:
        progress.loss = updates.loss
    return updates


def policy_options(algorithm: GrpoConfig, *, on_policy: bool = False) -> dict[str, object]:
    """Of the loss; a KL that counts in the reward is not in it. `on_policy`: see PolicyGradientOptions."""
    names = ("ratio", "objective", "clip_low", "clip_high", "dual_clip", "kl", "entropy_coefficient")
    options = {name: getattr(algorithm, name) for name in (*names, "importance_weighting", "importance_cap")}
    kl_coefficient = algorithm.kl_coefficient if algorithm.kl_in == "loss" else 0.0
    return {**options, "kl_coefficient": kl_coefficient, "on_policy": on_policy}


class SamplerCheck:
    """Whether the sampler computes what the trainer does: algorithm.max_sampler_trainer_logprob_diff.

    Only fresh tokens show it, those that the present weights have sampled: in the others there is also what was learned
    since. Where steps may learn from stale ones, fresh ones are few: they are added up over steps until their mean
    means something, and sampled for this alone (`probe`) where they do not come by themselves.
    """

    min_tokens = 64
    max_steps = 10
    """Without a complete comparison, before fresh tokens are asked for."""

    def __init__(self, algorithm: GrpoConfig, max_staleness: int) -> None:
        self.limit = algorithm.max_sampler_trainer_logprob_diff
        self._may_be_stale = max_staleness > 0
        self._total, self._count, self._num_steps = 0.0, 0, 0
        self.mean = 0.0

    def is_overdue(self) -> bool:
        """Called once in each step. The same on all ranks."""
        self._num_steps += 1
        return self._may_be_stale and self.limit is not None and self._num_steps > self.max_steps

    def is_too_far(self, total: float, count: int) -> bool:
        """`total` of the differences of `count` more fresh tokens."""
        self._total, self._count = self._total + total, self._count + count
        if not self._count or (self._may_be_stale and self._count < self.min_tokens and math.isfinite(self._total)):
            return False
        self.mean, self._total, self._count, self._num_steps = self._total / self._count, 0.0, 0, 0
        return self.limit is not None and not self.mean <= self.limit

    def compare(self, batch: Sequence[Datum], trainer: Sequence[Logprobs], step: int) -> Metrics:
        """Metrics of fresh and stale tokens, given the trainer's log-probs before the step."""
        fresh, stale = (measure_logprob_diff(batch, trainer, fresh=is_fresh) for is_fresh in (True, False))
        if fresh is not None and self.is_too_far(fresh.mean * fresh.count, fresh.count):
            raise self.diverged(fresh, step)
        metrics = {} if fresh is None else {FRESH_DIFF: fresh.mean, f"{FRESH_DIFF}_max": fresh.max}
        return metrics | ({} if stale is None else {STALE_DIFF: stale.mean})

    def diverged(self, diff: LogprobDiff | None, step: int) -> Diverged:
        """`diff`: of this step's fresh tokens, in which the last difference was found."""
        most = "" if diff is None else f" (at most {diff.max:.3g}, in an answer to {diff.origin})"
        return Diverged(
            f"at step {step} sampler and trainer differ by {self.mean:.3g} in a token's log-prob on average{most}, and "
            f"algorithm.max_sampler_trainer_logprob_diff is {self.limit:g}: what is sampled is not what is trained. "
            "Use a higher model.precision, or raise the limit if this is known"
        )


def probe(
    check: SamplerCheck, backend: TrainingBackend, rollouts: RolloutSource, groups: Sequence[Group], step: int
) -> Metrics:
    """Sample a few tokens with the present weights, only to compare sampler and trainer. All ranks."""
    prompts = [group.prompt for group in groups[:_PROBE_PROMPTS]]
    completions = rollouts.probe(prompts, _PROBE_TOKENS)
    batch = [
        Datum(p.tokens, [Completion(c.tokens, [1.0] * len(c.tokens), {"behaviour_logprobs": c.logprobs})], p.origin)
        for p, c in zip(prompts, completions, strict=True)
        if c.tokens and c.logprobs
    ]
    return check.compare(batch, backend.forward(batch), step) if batch else {}


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
