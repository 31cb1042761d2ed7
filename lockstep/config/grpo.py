"""The algorithm section for kind grpo, and the rollouts section: what is sampled, who samples, how it is scored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lockstep.config.renames import rename_keys
from lockstep.config.schema import (
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
    Share,
    check_code_name,
)

# By these names; all others are module:function, or module:class, of the user's own.
REWARDS = ("exact", "numeric", "regex", "format", "length", "reasoning_gym", "environment")
ENVIRONMENTS = ("calculator",)
# This package makes rows and scores answers by evaluating text as Python, for some of its tasks the model's own answer.
EVALUATING = "reasoning_gym"

# Kinds that are short for grpo with the settings of a paper.
SHORT_GRPO: dict[str, dict[str, str | float]] = {
    "dr_grpo": {"kind": "grpo", "advantage": "dr_grpo", "aggregation": "fixed"},
    "rloo": {"kind": "grpo", "advantage": "rloo"},
    "reinforce++": {"kind": "grpo", "advantage": "reinforce++"},
    "dapo": {"kind": "grpo", "clip_high": 0.28, "zero_std_groups": "refill", "overlong": "mask"},
    "gspo": {"kind": "grpo", "ratio": "sequence", "aggregation": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"kind": "grpo", "objective": "cispo", "clip_low": 1.0, "clip_high": 4.0},
}


class RewardConfig(Section):
    """One reward and its weight."""

    name: str
    """exact, numeric, regex, format, length, reasoning_gym, environment, or module:function of yours."""
    weight: float = 1.0
    """Its weight in the sum of all rewards. 0: measured, and not learned from."""
    options: dict[str, Any] = Field(default={})
    """Settings of this reward. For example {pattern: "#### (.*)"}."""


def as_rewards(value: object) -> object:
    """`numeric`, `[numeric, format]`, `{numeric: 1.0, format: 0.2}` and full entries are all lists of rewards."""
    if isinstance(value, (str, RewardConfig)):
        value = [value]
    elif isinstance(value, Mapping):
        value = [value] if "name" in value else [{"name": name, "weight": weight} for name, weight in value.items()]
    if not isinstance(value, (list, tuple)):
        return value
    return [{"name": entry} if isinstance(entry, str) else entry for entry in value]


class GrpoConfig(Section):
    kind: Literal["grpo"]
    """grpo: samples answers, scores them with rewards, and makes the better ones likelier. dr_grpo, rloo, reinforce++,
    dapo, gspo and cispo are short for grpo with the settings of those papers."""
    reward: Annotated[tuple[RewardConfig, ...], BeforeValidator(as_rewards)] = Field(min_length=1)
    """How an answer is scored: the name of a reward, a list, a mapping with weights like {numeric: 1.0, format: 0.2},
    or entries with options."""
    environment: str | None = None
    """What replies to the model, for several turns or tools: calculator, or module:class of yours. null: one turn."""
    max_turns: PositiveInt = 4
    """Most turns of an episode with an environment."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Answers to each prompt: a group. batch.samples counts prompts."""
    max_tokens: PositiveInt = 256
    """Longest answer, or turn of an answer, in tokens."""
    temperature: Positive = 1.0
    """Of sampling, and of all log-probs in training: the model is trained at the temperature that it is sampled at."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that hold this much of the probability."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the likeliest tokens. 0: from all."""
    min_p: Share = 0.0
    """Leave out tokens less likely than this share of the likeliest."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline"] = "grpo"
    """What a reward is compared with. grpo: its group's mean, over the group's spread. dr_grpo: the mean alone. rloo:
    the mean of the others. reinforce++: the whole batch; reinforce++_baseline: the group's mean over the batch's
    spread."""
    zero_std_groups: Literal["keep", "drop", "refill"] = "keep"
    """Groups whose answers all have the same reward, and no gradient. refill: take the next prompts in their place."""
    max_refills: PositiveInt = 4
    """Most prompts taken as replacements, in multiples of batch.samples. Then the step goes on with fewer groups."""
    overlong: Literal["keep", "mask"] = "keep"
    """Answers truncated at max_tokens. mask: not trained on."""
    ratio: Literal["token", "sequence"] = "token"
    """Probability now over probability before this step: of each token, or of the whole answer (gspo)."""
    objective: Literal["clip", "cispo"] = "clip"
    """clip: a ratio beyond the range has no gradient. cispo: it is capped and kept as a constant weight."""
    clip_low: Share = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: NonNegative = 0.2
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bounds the loss of a token of a bad answer, whatever its ratio. null: unbounded."""
    aggregation: Literal["token", "sequence", "fixed"] = "token"
    """The loss is a mean over the tokens of the batch; over answers of the mean over their tokens; or over answers of
    the sum over their tokens, divided by max_tokens."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """How the distance from the reference is estimated."""
    kl_coefficient: NonNegative = 0.0
    """Its weight. 0: there is no reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it is applied: added to the loss, or subtracted from the reward of an answer."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy of the model's choices; anything but 0 makes the step compute it."""
    importance_weighting: Literal["none", "token", "sequence"] = "none"
    """Weigh tokens, or answers, by the ratio of trainer to sampler probability. Default with rollouts.max_staleness:
    token."""
    importance_cap: Positive = 2.0
    """The largest such weight."""
    max_sampler_trainer_logprob_diff: Positive | None = 0.2
    """Stop the run when the log-probs of sampler and trainer differ by more than this per token, on average. Of fresh
    tokens: in those that older weights have sampled, there is also what was learned since. null: never."""
    router_replay: bool = False
    """For mixtures: train with the experts that the sampler chose for each token, not with those that the trainer's
    routers would choose."""
    num_updates: PositiveInt = 1
    """Passes of a step over its samples."""
    minibatches: PositiveInt = 1
    """Optimizer steps that each pass is split into, by prompts."""
    reference: Literal["auto", "adapter_off", "copy", "none"] = "auto"
    """Where the reference's log-probs come from. adapter_off: the model without its LoRA adapters. copy: a frozen copy
    of the weights. auto: the cheapest that is right."""
    reference_sync_steps: PositiveInt | None = None
    """Move the reference towards the model in training every so many steps. null: never."""
    reference_mix: Share = 0.6
    """Weight of the model in training in each such move: 1 replaces the reference."""
    reward_procs: PositiveInt = 2
    """Processes that score answers."""
    reward_timeout_s: Positive = 10.0
    """Longest time to score one answer. One that takes longer is left out and counted."""
    keep_samples: NonNegativeInt = 100
    """The newest steps whose answers are kept in samples/."""

    @model_validator(mode="before")
    @classmethod
    def _current_names(cls, section: object) -> object:
        return rename_keys(section)

    @property
    def updates(self) -> int:
        """Optimizer steps of a step."""
        return self.num_updates * self.minibatches

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def reference_model(self) -> None:
        return None

    @property
    def loss(self) -> str:
        return self.advantage

    @model_validator(mode="after")
    def _applies(self) -> Self:
        for reward in self.reward:
            if reward.name not in REWARDS:
                known = f"use {', '.join(REWARDS)}, or write module:function"
                check_code_name(reward.name, "algorithm.reward", known)
        if self.environment is not None and self.environment not in ENVIRONMENTS:
            known = f"use {', '.join(ENVIRONMENTS)}, or write module:class"
            check_code_name(self.environment, "algorithm.environment", known)
        names = [reward.name for reward in self.reward]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"algorithm.reward names {name} twice: give each reward once")
        if "environment" in names and self.environment is None:
            raise ValueError("algorithm.reward environment needs an environment that gives it: set it, or remove one")
        if not any(reward.weight for reward in self.reward):
            raise ValueError("algorithm.reward has no weight but 0, so nothing would be learned: give one another")
        if self.group_size < 2 and self.advantage != "reinforce++":
            raise ValueError(
                f"algorithm.group_size 1 leaves nothing to compare with under advantage {self.advantage}: give at "
                "least 2"
            )
        if self.dual_clip is not None and self.objective != "clip":
            raise ValueError(f"algorithm.dual_clip is for objective clip, and this is {self.objective}: remove it")
        self._check_reference()
        return self

    def _check_reference(self) -> None:
        if self.needs_reference and self.reference == "none":
            raise ValueError("algorithm.reference is none, but kl_coefficient needs one: set auto")
        if not self.needs_reference and (self.reference not in ("auto", "none") or self.reference_sync_steps):
            key = "reference_sync_steps" if self.reference_sync_steps else "reference"
            raise ValueError(f"algorithm.{key} is given, but kl_coefficient is 0 and nothing is compared: remove it")
        if self.reference_sync_steps and self.reference not in ("auto", "copy"):
            raise ValueError(f"algorithm.reference_sync_steps needs reference copy, not {self.reference}")


class RolloutsConfig(Section):
    """Which processes sample, and how far sampling may run ahead of training."""

    engines: NonNegativeInt = 0
    """Processes that sample, besides those that train. 0: the processes that train also sample, between steps."""
    endpoint: str | None = None
    """Address of a server that samples instead, like http://localhost:8000. It must see the run directory, from which
    it loads the weights of every step."""
    kind: Literal["vllm", "sglang"] = "vllm"
    """What the server at endpoint is."""
    max_staleness: NonNegativeInt = 0
    """Most optimizer steps between the weights that sampled a token and the weights that are trained on it.
    0: sampling and training alternate. More: engines sample while the others train."""
    check_interval_s: Positive = 2.0
    """How often the health of each engine is checked."""
    deadline_s: Positive = 6.0
    """An engine that does not answer for so long is replaced."""
    start_timeout_s: Positive = 300.0
    """Longest time for an engine to load its model."""
    max_replacements: NonNegativeInt = 8
    """Engines that may be replaced in one run before it gives up."""
    threads: PositiveInt | None = None
    """Most prompts that are sampled at once. Default: as many as may be in flight."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Of the engines. auto: as launch.device."""

    @property
    def samples_elsewhere(self) -> bool:
        """Not in the processes that train."""
        return self.engines > 0 or self.endpoint is not None


def check_rollouts(rollouts: RolloutsConfig, algorithm: Section) -> None:
    """What the rollouts section requires of the algorithm."""
    if not isinstance(algorithm, GrpoConfig):
        if rollouts != RolloutsConfig():
            raise ValueError("rollouts is for algorithm grpo, which samples: remove it")
        return
    if rollouts.max_staleness and not rollouts.samples_elsewhere:
        raise ValueError(
            f"rollouts.max_staleness {rollouts.max_staleness} needs engines that sample while others train: set "
            "rollouts.engines, or max_staleness 0"
        )
    if rollouts.endpoint is not None:
        _check_endpoint(rollouts, algorithm)
    updates = algorithm.updates
    if 0 < rollouts.max_staleness < updates:
        raise ValueError(
            f"rollouts.max_staleness {rollouts.max_staleness} is less than the {updates} optimizer steps of a step "
            f"(algorithm.num_updates x minibatches), so nothing could be sampled ahead: give 0, or {updates} and more"
        )


def _check_endpoint(rollouts: RolloutsConfig, algorithm: GrpoConfig) -> None:
    if rollouts.engines:
        raise ValueError("rollouts has both engines and an endpoint: give one of them")
    if algorithm.router_replay:
        raise ValueError(
            "algorithm.router_replay needs a sampler that tells which experts it chose, and rollouts.endpoint does "
            "not: use rollouts.engines, or set it to false"
        )
    if rollouts.kind == "vllm" and algorithm.temperature != 1:
        raise ValueError(
            f"algorithm.temperature {algorithm.temperature:g} does not go with rollouts.kind vllm, which gives "
            "log-probs at 1: set it to 1"
        )


def with_importance_weighting(tree: object) -> object:
    """The default of importance_weighting where samples may come from older weights."""
    if not isinstance(tree, Mapping):
        return tree
    rollouts, algorithm = tree.get("rollouts"), rename_keys(tree.get("algorithm"))
    if not isinstance(rollouts, Mapping) or not isinstance(algorithm, Mapping) or "importance_weighting" in algorithm:
        return tree
    if algorithm.get("kind") not in ("grpo", *SHORT_GRPO) or rollouts.get("max_staleness") in (None, 0):
        return tree
    return {**tree, "algorithm": {**algorithm, "importance_weighting": "token"}}
