"""Where code that torch and Triton compile is kept, so that a second run finds what the first one compiled; and who is
told when something is compiled."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import torch

_TORCH, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def keep_compiled_code() -> None:
    """In Lockstep's cache folder, unless the user has named another. Call before anything is compiled.

    What is in there is run, so that nobody else may write to it: otherwise torch keeps it where it always does.
    """
    folder = compiled_code_folder()
    if _TORCH in os.environ or not _is_private(folder):
        return
    os.environ[_TORCH] = str(folder / "torch")
    os.environ.setdefault(_TRITON, str(folder / "triton"))


def compiled_code_folder() -> Path:
    """Of this user: the cache folder may be one that several share."""
    root = os.environ.get("LOCKSTEP_CACHE")
    cache = Path(root).expanduser() if root else Path.home() / ".cache" / "lockstep"
    return cache.absolute() / f"compiled-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    """Made for this user alone where it is not there. A link is nobody's promise about what it points to."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError):  # a read-only home, or none
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def note_compilations(note: Callable[[float], None]) -> Callable[[], None]:
    """`note` gets the seconds of everything that this process compiles, until the function is called that this returns.

    It brings torch's compiler into the process.
    """
    from torch._dynamo.callback import callback_handler

    started = 0.0

    def begin(_: object) -> None:
        nonlocal started
        started = time.perf_counter()

    def end(_: object) -> None:
        note(time.perf_counter() - started)

    def forget() -> None:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    return forget


def any_number_of_tokens(device: torch.device) -> dict[str, str | int | bool | Callable[..., object]]:
    """Options of torch.compile, for one code that serves batches of all sizes.

    Inductor fuses the gradients of a norm's input and weight into one kernel where it expects that to be faster, which
    it decides by the number of tokens (more than 5,120 for a hidden size of 1,024): the short batch that ends an epoch
    was compiled on its own, for seconds. This way it is always fused.
    """
    if device.type != "cuda":
        return {}
    from torch import _inductor

    wanted = "triton.mix_order_reduction_non_strict_mode"
    return {wanted: True} if wanted in _inductor.list_options() else {}
