"""From rows of preferences to batches of a loss and its options: pure functions and views of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, overload

import numpy as np
import numpy.typing as npt

from lockstep.config import ConfigError, DpoConfig, KtoConfig, RunConfig
from lockstep.data.columns import Rows
from lockstep.data.dataset import CompiledData
from lockstep.types import Completion, Datum, Metrics


def discount_length(pairs: Sequence[Datum], ld_alpha: float) -> list[Datum]:
    """Tokens by which one answer of a pair is longer than the other count `ld_alpha` times."""
    if ld_alpha == 1:
        return list(pairs)
    discounted = []
    for pair in pairs:
        weights = [np.array(completion.weights, dtype=np.float32) for completion in pair.completions]
        shared = min(int(np.count_nonzero(own)) for own in weights)
        for own in weights:
            own[np.flatnonzero(own)[shared:]] *= ld_alpha
        completions = [
            replace(c, weights=cast(Sequence[float], own)) for c, own in zip(pair.completions, weights, strict=True)
        ]
        discounted.append(replace(pair, completions=completions))
    return discounted


def count_supervised(completion: Completion) -> int:
    return int(np.count_nonzero(completion.weights))


def count_chosen_tokens(pairs: Sequence[Datum]) -> int:
    """Supervised tokens of the preferred answers."""
    return sum(count_supervised(pair.completions[0]) for pair in pairs)


def count_padded_tokens(batch: Sequence[Datum]) -> int:
    """Tokens of the batch with the prompt repeated for each answer, and all padded to the longest."""
    lengths = [len(datum.prompt) + len(c.tokens) for datum in batch for c in datum.completions]
    return len(lengths) * max(lengths)


def mismatch(rows: Sequence[Datum], max_length: int) -> list[Datum]:
    """Each prompt with the answer to another prompt of the batch, if there is one; a prompt loses its start to fit.

    The log-ratio of such answers estimates the KL of the model from its reference.
    """
    prompts = [tuple(int(token) for token in row.prompt) for row in rows]
    mismatched = []
    for i, row in enumerate(rows):
        others = (j % len(rows) for j in range(i + 1, i + len(rows)))
        partner = next((j for j in others if prompts[j] != prompts[i]), None)
        if partner is None:
            continue
        (answer,) = rows[partner].completions
        max_prompt = max(max_length - len(answer.tokens), 1)
        # Without values such as a reference's log-probs: these are of the answer behind its own prompt.
        mismatched.append(Datum(row.prompt[-max_prompt:], [Completion(answer.tokens, answer.weights)], row.origin))
    return mismatched


class AsLabelled(Sequence[Datum]):
    """Every pair as two rows: the preferred answer with label 1, the other with label 0."""

    def __init__(self, pairs: Rows) -> None:
        """`pairs` are compiled rows, with a digest and columns."""
        self._pairs = pairs

    def __len__(self) -> int:
        return 2 * len(self._pairs)

    @overload
    def __getitem__(self, place: int) -> Datum: ...
    @overload
    def __getitem__(self, place: slice) -> list[Datum]: ...
    def __getitem__(self, place: int | slice) -> Datum | list[Datum]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(f"row {place} of {len(self)}")
        number, side = divmod(int(place) % len(self), 2)
        pair: Datum = self._pairs[number]
        answer = pair.completions[side]
        label = np.full(len(answer.tokens), 1 - side, dtype=np.float32)
        return Datum(pair.prompt, [replace(answer, values={"label": cast(Sequence[float], label)})], pair.origin)

    def __iter__(self) -> Iterator[Datum]:
        return (self[i] for i in range(len(self)))

    @property
    def digest(self) -> str:
        return f"labelled {self._pairs.digest}"

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        pieces = np.asarray(self._pairs.column("pieces"), dtype=np.int64)
        return (pieces[:, :1] + pieces[:, 1:]).reshape(-1)


_NAMES = {
    "answers": "answers",
    "pairs": "preference pairs",
    "labelled": "answers with a label (unpaired preferences)",
}
_WANTED = {"sft": ("answers",), "dpo": ("pairs",), "kto": ("labelled", "pairs")}
_REMEDIES = {
    ("sft", "pairs"): "set algorithm.kind to dpo; or, to learn only the preferred ones, set data.format to "
    "prompt_completion and data.columns to {completion: chosen}",
    ("sft", "labelled"): "set algorithm.kind to kto; or, to learn all answers whatever their label, set data.format to "
    "what the rows are without it",
    ("dpo", "answers"): "give rows with chosen and rejected, or set algorithm.kind to sft",
    ("dpo", "labelled"): "set algorithm.kind to kto, or give rows with chosen and rejected",
    ("kto", "answers"): "give rows with a label (true or false), or set algorithm.kind to sft",
}
_LEARNS = {"sft": "learns answers", "dpo": "learns from pairs", "kto": "learns from labels"}


@dataclass(frozen=True)
class RowsToLearn:
    """Rows as the loop takes them. Kto takes pairs as well: each as two labelled rows."""

    train: Any
    validation: Any


def rows_to_learn(config: RunConfig, data: CompiledData) -> RowsToLearn:
    """Raises if the data holds rows of another kind than the algorithm learns from."""
    kind = config.algorithm.kind
    if kind == "grpo":
        raise ConfigError("grpo samples its answers itself: its data has no rows of answers")
    if data.kind not in _WANTED[kind]:
        raise ConfigError(
            f"data.train holds {_NAMES[data.kind]}, and algorithm.kind {kind} {_LEARNS[kind]}: "
            f"{_REMEDIES[kind, data.kind]}"
        )
    if kind == "kto" and data.kind == "pairs":
        return RowsToLearn(AsLabelled(data.train), AsLabelled(data.validation))
    return RowsToLearn(data.train, data.validation)


def row_warnings(config: RunConfig, data: CompiledData) -> list[str]:
    """Warnings about these rows that depend on the algorithm."""
    warnings = []
    budget = config.batch.micro_batch_tokens * config.parallel.context
    if data.kind == "pairs" and config.algorithm.kind == "dpo":
        totals = data.train.column("pieces").sum(axis=1, dtype=np.int64)
        if count := int((totals > budget).sum()):
            warnings.append(
                f"{count:,} of {len(totals):,} pairs have more than {budget:,} tokens with both answers, so a step "
                f"with one of them takes a second forward pass: raise batch.micro_batch_tokens to {totals.max():,} if "
                "there is memory"
            )
    if data.kind == "labelled" and config.algorithm.kind == "kto":
        labels = data.train.column("labels")
        good = int((labels == 1).sum())
        if good in (0, len(labels)):
            which = "good" if good else "bad"
            warnings.append(f"every training row is labelled {which}: kto learns more from both kinds")
    return warnings


def computed_lengths(batch: Sequence[Datum], budget_tokens: int) -> list[int]:
    """Tokens of each document: a prompt with all its answers, or with each of them where they do not fit."""
    lengths = []
    for datum in batch:
        answers = [len(completion.tokens) for completion in datum.completions]
        together = len(datum.prompt) + sum(answers)
        lengths += [together] if together <= budget_tokens else [len(datum.prompt) + size for size in answers]
    return lengths


_SUMS_OVER_PAIRS = ("chosen_reward", "rejected_reward", "margin", "accuracy", "chosen_logprob", "rejected_logprob")


def mean_scores(sums: Metrics, num_rows: int) -> Metrics:
    """Metrics of preference losses, which are sums over rows, as means; other metrics unchanged."""
    if "num_chosen" in sums:
        return _mean_over_labels(sums, num_rows)
    is_sum = {name: name in _SUMS_OVER_PAIRS or name.startswith("loss_") for name in sums}
    return {name: value / num_rows if is_sum[name] else value for name, value in sums.items()}


def _mean_over_labels(sums: Metrics, num_rows: int) -> Metrics:
    """Each side over its own rows; a side that a batch does not have is left out."""
    means = {
        name: value for name, value in sums.items() if name not in (*_SUMS_OVER_PAIRS, "num_chosen", "num_rejected")
    }
    means["kl"] = sums["kl"] / num_rows
    for side in ("chosen", "rejected"):
        count = sums[f"num_{side}"]
        for what in ("reward", "logprob"):
            if count:
                means[f"{side}_{what}"] = sums[f"{side}_{what}"] / count
    if "chosen_reward" in means and "rejected_reward" in means:
        means["margin"] = means["chosen_reward"] - means["rejected_reward"]
    return means


_PAIR_OPTIONS = (
    "beta",
    "label_smoothing",
    "divergence",
    "divergence_alpha",
    "discopop_tau",
    "margin",
    "cpo_alpha",
    "wpo",
    "bco_shift",
    "ld_alpha",
)


def pair_options(algorithm: DpoConfig, num_chosen_tokens: float | None = None) -> dict[str, object]:
    """Options of the loss. `num_chosen_tokens`: supervised tokens of the preferred answers in the global batch."""
    options: dict[str, object] = {name: getattr(algorithm, name) for name in _PAIR_OPTIONS}
    return {**options, "losses": dict(algorithm.loss), "num_chosen_tokens": num_chosen_tokens}


def label_options(algorithm: KtoConfig, kl: float = 0.0) -> dict[str, object]:
    """Options of the loss. `kl`: from the reference, estimated over the global batch."""
    names = ("loss", "beta", "desirable_weight", "undesirable_weight")
    return {**{name: getattr(algorithm, name) for name in names}, "kl": kl}
