"""Other forwards for the modules of a model, for the time of a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from torch import nn

Forward = Callable[..., object]  # of a module


@contextlib.contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Forward | None]) -> Iterator[None]:
    """Temporarily. None: the forward of the module's class."""
    previous = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            _set_forward(module, forward)
        yield
    finally:
        for module, forward in previous.items():
            _set_forward(module, forward)


def _set_forward(module: nn.Module, forward: Forward | None) -> None:
    # Bypasses nn.Module.__setattr__: this is done for hundreds of modules in every step.
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward
