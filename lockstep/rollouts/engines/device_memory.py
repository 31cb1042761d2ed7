"""Memory of a GPU that two processes read: one sends an address, the other opens it; nothing is copied to the host.

CUDA's own inter-process handles, as torch.multiprocessing has them, but as JSON instead of pickles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Address = list[Any]


class NotShared(RuntimeError):
    """The driver, or the machine, does not let another process read this memory."""


def device_id(device: torch.device) -> str:
    """The same for all processes that use one GPU, whatever number it has there; none for what is not a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def share(content: Tensor) -> Address:
    """The address of some bytes. They stay allocated until every process that opened them has let them go."""
    if not content.nbytes:
        return [0, 0]
    begin = content.storage_offset() * content.element_size()
    try:
        handles = content.untyped_storage()._share_cuda_()[1:]  # but for the number that the GPU has here
    except RuntimeError as error:
        raise NotShared(f"this process cannot share memory of its GPU ({_first_line(error)})") from error
    return [begin, content.nbytes, *(entry.hex() if isinstance(entry, bytes) else entry for entry in handles)]


def open_shared(address: Address, device: torch.device) -> Tensor:
    """The bytes at an address that another process sent, not copied. `device`: the same GPU, as it is known here."""
    begin, num_bytes, *handles = address
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    memory, size, offset, counter, counter_offset, event, needs_event = handles
    torch.cuda.init()
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            torch.cuda.current_device() if device.index is None else device.index,
            *(bytes.fromhex(memory), size, offset),
            *(bytes.fromhex(counter), counter_offset),
            *(bytes.fromhex(event), needs_event),
        )
    except RuntimeError as error:
        raise NotShared(f"this process cannot open another's memory of its GPU ({_first_line(error)})") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, begin, (num_bytes,), (1,))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
