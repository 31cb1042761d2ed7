"""Configuration keys by their former names: still read, with one notice per key and process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)
# In the algorithm section.
RENAMED_KEYS = {
    "num_samples": "group_size",
    "flat_groups": "zero_std_groups",
    "correction": "importance_weighting",
    "correction_cap": "importance_cap",
    "max_logprob_gap": "max_sampler_trainer_logprob_diff",
}
_announced: set[str] = set()


def announce_rename(old: str, new: str, place: str = "") -> None:
    """Log that a name has changed, the first time that this process meets the old one."""
    if old not in _announced:
        _announced.add(old)
        log.warning("%s%s is now called %s; the old name still works", f"{place}: " if place else "", old, new)


def rename_keys(section: object, place_of: Callable[[str], str] | None = None) -> Any:
    """The algorithm section with current key names. `place_of` says where a key was written."""
    if not isinstance(section, Mapping) or not RENAMED_KEYS.keys() & section.keys():
        return section
    renamed: dict[object, object] = {}
    for key, value in section.items():
        new = RENAMED_KEYS.get(key, key)
        if new != key:
            old_name, new_name = f"algorithm.{key}", f"algorithm.{new}"
            if new in section:
                raise ValueError(f"{new_name} is also given as {old_name}, its former name: remove one of them")
            announce_rename(old_name, new_name, place_of(old_name) if place_of else "")
        renamed[new] = value
    return renamed
