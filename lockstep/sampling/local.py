"""A sampler in this process: transformers' generate on one device, batched with padding on the left.

Only what SamplingParams says shapes the output: sampling defaults that come with a model are set aside.
Must not know runs in training, processes or terminals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer

from lockstep.sampling.sampler import Prompt, SamplingParams, TextCompletion

Message = Mapping[str, Any]


class LocalEngine:
    def __init__(self, model: Any, tokenizer: Any, batch_size: int = 8, *, sharded: bool = False) -> None:
        """`sharded`: several processes hold the model together, and must take the same number of steps."""
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self._sharded = sharded
        self.version = 0
        self._use(model)

    @classmethod
    def load(cls, source: str | Path, device: str = "auto", batch_size: int = 8) -> LocalEngine:
        """`source` is a run directory, a model folder or a Hub id."""
        from lockstep.model.load import load_for_inference

        return cls(*load_for_inference(str(source), device=device), batch_size=batch_size)

    def load_weights(self, source: str | Path, version: int) -> None:
        from lockstep.model.load import load_for_inference

        model, self.tokenizer = load_for_inference(str(source), device=str(self._model.device))
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

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[TextCompletion]]:
        rows = [(index, list(prompt)) for index, prompt in enumerate(prompts) for _ in range(params.num_samples)]
        budgets: dict[int, list[tuple[int, list[int]]]] = {}
        for index, prompt in rows:
            budgets.setdefault(self._num_new(prompt, params), []).append((index, prompt))
        results: list[list[TextCompletion]] = [[] for _ in prompts]
        with _seeded(params.seed):
            for num_new, group in budgets.items():
                for start in range(0, len(group), self.batch_size):
                    batch = group[start : start + self.batch_size]
                    for (index, _), answer in zip(batch, self._generate([p for _, p in batch], num_new, params)):
                        results[index].append(answer)
        return results

    def stream(self, prompt: Prompt, params: SamplingParams, on_text: Callable[[str], None]) -> TextCompletion:
        """One completion, whose text also arrives in pieces. An exception in `on_text` ends it."""
        streamer = _CallbackStreamer(self.tokenizer, on_text)
        with _seeded(params.seed):
            return self._generate([list(prompt)], self._num_new(prompt, params), params, streamer)[0]

    def _use(self, model: Any) -> None:
        self._model = model.eval()
        self._stop_ids = stop_token_ids(model, self.tokenizer)
        model.generation_config = GenerationConfig()
        pad = self.tokenizer.pad_token_id
        self._pad_id = pad if pad is not None else next(iter(self._stop_ids), 0)
        self._num_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def _num_new(self, prompt: Prompt, params: SamplingParams) -> int:
        if not len(prompt):
            raise ValueError("an empty prompt: nothing predicts its first token")
        if self._num_positions is None:
            return params.max_tokens
        if len(prompt) >= self._num_positions:
            raise ValueError(f"a prompt of {len(prompt)} tokens: the model takes {self._num_positions} at most")
        return min(params.max_tokens, self._num_positions - len(prompt))

    @torch.inference_mode()
    def _generate(
        self, prompts: list[list[int]], num_new: int, params: SamplingParams, streamer: TextStreamer | None = None
    ) -> list[TextCompletion]:
        width = max(len(p) for p in prompts)
        tokens_bt = torch.tensor([[self._pad_id] * (width - len(p)) + p for p in prompts], device=self._model.device)
        mask_bt = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._model.device)
        output = self._model.generate(
            inputs=tokens_bt,
            attention_mask=mask_bt,
            generation_config=self._generation_config(num_new, params),
            streamer=streamer,
            tokenizer=self.tokenizer if params.stop else None,
            synced_gpus=self._sharded,
        )
        new_bt = output.sequences[:, width:]
        logprobs_bt = _logprobs(output.logits, new_bt) if params.logprobs else None
        return [
            self._completion(row.tolist(), params, None if logprobs_bt is None else logprobs_bt[i].tolist())
            for i, row in enumerate(new_bt)
        ]

    def _generation_config(self, num_new: int, params: SamplingParams) -> GenerationConfig:
        sampled = {"temperature": params.temperature, "top_p": params.top_p, "top_k": 0} if params.temperature else {}
        return GenerationConfig(
            max_new_tokens=num_new,
            do_sample=params.temperature > 0,
            eos_token_id=sorted(self._stop_ids) or None,
            pad_token_id=self._pad_id,
            stop_strings=list(params.stop) or None,
            output_logits=params.logprobs,
            return_dict_in_generate=True,
            **sampled,
        )

    def _completion(self, tokens: list[int], params: SamplingParams, logprobs: list[float] | None) -> TextCompletion:
        """Cut a row of the batch where it ended: the rest is padding."""
        end = next((i for i, token in enumerate(tokens) if token in self._stop_ids), None)
        if end is not None:
            tokens = tokens[: end + 1]
        text = self.tokenizer.decode(tokens if end is None else tokens[:end], skip_special_tokens=True)
        cut = min((at for at in map(text.find, params.stop) if at >= 0), default=None)
        stopped = end is not None or cut is not None
        return TextCompletion(
            tuple(tokens),
            text[:cut],
            "stop" if stopped else "length",
            tuple(logprobs[: len(tokens)]) if logprobs is not None else None,
        )


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


def _logprobs(logits: Sequence[torch.Tensor], new_bt: torch.Tensor) -> torch.Tensor:
    columns = [
        torch.log_softmax(step_bv.float(), dim=-1).gather(1, new_bt[:, i : i + 1]) for i, step_bv in enumerate(logits)
    ]
    return torch.cat(columns, dim=1)


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """The caller's random state is left as it was."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class _CallbackStreamer(TextStreamer):
    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)
