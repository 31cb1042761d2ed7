"""Compiling in processes and from the cache: the same rows, errors and files, without doing the work twice."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
from data_tokenizers import CHATML, LLAMA3, build_tokenizer

from lockstep.config import DataConfig
from lockstep.data import CompiledData, CompileProgress, DataError, compile_data
from lockstep.data import cache as fingerprint
from lockstep.data import compile as compiling
from lockstep.data.compile import choose_procs
from lockstep.data.encoder import Encoder


def exchanges(num: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(start, start + num)]


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "CHUNK_ROWS", 4)
    return tmp_path / "cache" / "data"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows in each call of the encoder."""
    calls: list[int] = []
    encode = Encoder.encode

    def counted(self: Encoder, rows: Any) -> Any:
        calls.append(len(rows))
        return encode(self, rows)

    monkeypatch.setattr(Encoder, "encode", counted)
    return calls


def compiled(template: str = CHATML, seed: int = 0, adds_bos: bool = False, **settings: Any) -> CompiledData:
    return compile_data(DataConfig(**settings), build_tokenizer(template, adds_bos=adds_bos), seed=seed)


def contents(data: CompiledData) -> list[Any]:
    return [(d.origin, list(d.prompt), [(list(c.tokens), list(c.weights)) for c in d.completions]) for d in data.train]


# --- processes ------------------------------------------------------------------------------------------------------


def test_processes_give_the_same_rows_report_and_skipped_file(cache: Path, tmp_path: Path) -> None:
    bad = ["{not json", {"prompt": "q", "completion": ""}, {"text": "another format"}]
    a = write_lines(tmp_path / "a.jsonl", [bad[0], *exchanges(15), bad[1], *exchanges(15, 20), bad[2]])
    b = write_lines(tmp_path / "b.jsonl", exchanges(9, start=100))
    settings = {"train": [a, b], "on_bad_row": "skip", "max_length": 24}
    one = compiled(**settings, procs=1, cache_dir=str(tmp_path / "one"))
    two = compiled(**settings, procs=2, cache_dir=str(tmp_path / "two"))
    assert contents(two) == contents(one)
    assert len(one.train) == 39
    assert two.digest == one.digest
    assert two.report.files == one.report.files
    skipped = [Path(data.report.skipped_files[0]).read_text() for data in (one, two)]
    assert skipped[0] == skipped[1]
    found = [json.loads(line)["origin"].rsplit(":", 1)[-1] for line in skipped[0].splitlines()]
    assert found == ["1", "17", "33"]


@pytest.mark.parametrize("procs", [1, 2])
def test_the_first_bad_row_is_the_error(cache: Path, tmp_path: Path, procs: int) -> None:
    """Not the first that some process meets, nor one that is found earlier on a row's way."""
    too_long = {"prompt": "q", "completion": "long " * 60}
    rows: list[Any] = [*exchanges(9), too_long, "{not json", *exchanges(6), "{not json"]
    path = write_lines(tmp_path / "a.jsonl", rows)
    with open(path, "ab") as file:
        file.write(b"\xff\xfe\n")
    with pytest.raises(DataError, match=r"a\.jsonl:10: .*max_length"):
        compiled(train=path, procs=procs, max_length=40, truncate="error")
    assert list(cache.iterdir()) == []


def test_processes_import_the_converter_themselves(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "convert_in_process.py").write_text(
        "import os\ndef keep(row):\n    return {'prompt': row['prompt'], 'completion': str(os.getpid())}\n"
    )
    monkeypatch.chdir(tmp_path)
    path = write_lines(tmp_path / "a.jsonl", exchanges(5))
    tokenizer = build_tokenizer(CHATML)
    config = DataConfig(train=path, converter="convert_in_process:keep", procs=2)
    data = compile_data(config, tokenizer, seed=0)
    pids = {tokenizer.decode(d.completions[0].tokens, skip_special_tokens=True) for d in data.train}
    assert all(pid.isdigit() for pid in pids)
    assert str(os.getpid()) not in pids


def test_few_rows_need_no_processes() -> None:
    assert choose_procs("auto", 2**20) == 1
    assert choose_procs("auto", 2**40) == len(os.sched_getaffinity(0))
    assert choose_procs(3, 2**20) == 3


def test_a_file_that_cannot_be_read_on_comes_after_the_rows_before_it(cache: Path, tmp_path: Path) -> None:
    text = json.dumps(exchanges(3), indent=0)
    (tmp_path / "a.json").write_text(text[: text.rindex("{")] + '{"prompt": "cut o')
    with pytest.raises(DataError, match="cut off"):
        compiled(train=str(tmp_path / "a.json"))
    (tmp_path / "b.json").write_text('[{"prompt": "q", "completion": ""},\n{"prompt": "cut o')
    with pytest.raises(DataError, match=r"b\.json:1: nothing to learn"):
        compiled(train=str(tmp_path / "b.json"))


# --- the cache ------------------------------------------------------------------------------------------------------


def test_a_second_start_tokenises_nothing(cache: Path, tmp_path: Path, encoded: list[int]) -> None:
    path = write_lines(tmp_path / "a.jsonl", exchanges(10))
    first = compiled(train=path)
    assert encoded == [4, 4, 2]
    again = compiled(train=path)
    assert len(encoded) == 3
    assert contents(again) == contents(first)
    assert again.report == first.report
    assert again.digest == first.digest


def test_settings_that_choose_among_rows_open_the_same_entry(cache: Path, tmp_path: Path, encoded: list[int]) -> None:
    path = write_lines(tmp_path / "a.jsonl", exchanges(4))
    compiled(train=path)
    for settings in (
        {"validation_fraction": 0.5, "seed": 5},
        {"test_fraction": 0.3},
        {"shuffle": False},
        {"procs": 2},
        {"train": {"path": path, "weight": 3}},
        {"validation": path},
    ):
        compiled(**{"train": path, **settings})
    assert encoded == [4]


def test_whatever_changes_tokens_makes_a_new_entry(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    converter = tmp_path / "convert_for_key.py"
    converter.write_text("def same(row):\n    return row\n")
    path = write_lines(tmp_path / "a.jsonl", exchanges(4))
    (tmp_path / "own.jinja").write_text("{# mine #}" + CHATML)
    made = 0
    for settings in (
        {},
        {"max_length": 100},
        {"truncate": "drop"},
        {"train_on": "all"},
        {"on_bad_row": "skip"},
        {"chat_template": "none"},
        {"chat_template": "own.jinja"},
        {"template_options": {"date_string": "today"}},
        {"template": LLAMA3},
        {"adds_bos": True},
        {"format": "prompt_completion"},
        {"columns": {"prompt": "prompt"}},
        {"roles": {"bot": "assistant"}},
        {"input_template": "{prompt}", "output_template": "{completion}"},
        {"converter": "convert_for_key:same"},
        {"train": write_lines(tmp_path / "b.jsonl", exchanges(4))},
        {"train": [path, str(tmp_path / "b.jsonl")]},
    ):
        compiled(**{"train": path, **settings})
        made += 1
        assert len(list(cache.iterdir())) == made, settings
    converter.write_text("def same(row):\n    return dict(row)\n")
    compiled(train=path, converter="convert_for_key:same")
    write_lines(Path(path), exchanges(3))
    compiled(train=path)
    assert len(list(cache.iterdir())) == made + 2
    monkeypatch.setattr(fingerprint, "digest_code", lambda: "another compiler")
    compiled(train=path)
    assert len(list(cache.iterdir())) == made + 3


def test_modules_that_do_not_compile_are_not_part_of_the_key() -> None:
    package = Path(fingerprint.__file__).parent
    reached, to_do = set[Path](), [package / "compile.py"]
    while to_do:
        path = to_do.pop()
        if path in reached or not path.is_file():
            continue
        reached.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep.data."):
                inner = package.joinpath(*str(node.module).split(".")[2:])
                to_do += [inner.with_suffix(".py"), *((inner / alias.name).with_suffix(".py") for alias in node.names)]
    assert {"columns.py", "encoder.py", "conversation.py", "rows.py"} <= {path.name for path in reached}
    for name in fingerprint.NOT_COMPILING:
        assert (package / name).is_file()
        assert package / name not in reached, f"{name} can change compiled rows"


def test_a_file_that_changes_while_it_is_read_is_an_error(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(write_lines(tmp_path / "a.jsonl", exchanges(4)))
    encode = Encoder.encode

    def encode_slowly(self: Encoder, rows: Any) -> Any:
        with path.open("a") as file:
            file.write(json.dumps(exchanges(1)[0]) + "\n")
        return encode(self, rows)

    monkeypatch.setattr(Encoder, "encode", encode_slowly)
    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read"):
        compiled(train=str(path))
    assert list(cache.iterdir()) == []


def test_without_a_cache_it_compiles_and_says_so(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = write_lines(tmp_path / "a.jsonl", exchanges(4))
    data = compiled(train=path, cache_dir=str(tmp_path / "file" / "data"))
    assert len(data.train) == 4
    (warning,) = data.report.warnings()
    assert "cannot be written" in warning


def test_progress_is_told(cache: Path, tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", exchanges(6))
    b = write_lines(tmp_path / "b.jsonl", exchanges(4, start=50))
    reports: list[CompileProgress] = []
    config = DataConfig(train=[a, b], validation=b)
    compile_data(config, build_tokenizer(CHATML), seed=0, on_progress=reports.append)
    train = [progress for progress in reports if progress.split == "train"]
    assert [progress.rows for progress in train] == [0, 4, 6, 10]
    assert [progress.phase for progress in train] == ["reading"] + ["tokenising"] * 3
    sizes = [os.path.getsize(path) for path in (a, b)]
    assert train[-1].total_bytes == sum(sizes)
    done = [progress.done_bytes for progress in train]
    assert done == sorted(done)
    assert done[-1] >= sizes[0]
    assert done[-1] <= sum(sizes)
    assert [progress.split for progress in reports][-1] == "validation"
