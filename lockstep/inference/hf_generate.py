"""transformers' own generate, for models that the decoder does not serve."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from lockstep.inference.model_check import FloatsStayWide
from lockstep.inference.sequence import TokenSequence
from lockstep.model.policy import CausalLM, causal_lm
from lockstep.types import SamplingParams


@torch.inference_mode()
def hf_generate(
    model: CausalLM,
    sequences: Sequence[TokenSequence],
    params: SamplingParams,
    *,
    pad_id: int,
    batch_size: int,
    sharded: bool,
    inputs: Mapping[str, Tensor] | None = None,
) -> None:
    """Slower, and a batch draws from one generator: samples depend on what else is in it.

    Sequences with equally many tokens, and as many left, go together: padding on the left would enter the state of
    many models that this is for. Where ranks make the same passes, those of all lengths do, padded.
    `inputs`: what the model takes beside the tokens of a single sequence.
    """
    batches: dict[tuple[int, int], list[TokenSequence]] = {}
    for sequence in sequences:
        batches.setdefault((sequence.num_left, 0 if sharded else sequence.length), []).append(sequence)
    with _seeded(params.seed), _without_defaults(model):
        for (num_left, _), group in batches.items():
            for start in range(0, len(group), batch_size):
                part = group[start : start + batch_size]
                _hf_generate_batch(model, part, num_left, params, pad_id, sharded, inputs or {})


class GenerateFacts(NamedTuple):
    """What transformers' generate can do with a model, as measured."""

    row_s: float  # for a token of one row
    rows_s: float | None  # for a token of `num_rows` rows at once; None: rows beside each other disturb each other
    num_rows: int
    min_length: int  # of a prompt

    @property
    def slowness(self) -> str:
        """Beside one batch of rows of all lengths, as the decoder has them."""
        one = f"{1e3 * self.row_s:.0f} ms for one token of one row"
        if self.rows_s is None:
            return f"slower: {one}, and one row after another, as rows of a batch would disturb each other"
        factor = min(max(self.num_rows * self.row_s / self.rows_s, 1.0), self.num_rows)
        return (
            f"slower: {one}, and prompts of different lengths one after another ({self.num_rows} of them take "
            f"{factor:.0f} times as long as one batch)"
        )


def check_generate(model: Any, *, pad_id: int, sharded: bool, num_rows: int) -> GenerateFacts:
    """ValueError where generate computes something else than the model's forward, which is what is trained."""
    name, causal = type(causal_lm(model)).__name__, causal_lm(model)
    size = causal.config.get_text_config().vocab_size
    tokens = (torch.arange(max(num_rows, 1) * 5, device=model.device) % max(size - 3, 1) + 3).view(-1, 5) % size
    is_narrow = model.dtype not in (torch.float32, torch.float64)

    def distance(prompts: Tensor) -> float:
        with torch.inference_mode(), _without_defaults(model):
            if is_narrow and not sharded:
                with contextlib.suppress(TypeError, RuntimeError), FloatsStayWide():  # not every part can be so
                    return _generate_distance(model, prompts, pad_id, sharded)
            return _generate_distance(model, prompts, pad_id, sharded)

    def seconds(prompts: Tensor) -> float:
        with torch.inference_mode(), _without_defaults(model):
            return _generate_few(model, prompts, pad_id, sharded)[1]

    try:
        found = distance(tokens[:1])
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ValueError(f"nothing samples from {name}: transformers' generate does not take it ({error})") from error
    limit = 0.1 if is_narrow and sharded else 1e-3
    if not found < limit:
        raise ValueError(
            f"nothing samples from {name} as it is trained: the logits of transformers' generate are {found:.1%} "
            "off those of its own forward pass"
        )
    takes_rows = num_rows == 1 or _or_infinite(lambda: distance(tokens)) < limit
    min_length = 1 if _or_infinite(lambda: distance(tokens[:1, :1])) < limit else 2
    return GenerateFacts(seconds(tokens[:1]), seconds(tokens) if takes_rows else None, num_rows, min_length)


def _or_infinite(measure: Callable[[], float]) -> float:
    try:
        return measure()
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError):
        return math.inf


def _generate_distance(model: Any, prompts: Tensor, pad_id: int, sharded: bool) -> float:
    """Between the logits of generate and of a forward pass, the largest of the rows.

    Logits that are not finite are reported when sampling.
    """
    output, _ = _generate_few(model, prompts, pad_id, sharded)
    worst = 0.0
    for row, sequence in enumerate(output.sequences):
        own = causal_lm(model)(input_ids=sequence[None, :-1], use_cache=False).logits[0, prompts.shape[1] - 1 :]
        found = torch.stack([logits[row] for logits in output.logits]).double()
        if bool(own.isfinite().all()):
            worst = max(worst, float((found - own.double()).norm() / own.double().norm().clamp(min=1e-30)))
    return worst


def _generate_few(model: Any, prompts: Tensor, pad_id: int, sharded: bool) -> tuple[Any, float]:
    """(output, seconds for a token)"""
    config = GenerationConfig(
        max_new_tokens=4, do_sample=False, pad_token_id=pad_id, output_logits=True, return_dict_in_generate=True
    )
    started = time.perf_counter()
    output = model.generate(
        inputs=prompts, attention_mask=torch.ones_like(prompts), generation_config=config, synced_gpus=sharded
    )
    return output, (time.perf_counter() - started) / len(output.logits)


def _hf_generate_batch(
    model: Any,
    batch: Sequence[TokenSequence],
    max_new_tokens: int,
    params: SamplingParams,
    pad_id: int,
    sharded: bool,
    inputs: Mapping[str, Tensor],
) -> None:
    width = max(sequence.length for sequence in batch)
    rows = [[pad_id] * (width - sequence.length) + list(sequence.tokens) for sequence in batch]
    mask = [[0] * (width - sequence.length) + [1] * sequence.length for sequence in batch]
    starts = [sequence.num_sampled for sequence in batch]
    options: dict[str, object] = {}
    if params.temperature > 0:
        options = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        options["min_p"] = params.min_p or None
    output = model.generate(
        inputs=torch.tensor(rows, device=model.device),
        **inputs,
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=params.temperature > 0,
            pad_token_id=pad_id,
            output_logits=params.logprobs,
            return_dict_in_generate=True,
            **options,
        ),
        stopping_criteria=StoppingCriteriaList([_SequenceCriteria(batch)]),
        synced_gpus=sharded,
    )
    if params.logprobs:
        logprobs_bt = _logprobs(output.logits, output.sequences[:, width:], params.temperature)
        for sequence, start, row in zip(batch, starts, logprobs_bt.tolist(), strict=True):
            sequence.logprobs[start:] = row[: sequence.num_sampled - start]


class _SequenceCriteria(StoppingCriteria):
    """Called after every token: appends it to its sequence, which knows when it is finished."""

    def __init__(self, batch: Sequence[TokenSequence]) -> None:
        self._batch = batch

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        for sequence, token in zip(self._batch, input_ids[:, -1].tolist(), strict=True):
            if not sequence.finished:
                sequence.append(token, 0.0)
        return torch.tensor([sequence.finished for sequence in self._batch], device=input_ids.device)


def _logprobs(logits: Sequence[Tensor], new_bt: Tensor, temperature: float) -> Tensor:
    columns = []
    for step, step_bv in enumerate(logits):
        wide = step_bv if step_bv.dtype == torch.float64 else step_bv.float()
        logprobs_bv = torch.log_softmax(wide / temperature if temperature > 0 else wide, dim=-1)
        columns.append(logprobs_bv.gather(1, new_bt[:, step : step + 1]))
    return torch.cat(columns, dim=1)


@contextlib.contextmanager
def _without_defaults(model: CausalLM) -> Iterator[None]:
    """Ignore the sampling defaults that come with a model."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """The caller's random state is restored."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
