"""What the documents show is true: Python runs, commands and their options exist, configurations are valid."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pages
import pytest
import tiny
import typer
import yaml
from pages import ROOT, Block
from pydantic import BaseModel

from lockstep.cli import app
from lockstep.config import RunConfig, load_config, resolve_config
from lockstep.config.renames import RENAMED_KEYS

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
LANGUAGES = {"python", "yaml", "json", "sh", "text"}
MINIMAL = {"model": "some/model", "data": {"train": "train.jsonl"}}


def by_place(block: Block) -> str:
    return block.place


def runnable() -> list[Any]:
    found = [block for block in pages.blocks("python") if block.is_run]
    return [
        pytest.param(block, id=block.place, marks=[pytest.mark.slow] if block.note == "run: slow" else [])
        for block in found
    ]


# --- Python ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder as readers have it by then: a configuration and rows. Its model is a tiny one."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "examples").symlink_to(ROOT / "examples")
    tiny.write_rows(folder / "train.jsonl", 16)
    sums = [{"prompt": f"What is {n} + 1?", "completion": f"{n + 1}"} for n in range(8)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    tiny.write_config(folder, tiny_model).rename(folder / "lockstep.yaml")
    return folder


@pytest.fixture(scope="session")
def desk_with_runs(desk: Path) -> Path:
    """And two runs."""
    code, _, err = tiny.run_lockstep("train", desk / "lockstep.yaml", "--run-dir", desk / "runs" / "a")
    assert code == 0, err
    shutil.copytree(desk / "runs" / "a", desk / "runs" / "b")
    return desk


@pytest.mark.parametrize("block", runnable())
def test_python_runs(block: Block, request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path):
    desk: Path = request.getfixturevalue("desk_with_runs" if "runs/" in block.text else "desk")
    shutil.copytree(desk, tmp_path, symlinks=True, dirs_exist_ok=True)
    for other in pages.blocks():  # what the same page calls a file is one
        if other.page == block.page and other.file and other.is_run:
            (tmp_path / other.file).write_text(other.text.replace(MODEL, str(tiny_model)))
    (tmp_path / "block.py").write_text(block.text.replace(MODEL, str(tiny_model)))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "block.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"{block.place}:\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("block", pages.blocks("python"), ids=by_place)
def test_python_imports_what_is_there(block: Block):
    for node in ast.walk(ast.parse(block.text, filename=block.place)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lockstep":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{block.place}: {node.module} has no {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "lockstep":
                    importlib.import_module(alias.name)


# --- configurations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [b for b in pages.blocks("yaml") if b.is_run], ids=by_place)
def test_configurations_are_valid(block: Block):
    """A part of a configuration is completed by the two keys that every run needs."""
    tree = yaml.safe_load(block.text)
    assert isinstance(tree, dict), f"{block.place} is not a configuration: mark it as not run, with the reason"
    resolve_config(merge(MINIMAL, tree), source=block.place, directory=ROOT)


def merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {**under, **over}
    for key in under.keys() & over.keys():
        if isinstance(under[key], dict) and isinstance(over[key], dict):
            both[key] = merge(under[key], over[key])
    return both


@pytest.mark.parametrize("block", pages.blocks("json"), ids=by_place)
def test_json_is_json(block: Block):
    for line in block.text.splitlines():
        json.loads(line)


def sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_of(inner)


def test_keys_in_the_text_exist():
    sections = {name: list(sections_of(field.annotation)) for name, field in RunConfig.model_fields.items()}
    missing = []
    for place, text in pages.inline_code():
        key = re.match(r"([a-z]+)\.([a-z_]+)(?=$|[:= ])", text)
        if not key or not sections.get(key[1]) or RENAMED_KEYS.keys() & {key[2]}:
            continue
        if not any(key[2] in section.model_fields for section in sections[key[1]]):
            missing.append(f"{place}: {key[0]}")
    # data.train is a key, data.html a file.
    missing = [text for text in missing if not text.endswith((".py", ".html", ".json", ".jsonl"))]
    assert not missing, "\n".join(["no such key", *missing])


# --- commands -------------------------------------------------------------------------------------------------------


def commands_of(text: str) -> Iterator[list[str]]:
    """The commands of a shell block, without prompts, comments, pipes and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s&&\s|\s\|\s", re.sub(r"(^|\s)#.*", "", line)):
            words = shlex.split(part.replace("$(", "'$(").replace(")", ")'") if "$(" in part else part)
            if ">>" in words:
                words = words[: words.index(">>")]
            words = [word for word in words if word != "&"]
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


def problem_with(words: list[str], config: Path) -> str | None:
    match words:
        case ["lockstep", *arguments] | ["python", "-m", "lockstep", *arguments]:
            return problem_with_lockstep(arguments, config)
        case ["make", *targets]:
            known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            parts = re.search(r"SWEEP_PARTS := (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
            known += [f"sweep-{part}" for part in parts[1].split()] if parts else []
            return next((f"no target {t}" for t in targets if "=" not in t and t not in known), None)
        case ["pip", "install", *_]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            named = {name for word in words for group in re.findall(r"\[(.*)\]", word) for name in group.split(",")}
            return f"no extra {named - extras.keys()}" if named - extras.keys() else None
    files = [word for word in words if re.fullmatch(r"(examples|benchmarks|tests|docs)/[\w./-]+", word)]
    return next((f"no file {name}" for name in files if not (ROOT / name).exists()), None)


def problem_with_lockstep(arguments: list[str], config: Path) -> str | None:
    group = typer.main.get_command(app)
    if not arguments or arguments[0].startswith("-"):
        return None
    command = group.commands.get(arguments[0])
    if command is None:
        return f"no command {arguments[0]}"
    context = type(group).context_class(command, info_name=arguments[0])
    try:
        values, rest, _ = command.make_parser(context).parse_args(list(arguments[1:]))
        if rest:
            return f"too many arguments: {rest}"
        positional = [p.name for p in command.params if p.param_type_name == "argument"]
        words = [word for name in positional for word in flatten(values.get(name))]
        load_config(config, [word for word in words if re.match(r"[a-z_.]+=", word)])
    except Exception as error:  # typer brings its own click, or uses the installed one: whose errors these are varies
        return f"{type(error).__name__}: {error}"
    return None


def flatten(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


@pytest.fixture(scope="module")
def minimal_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("minimal") / "lockstep.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


@pytest.mark.parametrize("block", pages.blocks("sh"), ids=by_place)
def test_commands_exist(block: Block, minimal_config: Path):
    problems = {" ".join(words): problem_with(words, minimal_config) for words in commands_of(block.text)}
    assert not any(problems.values()), {command: why for command, why in problems.items() if why}


def test_commands_in_the_text_exist(minimal_config: Path):
    problems = []
    for place, text in pages.inline_code():
        if re.match(r"(lockstep|make) [a-z]", text):
            words = shlex.split(re.sub(r"[\[\]|]", " ", text))
            if why := problem_with(words, minimal_config):
                problems.append(f"{place}: {text}: {why}")
    assert not problems, "\n".join(problems)


# --- everything -----------------------------------------------------------------------------------------------------


def test_every_block_says_its_language():
    vague = [f"{block.place}: {block.language or 'no language'}" for block in pages.blocks()]
    vague = [text for text in vague if text.rpartition(": ")[2] not in LANGUAGES]
    assert not vague, "\n".join([f"one of {sorted(LANGUAGES)} is known here:", *vague])


def test_modules_and_files_in_the_text_exist():
    missing = []
    for place, text in pages.inline_code():
        if re.fullmatch(r"lockstep(\.\w+)+", text):
            if not resolves(text):
                missing.append(f"{place}: {text}")
        elif re.fullmatch(r"[\w-]+(/[\w.-]+)*/?\.?(py|yaml|md|sh|toml)?", text) and "/" in text:
            home = text.split("/")[0]
            known = {path.name for base in (ROOT, ROOT / "lockstep") for path in base.iterdir() if path.is_dir()}
            if home in known - {"data"} and not any((base / text).exists() for base in (ROOT, ROOT / "lockstep")):
                missing.append(f"{place}: {text}")
    assert not missing, "\n".join(["not there:", *missing])


def resolves(name: str) -> bool:
    """Whether a dotted name is a module or something in one."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False
