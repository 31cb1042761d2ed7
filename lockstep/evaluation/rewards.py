"""Rewards of runs that learned preferences: each beside the reference it was held to, on the pairs of the exam.

A reference that is itself among the models is not measured twice.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from lockstep.config import DpoConfig, KtoConfig
from lockstep.data.chat_template import load_template
from lockstep.evaluation.candidates import EvalModel, base_of
from lockstep.evaluation.exam import EvalTask
from lockstep.evaluation.pairs import PairLogprobs, pair_logprobs, reward_margins
from lockstep.evaluation.trial import EvalResult, load_candidate, longest_row, measure_rows, note_scores


def add_rewards(exam: EvalTask, candidates: Sequence[EvalModel], outcomes: Sequence[EvalResult]) -> None:
    """reward_margin and reward_accuracy of every run by dpo or kto; its reference, if it is there, has margin 0."""
    measured: dict[str, list[PairLogprobs | None]] = {}
    for candidate, outcome in zip(candidates, outcomes, strict=True):
        if outcome.pairs and not candidate.is_run:
            measured.setdefault(candidate.source, outcome.pairs)
    for candidate, outcome in zip(candidates, outcomes, strict=True):
        reference = _reference_of(candidate)
        if reference is None or not outcome.pairs:
            continue
        if reference.source not in measured:
            measured[reference.source] = _measure(exam, reference)
        config = candidate.run_config()
        assert config is not None
        algorithm = config.algorithm
        assert isinstance(algorithm, (DpoConfig, KtoConfig))
        outcome.margins = reward_margins(outcome.pairs, measured[reference.source], algorithm.beta)
        known = [margin for margin in outcome.margins if margin is not None]
        note_scores(outcome, [{"reward_accuracy": float(m > 0), "reward_margin": m} for m in known])
        outcome.facts |= {"reference": reference.source, "beta": algorithm.beta}
    references = {outcome.facts.get("reference") for outcome in outcomes}
    for candidate, outcome in zip(candidates, outcomes, strict=True):
        if candidate.source in references and not candidate.is_run:
            outcome.metrics["reward_margin"] = 0.0  # by definition


def _reference_of(candidate: EvalModel) -> EvalModel | None:
    config = candidate.run_config()
    if config is None or not isinstance(config.algorithm, (DpoConfig, KtoConfig)):
        return None
    other = config.algorithm.reference_model
    return base_of(candidate, config) if other is None else EvalModel(other, other)


def _measure(exam: EvalTask, reference: EvalModel) -> list[PairLogprobs | None]:
    model, tokenizer = load_candidate(reference, exam.options.device)
    template = load_template(
        tokenizer, "none" if exam.options.raw else exam.data.chat_template, exam.data.template_options
    )
    _, found = measure_rows(exam, reference, model, tokenizer, template, longest_row(exam, model))
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [None if answers is None else pair_logprobs(answers) for answers in found]
