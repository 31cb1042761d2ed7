"""Training on sampled answers: the loop's own `learn` on a backend that records every update, and a plain backend with
one forward per answer and full logits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.algorithms.losses import LOSSES
from lockstep.config import GrpoConfig, RunConfig
from lockstep.model.replay import RoutingRows
from lockstep.train.checkpoints import Progress
from lockstep.train.grpo import learn
from lockstep.types import Completion, Datum, Logprobs, LossResult, LossSpec, LossValues, OptimResult, OptimStep
from lockstep.verification.plain_loop import StepValues, target_logprobs, token_distributions
from lockstep.verification.plain_optimizers import PlainOptimizer, step_number
from lockstep.verification.plain_preference import copy_reference, mix_into, side_values, supervised, whole_inputs
from lockstep.verification.reduced import leave_reference
from lockstep.verification.sample import SampleBatch, add_routing, as_groups

_MOST_UPDATES = 2  # of each kind: passes over the batch, and minibatches


@dataclass
class UpdateValues:
    """Of one optimizer step. Log-probs are from before the updates of a batch, and given for its first update only."""

    loss: float
    norm: float
    logprobs: list[float]
    reference_logprobs: list[float]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass
class RecordingBackend:
    """A backend that records every update of a loop. `snapshot` returns whole "gradients" or "weights" by name; `step`
    replaces the loop's own.

    The log-probs from before the updates are returned shifted, as if the model had been trained since: otherwise all
    ratios would be 1, and neither ratios nor clipping would be tested.
    """

    backend: Any
    snapshot: Callable[[str], dict[str, Tensor]]
    step: OptimStep | None = None
    num_before: int = 0  # updates of earlier batches
    updates: list[UpdateValues] = field(default_factory=list)
    logprobs: dict[bool, list[float]] = field(default_factory=dict)
    _last_pass: tuple[LossResult, LossSpec, dict[str, Tensor]] | None = None

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> list[Logprobs]:
        logprobs = self.backend.forward(batch, reference=reference)
        self.logprobs[reference] = supervised_logprobs(logprobs, batch)
        return logprobs if reference else [[_perturbed(own, i) for own in row] for i, row in enumerate(logprobs)]

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult:
        if not self.updates and False not in self.logprobs:  # the loop did not need them
            self.logprobs[False] = supervised_logprobs(self.backend.forward(batch), batch)
        result = self.backend.forward_backward(batch, loss)
        self._last_pass = result, loss, self.snapshot("gradients")
        return result

    def optim_step(self, step: OptimStep) -> OptimResult:
        assert self._last_pass is not None, "a step follows a pass"
        result, loss, gradients = self._last_pass
        if self.step is not None:
            step = step_number(self.step, self.num_before + len(self.updates) + 1)
        optim: OptimResult = self.backend.optim_step(step)
        names = LOSSES[loss.kind].metrics(loss.options)
        self.updates.append(
            UpdateValues(
                result.loss,
                optim.grad_norm,
                self.logprobs.pop(False, []),
                self.logprobs.pop(True, []),
                {name: result.metrics[name] for name in names},
                gradients,
                self.snapshot("weights"),
            )
        )
        return optim


def learn_groups(config: RunConfig, recorder: RecordingBackend, rows: Sequence[Datum]) -> list[UpdateValues]:
    """Every update that the loop makes with these rows. All ranks."""
    assert isinstance(config.algorithm, GrpoConfig)
    changes = {name: min(getattr(config.algorithm, name), _MOST_UPDATES) for name in ("num_updates", "minibatches")}
    # Made-up answers have made-up sampler log-probs: their difference from the trainer means nothing.
    algorithm = config.algorithm.model_copy(update={**changes, "max_sampler_trainer_logprob_diff": None})
    recorder.updates = []
    learn(config, algorithm, cast(Any, recorder), as_groups(rows), Progress(step=1), config.learning_rate)
    return recorder.updates


def give_routing(config: RunConfig, model: nn.Module, rows: Sequence[Datum]) -> list[Datum]:
    """With the experts of a sampler, where the configuration replays them. `model` is a whole one."""
    if not getattr(config.algorithm, "router_replay", False):
        return list(rows)
    written = RoutingRows(model)
    return add_routing(rows, written.num_routers, written.num_experts, written.top_k)


def supervised_logprobs(logprobs: Sequence[Logprobs], batch: Sequence[Datum]) -> list[float]:
    """Of the target tokens, row by row."""
    return [
        value
        for datum, row in zip(batch, logprobs, strict=True)
        for completion, values in zip(datum.completions, row, strict=True)
        for weight, value in zip(completion.weights, values, strict=True)
        if weight
    ]


def _perturbed(logprobs: Sequence[float], row: int) -> list[float]:
    return [value + 0.4 * math.sin(1 + 5 * row + 3 * place) if value else value for place, value in enumerate(logprobs)]


class PlainPolicy:
    """A backend without any optimisation. `kind` as in algorithm.reference, never auto."""

    def __init__(self, config: RunConfig, model: nn.Module, kind: str, optimizer: PlainOptimizer) -> None:
        assert isinstance(config.algorithm, GrpoConfig)
        self._temperature = config.algorithm.temperature
        self._model, self._optimizer = model, optimizer
        self._reference = None if kind == "none" else copy_reference(model, kind, config)
        if kind != "none":
            leave_reference(p.data for p in model.parameters() if p.requires_grad)

    @torch.no_grad()
    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> list[Logprobs]:
        model = self._reference if reference else self._model
        assert model is not None
        return [
            tuple(target_logprobs(self._distributions(model, datum, c), c).tolist() for c in datum.completions)
            for datum in batch
        ]

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult:
        answers = [(datum, completion) for datum in batch for completion in datum.completions]
        completions = [completion for _, completion in answers]
        every = [self._distributions(self._model, *answer) for answer in answers]
        logprobs = torch.cat([supervised(target_logprobs(d, c), c) for d, c in zip(every, completions, strict=True)])
        entropies = [supervised(-(d.exp() * d).sum(dim=-1), c) for d, c in zip(every, completions, strict=True)]
        values = {**side_values(completions), "entropies": torch.cat(entropies)}
        total, metrics = LOSSES[loss.kind].fn(logprobs, whole_inputs(completions, loss, values))
        total.backward()
        sums = LossValues(float(total.detach()), {name: float(value) for name, value in metrics.items()})
        num_tokens = sum(datum.num_tokens for datum in batch)
        return LossResult(lambda: sums, num_tokens=num_tokens, num_supervised=len(logprobs))

    def optim_step(self, step: OptimStep) -> OptimResult:
        norm = self._optimizer.apply()
        return OptimResult(lambda: norm)

    def mix_reference(self, share: float) -> None:
        assert self._reference is not None
        mix_into(self._reference, self._model, share)

    def _distributions(self, model: nn.Module, datum: Datum, completion: Completion) -> Tensor:
        replays = completion.routing and model is self._model  # a reference chooses by itself
        with given_experts(model, completion.routing) if replays else contextlib.nullcontext():
            return token_distributions(model, datum, completion, self._temperature)


@contextlib.contextmanager
def given_experts(model: nn.Module, routing: bytes) -> Iterator[None]:
    """Around a pass over one text: routers, which are called one after another, find these experts the likeliest."""
    written, honest = RoutingRows(model), torch.topk
    numbers = np.frombuffer(routing, np.uint8 if written.num_experts < 255 else np.int16)
    every = torch.from_numpy(numbers.astype(np.int64).reshape(-1, written.num_routers, written.top_k))
    left = list(every.unbind(1))

    def topk(scores: Tensor, k: int, *arguments: Any, **options: Any) -> object:
        found = honest(scores, k, *arguments, **options)
        if k != written.top_k or scores.shape != (len(every) + 1, written.num_experts):
            return found
        indices = torch.cat([left.pop(0), found.indices[-1:]])  # the last token has no row
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    torch.topk = topk  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.topk = honest
    if left:
        raise ValueError(f"{len(left)} routers do not choose experts with torch.topk: set router_replay to false")


def run_plain_policy(
    config: RunConfig, model: nn.Module, batches: Sequence[SampleBatch], kind: str, optimizer: PlainOptimizer
) -> list[StepValues]:
    """All updates on each batch."""
    assert isinstance(config.algorithm, GrpoConfig)
    plain = PlainPolicy(config, model, kind, optimizer)
    recorder = RecordingBackend(plain, optimizer.snapshot)
    steps: list[StepValues] = []
    for number, batch in enumerate(batches, start=1):
        rows = give_routing(config, model, batch.data)
        for place, update in enumerate(learn_groups(config, recorder, rows), start=1):
            steps.append(StepValues(batch.names, batch.cursor, where=update_name(number, place), **vars(update)))
        if number == 1 and config.algorithm.reference_sync_steps is not None:
            plain.mix_reference(config.algorithm.reference_mix)
    return steps


def update_name(batch: int, update: int) -> str:
    return f"batch {batch}, update {update}"
