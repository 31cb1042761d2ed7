"""Does every layout make the step that one rank makes? `lockstep verify`, and `verify` from Python.

A reduced copy of the user's model and the first rows of the user's data → the plain loop, and real ranks for each
layout → one comparison.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.verification.checking import verify

__all__ = ["verify"]


def __getattr__(name: str) -> Any:
    """`verify` brings torch with it."""
    if name != "verify":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lockstep.verification import checking

    return checking.verify
