"""The inference engine of this process, on one device: it samples from the trainer's own model object.

Only SamplingParams shape the output: sampling defaults that come with a model are ignored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.config import LoraConfig, ModelConfig
from lockstep.inference.adapter_bank import AdapterBank
from lockstep.inference.decoder import Decoder
from lockstep.inference.hf_generate import GenerateFacts, check_generate, hf_generate
from lockstep.inference.kv_cache import UnsupportedModelError
from lockstep.inference.scheduler import BatchLimits, decode_all
from lockstep.inference.sequence import NOTHING_ELSE, SequenceOptions, TokenSequence
from lockstep.inference.token_sampling import random_streams
from lockstep.model.compiled_code import note_compilations
from lockstep.model.load import (
    DTYPES,
    apply_weights,
    build_model,
    keep_freed_memory,
    load_for_inference,
    load_tokenizer,
)
from lockstep.model.lora import speed_up_eager
from lockstep.model.policy import CausalLM
from lockstep.model.replay import RoutingRecorder
from lockstep.model.rotary import RotaryByLength
from lockstep.types import (
    PartialCompletions,
    Prompt,
    SamplingParams,
    TextCompletion,
    Tokenizer,
    Weights,
)

Message = Mapping[str, Any]

_GPU_ROWS = 256  # decoded at once by default


class LocalEngine:
    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        batch_size: int | None = None,
        *,
        sharded: bool = False,
        max_cache_bytes: int | None = None,
        steps_per_read: int | None = None,
        min_length: int = 0,
        min_length_bytes: int = 0,
        graphs: bool = True,
        compiles: bool = False,
        records_routing: bool = False,
        report: Callable[[str], None] = warnings.warn,
    ) -> None:
        """`batch_size`: sequences decoded at once; fewer where their cache would exceed `max_cache_bytes`, by default
        half of the free memory. `sharded`: several processes hold the model together, and all make the same calls.
        `steps_per_read`: tokens are fetched from the device only so often. `graphs`: on a GPU, replay CUDA graphs.
        `min_length` and `min_length_bytes`: see BatchLimits.
        `compiles`: on a GPU, compile the captured steps: half a minute once, and steps take a third of the time.
        `records_routing`: completions tell which experts their tokens chose; for mixtures alone.
        `report` is told, once, of each fast way that cannot be taken.
        """
        self.tokenizer = tokenizer
        self.bank: AdapterBank | None = None
        """Adapters that a sequence may name; see `hold_adapters`."""
        self._decoder: Decoder | None = None
        on_gpu = model.device.type == "cuda"
        self.batch_size = batch_size or (_GPU_ROWS if on_gpu else 16)
        steps_per_read = steps_per_read or (8 if on_gpu else 1)
        self.limits = BatchLimits(
            self.batch_size,
            max_cache_bytes,
            steps_per_read,
            min_length=min_length,
            min_length_bytes=min_length_bytes,
        )
        self._sharded, self._graphs, self._compiles, self._report = sharded, graphs, compiles, report
        self._records_routing = records_routing
        self.version = 0
        self._use(model)

    @classmethod
    def load(
        cls,
        source: str | Path,
        device: str = "auto",
        batch_size: int | None = None,
        report: Callable[[str], None] = warnings.warn,
    ) -> LocalEngine:
        """`source` is a run directory, a model folder or a Hub id."""
        return cls(*load_for_inference(str(source), device=device), batch_size=batch_size, report=report)

    def load_weights(self, source: Weights, version: int) -> None:
        """A run directory or a model folder replaces model and tokenizer; named tensors are copied into the model.

        Weights that do not fit raise, and nothing changes.
        """
        if isinstance(source, Mapping):
            apply_weights(self.model, source)
        else:
            model, self.tokenizer = load_for_inference(str(source), device=str(self.model.device))
            self._use(model)
        self.version = version

    def hold_adapters(self) -> AdapterBank:
        """From here on sequences may have an adapter each; the bank is empty at first."""
        if self._sharded:
            raise ValueError("a model that several processes hold takes no adapters of rows")
        if self.bank is None:
            self.bank, self._decoder = AdapterBank(self.model), None
        return self.bank

    def encode(
        self, prompt: str | Sequence[Message], tools: list[Any] | None = None, chat_template: str | None = None
    ) -> list[int]:
        """Tokens of plain text, or of a conversation that the model is to continue.

        `chat_template`: another than the tokenizer's own.
        """
        if isinstance(prompt, str):
            ids = self._tokenise(prompt)
            # As training frames plain text: a BOS where the tokenizer adds one, and no EOS after a prompt.
            framed = list(self.tokenizer(prompt, verbose=False)["input_ids"])
            bos = self.tokenizer.bos_token_id
            return [bos, *ids] if bos is not None and framed[:1] == [bos] and ids[:1] != [bos] else ids
        if not self.has_template and chat_template is None:
            return self.encode("\n".join(str(message["content"]) for message in prompt))
        try:
            text = self.tokenizer.apply_chat_template(
                list(prompt), tools=tools, add_generation_prompt=True, tokenize=False, chat_template=chat_template
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
        """Memory held for keys and values, also between calls: CUDA graphs read and write it."""
        return 0 if self._decoder is None else self._decoder.slots.num_bytes

    def release_cache(self) -> None:
        if self._decoder is not None:
            self._decoder.release()

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int] | None = None,
        partial: PartialCompletions | None = None,
    ) -> list[list[TextCompletion]]:
        groups = self.make_sequences(prompts, params, keys, partial)
        self.decode([sequence for group in groups for sequence in group], params)
        return [[sequence.completion() for sequence in group] for group in groups]

    def make_sequences(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int] | None = None,
        partial: PartialCompletions | None = None,
        options: SequenceOptions = NOTHING_ELSE,
    ) -> list[list[TokenSequence]]:
        """For each prompt its `num_samples` sequences."""
        if options.adapter is not None:
            self._check_adapter(options.adapter)
        keys = range(len(prompts)) if keys is None else keys
        if len(keys) != len(prompts):
            raise ValueError(f"{len(keys)} keys for {len(prompts)} prompts: each needs one")
        if partial is not None and [len(group) for group in partial] != [params.num_samples] * len(prompts):
            raise ValueError(f"partial must have {params.num_samples} entries for each of the {len(prompts)} prompts")
        numbers = list(range(params.num_samples))
        each_key = [key for key in keys for _ in numbers]
        streams = iter(random_streams(self._seed(params), each_key, numbers * len(prompts)).tolist())
        groups = [
            [self._sequence(prompt, params, next(streams), options=options) for _ in numbers] for prompt in prompts
        ]
        for group, parts in zip(groups, partial or (), strict=partial is not None):
            for sequence, part in zip(group, parts, strict=True):
                if part is not None:
                    sequence.resume(part)
        return groups

    def decode(
        self, sequences: Sequence[TokenSequence], params: SamplingParams, steps_per_read: int | None = None
    ) -> None:
        """Until all are finished. They were made with these `params`."""
        if not sequences and not self._sharded:
            return
        decoder = self.find_decoder()
        if decoder is not None:
            limits = replace(self.limits, steps_per_read=steps_per_read or self.limits.steps_per_read)
            decode_all(decoder, sequences, limits)
            return
        unfinished = [sequence for sequence in sequences if not sequence.finished]
        # Where positions depend on the longest sequence of a batch, each is sampled alone.
        assert self.generate_facts is not None
        alone = RotaryByLength.of(self.model).rules or self.generate_facts.rows_s is None
        if any(sequence.length < self.generate_facts.min_length for sequence in unfinished):
            raise ValueError("transformers' generate computes something else for a prompt of one token: give it two")
        batch_size = 1 if alone else self.batch_size
        hf_generate(self.model, unfinished, params, pad_id=self._pad_id, batch_size=batch_size, sharded=self._sharded)

    def stream(self, prompt: Prompt, params: SamplingParams, on_text: Callable[[str], None]) -> TextCompletion:
        """One completion, whose text also arrives in pieces. An exception in `on_text` ends it."""
        random_stream = int(random_streams(self._seed(params), [0], [0]))
        sequence = self._sequence(prompt, params, random_stream, on_text)
        self.decode([sequence], params, steps_per_read=1)
        return sequence.completion()

    def _use(self, model: CausalLM) -> None:
        self.model = model.eval()
        self._end_tokens = stop_token_ids(model, self.tokenizer)
        self.num_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._decoder = None
        self._recorder = RoutingRecorder(model) if self._records_routing else None
        self.generate_facts: GenerateFacts | None = None
        self.decodes = True  # False once the decoder has refused the model

    def _check_adapter(self, name: str) -> None:
        if self.bank is None:
            raise ValueError(f"there is no adapter {name!r}: the engine holds none")
        self.bank.number(name)
        if self.find_decoder() is None:
            raise ValueError("transformers' generate serves this model, and it takes no adapters of rows")

    def _sequence(
        self,
        prompt: Prompt,
        params: SamplingParams,
        random_stream: int,
        on_text: Callable[[str], None] | None = None,
        options: SequenceOptions = NOTHING_ELSE,
    ) -> TokenSequence:
        return TokenSequence(
            prompt,
            self.tokenizer,
            params,
            (frozenset() if options.ignores_end else self._end_tokens) | frozenset(params.stop_tokens),
            self._max_new_tokens(prompt, params, options),
            random_stream=random_stream,
            on_text=on_text,
            version=self.version,
            options=options,
            routing_bytes=0 if self._recorder is None else self._recorder.rows.num_bytes,
        )

    def _seed(self, params: SamplingParams) -> int:
        if self._sharded and params.temperature > 0 and params.seed is None:
            raise ValueError("a model that several processes hold needs a seed: each would draw tokens of its own")
        return params.seed if params.seed is not None else int(torch.randint(2**62, ()))

    def _max_new_tokens(self, prompt: Prompt, params: SamplingParams, options: SequenceOptions) -> int:
        if not len(prompt):
            raise ValueError("an empty prompt: nothing predicts its first token")
        if self.num_positions is None:
            return 0 if options.score_only else params.max_tokens
        if options.score_only and len(prompt) <= self.num_positions:
            return 0
        if len(prompt) >= self.num_positions:
            raise ValueError(f"a prompt of {len(prompt)} tokens: the model takes {self.num_positions} at most")
        return min(params.max_tokens, self.num_positions - len(prompt))

    @property
    def _pad_id(self) -> int:
        padding = self.tokenizer.pad_token_id
        return padding if padding is not None else next(iter(self._end_tokens), 0)

    def find_decoder(self) -> Decoder | None:
        """None, and one warning, for a model that it cannot decode."""
        if self._decoder is None and self.decodes:
            try:
                self._decoder = Decoder(
                    self.model,
                    sharded=self._sharded,
                    graphs=self._graphs,
                    compiles=self._compiles,
                    bank=self.bank,
                    recorder=self._recorder,
                    report=self._report,
                )
            except UnsupportedModelError as error:
                if self._recorder is not None:
                    raise ValueError(
                        f"{error}, and transformers' generate does not tell which experts it chose: set "
                        "algorithm.router_replay to false"
                    ) from error
                self.generate_facts = check_generate(
                    self.model, pad_id=self._pad_id, sharded=self._sharded, num_rows=min(self.batch_size, 16)
                )
                self.decodes = False
                self._report(
                    f"{error}. Completions come from transformers' generate, {self.generate_facts.slowness}; samples "
                    "depend on their batch"
                )
        return self._decoder


def load_engine(
    model: ModelConfig,
    lora: LoraConfig | None = None,
    *,
    precision: str,
    device: str = "cpu",
    batch_size: int | None = None,
    compiles: bool = False,
    chat_template: str = "auto",
    records_routing: bool = False,
    report: Callable[[str], None] = warnings.warn,
    on_compiled: Callable[[float], None] | None = None,
) -> LocalEngine:
    """An engine that samples as a run of this configuration would itself. `chat_template`: as data.chat_template.
    `on_compiled` gets the seconds of whatever this process compiles."""
    keep_freed_memory()
    built, tokenizer = build_engine_model(model, lora, precision, device), load_tokenizer(model)
    if compiles and on_compiled is not None and built.device.type == "cuda":
        note_compilations(on_compiled)
    if chat_template not in ("auto", "none"):
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return LocalEngine(built, tokenizer, batch_size, compiles=compiles, records_routing=records_routing, report=report)


def build_engine_model(config: ModelConfig, lora: LoraConfig | None, precision: str, device: str) -> CausalLM:
    """As the trainer lends its own for sampling: every parameter in the dtype that is computed in."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # With its weights, though published ones replace them: the model's end-of-text tokens come with them.
    model: Any = build_model(config, lora, precision, with_weights=True)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(DTYPES[precision])
    if lora is not None and device == "cpu":
        speed_up_eager(model)  # as in training: the same numbers to the last bit
    return model.to(device).eval()


def stop_token_ids(model: CausalLM, tokenizer: Tokenizer) -> frozenset[int]:
    """End of text in the configurations of model and tokenizer, and the chat template's end of turn."""
    ids: set[int] = set()
    for configured in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if configured is not None:
            ids.update(configured if isinstance(configured, (list, tuple)) else [configured])
    end_of_turn = end_of_turn_id(tokenizer)
    return frozenset(ids if end_of_turn is None else ids | {end_of_turn})


def end_of_turn_id(tokenizer: Tokenizer, template: str | None = None) -> int | None:
    """A base model's end of text is often not its chat template's end of turn: read that from the template.

    `template`: another than the tokenizer's own.
    """
    if template is None and not getattr(tokenizer, "chat_template", None):
        return None
    answer = "lockstep"
    text = ""
    for content in (str, lambda text: [{"type": "text", "text": text}]):  # some of models that see read only parts
        turns = [{"role": "user", "content": content("?")}, {"role": "assistant", "content": content(answer)}]
        try:
            text = str(tokenizer.apply_chat_template(turns, tokenize=False, chat_template=template))
        except Exception:  # a template may refuse any conversation; then only the configured tokens count
            return None
        if answer in text:
            break
    tail = text.rpartition(answer)[2]
    ids = tokenizer(tail.lstrip(), add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return ids[0] if ids and ids[0] in special else None
