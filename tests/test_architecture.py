"""The house rules that a machine can check: who imports whom, sizes, names, and what the tree must not hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lockstep"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70
MAX_DOCSTRING_LINES = 5

BASE = {"types", "config", "rundir"}
CORE = {"algorithms", "data", "model", "parallel"}
# What each part of lockstep may import of lockstep besides itself. A part is a folder or a module beside the folders.
# A new part needs a line here: adding one is a decision.
MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    **dict.fromkeys(CORE, BASE),
    "backend": BASE | CORE | {"launch", "workers"},
    "sampling": BASE | {"model", "workers"},
    "rewards": BASE | {"evaluation.metrics"},
    "train": BASE | {"data", "algorithms", "sampling.sampler", "sampling.buffer", "rewards.reward"},
    "evaluation": BASE | {"data", "sampling", "model", "backend"},
    "verification": BASE
    | CORE
    | {"backend", "train.dpo", "train.grpo", "train.options", "train.progress", "train.reference", "train.rows"}
    | {"train.rollouts", "train.rollout_parts", "rewards.reward"},
    "plan": BASE | {"model", "parallel"},
    "workers": BASE,
    "launch": BASE,
    "service": BASE | {"launch", "plan"},
    "providers": {"service"},
}
# The one module of a package that composes what its neighbours must not know.
EXCEPTIONS: dict[str, set[str]] = {
    "train/run.py": CORE | {"backend", "sampling", "evaluation", "rewards"},  # the only one that names concrete classes
    "rollouts/compose.py": {"backend", "model", "parallel", "sampling", "workers"},  # who samples for a run, and where
    "rollouts/parts.py": {"rewards"},  # who makes rewards, for a run that samples
    "reports/evaluation.py": {"page"},  # a page is for a person, and stands on nothing
    "backend/torch_backend.py": {"plan.traffic"},  # what a step should send, beside what it did
    "train/worker.py": {"train.run"},  # the only place in launch that calls up
    "__init__.py": {"types", "backend", "train", "launch", "workers"},  # the public names
}
# What a person at a terminal uses: nothing below imports these. At module level they may import the base, launch and
# each other; anything else inside the function that needs it. cli imports nothing of lockstep at module level.
TERMINAL = {"cli", "display", "plot", "starter", "demo", "datasheet", "datapage", "page", "scoreboard"}
TERMINAL |= {"scaling", "scalingpage", "verdict"}
TERMINAL_AT_TOP = BASE | {"launch"} | (TERMINAL - {"cli"})

# Other people's libraries, where it matters which. Parts that are not named may use any dependency.
MAY_USE: dict[str, set[str]] = {
    **{part: {"pydantic", "yaml"} for part in BASE},
    "algorithms": {"torch"},
    "data": {"numpy", "jinja2", "pyarrow", "datasets"},
    "parallel": {"torch"},
    "launch": {"ray"},
}
NEVER_USES: dict[str, set[str]] = {"service": {"torch"}, "providers": {"torch"}, "train": {"transformers", "peft"}}


@dataclass(frozen=True)
class Import:
    """`name` is the dotted module, `top` whether it is imported when the file is, `place` is for messages."""

    name: str
    top: bool
    place: str

    @property
    def library(self) -> str:
        return self.name.split(".")[0]

    @property
    def part(self) -> str:
        """types, data, ... of lockstep.data.order; empty for lockstep itself."""
        return self.inner.split(".")[0]

    @property
    def inner(self) -> str:
        return self.name.partition(".")[2]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import, also inside functions; those for type checkers alone are left out."""
    return tuple(_walk(parse(path), path, top=True))


def _walk(node: ast.AST, path: Path, *, top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        place = f"{path.relative_to(ROOT)}:{getattr(child, 'lineno', 0)}"
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in child.orelse:
                yield from _walk(ast.Module([statement], []), path, top=top)
        elif isinstance(child, ast.Import):
            yield from (Import(alias.name, top, place) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{place}: relative import: write the full name"
            for alias in child.names:
                yield Import(_imported_module(child.module or "", alias.name), top, place)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _walk(child, path, top=top and not inside)


def _imported_module(module: str, name: str) -> str:
    """`from lockstep.backend import state` imports the module lockstep.backend.state."""
    if module.split(".")[0] != "lockstep":
        return module
    inner = Path(*module.split(".")[1:]) if "." in module else Path()
    is_module = (PACKAGE / inner / f"{name}.py").exists() or (PACKAGE / inner / name).is_dir()
    return f"{module}.{name}" if is_module else module


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def of_lockstep(path: Path) -> list[Import]:
    return [i for i in imports_of(path) if i.library == "lockstep"]


def of_others(path: Path) -> list[Import]:
    return [i for i in imports_of(path) if i.library not in sys.stdlib_module_names and i.library != "lockstep"]


def is_allowed(found: Import, allowed: set[str]) -> bool:
    return any(found.inner == name or found.inner.startswith(name + ".") for name in allowed)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


every_source = pytest.mark.parametrize("path", SOURCES, ids=name_of)


# --- imports --------------------------------------------------------------------------------------------------------


def test_every_part_has_its_line_in_the_table():
    parts = {part_of(path) for path in SOURCES} - {"__init__"}
    unknown = parts - MAY_IMPORT.keys() - TERMINAL
    assert not unknown, f"{sorted(unknown)}: say in MAY_IMPORT or TERMINAL what they may import"


@every_source
def test_imports_point_down(path):
    part = part_of(path)
    if part in TERMINAL:
        return
    allowed = {part} | MAY_IMPORT.get(part, set()) | EXCEPTIONS.get(name_of(path), set())
    for found in of_lockstep(path):
        assert is_allowed(found, allowed), f"{found.place}: {part} may not import {found.name}"


@every_source
def test_terminal_modules_import_what_is_heavy_inside_functions(path):
    if part_of(path) not in TERMINAL:
        return
    allowed = {"cli"} if part_of(path) == "cli" else TERMINAL_AT_TOP
    for found in of_lockstep(path):
        assert not found.top or is_allowed(found, allowed), f"{found.place}: import {found.name} inside the function"
    if part_of(path) == "cli":
        libraries = {found.library for found in of_others(path) if found.top}
        assert libraries <= {"typer"}, f"{name_of(path)} imports {sorted(libraries)} at module level"


@every_source
def test_libraries_stay_where_they_belong(path):
    part = part_of(path)
    for found in of_others(path):
        assert found.library in MAY_USE.get(part, {found.library}), f"{found.place}: {part} may not use {found.library}"
        assert found.library not in NEVER_USES.get(part, set()), f"{found.place}: {part} may not use {found.library}"


def test_the_public_names_import_nothing_heavy_when_the_package_is_imported():
    for found in of_lockstep(PACKAGE / "__init__.py"):
        # The package of loops is empty itself; it is made callable, so that lockstep.train is a function too.
        assert not found.top or found.part in ("types", "train"), (
            f"{found.place}: import {found.name} when it is asked for"
        )


@pytest.mark.parametrize(
    "modules", ["lockstep, lockstep.cli, lockstep.config", "lockstep.launch, lockstep.config.template"]
)
def test_the_command_starts_without_heavy_libraries(modules):
    program = f"import sys, {modules}; print(*{{'torch', 'transformers', 'numpy', 'matplotlib'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "", f"import {modules} brings {result.stdout.strip()}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "train").glob("*.py")), ids=name_of)
def test_loops_do_not_know_ranks(path):
    # Who composes, and who is told about ranks without being one.
    if path.name in ("run.py", "feeding.py", "stragglers.py"):
        return
    for node in ast.walk(parse(path)):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert name not in ("rank", "num_ranks", "world_size"), f"{name_of(path)}:{node.lineno}: a loop is rank-free"


# --- sizes and names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))], ids=lambda path: path.name)
def test_files_are_short(path):
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines < MAX_FILE_LINES, f"{path.relative_to(ROOT)} has {num_lines} lines: split it"


@every_source
def test_functions_are_short(path):
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{name_of(path)}:{node.lineno}: {node.name} has {num_lines} lines"


@every_source
def test_every_module_says_what_it_is_in_few_lines(path):
    docstring = ast.get_docstring(parse(path))
    assert docstring or path.name == "__init__.py", f"{name_of(path)} has no docstring"
    num_lines = len((docstring or "").splitlines())
    assert num_lines <= MAX_DOCSTRING_LINES, f"{name_of(path)}: a docstring of {num_lines} lines"


@every_source
def test_a_name_says_what_is_inside(path):
    assert not {"utils", "util", "common", "helpers", "base", "misc"} & {path.stem, path.parent.name}


# --- the tree -------------------------------------------------------------------------------------------------------


def tracked_texts() -> Iterator[tuple[Path, str]]:
    """Every text file that is, or is about to be, in the repository."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    for name in listing.stdout.splitlines():
        path = ROOT / name
        if path.is_file():
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_no_machine_and_no_unfinished_business_in_the_tree():
    # Put together here, so that this file does not find itself.
    unfinished = re.compile(rf"\b({'|'.join(['TO' + 'DO', 'FIX' + 'ME', 'XX' + 'X'])})\b")
    machine = re.compile(rf"(?<![\w.~])/({'|'.join(['work', 'home', 'root', 'Users', 'scratch', 'mnt'])})/\w")
    found = []
    for path, text in tracked_texts():
        for number, line in enumerate(text.splitlines(), start=1):
            if unfinished.search(line) or machine.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def readme_tree() -> list[str]:
    """Paths of the annotated tree: the first code block whose first line is lockstep/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```\n(lockstep/\s.*?)```", text, re.DOTALL)
    assert block, "README.md has no annotated tree"
    paths, parents = [], []
    for line in block[1].splitlines():
        name = line.split()[0] if line.strip() else ""
        if not re.fullmatch(r"[\w.]+/?", name):
            continue  # a comment that goes on
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [name]
        paths.append("".join(parents))
    return paths


def test_what_the_readme_shows_exists():
    paths = readme_tree()
    assert len(paths) > 20
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"README.md shows {missing}"


def test_the_readme_shows_every_part():
    shown = set(readme_tree())
    expected = {f"lockstep/{p.name}/" for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    expected |= {f"lockstep/{p.name}" for p in PACKAGE.glob("*.py") if p.name != "__init__.py"}
    assert expected <= shown, f"README.md does not show {sorted(expected - shown)}"


def test_links_in_the_documents_lead_somewhere():
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
