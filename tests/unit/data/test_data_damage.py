"""A damaged cache of compiled rows: found before a row of it is learned, and compiled again."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_tokenizers import CHATML, build_tokenizer

from lockstep.config import DataConfig
from lockstep.data import CompiledData, blocks, compile_data
from lockstep.data.blocks import DamagedCache
from lockstep.data.columns import COLUMNS


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def exchanges(num: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(num)]


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def compiled(**settings: Any) -> CompiledData:
    return compile_data(DataConfig(**settings), build_tokenizer(CHATML), seed=0)


def contents(data: CompiledData) -> list[Any]:
    return [(d.origin, list(d.prompt), [(list(c.tokens), list(c.weights)) for c in d.completions]) for d in data.train]


def flip_bit(file: Path, byte: int) -> None:
    """As a disk does: neither size nor time change."""
    stat = file.stat()
    content = bytearray(file.read_bytes())
    content[byte] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize(
    ("name", "how"),
    [*((f"{column}.bin", "a bit") for column in COLUMNS), ("tokens.bin", "zeros"), ("tokens.bin", "pickle")],
)
def test_no_row_comes_from_a_damaged_cache(cache: Path, tmp_path: Path, name: str, how: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", exchanges(4))
    good = contents(compiled(train=path))
    (entry,) = cache.iterdir()
    size = (entry / name).stat().st_size
    match how:
        case "a bit":
            flip_bit(entry / name, size // 2)
        case "zeros":
            (entry / name).write_bytes(bytes(size))
        case "pickle":
            bomb = pickle.dumps(Bomb(tmp_path / "canary"))
            (entry / name).write_bytes((bomb + bytes(size))[:size])
    data, told = compiled(train=path), []
    try:
        found = contents(data)
    except DamagedCache as error:  # found while training: the next start compiles it again
        told.append(str(error))
        data = compiled(train=path)
        found = contents(data)
    told += data.report.warnings()
    assert found == good
    assert any(name in text and "the data cache is damaged" in text for text in told), told
    assert not (tmp_path / "canary").exists()
    assert compiled(train=path).report.warnings() == []


def test_damage_that_a_start_meets_is_mended_by_it(cache: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", exchanges(4))
    good = contents(compiled(train=path))
    (entry,) = cache.iterdir()
    flip_bit(entry / "row_keys.bin", 3)
    data = compiled(train=path)
    (warning,) = data.report.warnings()
    assert "row_keys.bin" in warning
    assert warning.endswith("it was compiled again")
    assert contents(data) == good


def test_a_start_reads_only_what_it_needs_and_training_the_blocks_it_touches(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    path = write_lines(tmp_path / "a.jsonl", exchanges(40))
    compiled(train=path)
    (entry,) = cache.iterdir()
    flip_bit(entry / "tokens.bin", -1)
    data = compiled(train=path)
    assert data.report.warnings() == [], "nobody has read the tokens yet"
    for number in range(30):
        data.train[number]
    with pytest.raises(DamagedCache, match=r"tokens\.bin .* the next start compiles it again") as caught:
        list(data.train)
    assert caught.value.exit_code == 1, "the launcher starts the run again"
    assert not entry.exists()


def test_what_another_process_removed_can_still_be_read_here(cache: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", exchanges(4))
    data = compiled(train=path)
    first = data.train[0]
    shutil.rmtree(cache)
    assert list(data.train[0].prompt) == list(first.prompt)
    assert len(contents(data)) == 4


def test_a_skipped_file_is_verified(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_lines(path, exchanges(4))
    with path.open("a") as file:
        file.write("{\n")
    (skipped,) = compiled(train=str(path), on_bad_row="skip").report.skipped_files
    text = Path(skipped).read_text()
    flip_bit(Path(skipped), 5)
    data = compiled(train=str(path), on_bad_row="skip")
    assert Path(data.report.skipped_files[0]).read_text() == text
    assert any("compiled again" in warning for warning in data.report.warnings())
