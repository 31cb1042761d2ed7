"""One step of a configuration on any number of ranks, without them: the real code, tensors without contents.

A few ranks stand for all: every pipeline stage, and along each other axis the first and the last. Each is simulated on
its own (fake_rank.py); what they say is compared, so that calls that would wait forever are found here.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from lockstep.algorithms.losses import lacks_reference
from lockstep.backend.batching import MicroBatchPlan, RankBatch
from lockstep.backend.build import Built
from lockstep.backend.loss_step import is_direct, metric_names
from lockstep.backend.optimizers import ADAMW, OptimizerSettings
from lockstep.backend.router_balance import RouterLosses
from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import ConfigError, DpoConfig, GrpoConfig, KtoConfig, RunConfig, SftConfig
from lockstep.config.parallel import AXES, Degrees
from lockstep.config.reference import choose_reference
from lockstep.model.load import build_model, load_hf_config
from lockstep.model.policy import Policy
from lockstep.model.vision import sees
from lockstep.parallel.collectives import Call, Mismatch, Record, find_mismatches
from lockstep.parallel.expected_traffic import Bytes, Sizes
from lockstep.parallel.group import ProcessGroup
from lockstep.processes.pool import WorkerPool
from lockstep.processes.worker import WorkerFailed
from lockstep.train.checkpoints import Progress
from lockstep.train.dpo import prepare
from lockstep.train.grpo import learn
from lockstep.train.reference import REFERENCE
from lockstep.train.steps import optim_step
from lockstep.types import Completion, Datum, Logprobs, LossResult, LossSpec, OptimResult, OptimStep
from lockstep.verification.assumed_routing import AssumedTrades, assume_choices, sharing_experts
from lockstep.verification.fake_rank import CPU, FakeRank, fake_rank
from lockstep.verification.reduced import build_reduced, choose_reduction
from lockstep.verification.sample import as_groups, total_weight

DEADLINE_S = 600.0  # of one rank
_PROBE_TOKENS = 64  # of the small copy's vocabulary
_PROBE_LAYERS = 2
OnProgress = Callable[[int, int], None]
Item = tuple[int, tuple[Any, ...]]  # a rank, and what it hears of rank 0


@dataclass(frozen=True)
class Findings:
    """How the model is called, as the checks before a run's first step find out: here on a small copy with numbers."""

    packs: bool
    attends_packed: bool
    enters_head: bool
    gives_positions: bool
    shares_prompts: bool
    loops: bool
    routes: bool
    """Whether it has routers of experts."""

    @classmethod
    def of(cls, policy: Policy) -> Findings:
        names = ("packs", "attends_packed", "enters_head", "gives_positions", "shares_prompts")
        return cls(
            **{name: getattr(policy, name) for name in names},
            loops=bool(policy.mixers.parts),
            routes=bool(policy.routers),
        )

    def apply(self, policy: Policy) -> None:
        while (policy.packs, policy.attends_packed) != (self.packs, self.attends_packed):
            assert policy.packs, "a model of the same class packs in the same way"
            policy.attend_more_plainly()
        policy.enters_head, policy.gives_positions = self.enters_head, self.gives_positions
        policy.shares_prompts = self.shares_prompts


class SimulatedBackend(TorchBackend):
    """Inside of `fake_rank`. It says what its tensors are for; checks that need numbers are made before."""

    def __init__(
        self,
        model: Any,
        fake: FakeRank,
        findings: Findings | None = None,
        *,
        tile_tokens: int = 1,
        imbalance: float = 1.0,
        **settings: Any,
    ) -> None:
        """`imbalance`: of experts, see `assume_choices`."""
        self._memory, self._findings, self._tile = fake.memory, findings, tile_tokens
        self.expected: Bytes = {}
        """What the formula says that the last step sends; nothing, where it does not know."""
        self._is_plain = settings.get("activation_checkpointing", "none") == "none"
        self._is_plain &= settings.get("optimizer", ADAMW).kind == "adamw"
        self._passes_taken: list[str] = []
        assume_choices(model, imbalance)
        super().__init__(model, compile=False, group=fake.group, **settings)
        self._trades = AssumedTrades(self.policy, self.group, imbalance)
        fake.recorder.arriving = self._trades.answer

    @property
    def sizes(self) -> Sizes | None:
        """Of what this rank has, by which the formula goes; None on one rank."""
        return None if self._expected is None else self._expected.sizes

    @property
    def _tile_tokens(self) -> int:
        return self._tile

    def _check_passes(self, built: Built) -> list[str]:
        if self._findings is not None:
            self._findings.apply(self.policy)
        return []

    def start_step(self) -> None:
        self.expected, self._passes_taken = {}, []

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> list[Logprobs]:
        self._passes_taken.append("forward")
        return super().forward(batch, reference=reference)

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult:
        self._memory.kind = "activations"
        self._loss = loss
        self._passes_taken.append("reference" if lacks_reference(loss, batch) else "backward")
        routed = self.policy.routers.empty_counts(CPU).flatten() if self.policy.routers else ()
        self._num_summed = 1 + len(metric_names(loss)) + len(self.traffic.facts()) + len(routed)
        result = super().forward_backward(batch, loss)
        self._memory.name_gradients([p.grad for p in self.parameters().values() if p.grad is not None])
        return result

    def _rank_batch(self, batch: Sequence[Datum], loss: LossSpec) -> RankBatch:
        mine = super()._rank_batch(batch, loss)
        if self.group.degrees.expert > 1:
            sharing = sharing_experts(self.group.data_rank, self.group.degrees)
            everybody = [self._num_tokens(self._plan(batch, rank)) for rank in sharing]
            read = [m.packed.counts for m in mine.micro_batches]
            self._trades.prepare(read, list(zip(*everybody, strict=True)))
        return mine

    def _num_tokens(self, plan: MicroBatchPlan) -> list[int]:
        """Of each micro-batch of some data rank, as `to_micro_batch` fills it up; where there is no row, two."""
        multiple = self._batches.multiple_of(plan)
        sizes = [sum(document.num_tokens for document in part) or 2 for part in plan.micro_batches]
        return [-(-size // multiple) * multiple // self.group.degrees.context for size in sizes]

    def _describe_traffic(self, rank_batch: RankBatch) -> Callable[[Sequence[float]], dict[str, float]]:
        packs = [m.packed for m in rank_batch.micro_batches]
        num_tokens, num_targets = [len(p.tokens) for p in packs], sum(len(p.targets) for p in packs)
        self.expected = {}
        if self._expected is not None and self._formula_holds(rank_batch):
            routed = self._trades.count(), self._trades.weight_bytes
            self.expected = self._expected.exact(num_tokens, num_targets, self._num_summed, *routed)
        return super()._describe_traffic(rank_batch)

    def _formula_holds(self, rank_batch: RankBatch) -> bool:
        """One pass for each micro-batch and nothing else."""
        passes = is_direct(self._loss, rank_batch, self.group.degrees.context) and self._passes_taken == ["backward"]
        return self._is_plain and passes and not self._counts_first(rank_batch, self._loss, self.group.degrees.context)

    def optim_step(self, step: OptimStep) -> OptimResult:
        self._memory.kind = "optimizer"
        result = super().optim_step(step)
        self._memory.see(value for state in self._optimizer.state.values() for value in state.values())
        return result


@dataclass(frozen=True)
class SimulatedRank:
    """What is known of one rank. `expected`: what the formula says that it sends, by (axis, kind)."""

    record: Record
    place: dict[str, int]
    peak_bytes: dict[str, int]
    expected: Bytes
    seconds: float
    heard: tuple[Any, ...] = ()

    @property
    def rank(self) -> int:
        return self.record.rank


@dataclass(frozen=True)
class Simulation:
    """The result of `simulate`. `notes` say how it differs from a run."""

    model: str
    degrees: Degrees
    precision: str
    ranks: list[SimulatedRank]
    mismatches: list[Mismatch]
    num_rows: int
    num_tokens: int
    seconds: float
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.mismatches


@dataclass(frozen=True)
class SimulatedStep:
    """The step of a configuration, as any rank of `degrees` makes it. Sent to the processes that simulate."""

    config: RunConfig
    degrees: Degrees
    precision: str
    findings: Findings
    reference: str
    tile_tokens: int
    expert_imbalance: float = 1.0

    def prepare(self) -> Callable[[Item], SimulatedRank]:
        torch.set_num_threads(1)
        return lambda item: self.simulate(*item)

    def simulate(self, rank: int, heard_before: tuple[object, ...] = ()) -> SimulatedRank:
        """`heard_before`: what rank 0 says to all, of a rank 0 that was simulated before."""
        started, heard = time.monotonic(), list(heard_before)
        with refusing_decisions(), fake_rank(rank, self.degrees, heard) as fake:
            backend = self._build(fake)
            # The second step is like all that follow: the optimizer has its state, and stages know their shapes.
            for _ in range(2):
                gc.collect()  # layers of other stages are garbage by now
                fake.recorder.end_step()
                fake.memory.start_step()
                self._take(backend)
            record = fake.recorder.end_step()
            place = {axis: fake.group.place(axis) for axis in AXES}
        peak = {kind: size for kind, size in sorted(fake.memory.peak.items()) if size}
        return SimulatedRank(record, place, peak, backend.expected, time.monotonic() - started, tuple(heard))

    def _build(self, fake: FakeRank) -> SimulatedBackend:
        config = self.config
        model = build_model(config.model, config.lora, self.precision, with_weights=False)
        return SimulatedBackend(
            model,
            fake,
            self.findings,
            micro_batch_tokens=config.batch.micro_batch_tokens,
            precision=self.precision,
            parallel=config.parallel,
            activation_checkpointing=config.model.activation_checkpointing,
            activation_offload=config.model.activation_offload,
            logits_gib=config.model.logits_gib,
            reference=self.reference if self.reference != "precomputed" else "none",
            router_losses=RouterLosses.of(config.model),
            temperature=getattr(config.algorithm, "temperature", 1.0),
            seed=config.seed,
            optimizer=OptimizerSettings.of(config),
            router_replay=config.router_replay,
            tile_tokens=self.tile_tokens,
            imbalance=self.expert_imbalance,
        )

    def _take(self, backend: SimulatedBackend) -> None:
        """As the loop of the algorithm does."""
        backend.start_step()
        config, algorithm = self.config, self.config.algorithm
        rows = make_rows(config, with_reference=self.reference == "precomputed")
        batch: Sequence[Datum] = rows
        if isinstance(algorithm, GrpoConfig):
            unchecked = algorithm.model_copy(update={"max_sampler_trainer_logprob_diff": None})
            learn(config, unchecked, backend, as_groups(rows), Progress(step=1), config.learning_rate)
            return
        if isinstance(algorithm, SftConfig):
            loss = LossSpec("cross_entropy", scale=1.0 / total_weight(rows))
        else:
            batch, loss = prepare(config, backend, rows)
        backend.forward_backward(batch, loss)
        backend.optim_step(optim_step(config, config.learning_rate))


@contextlib.contextmanager
def refusing_decisions() -> Iterator[None]:
    """What a model decides by the values of tensors cannot be known."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"this model decides by the values of its tensors ({error}), as routers of experts do: a simulation has no "
            "values. Use 'lockstep verify', which computes a small copy"
        ) from error


def simulate(
    config: RunConfig,
    num_ranks: int,
    *,
    ranks: Sequence[int] | None = None,
    expert_imbalance: float = 1.0,
    num_processes: int = 2,
    on_progress: OnProgress = lambda done, total: None,
) -> Simulation:
    """`ranks`: those to simulate, with some that they talk to; default: `choose_ranks`. `expert_imbalance`: how many
    times its share of tokens an expert gets that many choose. Raises ConfigError for what cannot be.

    `num_processes` 0: in this one.
    """
    started = time.monotonic()
    step = plan_step(config, num_ranks, expert_imbalance)
    chosen = choose_ranks(step.degrees) if ranks is None else add_partners(step.degrees, ranks)
    wanted = sorted({0, *chosen})
    found: list[SimulatedRank] = []
    said: dict[Call, Call] = {}
    with _explaining(), _started(step, num_processes) as run:
        heard: tuple[object, ...] = ()
        for batch in (wanted[:1], wanted[1:]):  # what rank 0 says to all, the others hear
            for result in run((rank, heard) for rank in batch):
                result.record.share(said)
                found.append(result)
                on_progress(len(found), len(wanted))
            heard = found[0].heard
    rows = make_rows(config)
    num_tokens = sum(len(row.prompt) + sum(len(c.tokens) for c in row.completions) for row in rows)
    return Simulation(
        load_hf_config(config.model).model_type,
        step.degrees,
        step.precision,
        found,
        find_mismatches([one.record for one in found]),
        len(rows),
        num_tokens,
        time.monotonic() - started,
        list(_notes(config, step)),
    )


@contextlib.contextmanager
def _started(step: SimulatedStep, num_processes: int) -> Iterator[Callable[[Iterable[Item]], Iterator[SimulatedRank]]]:
    if not num_processes:
        yield lambda items: map(step.prepare(), items)
        return
    with WorkerPool("simulated rank", step, num_processes, timeout_s=DEADLINE_S) as pool:
        yield pool.map


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    """A user's mistake is the same whichever process notices it."""
    try:
        yield
    except WorkerFailed as error:
        if error.kind in ("ValueError", "ConfigError"):
            raise ConfigError(error.reason) from None
        raise


def plan_step(config: RunConfig, num_ranks: int, expert_imbalance: float = 1.0) -> SimulatedStep:
    """What the ranks must know before, found with numbers on a small copy of the model."""
    if config.parallel.backend != "torch":
        raise ConfigError("a simulation is of parallel.backend torch: DeepSpeed's ranks cannot be simulated")
    if sees(load_hf_config(config.model), config.model.vision):
        raise ConfigError(
            "a model that sees images is not simulated: what its rows show is not known. A simulation of its language "
            "model alone takes that model's own configuration as model.path"
        )
    degrees = config.parallel.degrees(num_ranks, _ranks_per_machine(config, num_ranks))
    num_rows = len(make_rows(config))
    if num_rows < degrees.data:
        raise ConfigError(
            f"a batch has {num_rows} rows, and {degrees.data} ranks have rows of their own: raise batch.samples (or "
            "batch.tokens) or lower parallel.replicate and parallel.shard"
        )
    on_gpu = config.launch.device != "cpu"
    precision = config.model.precision
    if precision == "auto":
        precision = "bf16" if on_gpu else "fp32"
    config.parallel.check_precision(precision)
    choice = choose_reference(config, num_rows=num_rows, num_seen=num_rows)
    tile = 128 if on_gpu else 1
    return SimulatedStep(config, degrees, precision, probe(config), choice.kind, tile, expert_imbalance)


def _ranks_per_machine(config: RunConfig, num_ranks: int) -> int:
    """As many as launch says."""
    own = getattr(config.launch, "procs_per_node", None) or config.launch.procs
    return min(own if own > 1 else num_ranks, num_ranks)


def probe(config: RunConfig) -> Findings:
    reduction = choose_reduction(config, list(range(_PROBE_TOKENS)), _PROBE_LAYERS)
    model = build_reduced(config, reduction)
    backend = TorchBackend(model, precision="fp64", group=ProcessGroup(0, 1, CPU), compile=False)
    return Findings.of(backend.policy)


def choose_ranks(degrees: Degrees) -> list[int]:
    """Every stage; of the first and the last one also the last rank of each other axis."""
    others = [axis for axis in AXES if axis != "pipeline" and getattr(degrees, axis) > 1]
    chosen = {_rank_at(degrees, {"pipeline": stage}) for stage in range(degrees.pipeline)}
    for stage in {0, degrees.pipeline - 1}:
        chosen |= {_rank_at(degrees, {"pipeline": stage, axis: getattr(degrees, axis) - 1}) for axis in others}
    return sorted(chosen)


def add_partners(degrees: Degrees, ranks: Iterable[int]) -> list[int]:
    """With ranks that each of these talks to: two of every axis, where it has as many, so that of three that do not all
    say the same the odd one is known; of stages, the ones before and after."""
    found: set[int] = set()
    for rank in ranks:
        if not 0 <= rank < degrees.num_ranks:
            raise ConfigError(f"there is no rank {rank} of {degrees.num_ranks:,}: they are counted from 0")
        place = _place_of(degrees, rank)
        found.add(rank)
        for axis, own in place.items():
            others = [i for i in (0, own - 1, own + 1, getattr(degrees, axis) - 1) if i != own]
            if axis == "pipeline":
                others = [own - 1, own + 1]
            near = [i for i in dict.fromkeys(others) if 0 <= i < getattr(degrees, axis)][:2]
            found |= {_rank_at(degrees, place | {axis: i}) for i in near}
    return sorted(found)


def _place_of(degrees: Degrees, rank: int) -> dict[str, int]:
    place = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, getattr(degrees, axis))
    return place


def _rank_at(degrees: Degrees, place: dict[str, int]) -> int:
    rank = 0
    for axis in AXES:
        rank = rank * getattr(degrees, axis) + place.get(axis, 0)
    return rank


def _notes(config: RunConfig, step: SimulatedStep) -> Iterator[str]:
    longest = config.data.max_length
    yield f"rows are made up: {longest // 4:,} to {longest:,} tokens, of which a third is prompt"
    yield "layers are not compiled and attention is the CPU's: a GPU's own workspaces are not counted"
    if step.findings.routes:
        most = f", but the first few {step.expert_imbalance:g} times their share" if step.expert_imbalance > 1 else ""
        yield f"tokens are taken to choose all experts equally often{most}: what they would choose is not known"
    if step.findings.loops:
        yield "parts of this model compute documents one after another, here all at once: activations may differ"
    if step.reference == "precomputed":
        yield "the reference's log-probs are taken as computed before"


# --- rows -------------------------------------------------------------------------------------------------------------


def make_rows(config: RunConfig, *, with_reference: bool = False) -> list[Datum]:
    """A batch of made-up rows: as many as the configuration takes in a step, of lengths up to data.max_length."""
    draw = random.Random(config.seed)
    longest = config.data.max_length
    rows: list[Datum] = []
    wanted, tokens_left = config.batch.samples_per_step, config.batch.tokens
    while len(rows) < wanted if wanted is not None else (tokens_left or 0) > 0:
        length = draw.randint(max(longest // 4, 4), max(longest, 4))
        prompt = [1] * max(length // 3, 1)
        completions = [_completion(config, draw, length - len(prompt), i) for i in range(_num_answers(config))]
        if with_reference:
            completions = [replace(c, values={**c.values, REFERENCE: [-1.0] * len(c.tokens)}) for c in completions]
        row = Datum(prompt, completions, f"row {len(rows)}")
        num_tokens = len(prompt) + sum(len(c.tokens) for c in completions)
        if tokens_left is not None and rows and num_tokens > tokens_left:
            break
        tokens_left = None if tokens_left is None else tokens_left - num_tokens
        rows.append(row)
    return rows


def _num_answers(config: RunConfig) -> int:
    algorithm = config.algorithm
    if isinstance(algorithm, GrpoConfig):
        return algorithm.group_size
    return 2 if isinstance(algorithm, DpoConfig) else 1


def _completion(config: RunConfig, draw: random.Random, longest: int, number: int) -> Completion:
    algorithm = config.algorithm
    length = longest
    values: dict[str, list[float]] = {}
    if isinstance(algorithm, GrpoConfig):
        length = draw.randint(max(algorithm.max_tokens // 4, 1), algorithm.max_tokens)
        facts = {"behaviour_logprobs": -1.0, "reward": float(number % 2), "truncated": 0.0, "reward_failed": 0.0}
        values = {name: [value] * length for name, value in facts.items()}
    elif isinstance(algorithm, DpoConfig) and number:
        length = draw.randint(max(longest // 2, 1), longest)
    elif isinstance(algorithm, KtoConfig):
        values = {"label": [float(draw.random() < 0.5)] * length}
    return Completion([1] * length, [1.0] * length, values)
