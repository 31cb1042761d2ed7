"""Tiny things on disk that every test may train: a random Llama, its byte-level tokenizer, rows, a configuration.

Everything is small enough for a step of a few milliseconds; nothing is downloaded. Also the `lockstep` command as a
person runs it, and the digest of what it exported.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep.launch.local import launched_processes, read_handle
from lockstep.rundir import RunDir

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 288  # 256 bytes and the special tokens, with room that no token uses, as in real models
WORDS = ("red", "green", "blue", "one", "two", "three", "four", "five", "cat", "dog", "sun", "moon", "up", "down")


def build_tokenizer(template: str | None = CHATML) -> Any:
    """One token per byte; the three special tokens come first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = template
    return wrapped


def build_model(*, seed: int = 0, **changes: Any) -> Any:
    """A random Llama in float32: hidden 32, two layers, untied. `changes` go to its LlamaConfig."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,  # large, so that a wrong weight shows in the logits
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def write_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A model folder as the Hub has them: configuration, safetensors, tokenizer with a ChatML template."""
    build_model(seed=seed, **changes).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, *, seed: int = 0) -> Path:
    """Question and answer of a few words each, in the `messages` format, one line per row."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        question, answer = (" ".join(draw.choices(WORDS, k=draw.randint(2, 6))) for _ in range(2))
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}) + "\n")
    path.write_text("".join(lines))
    return path


def write_config(folder: Path, model: Path, **changes: Any) -> Path:
    """`folder`/config.yaml for 48 rows in 12 steps, in fp32 on CPU. `changes` are merged in, section by section."""
    if not (folder / "train.jsonl").exists():
        write_rows(folder / "train.jsonl", 48)
    settings: dict[str, Any] = {
        "model": {"path": str(model), "precision": "fp32"},
        "data": {"train": "train.jsonl", "max_length": 128},
        "batch": {"samples": 4, "micro_batch_tokens": 256},
        "optim": {"learning_rate": 0.01},
        "launch": {"device": "cpu", "timeout_s": 60},
        "logging": {"tensorboard": False},
    }
    for section, values in changes.items():
        old = settings.get(section)
        settings[section] = {**old, **values} if isinstance(old, dict) and isinstance(values, Mapping) else values
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def start_lockstep(*arguments: object) -> subprocess.Popen[str]:
    """The real command in a process of its own. One thread per rank: tiny models only lose time with more."""
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_lockstep(*arguments: object, timeout_s: float = 300.0) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    process = start_lockstep(*arguments)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # the command ends its workers
        raise
    return process.returncode, out, err


def pid_of_rank(run: RunDir, rank: int) -> int:
    """The process that the launcher started as this rank."""
    handle = read_handle(run.path)
    assert handle is not None
    name = f"RANK={rank}".encode()
    marked = launched_processes(handle.launch_id)
    (pid,) = [pid for pid in marked if name in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    return pid


def digest_weights(folder: Path) -> str:
    """SHA-256 over every safetensors file of an export."""
    files = sorted(folder.glob("*.safetensors"))
    assert files, f"there are no weights in {folder}"
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
