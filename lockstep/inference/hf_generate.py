"""Answers from transformers' own generate, padded on the left: for models that our decoding does not serve.

Slower, and the draws of a batch come from one generator: what else is in a batch changes samples.
Must not know processes or terminals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from lockstep.inference.completion import GrowingAnswer
from lockstep.types import SamplingParams

Request = tuple[Sequence[int], GrowingAnswer]


@torch.inference_mode()
def generate(
    model: Any,
    requests: Sequence[Request],
    params: SamplingParams,
    *,
    pad_id: int,
    batch_size: int,
    sharded: bool = False,
) -> None:
    """Fill the answers, each with the text that it follows. Those that may have equally many tokens go together."""
    by_length: dict[int, list[Request]] = {}
    for request in requests:
        by_length.setdefault(request[1].num_left, []).append(request)
    with _seeded(params.seed), _without_defaults(model):
        for num_new, group in by_length.items():
            for start in range(0, len(group), batch_size):
                _generate_batch(model, group[start : start + batch_size], num_new, params, pad_id, sharded)


def _generate_batch(
    model: Any, requests: Sequence[Request], num_new: int, params: SamplingParams, pad_id: int, sharded: bool
) -> None:
    width = max(len(prompt) for prompt, _ in requests)
    rows = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt, _ in requests]
    seen = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in requests]
    answers = [answer for _, answer in requests]
    starts = [answer.num_tokens for answer in answers]
    sampled: dict[str, Any] = {}
    if params.temperature > 0:
        sampled = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        sampled["min_p"] = params.min_p or None
    output = model.generate(
        inputs=torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(seen, device=model.device),
        generation_config=GenerationConfig(
            max_new_tokens=num_new,
            do_sample=params.temperature > 0,
            pad_token_id=pad_id,
            output_logits=params.logprobs,
            return_dict_in_generate=True,
            **sampled,
        ),
        stopping_criteria=StoppingCriteriaList([_Answers(answers)]),
        synced_gpus=sharded,
    )
    if params.logprobs:
        logprobs_bt = _logprobs(output.logits, output.sequences[:, width:], params.temperature)
        for answer, start, row in zip(answers, starts, logprobs_bt.tolist(), strict=True):
            answer.logprobs[start:] = row[: answer.num_tokens - start]


class _Answers(StoppingCriteria):
    """Asked after every token: hands it to the answer, which knows its own end."""

    def __init__(self, answers: Sequence[GrowingAnswer]) -> None:
        self._answers = answers

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        for answer, token in zip(self._answers, input_ids[:, -1].tolist(), strict=True):
            if not answer.finished:
                answer.push(token, 0.0)
        return torch.tensor([answer.finished for answer in self._answers], device=input_ids.device)


def _logprobs(logits: Sequence[Tensor], new_bt: Tensor, temperature: float) -> Tensor:
    columns = []
    for place, step_bv in enumerate(logits):
        wide = step_bv if step_bv.dtype == torch.float64 else step_bv.float()
        logprobs_bv = torch.log_softmax(wide / temperature if temperature > 0 else wide, dim=-1)
        columns.append(logprobs_bv.gather(1, new_bt[:, place : place + 1]))
    return torch.cat(columns, dim=1)


@contextlib.contextmanager
def _without_defaults(model: Any) -> Iterator[None]:
    """Sampling defaults that come with a model are set aside."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """The caller's random state is left as it was."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
