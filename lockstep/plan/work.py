"""What a plan is made for: how ranks share the work, what a step has to compute, and how. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lockstep.config.parallel import Degrees


@dataclass(frozen=True)
class RankLayout:
    """See config.ParallelConfig. `ranks_per_node`: neighbours in rank share a node."""

    degrees: Degrees
    ranks_per_node: int = 8
    keep_parameters: bool = False
    prefetch: int = 1
    offload: bool = False
    schedule: str = "1f1b"

    @property
    def sharding_ranks(self) -> int:
        """Over which FSDP2 splits parameters: those of the context axis count."""
        return self.degrees.shard * self.degrees.context if self.degrees.sharded else 1

    @property
    def expert_sharding_ranks(self) -> int:
        """The same of experts that are divided over ranks: those that have the same ones."""
        degrees = self.degrees
        return self.sharding_ranks // (degrees.expert if degrees.expert_axis == "shard" else 1)

    def expert_place(self, place: int) -> int:
        """Among those, of the rank at `place` of the ranks that shard."""
        if self.degrees.expert_axis != "shard":
            return place
        shard, context = divmod(place, self.degrees.context)
        return shard // self.degrees.expert * self.degrees.context + context

    def __str__(self) -> str:
        named = self.degrees.name
        flags = [name for name in ("keep_parameters", "offload") if getattr(self, name)]
        schedule = [self.schedule] if self.degrees.pipeline > 1 else []
        return ", ".join([named, *schedule, *flags])


@dataclass(frozen=True)
class Sampling:
    """Of one step, by this rank: answers to prompts, decoded together."""

    sequences: int
    prompt_tokens: int
    new_tokens: int
    prompts: int
    colocated: bool = True
    """By the model in training; otherwise by an engine of its own."""
    engines: int = 0
    """That have GPUs of their own."""
    shards: int = 1
    """Ranks that hold the model together, and decode the same sequences."""


@dataclass(frozen=True)
class Workload:
    """One step of one rank. Sizes are of a micro-batch, before context ranks share its tokens.

    `pairs`: of a token and one that it attends to. `texts`: documents in it.
    """

    micro_batches: int
    tokens: int
    targets: int
    pairs: float
    texts: float = 1.0
    keys: int = 0
    """Tokens that are attended to: a prompt counts once for each of its answers. 0: as many as tokens."""
    linear: bool = True
    """The gradient for each log-prob is known before the pass, as in SFT."""
    reference: str = "none"
    """copy: a second set of weights; adapter_off: the frozen base."""
    reference_passes: int = 0
    """Forward passes of the reference, for each micro-batch of a step."""
    extra_forwards: int = 0
    """Passes without gradient that the loss needs first."""
    updates: int = 1
    """Passes with gradient over the same rows, in one step."""
    optimizer_steps: int = 1
    sampling: Sampling | None = None
    step_tokens: int = 0
    """Of the whole step, over all ranks."""
    peak_tokens: int = 0
    """Of the largest micro-batch; 0: they are alike."""

    @property
    def largest(self) -> Workload:
        """With every micro-batch as large as the largest: what memory must hold."""
        if self.peak_tokens <= self.tokens:
            return self
        share = self.peak_tokens / max(self.tokens, 1)
        return replace(
            self,
            tokens=self.peak_tokens,
            pairs=self.pairs * share,
            texts=self.texts * share,
            targets=int(self.targets * share),
            keys=int(self.keys * share),
        )

    @property
    def mean_length(self) -> float:
        return self.tokens / max(self.texts, 1e-9)


@dataclass(frozen=True)
class Options:
    """How a rank computes."""

    device: str = "cuda"
    logits_gib: float = 2.5
    activation_offload: bool = False
    checkpoint_in_background: bool = False
    compression: str = "none"
    optimizer: str = "adamw"
    """As optim.kind."""
    device_gib: float = math.inf
    """Of the device: a cache that would take more than half of what is free holds fewer sequences at once."""


@dataclass(frozen=True)
class StepRows:
    """What a step learns from, whatever the layout. `assumed`: what of it was not measured on the data, in words."""

    step_tokens: int
    longest: int
    mean_length: float
    targets_share: float = 1.0
    pairs_per_token: float = 0.0
    """Tokens that one attends to, on average."""
    keys_per_token: float = 1.0
    linear: bool = True
    reference: str = "none"
    reference_passes: int = 0
    reference_is_assumed: bool = False
    """It depends on the number of rows, which is not known."""
    extra_forwards: int = 0
    updates: int = 1
    optimizer_steps: int = 1
    sampling: Sampling | None = None
    steps: int | None = None
    precomputed_steps: float = 0.0
    """Steps' worth of rows of which a reference is computed before the first step."""
    assumed: str = ""

    def work(self, layout: RankLayout, budget: int, multiple_of: int = 128) -> Workload:
        """Of one rank, with `budget` tokens in each micro-batch (batch.micro_batch_tokens)."""
        degrees = layout.degrees
        room = budget * degrees.context
        mine = -(-self.step_tokens // degrees.data)
        if self.longest <= self.mean_length * 1.01:  # alike: as many as fit
            fullness = max(room // self.longest, 1) * self.longest / max(room, self.longest)
        else:  # packed longest first: about half a short one is left empty
            fullness = max(1.0 - 0.25 * self.mean_length / room, 0.5)
        count = max(1, -(-mine // int(room * fullness)) if mine > room else 1)
        tokens = min(-(-mine // count), room)
        padded = -(-tokens // multiple_of) * multiple_of
        sampling = self.sampling
        if sampling is not None:
            # Ranks that hold one model together all decode what is sampled from it.
            ranks = degrees.replicas if sampling.colocated else 1
            sequences, prompts = -(-sampling.sequences // ranks), -(-sampling.prompts // ranks)
            shards = degrees.num_ranks // ranks if sampling.colocated else 1
            sampling = replace(sampling, sequences=sequences, prompts=prompts, shards=shards)
        return Workload(
            micro_batches=count,
            tokens=padded,
            targets=int(tokens * self.targets_share),
            pairs=tokens * (self.pairs_per_token or self.mean_length / 2),
            texts=tokens / max(self.mean_length, 1.0),
            keys=int(padded * self.keys_per_token),
            linear=self.linear,
            reference=self.reference,
            reference_passes=self.reference_passes,
            extra_forwards=self.extra_forwards,
            updates=self.updates,
            optimizer_steps=self.optimizer_steps,
            sampling=sampling,
            step_tokens=self.step_tokens,
            peak_tokens=min(room, max(padded, self.longest)) if count > 1 else padded,
        )
