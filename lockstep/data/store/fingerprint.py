"""The key of compiled rows: everything that can change them, and nothing else.

Seed, weights, fractions, shuffling and the number of processes are left out: they only choose among compiled rows.
Must not know what compiling does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.config.data import DataConfig, SourceConfig
from lockstep.data.sources.files import SourceFile, digest_file
from lockstep.data.text.rendering import Template, Tokenizer

_READING = ("format", "columns", "roles", "input_template", "output_template", "converter")
_COMPILING = ("train_on", "max_length", "truncate", "on_bad_row", "template_options")
_LIBRARIES = ("tokenizers", "transformers", "jinja2")


def fingerprint(
    config: DataConfig,
    files: Sequence[tuple[SourceConfig, SourceFile]],
    tokenizer_digest: str,
    template: Template | None,
) -> str:
    """One key for all files of a part, each with the settings it is read with."""
    described = {
        "code": _own_code(),
        "libraries": {name: metadata.version(name) for name in _LIBRARIES},
        "tokenizer": tokenizer_digest,
        "template": None if template is None else template.source,
        "settings": {name: getattr(config, name) for name in _COMPILING},
        "files": [_describe_file(source, file) for source, file in files],
    }
    return _digest(json.dumps(described, sort_keys=True, default=repr))


def digest_tokenizer(tokenizer: Tokenizer) -> str:
    """What decides its tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # The text opens with padding and truncation, which every call sets anew: they are no part of the tokenizer.
    model = backend.to_str().partition('"added_tokens":')[2] if backend is not None else repr(tokenizer)
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    return _digest(json.dumps([type(tokenizer).__name__, _digest(model), special], sort_keys=True))


def _describe_file(source: SourceConfig, file: SourceFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "kind": file.kind,
        "digest": digest_file(file),
        "settings": {name: getattr(source, name) for name in _READING},
        "converter": _digest_converter(source.converter),
    }


def _digest_converter(converter: str | None) -> str | None:
    """The file of the user's module; what it imports in turn is not looked at."""
    if converter is None:
        return None
    module = converter.partition(":")[0]
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        spec = None
    finally:
        sys.path.remove(here)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return "not found"  # whoever reads the rows says so
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


@cache
def _own_code() -> str:
    """A changed compiler never meets what an older one made."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()
