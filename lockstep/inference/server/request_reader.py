"""From the body of a request to tokens and sampling parameters, in the one thread that tokenises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from lockstep.inference.sequence import SequenceOptions
from lockstep.inference.server.engine_thread import DecodeRequest
from lockstep.inference.server.errors import ApiError, bad_request
from lockstep.inference.server.requests import ChatBody, CompletionBody, SamplingBody
from lockstep.inference.server.served import ServedModel, ServedModels
from lockstep.inference.server.settings import ServerSettings
from lockstep.model.policy import causal_lm, num_logits

_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
Result = TypeVar("Result")


class RequestReader:
    def __init__(self, models: ServedModels, settings: ServerSettings) -> None:
        self._engine, self._settings = models.engine, settings
        size = self._engine.model.config.get_text_config().vocab_size
        self._num_tokens = min(size, num_logits(causal_lm(self._engine.model)) or size)
        self._longest_token = max(map(len, self._engine.tokenizer.get_vocab()), default=1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Tokenizers are not made for several threads at once: in the one that there is for it."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except ValueError as error:
            raise bad_request(str(error)) from error

    def encode(self, prompts: Sequence[str | list[int]]) -> tuple[list[list[int]], list[str]]:
        """Tokens and text of each."""
        tokens = [self._encode(prompt) for prompt in prompts]
        decode = self._engine.tokenizer.decode
        texts = [prompt if isinstance(prompt, str) else decode(prompt, skip_special_tokens=True) for prompt in prompts]
        return tokens, texts

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            limit = self._engine.num_positions
            if limit is not None and len(prompt) > limit * self._longest_token:  # without counting its tokens
                raise ValueError(f"a prompt of {len(prompt):,} characters: the model takes {limit} tokens at most")
            return self._engine.encode(prompt)
        unknown = next((token for token in prompt if not 0 <= token < self._num_tokens), None)
        if unknown is not None:
            raise ValueError(f"there is no token {unknown}: the vocabulary has {self._num_tokens}")
        return prompt

    def make_request(
        self,
        model: ServedModel,
        body: SamplingBody,
        prompts: Sequence[Sequence[int]],
        wanted: int | None,
        num_top: int | None,
    ) -> DecodeRequest:
        """`wanted`: new tokens at most, where the body says so."""
        for prompt in prompts:
            self._check_length(len(prompt), wanted)
        is_chat = isinstance(body, ChatBody)
        echo = isinstance(body, CompletionBody) and bool(body.echo)
        options = SequenceOptions(
            adapter=model.adapter,
            num_top=num_top,
            prompt_scores=echo and num_top is not None,
            score_only=wanted == 0,
            streams=bool(body.stream),
        )
        default = self._settings.max_tokens if is_chat else _COMPLETION_TOKENS
        try:
            params = body.params(default if wanted is None else wanted, self._settings.temperature)
        except ValueError as error:
            raise bad_request(str(error)) from error
        return DecodeRequest(prompts, replace(params, stop_tokens=model.end_tokens), options)

    def _check_length(self, length: int, wanted: int | None) -> None:
        limit = self._engine.num_positions
        if not length:
            raise bad_request("an empty prompt: nothing predicts its first token", "prompt")
        if limit is not None and length + (1 if wanted is None else wanted) > limit:
            asked = "" if wanted is None else f" and {wanted} new ones"
            message = f"a prompt of {length} tokens{asked}: the model takes {limit} in all"
            raise ApiError(400, message, param="max_tokens" if wanted else "prompt", code="context_length_exceeded")
