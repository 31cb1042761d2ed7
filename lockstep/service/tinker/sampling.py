"""Samples on the wire: the client's JSON as a body for the process of a base model, and its reply as protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.service.errors import ServiceError
from lockstep.service.tinker.messages import STOP_REASONS, SampleResponse
from lockstep.service.tinker.schemas import AskedSample

_NO_LOGPROB = -99999.0  # of a cell that has no token


def as_sample_body(request: AskedSample) -> dict[str, Any]:
    """What the process of a base model is sent, but for the adapter and the call's name."""
    prompt = _read_prompt(request)
    _refuse_unknown(request, len(prompt))
    params = request.sampling_params
    strings, tokens = _read_stop(params.stop)
    return {
        "prompt": np.asarray(prompt, dtype="<i4").tobytes(),
        "num_samples": request.num_samples,
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "stop": strings,
        "stop_tokens": tokens,
        "ignore_eos": params.stop == [],
        "prompt_logprobs": bool(request.prompt_logprobs),
        "topk_prompt_logprobs": request.topk_prompt_logprobs,
        "topk_sample_logprobs": request.topk_sample_logprobs,
    }


def write_response(reply: Mapping[str, Any], request: AskedSample) -> bytes:
    response = SampleResponse()
    for sequence in reply["sequences"]:
        message = response.sequences.add(stop_reason=STOP_REASONS[sequence["stop_reason"]])
        message.tokens = np.asarray(sequence["tokens"], dtype="<i4").tobytes()
        message.logprobs = np.asarray(sequence["logprobs"], dtype="<f4").tobytes()
        if request.topk_sample_logprobs:
            _write_topk(message.topk_sampled_logprobs, sequence.get("topk", []), request.topk_sample_logprobs)
    if request.prompt_logprobs:
        scored = np.frombuffer(reply["prompt_logprobs"], dtype="<f4").copy()
        scored[: _num_unscored(request, len(scored))] = np.nan
        response.prompt_logprobs = scored.tobytes()
    if request.topk_prompt_logprobs:
        rows = list(reply.get("topk_prompt", []))
        unscored = _num_unscored(request, len(rows))
        rows[:unscored] = [[]] * unscored
        _write_topk(response.topk_prompt_logprobs, rows, request.topk_prompt_logprobs)
    return bytes(response.SerializeToString())


def _num_unscored(request: AskedSample, length: int) -> int:
    return 0 if request.prompt_logprobs_last_n is None else max(length - request.prompt_logprobs_last_n, 0)


def _read_prompt(request: AskedSample) -> list[int]:
    tokens: list[int] = []
    for chunk in request.prompt.chunks:
        if chunk.type != "encoded_text":
            raise ServiceError(f"the prompt holds a chunk of type {chunk.type}, and this server takes text tokens only")
        tokens += chunk.tokens
    if not tokens:
        raise ServiceError("the prompt holds no tokens")
    return tokens


def _refuse_unknown(request: AskedSample, length: int) -> None:
    asked = {
        "target_prompt_logprobs": request.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": request.prompt_alt_tokens_k > 0,
        "record_stability_info": bool(request.record_stability_info),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ServiceError(f"{name} is not offered by this server")
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 1 <= last < length):
        raise ServiceError(
            f"prompt_logprobs_last_n {last} needs prompt_logprobs, and at least one token of the prompt before them"
        )


def _read_stop(stop: str | list[Any] | None) -> tuple[list[str], list[int]]:
    if stop is None:
        return [], []
    if isinstance(stop, str):
        return [stop], []
    if all(isinstance(each, str) for each in stop):
        return stop, []
    if all(type(each) is int and 0 <= each < 1 << 31 for each in stop):
        return [], stop
    raise ServiceError("sampling_params.stop is a text, a list of texts or a list of tokens")


def _write_topk(message: Any, rows: Sequence[Sequence[Sequence[float]]], width: int) -> None:
    tokens = np.zeros((len(rows), width), dtype="<i4")
    logprobs = np.full((len(rows), width), _NO_LOGPROB, dtype="<f4")
    for row, cells in enumerate(rows):
        for column, (token, logprob) in enumerate(cells[:width]):
            tokens[row, column], logprobs[row, column] = token, logprob
    message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()
    message.k, message.length = width, len(rows)
