"""Files by the names that requests and answers have for them, and which of them a request may read or write.

`dataset:NAME`, `job:ID/...`, `model:...` (below models/ of the data directory) and `root:NAME/...` (below a folder that
the operator allowed). Where these are on this machine is the operator's business: answers do not say it.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lockstep.service.data_dir import DataDir
from lockstep.service.errors import ServiceError

DATASET, JOB, MODEL, ROOT = "dataset:", "job:", "model:", "root:"
PACKAGE = Path(__file__).resolve().parents[2]
_MAX_ENTRIES = 100_000
# Not in the middle of another path; but behind a line's end as JSON writes it, or the end of a colour.
_BEFORE = rb"(?:(?<![\w.~-])|(?<=\\[nrt])|(?<=\[\dm)|(?<=\[\d\dm))"


class Places:
    """`readable` and `writable` are the operator's: neither includes the other."""

    def __init__(self, data_dir: DataDir, readable: Sequence[Path] = (), writable: Sequence[Path] = ()) -> None:
        self._data_dir = data_dir
        self._readable = [data_dir.models, *(_resolve(path) for path in readable)]
        self._writable = [_resolve(path) for path in writable]
        self.roots = _name_roots([*self._readable[1:], *self._writable])
        self._hidden = _hidden_prefixes(data_dir, self.roots)
        names = sorted(self._hidden, key=len, reverse=True)
        ends = (re.escape(name) + (b"" if name.endswith(b"/") else rb"(?!\w|[.-]\w)") for name in names)
        dataset = re.escape(str(data_dir.datasets).encode()) + rb"/([\w.-]+)\.jsonl"
        self._pattern = re.compile(_BEFORE + b"(?:" + b"|".join((dataset, *ends)) + b")")

    # --- names --------------------------------------------------------------------------------------------------------

    def locate(self, name: str) -> Path | None:
        """Where something with a name of ours is, whether or not it is there. None: it is not such a name."""
        if name.startswith(JOB):
            job, _, inside = name.removeprefix(JOB).partition("/")
            return self._data_dir.jobs / job / (inside or "export")
        if name.startswith(MODEL):
            return self._data_dir.models / name.removeprefix(MODEL)
        if name.startswith(ROOT):
            root, _, inside = name.removeprefix(ROOT).partition("/")
            if root not in self.roots:
                raise ServiceError(f"{name}: there is no folder {root}; known are {', '.join(self.roots) or 'none'}")
            return self.roots[root] / inside
        return None

    def hide(self, content: bytes) -> bytes:
        """Every place that this machine has for what has a name of ours, by that name."""
        if not any(place in content for place in self._hidden):
            return content
        return self._pattern.sub(self._rename, content)

    def hide_text(self, text: str) -> str:
        return self.hide(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")

    def _rename(self, match: re.Match[bytes]) -> bytes:
        return DATASET.encode() + match[1] if match[1] else self._hidden[match[0]]

    # --- what may be reached ------------------------------------------------------------------------------------------

    def may_read(self, path: Path, may_use_job: Callable[[str], bool] | None = None) -> bool:
        """`path` is resolved. Without `may_use_job`: only what the operator put there, not what jobs have written."""
        if path.is_relative_to(self._data_dir.path) and not path.is_relative_to(self._data_dir.models):
            # Whatever the operator allows around it: what is in here belongs to its owners.
            inside = path.relative_to(self._data_dir.path).parts
            return may_use_job is not None and inside[:1] == ("jobs",) and len(inside) > 1 and may_use_job(inside[1])
        return any(path.is_relative_to(folder.resolve()) for folder in self._readable)

    def may_write(self, path: Path) -> bool:
        """`path` is resolved. Never in the data directory, whatever the operator allows around it."""
        if path.is_relative_to(self._data_dir.path):
            return False
        return any(path.is_relative_to(folder.resolve()) for folder in self._writable)


def files_read(value: str) -> Iterator[Path]:
    """What reading `value` may open, resolved: the path itself, all that a pattern matches, all links below a folder.

    Each may lead elsewhere; what is no link is where its folder is.
    """
    path = Path(value).expanduser()
    if not any(sign in value for sign in "*?["):
        yield path.resolve()
        yield from _links_below(path)
        return
    yield Path(*_parts_before_pattern(path)).resolve()
    for number, match in enumerate(glob.iglob(str(path), recursive=True)):
        if number == _MAX_ENTRIES:
            raise ServiceError(f"{value} matches more than {_MAX_ENTRIES:,} files: name a folder instead")
        yield Path(match).resolve()
        yield from _links_below(Path(match))


def _links_below(folder: Path) -> Iterator[Path]:
    """Where the links in a folder lead, those below linked folders too. Each folder once: links may form a circle."""
    waiting, seen, num_entries = [folder.resolve()], set[Path](), 0
    while waiting:
        here = waiting.pop()
        if here in seen or not here.is_dir():
            continue
        seen.add(here)
        with os.scandir(here) as entries:
            for entry in entries:
                num_entries += 1
                if num_entries > _MAX_ENTRIES:
                    raise ServiceError(f"{folder} holds more than {_MAX_ENTRIES:,} files: name a smaller folder")
                if entry.is_symlink():
                    target = Path(entry.path).resolve()
                    yield target
                    waiting.append(target)
                elif entry.is_dir():
                    waiting.append(Path(entry.path))


def _parts_before_pattern(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        if any(sign in part for sign in "*?["):
            break
        parts.append(part)
    return parts


def _resolve(path: Path) -> Path:
    return Path(path).expanduser().resolve()


def _name_roots(folders: Sequence[Path]) -> dict[str, Path]:
    """By the last part of the path, with a number where several have the same."""
    roots: dict[str, Path] = {}
    for folder in dict.fromkeys(folders):
        name = re.sub(r"[^\w.-]", "-", folder.name) or "root"
        number = 1
        while (f"{name}-{number}" if number > 1 else name) in roots:
            number += 1
        roots[f"{name}-{number}" if number > 1 else name] = folder
    return roots


def _hidden_prefixes(data_dir: DataDir, roots: dict[str, Path]) -> dict[bytes, bytes]:
    """What stands in an answer for each place of this machine."""
    hidden = {f"{_resolve(Path(entry))}/": "" for entry in sys.path if entry and Path(entry).is_dir()}
    hidden |= {
        f"{PACKAGE}/": "",
        str(Path(sys.prefix).resolve()): "python",
        str(Path(sys.base_prefix).resolve()): "python",
    }
    hidden |= {str(Path.home()): "~"}
    hidden |= {str(path): f"{ROOT}{name}" for name, path in roots.items()}
    hidden |= {f"{data_dir.jobs}/": JOB, f"{data_dir.models}/": MODEL, str(data_dir.path): "data"}
    return {place.encode(): name.encode() for place, name in hidden.items() if place not in ("/", "//")}
