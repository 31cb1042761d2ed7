"""Rows of other shapes: text with {columns}, and the user's own function."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.data import SourceConfig
from lockstep.data.formats.conversation import Content, Conversation, Passage
from lockstep.data.formats.reader import RowReader, load_converter, recognise_format
from lockstep.data.sources.rows import DataError, Row


def open_rows(source: SourceConfig, fields: dict[str, Any], *, has_template: bool = False) -> RowReader:
    format = recognise_format(Row("f.jsonl:7", fields), source)
    assert format is not None
    return RowReader(source, format, train_on="assistant", has_template=has_template)


# --- text with {columns} --------------------------------------------------------------------------------------------


def read_with(input_template: str, output_template: str, fields: dict[str, Any], **options: Any) -> Content | None:
    source = SourceConfig(path="f", input_template=input_template, output_template=output_template)
    return open_rows(source, fields, **options).read(Row("f.jsonl:7", fields))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Q: {question}\nA:", "Q: Why?\nA:"),
        ("{question}{question}", "Why?Why?"),
        ("{{{question}}}", "{Why?}"),
        ("{{question}} {n}", "{question} 3"),
        ("{options} {n} {two words} {yes}", '["é", null] 3 w true'),
        ("{question!r}", "bang"),
    ],
)
def test_columns_are_filled_in(text: str, expected: str) -> None:
    fields = {"question": "Why?", "n": 3, "options": ["é", None], "two words": "w", "yes": True, "a": "so"}
    fields["question!r"] = "bang"
    assert read_with(text, "{a}", fields) == Passage("f.jsonl:7", expected, "so")


def test_filled_text_is_a_question_and_its_answer() -> None:
    messages = ({"role": "user", "content": "q?"}, {"role": "assistant", "content": "a!"})
    fields = {"messages": "q", "label": "a"}
    assert read_with("{messages}?", "{label}!", fields, has_template=True) == Conversation("f.jsonl:7", messages, (1,))


def test_columns_that_no_text_names_are_ignored() -> None:
    source = SourceConfig(path="f", input_template="{a}", output_template="{b} {a}", columns={"prompt": "b"})
    fields = {"a": "1", "b": "2", "c": "3", "system": "s"}
    assert open_rows(source, fields).ignored_keys(Row("f:1", fields)) == {"c", "system"}


@pytest.mark.parametrize(
    ("template", "fields", "words"),
    [
        ("{b}", {"a": "1", "c": 2}, 'data.input_template names {b}, the row has "a", "c"'),
        ("{a}", {"a": None}, "'a' is null and data.input_template needs it"),
        ("{a}", {"a": {1}}, "'a' cannot be written as JSON"),
        (" {a}", {"a": " "}, "'input_template' is empty"),
    ],
)
def test_rows_that_do_not_fill_the_text(template: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        read_with(template, "{a}", fields)
    assert str(caught.value).startswith("f.jsonl:7: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{a} {", r"^data\.input_template: a single \{ at character 5: write \{column\}, or \{\{ for the brace itself"),
        ("a}", r"^data\.input_template: a single \} at character 2"),
        ("{}", r"^data\.input_template: a single \{ at character 1"),
        ("hello {{a}}", r"^data\.input_template: it names no column"),
    ],
)
def test_wrong_text(template: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_with(template, "{a}", {"a": "1"})


# --- the user's function --------------------------------------------------------------------------------------------

CONVERTERS = """
def to_pair_of_strings(row):
    row["parts"].append("changed")
    if row["parts"][0] == "skip":
        return None
    return {"prompt": row["parts"][0], "completion": row["parts"][1], "sytem": "s"}

def fail(row):
    return {"prompt": row["nothing"]}

def fail_quietly(row):
    raise RuntimeError

def to_list(row):
    return [row]

def to_nothing_known(row):
    return {"x": 1}

constant = 3
"""

WriteModule = Callable[[str], str]


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> WriteModule:
    """Writes a module into a new working directory; returns its name, which no other test uses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str) -> str:
        name = f"converter_{hashlib.sha256(request.node.nodeid.encode()).hexdigest()}"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        return name

    return write


def convert_with(setting: str, fields: dict[str, Any]) -> Content | None:
    source = SourceConfig(path="f", converter=setting)
    reader = RowReader(source, "prompt_completion", train_on="assistant", has_template=False)
    return reader.read(Row("f.jsonl:7", fields))


def test_a_converter_makes_rows_of_a_known_format(write_module: WriteModule) -> None:
    source = SourceConfig(path="f", converter=f"{write_module(CONVERTERS)}:to_pair_of_strings")
    fields = {"parts": ["q", "a"], "prompt": "not looked at"}
    reader = open_rows(source, fields)
    assert reader.format == "prompt_completion"
    assert reader.read(Row("f.jsonl:7", fields)) == Passage("f.jsonl:7", "q", "a")
    assert fields["parts"] == ["q", "a"]
    assert reader.ignored_keys(Row("f.jsonl:7", fields)) == {"sytem"}


def test_a_converter_leaves_rows_out(write_module: WriteModule) -> None:
    source = SourceConfig(path="f", converter=f"{write_module(CONVERTERS)}:to_pair_of_strings")
    left_out = Row("f.jsonl:1", {"parts": ["skip"]})
    assert recognise_format(left_out, source) is None
    reader = open_rows(source, {"parts": ["q", "a"]})
    assert reader.read(left_out) is None
    assert reader.ignored_keys(left_out) == set()


def test_columns_and_texts_come_after_the_converter(write_module: WriteModule) -> None:
    setting = f"{write_module(CONVERTERS)}:to_pair_of_strings"
    fields = {"parts": ["q", "a"]}
    renamed = SourceConfig(path="f", converter=setting, columns={"system": "sytem"})
    assert open_rows(renamed, fields).read(Row("f.jsonl:7", fields)) == Passage("f.jsonl:7", "s\n\nq", "a")
    filled = SourceConfig(path="f", converter=setting, input_template="{sytem}", output_template="{prompt}")
    assert open_rows(filled, fields).read(Row("f.jsonl:7", fields)) == Passage("f.jsonl:7", "s", "q")


def test_another_process_imports_the_converter_itself(write_module: WriteModule, tmp_path: Path) -> None:
    source = SourceConfig(path="f", converter=f"{write_module(CONVERTERS)}:to_pair_of_strings")
    fields = {"parts": ["q", "a"]}
    reader = open_rows(source, fields)
    reader.read(Row("f.jsonl:7", fields))
    (tmp_path / "reader").write_bytes(pickle.dumps((reader, Row("f.jsonl:7", fields))))
    program = "import pickle; reader, row = pickle.load(open('reader', 'rb')); print(reader.read(row).answer)"
    # -P keeps the working directory off sys.path, as it is for an installed command.
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (result.stdout, result.stderr) == ("a\n", "")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("fail", "f.jsonl:7: the converter {module}:fail failed: KeyError: 'nothing'"),
        ("fail_quietly", "f.jsonl:7: the converter {module}:fail_quietly failed: RuntimeError"),
        ("to_list", "f.jsonl:7: the converter {module}:to_list returned a list: return a dict or None"),
        (
            "to_nothing_known",
            'f.jsonl:7: not a row of format prompt_completion: expected the keys "prompt", "completion"',
        ),
        ("absent", "data.converter '{module}:absent': {module} has no function absent"),
        ("constant", "data.converter '{module}:constant': {module} has int, not a function, called constant"),
    ],
)
def test_converters_that_fail(write_module: WriteModule, function: str, words: str) -> None:
    module = write_module(CONVERTERS)
    with pytest.raises(DataError) as caught:
        convert_with(f"{module}:{function}", {"parts": ["q", "a"]})
    assert str(caught.value).startswith(words.format(module=module))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_library", "{module} cannot be imported: No module named 'no_such_library'"),
        ("1 / 0", "{module} cannot be imported: ZeroDivisionError: division by zero"),
        ("def f(row:", "{module} cannot be imported: SyntaxError: "),
    ],
)
def test_modules_that_cannot_be_imported(write_module: WriteModule, text: str, words: str) -> None:
    module = write_module(text)
    with pytest.raises(DataError) as caught:
        load_converter(f"{module}:f")
    assert str(caught.value).startswith(f"data.converter '{module}:f': {words.format(module=module)}")


@pytest.mark.parametrize("setting", ["convert", ":f", "convert:", "convert.f"])
def test_settings_that_are_no_function(setting: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.converter '{setting}': write module:function"):
        load_converter(setting)


def test_a_missing_module_is_named() -> None:
    words = (
        r"^data\.converter 'no_such_package\.inner:f': there is no module no_such_package: put no_such_package\.py into"
    )
    with pytest.raises(DataError, match=words):
        load_converter("no_such_package.inner:f")
