"""The house rules that a machine can check: who imports whom, sizes, names, and what the tree must not hold.

One test for each rule; a failure lists every place that breaks it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest
from mutation.run import ALL as FAULTS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lockstep"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70
MAX_DOCSTRING_LINES = 5

BASE = {"types", "config", "rundir"}
CORE = {"algorithms", "data", "model", "parallel"}
# What each room may import of lockstep besides itself, inside functions too. A room is a folder or a module beside the
# folders. A new room needs a line here: adding one is a decision.
MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    **dict.fromkeys(CORE, BASE),
    # Rows are compiled in processes. `processes` imports only base rooms, so this closes no cycle; handing a pool down
    # from every caller through the cache would let one that forgets compile on one core.
    "data": BASE | {"processes"},
    "processes": BASE,
    "backend": BASE | CORE | {"processes"},
    "inference": BASE | {"model", "processes"},
    "rollouts": BASE | {"inference", "processes", "algorithms", "data"},
    # evaluate(out=...) leaves a page beside its numbers, also when a program calls it.
    "evaluation": BASE | {"data", "model", "backend", "inference", "reports"},
    "tenants": BASE | CORE | {"backend", "inference", "processes"},
    "train": BASE | {"data", "algorithms", "rollouts"},
    "verification": BASE | CORE | {"backend", "processes", "rollouts", "train"},
    # The layers that are counted are recomputed and held as the backend does it.
    "plan": BASE | {"model", "parallel", "backend"},
    "launch": BASE | {"processes"},
    # It starts the process of a base model that Tinker's client trains: by name, as launch starts ranks.
    "service": BASE | {"launch", "plan", "processes"},
    "reports": BASE,
}
# The one module of a room that composes what its neighbours do not know.
COMPOSERS: dict[str, set[str]] = {
    "train/run.py": CORE | {"backend", "inference", "processes", "evaluation"},
    "train/prepare.py": {"model", "evaluation"},
    "train/describe.py": {"model", "parallel"},
    "train/foresee.py": {"plan", "parallel"},
    "train/worker.py": {"processes"},  # the entry of a rank: which one it is, and which signals reach it
    "__init__.py": {"types", "backend", "launch", "processes", "train"},
}
# What is known by name below the rule above.
FACADES = {"cli", "__init__", "__main__"}

# Other people's libraries, where it matters which. Rooms that are not named may use any dependency.
MAY_USE: dict[str, set[str]] = {
    **{room: {"pydantic", "yaml"} for room in BASE},
    "algorithms": {"torch"},
    "data": {"numpy", "jinja2", "pyarrow", "datasets", "PIL"},
    "parallel": {"torch"},
    # Each where a run asks for it: a Ray cluster, a Kubernetes cluster (urllib3 carries its client), an object store.
    "launch": {"ray", "kubernetes", "urllib3", "fsspec"},
}
NEVER_USES: dict[str, set[str]] = {"service": {"torch"}, "launch": {"torch"}, "train": {"transformers", "peft"}}


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
    def room(self) -> str:
        """types, data, ... of lockstep.data.order; empty for lockstep itself."""
        return self.name.partition(".")[2].split(".")[0]


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


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def of_lockstep(path: Path) -> list[Import]:
    return [i for i in imports_of(path) if i.library == "lockstep" and i.room]


def of_others(path: Path) -> list[Import]:
    return [i for i in imports_of(path) if i.library not in sys.stdlib_module_names and i.library != "lockstep"]


def rooms() -> set[str]:
    return {room_of(path) for path in SOURCES} - FACADES


def refuse(broken: Iterable[str]) -> None:
    found = list(broken)
    assert not found, "\n" + "\n".join(found)


# --- imports --------------------------------------------------------------------------------------------------------


def test_every_room_has_its_line_in_the_table():
    unknown = rooms() - MAY_IMPORT.keys()
    assert not unknown, f"{sorted(unknown)}: say in MAY_IMPORT what they may import"


def test_imports_point_down():
    refuse(
        f"{found.place}: {room_of(path)} may not import {found.name}"
        for path in SOURCES
        if room_of(path) not in FACADES
        for found in of_lockstep(path)
        if found.room
        not in {room_of(path)} | MAY_IMPORT.get(room_of(path), set()) | COMPOSERS.get(name_of(path), set())
    )


def test_the_rooms_have_no_cycle():
    places: dict[tuple[str, str], str] = {}
    graph: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        for found in of_lockstep(path):
            room = room_of(path)
            if room not in FACADES and found.room != room:
                graph[room].add(found.room)
                places.setdefault((room, found.room), found.place)
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        cycle = list(reversed(error.args[1]))
        edges = [f"{a} -> {b} ({places[a, b]})" for a, b in pairwise(cycle)]
        pytest.fail("rooms import each other in a circle: " + ", ".join(edges))


def test_nothing_imports_the_command():
    refuse(
        f"{found.place} imports {found.name}"
        for path in SOURCES
        if room_of(path) not in ("cli", "__main__")
        for found in of_lockstep(path)
        if found.room == "cli"
    )


def test_the_command_imports_what_is_heavy_inside_functions():
    refuse(
        f"{found.place}: import {found.name} inside the function"
        for path in SOURCES
        if room_of(path) == "cli"
        for found in imports_of(path)
        if found.top
        and found.library not in sys.stdlib_module_names
        and not (found.library == "lockstep" and found.room in {"", "cli", "launch"} | BASE)
        and found.name != "lockstep.reports.page"
        and found.library not in ("typer", "rich")
    )


def test_libraries_stay_where_they_belong():
    refuse(
        f"{found.place}: {room_of(path)} may not use {found.library}"
        for path in SOURCES
        for found in of_others(path)
        if found.library not in MAY_USE.get(room_of(path), {found.library})
        or found.library in NEVER_USES.get(room_of(path), set())
    )


@pytest.mark.parametrize(
    "modules", ["lockstep, lockstep.cli, lockstep.config", "lockstep.launch.start, lockstep.config.template"]
)
def test_the_command_starts_without_heavy_libraries(modules):
    program = f"import sys, {modules}; print(*{{'torch', 'transformers', 'numpy', 'matplotlib'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "", f"import {modules} brings {result.stdout.strip()}"


def test_loops_do_not_know_ranks():
    # Who composes, who is the entry of a rank, and who is told about ranks without being one.
    knowing = ("run.py", "prepare.py", "describe.py", "foresee.py", "worker.py", "steps.py")
    paths = [path for path in (PACKAGE / "train").glob("*.py") if path.name not in knowing]
    names = ((path, node) for path in paths for node in ast.walk(parse(path)))
    refuse(
        f"{name_of(path)}:{node.lineno}: a loop is rank-free"
        for path, node in names
        if (isinstance(node, ast.Attribute) and node.attr in ("rank", "num_ranks", "world_size"))
        or (isinstance(node, ast.Name) and node.id in ("rank", "num_ranks", "world_size"))
    )


# --- sizes and names ------------------------------------------------------------------------------------------------


def test_files_are_short():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (*SOURCES, *TESTS)}
    refuse(f"{path.relative_to(ROOT)} has {n} lines: split it" for path, n in lengths.items() if n >= MAX_FILE_LINES)


def test_functions_are_short():
    functions = (
        (path, node)
        for path in SOURCES
        for node in ast.walk(parse(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    refuse(
        f"{name_of(path)}:{node.lineno}: {node.name} has {(node.end_lineno or 0) - node.lineno + 1} lines"
        for path, node in functions
        if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    )


def test_every_module_says_what_it_is_in_few_lines():
    docstrings = {path: ast.get_docstring(parse(path)) for path in SOURCES}
    refuse(f"{name_of(path)} has no docstring" for path, text in docstrings.items() if not text and is_more(path))
    refuse(
        f"{name_of(path)}: a docstring of {len(text.splitlines())} lines"
        for path, text in docstrings.items()
        if text and len(text.splitlines()) > MAX_DOCSTRING_LINES
    )


def is_more(path: Path) -> bool:
    return path.name != "__init__.py" or bool(path.read_text(encoding="utf-8").strip())


def test_a_name_says_what_is_inside():
    vague = {"utils", "util", "common", "helpers", "base", "misc"}
    refuse(name_of(path) for path in SOURCES if vague & {path.stem, path.parent.name})


def test_a_class_name_means_one_thing():
    # Llama Stack's wire classes carry the names that Llama Stack gave them.
    homes: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        if name_of(path) != "service/llama_stack/schemas.py":
            for node in parse(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(f"{name_of(path)}:{node.lineno}")
    refuse(f"{name}: {', '.join(places)}" for name, places in homes.items() if len(places) > 1)


# --- tests ----------------------------------------------------------------------------------------------------------

# They break the inside of a process on purpose, to see that somebody notices.
FAULT_INJECTION = {"tests/fault_worker.py", "tests/faulty_worker.py"}

FOREIGN = {"_parameters", "_metrics"}  # torch's and TRL's, though some class of ours has one of that name too


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(tree: ast.Module) -> set[str]:
    """What a module defines for itself: functions, classes, variables and attributes of self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and on_itself(node):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def on_itself(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_tests_use_what_is_public():
    """Privates of other libraries are not seen, nor those that a test patches by their name as text."""
    ours = set[str]().union(*(private_names(parse(path)) for path in SOURCES))
    refuse(
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:100]}"
        for path in TESTS
        if path.relative_to(ROOT).as_posix() not in FAULT_INJECTION
        for hidden in [ours - private_names(parse(path)) - FOREIGN]
        for node in ast.walk(parse(path))
        if (isinstance(node, ast.Attribute) and node.attr in hidden and not on_itself(node))
        or (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("lockstep")
            and any(is_private(alias.name) for alias in node.names)
        )
    )


def test_every_test_file_is_in_one_part_of_the_sweep():
    def make(*arguments: str) -> str:
        command = ["make", "--silent", "--no-print-directory", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    parts = re.search(r"^SWEEP_PARTS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert parts, "the Makefile has no SWEEP_PARTS"
    homes: dict[Path, list[str]] = defaultdict(list)
    for part in parts[1].split():
        for name in make(f"sweep-files-{part}").split():
            path = ROOT / name
            assert path.exists(), f"make sweep-{part} runs {name}, which is not there"
            for file in [path] if path.is_file() else path.rglob("test_*.py"):
                homes[file].append(part)
    elsewhere = {"gpu", "peers", "test_architecture.py"}  # targets of their own, or nothing slow
    refuse(
        f"{path.relative_to(ROOT)} is in these parts of the sweep: {homes[path]}"
        for path in TESTS
        if path.name.startswith("test_") and path.relative_to(ROOT / "tests").parts[0] not in elsewhere
        if len(homes[path]) != 1
    )


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
    refuse(
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if unfinished.search(line) or machine.search(line)
    )


def readme_tree() -> list[str]:
    """Paths of the annotated tree: the first code block whose first line is lockstep/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```text\n(lockstep/\s.*?)```", text, re.DOTALL)
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


def test_the_readme_shows_every_room_and_nothing_that_is_not_there():
    shown = set(readme_tree())
    expected = {f"lockstep/{room}" + ("/" if (PACKAGE / room).is_dir() else ".py") for room in rooms() | {"cli"}}
    assert expected <= shown, f"README.md does not show {sorted(expected - shown)}"
    refuse(f"README.md shows {path}" for path in shown if not (ROOT / path).exists())


def test_the_picture_shows_every_room():
    picture = (ROOT / "docs" / "images" / "architecture.svg").read_text(encoding="utf-8")
    missing = {room for room in rooms() | {"cli"} if not re.search(rf"\b{room}\b", picture)}
    assert not missing, f"add {sorted(missing)} to docs/picture.py and run it"


def test_faults_replace_text_that_is_there_once():
    counts = ((fault, (PACKAGE / fault.file).read_text(encoding="utf-8").count(fault.old)) for fault in FAULTS)
    refuse(f"tests/mutation: {fault.name!r}: {n} places in {fault.file}" for fault, n in counts if n != 1)
    named = {fault.name for fault in FAULTS}
    assert len(named) == len(FAULTS), "two faults have one name"
    words = {word for fault in FAULTS for arguments in fault.tests for word in arguments.split()}
    paths = {word.split("::")[0] for word in words if word.startswith("tests/")}
    refuse(f"tests/mutation: {path} is not there" for path in paths if not (ROOT / path).exists())


def test_links_in_the_documents_lead_somewhere():
    links = (
        (page, target)
        for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    )
    refuse(
        f"{document.name} links to {target}" for document, target in links if not (document.parent / target).exists()
    )
