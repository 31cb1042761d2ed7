"""A configuration on its way from a user's machine to a service: local JSONL files become data sets there.

Runs at the client. Must not know how the service stores or starts anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.config import RunConfig
from lockstep.config.data import PARTS
from lockstep.rundir import digest_file
from lockstep.service.client import Client


def prepare_config(config: RunConfig, client: Client | None, say: Callable[[str], None]) -> dict[str, Any]:
    """The resolved sections, with uploaded files by the names of their data sets. Without a client nothing is sent."""
    tree = config.model_dump(mode="json")
    known = {dataset.name for dataset in client.datasets()} if client is not None else set()
    for part in PARTS:
        for source in tree["data"][part]:
            path = Path(source["path"])
            if client is not None and path.is_file() and path.suffix in (".jsonl", ".json"):
                name = f"{re.sub(r'[^a-zA-Z0-9_]+', '-', path.stem)[:40].strip('-') or 'rows'}-{digest_file(path)[:12]}"
                if name not in known:
                    say(f"uploading {path}")
                    client.upload(name, path)
                    known.add(name)
                source["path"] = f"dataset:{name}"
    return tree
