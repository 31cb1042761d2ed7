"""Requests and answers as they travel to an engine and back: plain JSON, and numbers in bulk as tensors.

Must not know engines or how messages travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lockstep.types import PartialCompletion, PartialCompletions, Prompt, SamplingParams, TextCompletion

Message = tuple[dict[str, Any], dict[str, Tensor]]


def pack_params(params: SamplingParams) -> dict[str, Any]:
    return asdict(params)


def unpack_params(body: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**{**body, "stop": tuple(body["stop"]), "stop_tokens": tuple(body["stop_tokens"])})


def pack_request(
    prompts: Sequence[Prompt], params: SamplingParams, keys: Sequence[int], begun: PartialCompletions | None
) -> dict[str, Any]:
    return {
        "prompts": [[int(token) for token in prompt] for prompt in prompts],
        "params": pack_params(params),
        "keys": [int(key) for key in keys],
        "begun": None if begun is None else [[part and pack_begun(part) for part in group] for group in begun],
    }


def unpack_request(
    body: Mapping[str, Any],
) -> tuple[list[list[int]], SamplingParams, list[int], list[list[PartialCompletion | None]] | None]:
    begun = body["begun"]
    if begun is not None:
        begun = [[part and unpack_begun(part) for part in group] for group in begun]
    return body["prompts"], unpack_params(body["params"]), body["keys"], begun


def pack_begun(begun: PartialCompletion) -> list[Any]:
    return [list(begun.tokens), list(begun.logprobs), list(begun.versions)]


def unpack_begun(values: Sequence[Any]) -> PartialCompletion:
    tokens, logprobs, versions = values
    return PartialCompletion(tuple(tokens), tuple(logprobs), tuple(versions))


def pack_answers(answers: Sequence[Sequence[TextCompletion]]) -> Message:
    every = [answer for group in answers for answer in group]
    body = {
        "groups": [len(group) for group in answers],
        "lengths": [len(answer.tokens) for answer in every],
        "texts": [answer.text for answer in every],
        "finish_reasons": [answer.finish_reason for answer in every],
        "versions": [answer.version for answer in every],
        "mixed": [bool(answer.versions) for answer in every],
        "has_logprobs": all(answer.logprobs is not None for answer in every),
    }
    tensors = {
        "tokens": torch.tensor([token for answer in every for token in answer.tokens], dtype=torch.int64),
        "logprobs": torch.tensor([x for answer in every for x in answer.logprobs or ()], dtype=torch.float64),
        "versions": torch.tensor([x for answer in every for x in answer.versions], dtype=torch.int64),
    }
    return body, tensors


def unpack_answers(body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[list[TextCompletion]]:
    lengths = body["lengths"]
    tokens = _split(tensors["tokens"], lengths)
    logprobs = _split(tensors["logprobs"], lengths) if body["has_logprobs"] else [None] * len(lengths)
    mixed = [length if is_mixed else 0 for length, is_mixed in zip(lengths, body["mixed"], strict=True)]
    versions = _split(tensors["versions"], mixed)
    rows = zip(tokens, body["texts"], body["finish_reasons"], logprobs, body["versions"], versions, strict=True)
    every = iter([TextCompletion(*row) for row in rows])
    return [[next(every) for _ in range(count)] for count in body["groups"]]


def _split(numbers: Tensor, lengths: Sequence[int]) -> list[Any]:
    return [tuple(part.tolist()) for part in numbers.split(list(lengths))] if lengths else []
