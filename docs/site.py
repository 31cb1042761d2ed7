"""For `make site`: documents that lie outside of docs/ join the site, and links between the two are rewritten."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Where they are in the repository, and on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "",
    "CHANGELOG.md": "",
    "SECURITY.md": "",
    "LICENSE": "LICENSE.txt",
}


def on_files(files: Files, config: Any) -> Files:
    for name, target in OUTSIDE.items():
        files.append(File.generated(config, target or name, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.is_file() and path.suffix in (".md", ".yaml", ".py", ".jsonl", ".txt"):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """`](docs/x.md)` of the README and `](../README.md)` of docs/ as the site has them."""
    if page.file.src_uri.startswith("examples/"):
        return markdown.replace("](../docs/", "](../")
    return re.sub(r"\]\(([^)#:\s]+)(#[^)]*)?\)", _rewrite, markdown)


def _rewrite(link: re.Match[str]) -> str:
    target = link[1].removeprefix("docs/").removeprefix("../")
    return f"]({OUTSIDE.get(target) or target}{link[2] or ''})"
