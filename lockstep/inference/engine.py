"""A sampler in this process, on one device: the trainer's own model object, decoded in slots that are filled at once.

Only what SamplingParams says shapes the output: sampling defaults that come with a model are set aside.
Must not know runs in training, processes or terminals.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.inference.completion import GrowingAnswer
from lockstep.inference.decoder import Decoder
from lockstep.inference.hf_generate import generate
from lockstep.inference.kv_cache import UnsupportedModelError
from lockstep.inference.scheduler import ContinuousBatch, Limits, SequenceRequest, answer_all
from lockstep.inference.token_sampling import Truncation, random_streams
from lockstep.inference.weights import apply_weights
from lockstep.types import (
    PartialCompletion,
    PartialCompletions,
    Prompt,
    SamplingParams,
    TextCompletion,
    Weights,
)

Message = Mapping[str, Any]


class LocalEngine:
    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        batch_size: int | None = None,
        *,
        sharded: bool = False,
        max_cache_bytes: int | None = None,
        steps_per_read: int | None = None,
        graphs: bool = True,
        compiles: bool = False,
    ) -> None:
        """`batch_size`: sequences computed at once; fewer where their cache would be more than `max_cache_bytes`, by
        default half of the memory that is free. `sharded`: several processes hold the model together, and all call
        alike. `steps_per_read`: tokens are fetched from the device only so often. `graphs`: on a GPU, replay steps.
        `compiles`: on a GPU, compile what is replayed: half a minute once, and steps take half the time.
        """
        self.tokenizer = tokenizer
        on_gpu = model.device.type == "cuda"
        self.batch_size = batch_size or (64 if on_gpu else 16)
        self.limits = Limits(self.batch_size, max_cache_bytes, steps_per_read or (8 if on_gpu else 1))
        self._sharded, self._graphs, self._compiles = sharded, graphs, compiles
        self.version = 0
        self._use(model)

    @classmethod
    def load(cls, source: str | Path, device: str = "auto", batch_size: int | None = None) -> LocalEngine:
        """`source` is a run directory, a model folder or a Hub id."""
        from lockstep.model.load import load_for_inference

        return cls(*load_for_inference(str(source), device=device), batch_size=batch_size)

    def load_weights(self, source: Weights, version: int) -> None:
        """A run directory or a model folder replaces model and tokenizer; tensors by name go into the model in place.

        What does not fit raises, and the engine goes on with what it had.
        """
        from lockstep.model.load import load_for_inference

        if isinstance(source, Mapping):
            apply_weights(self.model, source)
        else:
            model, self.tokenizer = load_for_inference(str(source), device=str(self.model.device))
            self._use(model)
        self.version = version

    def encode(self, prompt: str | Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        """Tokens of plain text, or of a conversation that the model is to continue."""
        if isinstance(prompt, str):
            ids = self._tokenise(prompt)
            # As training frames plain text: a BOS where the tokenizer adds one, and no EOS after a prompt.
            framed = list(self.tokenizer(prompt, verbose=False)["input_ids"])
            bos = self.tokenizer.bos_token_id
            return [bos, *ids] if bos is not None and framed[:1] == [bos] and ids[:1] != [bos] else ids
        if not self.has_template:
            return self.encode("\n".join(str(message["content"]) for message in prompt))
        try:
            text = self.tokenizer.apply_chat_template(
                list(prompt), tools=tools, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates raise whatever they like
            raise ValueError(f"the chat template cannot render this conversation: {error}") from error
        return self._tokenise(text)

    def _tokenise(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def cache_bytes(self) -> int:
        """Memory held for keys and values, also between calls: graphs on a GPU stand on it."""
        return 0 if self._decoder is None else self._decoder.cache_bytes

    def release_cache(self) -> None:
        if self._decoder is not None:
            self._decoder.release()

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int] | None = None,
        begun: PartialCompletions | None = None,
    ) -> list[list[TextCompletion]]:
        groups = self.make_requests(prompts, params, keys, begun)
        self.answer([request for group in groups for request in group], params)
        return [[request.answer.completion() for request in group] for group in groups]

    def make_requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int] | None = None,
        begun: PartialCompletions | None = None,
    ) -> list[list[SequenceRequest]]:
        """For each prompt those of its samples."""
        keys = range(len(prompts)) if keys is None else keys
        if len(keys) != len(prompts):
            raise ValueError(f"{len(keys)} keys for {len(prompts)} prompts: each needs one")
        if begun is not None and [len(group) for group in begun] != [params.num_samples] * len(prompts):
            raise ValueError(f"begun must have {params.num_samples} entries for each of the {len(prompts)} prompts")
        numbers = list(range(params.num_samples))
        each_key = [key for key in keys for _ in numbers]
        streams = iter(random_streams(self._seed(params), each_key, numbers * len(prompts)).tolist())
        groups = [[self._request(prompt, params, next(streams)) for _ in numbers] for prompt in prompts]
        for group, parts in zip(groups, begun or (), strict=begun is not None):
            for request, part in zip(group, parts, strict=True):
                if part is not None:
                    request.answer.go_on_from(part)
        return groups

    def answer(
        self, requests: Sequence[SequenceRequest], params: SamplingParams, steps_per_read: int | None = None
    ) -> None:
        """All of them, made with these `params`."""
        if not requests and not self._sharded:
            return
        decoder = self.find_decoder()
        if decoder is not None:
            answer_all(
                decoder, requests, replace(self.limits, steps_per_read=steps_per_read or self.limits.steps_per_read)
            )
            return
        pad = self.tokenizer.pad_token_id
        pad = pad if pad is not None else next(iter(self._end_tokens), 0)
        pairs = [(request.text, request.answer) for request in requests if not request.answer.finished]
        generate(self.model, pairs, params, pad_id=pad, batch_size=self.batch_size, sharded=self._sharded)

    def stream(self, prompt: Prompt, params: SamplingParams, on_text: Callable[[str], None]) -> TextCompletion:
        """One completion, whose text also arrives in pieces. An exception in `on_text` ends it."""
        stream = int(random_streams(self._seed(params), [0], [0]))
        request = self._request(prompt, params, stream, on_text)
        self.answer([request], params, steps_per_read=1)
        return request.answer.completion()

    def _use(self, model: Any) -> None:
        self.model = model.eval()
        self._end_tokens = stop_token_ids(model, self.tokenizer)
        self._num_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._decoder: Decoder | None = None
        self._serves = True  # until the model turns out to be one that the decoder cannot serve

    def _request(
        self, prompt: Prompt, params: SamplingParams, stream: int, on_text: Callable[[str], None] | None = None
    ) -> SequenceRequest:
        ends, num_new = self._end_tokens | frozenset(params.stop_tokens), self._num_new(prompt, params)
        answer = GrowingAnswer(self.tokenizer, params, ends, num_new, on_text, self.version)
        return SequenceRequest(tuple(int(token) for token in prompt), answer, stream, Truncation.of(params))

    def _seed(self, params: SamplingParams) -> int:
        if self._sharded and params.temperature > 0 and params.seed is None:
            raise ValueError("a model that several processes hold needs a seed: each would draw tokens of its own")
        return params.seed if params.seed is not None else int(torch.randint(2**62, ()))

    def _num_new(self, prompt: Prompt, params: SamplingParams) -> int:
        if not len(prompt):
            raise ValueError("an empty prompt: nothing predicts its first token")
        if self._num_positions is None:
            return params.max_tokens
        if len(prompt) >= self._num_positions:
            raise ValueError(f"a prompt of {len(prompt)} tokens: the model takes {self._num_positions} at most")
        return min(params.max_tokens, self._num_positions - len(prompt))

    def find_decoder(self) -> Decoder | None:
        """None, and a warning once, for a model that it cannot serve."""
        if self._decoder is None and self._serves:
            try:
                self._decoder = Decoder(self.model, sharded=self._sharded, graphs=self._graphs, compiles=self._compiles)
            except UnsupportedModelError as error:
                self._serves = False
                warnings.warn(
                    f"{error}. Answers come from transformers' generate: slower, and samples depend on their batch",
                    stacklevel=4,
                )
        return self._decoder


def stop_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """End of text as model and tokenizer name it, and the token with which the chat template ends a turn."""
    ids: set[int] = set()
    for configured in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if configured is not None:
            ids.update(configured if isinstance(configured, (list, tuple)) else [configured])
    end_of_turn = _end_of_turn_id(tokenizer)
    return frozenset(ids if end_of_turn is None else ids | {end_of_turn})


def _end_of_turn_id(tokenizer: Any) -> int | None:
    """A base model's end of text is often not the token its chat template puts after an answer: read the template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    answer = "lockstep"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template may refuse any conversation; then only the configured ends count
        return None
    tail = text.rpartition(answer)[2]
    ids = tokenizer(tail.lstrip(), add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return ids[0] if ids and ids[0] in special else None


_PIECE_S = 0.05  # of decoding, before whoever waits is heard


class Call:
    """What was asked for at once. `news` is for another thread than the one that samples."""

    def __init__(self, name: str, groups: list[list[SequenceRequest]], params: SamplingParams) -> None:
        self.name, self.groups, self.params = name, groups, params
        self.error: Exception | None = None
        self._num_told = [[request.answer.num_tokens for request in group] for group in groups]

    @property
    def requests(self) -> list[SequenceRequest]:
        return [request for group in self.groups for request in group]

    @property
    def finished(self) -> bool:
        return self.error is not None or all(request.answer.finished for request in self.requests)

    def completions(self) -> list[list[TextCompletion]]:
        return [[request.answer.completion() for request in group] for group in self.groups]

    def news(self) -> list[tuple[int, int, PartialCompletion]]:
        """(prompt, sample, tokens since the last time), of those that have any."""
        found = []
        for place, group in enumerate(self.groups):
            for sample, request in enumerate(group):
                new = request.answer.so_far(self._num_told[place][sample])
                if new.tokens:
                    self._num_told[place][sample] += len(new.tokens)
                    found.append((place, sample, new))
        return found


class ContinuousEngine:
    """`progress` counts passes: an engine that has something to do and does not count is stuck."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._batch: ContinuousBatch | None = None
        self._whole: deque[Call] = deque()  # of a model that cannot be decoded step by step
        self._attached, self._is_attached = contextlib.ExitStack(), False  # from piece to piece
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self.progress = 0

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def has_work(self) -> bool:
        return bool(self._whole) or (self._batch is not None and self._batch.busy)

    @property
    def under_way(self) -> list[Call]:
        """Those whose tokens can be read while they grow. From any thread."""
        with self._lock:
            return list(self._calls)

    def begin(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int] | None = None,
        begun: PartialCompletions | None = None,
        name: str = "",
    ) -> Call:
        """To be answered by `advance`. What can never be answered raises, and nothing is begun."""
        call = Call(name, self._engine.make_requests(prompts, params, keys, begun), params)
        decoder = self._engine.find_decoder()
        if decoder is None:
            self._whole.append(call)
            return call
        if self._batch is None:
            limits = self._engine.limits
            least = limits.max_slots if decoder.has_fixed_rows else 1  # every other number would be graphs of its own
            self._batch = ContinuousBatch(decoder, replace(limits, min_slots=least))
        self._batch.add(call.requests)
        if not call.finished:  # as one is that was begun to its end
            with self._lock:
                self._calls.append(call)
        return call

    def advance(self) -> list[Call]:
        """A short piece of work: the calls that it ended, with their answers or with the reason why there are none."""
        if self._whole:
            return [self._answer_whole(self._whole.popleft())]
        try:
            self._decode()
        except ValueError as error:  # such as weights that are no good: for all that were computed with them
            for call in self.under_way:
                call.error = call.error or error
            self._batch = None
            self._detach()
        ended = [call for call in self.under_way if call.finished]
        with self._lock:
            self._calls = [call for call in self._calls if not call.finished]
        return ended

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Between two steps, for all that follows. What does not fit raises and changes nothing."""
        apply_weights(self._engine.model, weights)
        self._engine.version = version
        if self._batch is not None:
            self._batch.renew(version)
        for call in self._whole:
            for request in call.requests:
                request.answer.version = version

    def _decode(self) -> None:
        decoder = self._engine.find_decoder()
        if decoder is None or self._batch is None:
            return
        end = time.monotonic() + _PIECE_S
        if not self._is_attached:
            self._attached.enter_context(decoder.attached())
            self._is_attached = True
        with torch.inference_mode():
            while self._batch.busy:
                finished = self._batch.advance()
                self.progress += 1
                if finished or time.monotonic() >= end:
                    break
        if not self._batch.busy:
            self._detach()

    def _detach(self) -> None:
        """From now on the model is as it was made."""
        self._attached.close()
        self._is_attached = False

    def _answer_whole(self, call: Call) -> Call:
        try:
            self._engine.answer(call.requests, call.params)
        except ValueError as error:
            call.error = error
        self.progress += 1
        return call
