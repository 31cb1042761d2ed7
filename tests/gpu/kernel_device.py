"""Where tests of Triton kernels run: on CUDA or, with TRITON_INTERPRET=1, on a CPU.

Interpreted, a kernel is Python over numpy: exact in float32, and thousands of times slower. Such tests ask here for
their device, dtypes and sizes, and are the same in both places.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
runs_kernels = pytest.mark.skipif(
    find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available()),
    reason="needs Triton, and CUDA or TRITON_INTERPRET=1",
)
needs_cuda = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs CUDA")


def here(on_cuda: T, interpreted: T) -> T:
    return interpreted if INTERPRETED else on_cuda


def dtypes(*wanted: torch.dtype) -> list[torch.dtype]:
    """Interpreted only float32: numpy has no bf16, whose bits would be taken for whole numbers."""
    return here(list(wanted), [torch.float32])
