"""Tokenizers for the data tests, built here: a small byte-level BPE, one of words, one of bytes; chat templates."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "templates").iterdir()}
# Special tokens of the public templates in the folder beside this file.
TEMPLATE_SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|User|>", "<|Assistant|>"),
]
_CORPUS = [
    "Describe how the system, the user and the assistant work.\n\nThe answer is: forty two.\n",
    "### Instruction:\n### Input:\n### Response:\nWhat is the capital of France? Paris is the capital.\n\n\n",
    "one two three four five six seven eight nine ten 0 1 2 3 4 5 6 7 8 9",
] * 4

# What the golden masks are about.
_WORDS = """user assistant system tool model ipython Hi Hello Why Because Bye Brief. Sum 4
Today: 01 Jan 2025 Environment: ipython <think> why because </think> <tool_call> </tool_call> <tool_response>
</tool_response> <tools> </tools> # Tools You call functions. {"name": "add", "arguments": {"a": 1}} "parameters":
{"a": 1}} [{"name": {"a": 1}}] {"content": "4"} {"n": 1} <think>why because</think> {"type": "function", "function":"""


@functools.cache
def _train(trim_offsets: bool, adds_bos: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    steps: list[Any] = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if adds_bos:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]))
    tokenizer.post_processor = processors.Sequence(steps)
    return tokenizer.to_str()


def build_tokenizer(
    template: str | None = None, *, trim_offsets: bool = False, adds_bos: bool = False, eos: str = "</s>"
) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_train(trim_offsets, adds_bos)), bos_token="<s>", eos_token=eos
    )
    tokenizer.chat_template = template
    return tokenizer


def build_metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """In the manner of Llama 2: every text it is given alone gets a space in front."""
    pieces = ["<s>", "</s>", "▁", "▁a", "▁b", "▁A:", "▁4", "a", "b", "4", "A", ":", "▁▁"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "4"), ("▁", "a"), ("▁", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def build_word_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Words, single spaces and line breaks are tokens, so that masks can be written and read by people."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|[^\s]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.WordLevelTrainer(special_tokens=["?", *TEMPLATE_SPECIAL], show_progress=False)
    tokenizer.train_from_iterator([_WORDS], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="?")
    fast.chat_template = TEMPLATES[template]
    return fast


def build_character_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Every UTF-8 byte is a token, apart from the special ones."""
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": TEMPLATE_SPECIAL[2:]})
    fast.chat_template = TEMPLATES[template]
    return fast
