"""Times what a step is made of on this machine: products, attention, memory, optimizer, launches, disk, collectives.

In under a minute. Rates go into a `Calibration`, which later plans read instead of the table of devices.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.model.attention import PackedLayout, packed_attention, variable_length_problem
from lockstep.plan.collective_rates import measure_collectives
from lockstep.plan.count import count_moved
from lockstep.plan.hardware import AttentionTime, Calibration, Calibrations, ProductTime

# (rows, inner, columns): rows are tokens, as they are in a micro-batch; the others sizes of matrices.
_GPU_PRODUCTS = [
    (rows, inner, columns)
    for rows in (1024, 4096, 16384)
    for inner, columns in ((1024, 1024), (1024, 3072), (2048, 6144), (4096, 4096), (4096, 14336), (1024, 65536))
]
_CPU_PRODUCTS = [(rows, inner, columns) for rows in (128, 512) for inner, columns in ((128, 512), (512, 512))]
# (heads, key heads, head size, document's length, documents)
_GPU_ATTENTION = [(16, 8, 128, length, 16384 // length) for length in (512, 2048, 8192)]
_CPU_ATTENTION = [(4, 2, 32, 128, 2), (4, 2, 32, 256, 1)]


def calibrate(device: str, *, seconds: float = 40.0, collectives: bool = True) -> Calibration:
    """Each thing is timed at least three times; `seconds` bounds what one process does. `collectives`: also between
    processes that are started for it."""
    place = torch.device(device)
    on_gpu = place.type == "cuda"
    deadline = time.monotonic() + seconds
    dtype = torch.bfloat16 if on_gpu else torch.float32
    name = torch.cuda.get_device_name(place) if on_gpu else "cpu"
    memory = torch.cuda.get_device_properties(place).total_memory if on_gpu else _host_memory()
    return Calibration(
        device=name,
        memory_gib=memory / 2**30,
        measured_at=time.time(),
        products=tuple(_products(place, dtype, deadline)),
        attention=tuple(_attention(place, dtype, deadline)),
        copy_bytes_per_s=_copy_rate(place),
        pointwise_bytes_per_s=_pointwise_rate(place, dtype),
        optimizer_bytes_per_s=_optimizer_rate(place),
        launch_s=_launch_time(place),
        disk_bytes_per_s=_disk_rate(),
        collectives=measure_collectives(place) if collectives else {},
    )


def keep(calibration: Calibration, path: Path | None = None) -> Path:
    """Where later plans find it."""
    return Calibrations(path).write(calibration)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _products(device: torch.device, dtype: torch.dtype, deadline: float) -> Iterator[ProductTime]:
    for rows, inner, columns in _GPU_PRODUCTS if device.type == "cuda" else _CPU_PRODUCTS:
        left = torch.randn(rows, inner, device=device, dtype=dtype)
        right = torch.randn(columns, inner, device=device, dtype=dtype)
        grad = torch.randn(rows, columns, device=device, dtype=dtype)
        # Of a linear layer: its product, the gradient of its input, and that of its weight.
        yield ProductTime(rows, inner, columns, _time(partial(torch.mm, left, right.T), device))
        yield ProductTime(columns, rows, inner, _time(partial(torch.mm, grad.T, left), device))
        if time.monotonic() > deadline:
            return


def _attention(device: torch.device, dtype: torch.dtype, deadline: float) -> Iterator[AttentionTime]:
    fused = variable_length_problem(device, dtype, 128) is None
    for heads, key_heads, size, length, documents in _GPU_ATTENTION if fused else _CPU_ATTENTION:
        tokens = length * documents
        shapes = [(1, count, tokens, size) for count in (heads, key_heads, key_heads)]
        inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
        attend = _attend(inputs, length, documents, fused)
        grad = torch.randn_like(attend())
        forward = _time(attend, device)
        both = _time(partial(_forward_backward, attend, grad), device)
        yield AttentionTime(heads, size, length, documents, forward, max(both - forward, 1e-9))
        if time.monotonic() > deadline:
            return


def _attend(inputs: list[Tensor], length: int, documents: int, fused: bool) -> Callable[[], Tensor]:
    module = torch.nn.Module()
    options: dict[str, Any] = {"packed_layout": PackedLayout((length,) * documents)}
    if fused:
        bounds = torch.arange(documents + 1, dtype=torch.int32, device=inputs[0].device) * length
        options = {"packed_boundaries": bounds, "packed_max_length": length}
    query, key, value = inputs
    return lambda: packed_attention(module, query, key, value, None, **options)[0]


def _forward_backward(work: Callable[[], Tensor], grad: Tensor) -> None:
    work().backward(grad)


def _copy_rate(device: torch.device) -> float:
    """Bytes read and written in a second, of tensors that no cache holds."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _time(lambda: target.copy_(source), device)


def _pointwise_rate(device: torch.device, dtype: torch.dtype) -> float:
    """The same of a norm, a rotation and a gate, one operation after the other, forward and backward."""
    shape = (1, 8192, 4096) if device.type == "cuda" else (1, 256, 512)

    def work(x: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        first, second = normed.chunk(2, dim=-1)
        turned = normed * 0.5 + torch.cat((-second, first), dim=-1) * 0.5
        gate, up = turned.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    given = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(work(given))
    return count_moved(work, shape, dtype) / _time(lambda: work(given).backward(grad), device)


def _optimizer_rate(device: torch.device) -> float:
    """Bytes that AdamW reads and writes in a second: parameter, gradient and two moments, all but the gradient back."""
    shapes = [(4096, 4096)] * 8 if device.type == "cuda" else [(256, 256)] * 8
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=device.type == "cuda")
    return 28 * sum(p.numel() for p in parameters) / _time(lambda: optimizer.step(), device)


def _launch_time(device: torch.device) -> float:
    """Of one small operation, as Python starts them one after the other: the least that an operation takes."""
    small = torch.zeros(16, device=device)
    count = 200

    def launch() -> None:
        for _ in range(count):
            small.add_(1.0)

    return _time(launch, device) / count


def _disk_rate() -> float:
    block = os.urandom(2**24)
    with tempfile.NamedTemporaryFile() as file:
        started = time.perf_counter()
        for _ in range(4):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return 4 * len(block) / (time.perf_counter() - started)


def _time(work: Callable[[], object], device: torch.device) -> float:
    """The median of several, each of several calls where one is short."""
    work()
    calls = max(1, min(20, int(2e-3 / max(_once(work, device, 1), 1e-9))))
    return statistics.median(_once(work, device, calls) for _ in range(5))


def _once(work: Callable[[], object], device: torch.device, calls: int) -> float:
    _wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        work()
    _wait(device)
    return (time.perf_counter() - started) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
