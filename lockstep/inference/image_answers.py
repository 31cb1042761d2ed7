"""Answers about images, through transformers' own generate, one prompt after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lockstep.inference.engine import stop_token_ids
from lockstep.inference.hf_generate import hf_generate
from lockstep.inference.sequence import TokenSequence
from lockstep.model.policy import CausalLM
from lockstep.types import Prompt, SamplingParams, TextCompletion, Tokenizer


def answer_with_images(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    inputs: Sequence[Mapping[str, Tensor]],
    params: SamplingParams,
    *,
    sharded: bool = False,
) -> list[list[TextCompletion]]:
    """One completion of each prompt. `inputs`: of each, what the model's forward takes beside its tokens."""
    if params.num_samples != 1:
        raise ValueError("prompts with images are answered once: set num_samples to 1")
    ends = stop_token_ids(model, tokenizer) | frozenset(params.stop_tokens)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
    completions = []
    for prompt, own in zip(prompts, inputs, strict=True):
        sequence = TokenSequence(prompt, tokenizer, params, ends, params.max_tokens)
        hf_generate(model, [sequence], params, pad_id=pad_id, batch_size=1, sharded=sharded, inputs=own)
        completions.append([sequence.completion()])
    return completions
