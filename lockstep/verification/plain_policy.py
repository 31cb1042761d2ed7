"""Learning from sampled answers: the loop's own `learn`, in the hands of which a backend is watched update by update;
and the plainest backend for it, with one pass for each answer and full logits.

Answers and rewards are made up. Must not know layouts or processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from lockstep.algorithms.losses import LOSSES
from lockstep.config import GrpoConfig, RunConfig
from lockstep.train.checkpoints import Progress
from lockstep.train.grpo import learn
from lockstep.types import Completion, Datum, Logprobs, LossResult, LossSpec, LossValues, OptimResult, OptimStep
from lockstep.verification.plain_loop import PlainAdamW, StepValues, target_logprobs, token_distributions
from lockstep.verification.plain_preference import copy_reference, mix_into, side_values, supervised, whole_inputs
from lockstep.verification.reduced import leave_reference
from lockstep.verification.sample import SampleBatch, as_groups

_MOST_UPDATES = 2  # of each sort: passes over the batch, and parts that it is cut into


@dataclass
class UpdateValues:
    """What one optimizer step came to. Log-probs are those from which the batch was begun, and of its first alone."""

    loss: float
    norm: float
    logprobs: list[float]
    reference_logprobs: list[float]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass
class RecordingBackend:
    """A backend as a loop sees it. `see` gives "gradients" or "weights", whole, by name; `step` takes the place of the
    loop's own.

    The log-probs from before the updates are given back moved, as if the model had learned since: otherwise ratios
    would all be 1, and neither they nor clipping would be seen.
    """

    backend: Any
    see: Callable[[str], dict[str, Tensor]]
    step: OptimStep | None = None
    updates: list[UpdateValues] = field(default_factory=list)
    _seen: dict[bool, list[float]] = field(default_factory=dict)
    _passed: tuple[LossResult, LossSpec, dict[str, Tensor]] | None = None

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> list[Logprobs]:
        found = self.backend.forward(batch, reference=reference)
        self._seen[reference] = supervised_logprobs(found, batch)
        return found if reference else [[_perturbed(own, i) for own in row] for i, row in enumerate(found)]

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult:
        if not self.updates and False not in self._seen:  # the loop had no need to ask
            self._seen[False] = supervised_logprobs(self.backend.forward(batch), batch)
        result = self.backend.forward_backward(batch, loss)
        self._passed = result, loss, self.see("gradients")
        return result

    def optim_step(self, step: OptimStep) -> OptimResult:
        assert self._passed is not None, "a step follows a pass"
        result, loss, gradients = self._passed
        optim: OptimResult = self.backend.optim_step(self.step or step)
        names = LOSSES[loss.kind].metrics(loss.options)
        self.updates.append(
            UpdateValues(
                result.loss,
                optim.grad_norm,
                self._seen.pop(False, []),
                self._seen.pop(True, []),
                {name: result.metrics[name] for name in names},
                gradients,
                self.see("weights"),
            )
        )
        return optim


def learn_groups(config: RunConfig, watched: RecordingBackend, rows: Sequence[Datum]) -> list[UpdateValues]:
    """Every update that the loop makes of these rows. All ranks."""
    assert isinstance(config.algorithm, GrpoConfig)
    changes = {name: min(getattr(config.algorithm, name), _MOST_UPDATES) for name in ("num_updates", "minibatches")}
    # Made-up answers are nobody's samples: their gap says nothing.
    algorithm = config.algorithm.model_copy(update={**changes, "max_sampler_trainer_logprob_diff": None})
    watched.updates = []
    learn(config, algorithm, cast(Any, watched), as_groups(rows), Progress(step=1), config.learning_rate)
    return watched.updates


def supervised_logprobs(logprobs: Sequence[Logprobs], batch: Sequence[Datum]) -> list[float]:
    """Row by row, those of the tokens that have a weight."""
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
    """A backend without any of what makes one fast. `kind` as in algorithm.reference, never auto."""

    def __init__(self, config: RunConfig, model: nn.Module, kind: str, optimizer: PlainAdamW) -> None:
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
            tuple(target_logprobs(self._every(model, datum, c), c).tolist() for c in datum.completions)
            for datum in batch
        ]

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult:
        answers = [(datum, completion) for datum in batch for completion in datum.completions]
        completions = [completion for _, completion in answers]
        every = [self._every(self._model, *answer) for answer in answers]
        logprobs = torch.cat([supervised(target_logprobs(d, c), c) for d, c in zip(every, completions, strict=True)])
        entropies = [supervised(-(d.exp() * d).sum(dim=-1), c) for d, c in zip(every, completions, strict=True)]
        values = {**side_values(completions), "entropies": torch.cat(entropies)}
        total, metrics = LOSSES[loss.kind].fn(logprobs, whole_inputs(completions, loss, values))
        total.backward()
        found = LossValues(float(total.detach()), {name: float(value) for name, value in metrics.items()})
        num_tokens = sum(datum.num_tokens for datum in batch)
        return LossResult(lambda: found, num_tokens=num_tokens, num_supervised=len(logprobs))

    def optim_step(self, step: OptimStep) -> OptimResult:
        norm = self._optimizer.apply()
        return OptimResult(lambda: norm)

    def mix_reference(self, share: float) -> None:
        assert self._reference is not None
        mix_into(self._reference, self._model, share)

    def _every(self, model: nn.Module, datum: Datum, completion: Completion) -> Tensor:
        return token_distributions(model, datum, completion, self._temperature)


def train_policy_plainly(
    config: RunConfig, model: nn.Module, taken: Sequence[SampleBatch], kind: str, optimizer: PlainAdamW
) -> list[StepValues]:
    """All updates on each batch."""
    assert isinstance(config.algorithm, GrpoConfig)
    plain = PlainPolicy(config, model, kind, optimizer)
    watched = RecordingBackend(plain, optimizer.see)
    found: list[StepValues] = []
    for number, part in enumerate(taken, start=1):
        for place, update in enumerate(learn_groups(config, watched, part.data), start=1):
            found.append(StepValues(part.names, part.cursor, where=update_name(number, place), **vars(update)))
        if number == 1 and config.algorithm.reference_sync_steps is not None:
            plain.mix_reference(config.algorithm.reference_mix)
    return found


def update_name(batch: int, update: int) -> str:
    return f"batch {batch}, update {update}"
