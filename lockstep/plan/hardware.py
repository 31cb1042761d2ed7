"""Machines a plan is made for: what GPUs, links and networks can do, from a table, a user's file or a calibration.

No torch: the service reads it too.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.schema import ConfigError
from lockstep.config.yaml_text import read_yaml


@dataclass(frozen=True)
class ProductTime:
    """One matrix product [rows, inner] x [inner, columns]."""

    rows: int
    inner: int
    columns: int
    seconds: float


@dataclass(frozen=True)
class AttentionTime:
    """Causal attention over documents of one length."""

    heads: int
    head_dim: int
    length: int
    documents: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Calibration:
    """What this machine does, as timed."""

    device: str
    memory_gib: float
    measured_at: float
    products: tuple[ProductTime, ...]
    attention: tuple[AttentionTime, ...]
    copy_bytes_per_s: float
    optimizer_bytes_per_s: float
    launch_s: float
    disk_bytes_per_s: float
    pointwise_bytes_per_s: float = 0.0
    """Of operations that are not fused; 0: as copies."""
    collectives: dict[str, float] = field(default_factory=dict)
    """Bytes that a rank sends in a second, by kind of collective."""


class Calibrations:
    """The ones that were kept, one file for each device."""

    def __init__(self, folder: Path | None = None) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
        self.folder = folder or Path(os.environ.get("LOCKSTEP_CACHE") or cache) / "calibrations"

    def prepare(self) -> None:
        """Raises ConfigError where nothing can be kept."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot be written to ({error.strerror}): name another folder in LOCKSTEP_CACHE"
            ) from error

    def write(self, calibration: Calibration) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(calibration.device)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(asdict(calibration), indent=1), encoding="utf-8")
        draft.replace(path)
        return path

    def read(self, device: str) -> Calibration | None:
        """None where there is none. Raises ConfigError for one that cannot be used."""
        path = self._path(device)
        try:
            return read_calibration(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"the calibration {path} cannot be read ({type(error).__name__}: {error}): remove it, or measure again "
                "with 'lockstep plan --calibrate'"
            ) from error

    def _path(self, device: str) -> Path:
        return self.folder / ("".join(c if c.isalnum() else "-" for c in device.lower()) + ".json")


def read_calibration(tree: dict[str, Any]) -> Calibration:
    """Raises ValueError for what no machine measures."""
    products = tuple(ProductTime(**p) for p in tree["products"])
    attention = tuple(AttentionTime(**a) for a in tree["attention"])
    found = Calibration(**{**tree, "products": products, "attention": attention})
    names = ("memory_gib", "copy_bytes_per_s", "optimizer_bytes_per_s", "launch_s", "disk_bytes_per_s")
    rates = {name: getattr(found, name) for name in names} | found.collectives
    times = [p.seconds for p in products] + [s for a in attention for s in (a.forward_s, a.backward_s)]
    for name, value in [*rates.items(), *(("a time", seconds) for seconds in times)]:
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}")
    if not attention:
        raise ValueError("attention was not timed")
    return found


# --- what devices can do ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """One GPU. Rates are of its data sheet; `memory_gib` is what a program sees. Attention: what kernels reach."""

    name: str
    memory_gib: float
    product_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To another GPU of the same machine, in one direction."""
    attention_flops: float
    source: str
    price_per_hour: float | None = None


@dataclass(frozen=True)
class Network:
    """Between machines, for each GPU, in one direction."""

    name: str
    bytes_per_s: float
    latency_s: float
    source: str


_T, _G = 1e12, 1e9
DEVICES = {
    d.name: d
    for d in (
        Device("h200", 139.8, 989 * _T, 4800 * _G, 450 * _G, 290 * _T, "NVIDIA H200 data sheet (SXM)"),
        Device("h100", 79.2, 989 * _T, 3350 * _G, 450 * _G, 290 * _T, "NVIDIA H100 data sheet (SXM5)"),
        Device("b200", 178.4, 2250 * _T, 8000 * _G, 900 * _G, 600 * _T, "NVIDIA DGX B200 data sheet, for each GPU"),
        Device("a100-80", 79.2, 312 * _T, 2039 * _G, 300 * _G, 190 * _T, "NVIDIA A100 data sheet (80 GB, SXM)"),
        Device("a100-40", 39.4, 312 * _T, 1555 * _G, 300 * _G, 190 * _T, "NVIDIA A100 data sheet (40 GB, SXM)"),
        Device("l40s", 44.4, 362 * _T, 864 * _G, 26 * _G, 180 * _T, "NVIDIA L40S data sheet; PCIe 4.0 x16"),
        Device("l4", 22.0, 121 * _T, 300 * _G, 26 * _G, 60 * _T, "NVIDIA L4 data sheet; PCIe 4.0 x16"),
        Device("a10g", 22.1, 70 * _T, 600 * _G, 26 * _G, 45 * _T, "NVIDIA A10G product brief; PCIe 4.0 x16"),
        Device("rtx4090", 23.5, 165 * _T, 1008 * _G, 26 * _G, 110 * _T, "NVIDIA Ada white paper; PCIe 4.0 x16"),
        Device("mi300x", 191.5, 1307 * _T, 5300 * _G, 448 * _G, 400 * _T, "AMD Instinct MI300X data sheet"),
    )
}
NETWORKS = {
    n.name: n
    for n in (
        Network("ib400", 50 * _G, 12e-6, "NVIDIA Quantum-2 InfiniBand NDR, 400 Gb/s for each GPU"),
        Network("ib200", 25 * _G, 12e-6, "InfiniBand HDR, 200 Gb/s for each GPU"),
        Network("efa400", 50 * _G, 30e-6, "AWS EC2 P5: 3200 Gb/s of EFA for 8 GPUs"),
        Network("eth100", 12.5 * _G / 8, 40e-6, "100 Gb/s Ethernet, shared by 8 GPUs"),
        Network("eth25", 3.125 * _G / 8, 50e-6, "25 Gb/s Ethernet, shared by 8 GPUs"),
    )
}
# What of a data sheet's rate real kernels reach: of an H200, measured (see docs/plan.md), and taken for all.
PRODUCT_SHARE, COPY_SHARE, OPTIMIZER_SHARE, LINK_SHARE, NETWORK_SHARE = 0.81, 0.86, 0.61, 0.75, 0.75
POINTWISE_SHARE = 0.65
"""Of the rate of copies: what operations reach that are not fused."""
LAUNCH_S = 7e-6


@dataclass(frozen=True)
class GpuCluster:
    """`nodes` machines with `per_node` GPUs each."""

    device: Device
    per_node: int
    nodes: int
    network: Network
    calibration: Calibration | None = None

    @property
    def num_ranks(self) -> int:
        return self.per_node * self.nodes

    @property
    def name(self) -> str:
        network = f"@{self.network.name}" if self.nodes > 1 else ""
        return f"{self.device.name}:{self.per_node}x{self.nodes}{network}"


def parse_cluster(text: str, own: Mapping[str, Any] | None = None) -> GpuCluster:
    """`h200:8x4`: four machines of eight; `h200:8`: one of eight; `h200`: one GPU; `h100:8x16@efa400`: with a network.

    `own`: devices and networks of a user's file, see `read_hardware`.
    """
    devices = {**DEVICES, **(own or {}).get("devices", {})}
    networks = {**NETWORKS, **(own or {}).get("networks", {})}
    found = re.fullmatch(r"([\w.-]+?)(?::(\d+)(?:x(\d+))?)?(?:@([\w.-]+))?", text.strip().lower())
    if found is None:
        raise ConfigError(f"{text!r} names no hardware: write GPU:PER_MACHINExMACHINES, such as h200:8x4")
    name, per_node, nodes, network = found.groups()
    if name not in devices:
        close = difflib.get_close_matches(name, devices, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        known = ", ".join(sorted(devices))
        raise ConfigError(f"unknown GPU {name!r}: {hint}known are {known}; give your own in YAML")
    if network is not None and network not in networks:
        raise ConfigError(f"unknown network {network!r}: known are {', '.join(sorted(networks))}")
    counts = (int(per_node or 1), int(nodes or 1))
    if min(counts) < 1 or counts[0] > 256 or counts[1] > 100_000:
        raise ConfigError(f"{text!r}: {counts[0]} GPUs in {counts[1]} machines is no cluster")
    return GpuCluster(devices[name], counts[0], counts[1], networks[network or "ib400"])


def read_hardware(path: Path) -> dict[str, object]:
    """A user's own devices and networks:

    devices: {gpu: {memory_gib: 48, product_tflops: 200, memory_gb_per_s: 900, link_gb_per_s: 26}}
    networks: {lan: {gb_per_s: 1.2, latency_us: 50}}
    """
    try:
        tree, _ = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the hardware file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the hardware file {path} is no text in UTF-8") from error
    if not isinstance(tree, dict) or not set(tree) <= {"devices", "networks"}:
        raise ConfigError(f"{path}: expected devices: and networks:, see docs/plan.md")
    for key, section in tree.items():
        if not isinstance(section, dict | None):
            raise ConfigError(f"{path}: {key} must hold entries with a name each, see docs/plan.md")
    devices = {str(n).lower(): _own_device(path, str(n).lower(), d) for n, d in (tree.get("devices") or {}).items()}
    networks = {str(n).lower(): _own_network(path, str(n).lower(), d) for n, d in (tree.get("networks") or {}).items()}
    return {"devices": devices, "networks": networks}


def _own_device(path: Path, name: str, tree: Any) -> Device:
    keys = ("memory_gib", "product_tflops", "memory_gb_per_s", "link_gb_per_s")
    values = _numbers(path, f"devices.{name}", tree, keys, ("attention_tflops",))
    if values["memory_gib"] < 1:
        raise ConfigError(f"{path}: devices.{name}.memory_gib {values['memory_gib']:g} holds no run: it is in GiB")
    products = values["product_tflops"] * _T
    attention = values.get("attention_tflops", values["product_tflops"] / 3) * _T
    memory, link = values["memory_gb_per_s"] * _G, values["link_gb_per_s"] * _G
    return Device(name, values["memory_gib"], products, memory, link, attention, str(path))


def _own_network(path: Path, name: str, tree: Any) -> Network:
    values = _numbers(path, f"networks.{name}", tree, ("gb_per_s", "latency_us"), ())
    return Network(name, values["gb_per_s"] * _G, values["latency_us"] * 1e-6, str(path))


def _numbers(path: Path, where: str, tree: Any, needed: Sequence[str], others: Sequence[str]) -> dict[str, float]:
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: {where} must have {', '.join(needed)}")
    for key in tree:
        if key not in (*needed, *others):
            raise ConfigError(f"{path}: unknown key {where}.{key}; it has {', '.join((*needed, *others))}")
    for key in needed:
        if key not in tree:
            raise ConfigError(f"{path}: {where}.{key} is missing")
    for key, value in tree.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
            raise ConfigError(f"{path}: {where}.{key} must be a positive number (given: {value!r})")
    return {key: float(value) for key, value in tree.items()}


# --- rates ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Seconds of what a step is made of, on one device: from a calibration where there is one."""

    product_flops: float
    copy_bytes_per_s: float
    pointwise_bytes_per_s: float
    optimizer_bytes_per_s: float
    launch_s: float
    attention: Mapping[str, tuple[float, float]]
    """forward, backward: (seconds for one value of a query, for one of a pair)."""
    calibrated: bool

    def product_s(self, rows: float, inner: float, columns: float, value_bytes: int, matrices: int = 1) -> float:
        """Arithmetic, and moving what goes in and out: the two do not quite overlap. Wider values take longer.
        `matrices`: of which each has a part of the rows."""
        flops, moved = 2 * rows * inner * columns, rows * inner + matrices * inner * columns + rows * columns
        return flops / self.product_flops * (value_bytes / 2) + moved * value_bytes / self.copy_bytes_per_s

    def attention_s(self, kind: str, values: float, pair_values: float) -> float:
        """`values`: of all queries; `pair_values`: pairs times the values of a head, over all heads."""
        for_value, for_pair = self.attention[kind]
        return values * for_value + pair_values * for_pair


def rates_of(cluster: GpuCluster) -> Rates:
    if cluster.calibration is not None:
        return _calibrated(cluster.calibration)
    device = cluster.device
    copy = device.memory_bytes_per_s * COPY_SHARE
    # Per value of a query: reading and writing it and its keys, a few times.
    attention = {
        "forward": (8 / copy, 4 / device.attention_flops),
        "backward": (24 / copy, 10 / (0.85 * device.attention_flops)),
    }
    rate = device.product_flops * PRODUCT_SHARE
    optimizer = device.memory_bytes_per_s * OPTIMIZER_SHARE
    return Rates(rate, copy, copy * POINTWISE_SHARE, optimizer, LAUNCH_S, attention, calibrated=False)


def _calibrated(found: Calibration) -> Rates:
    attention: dict[str, tuple[float, float]] = {}
    for kind in ("forward", "backward"):
        points = [
            (
                float(a.length * a.documents * a.heads * a.head_dim),
                a.documents * a.length**2 / 2 * a.heads * a.head_dim,
                a.forward_s if kind == "forward" else a.backward_s,
            )
            for a in found.attention
        ]
        attention[kind] = fit_two(points)
    for_flop = _fit_products(found)
    return Rates(
        1 / for_flop,
        found.copy_bytes_per_s,
        found.pointwise_bytes_per_s or found.copy_bytes_per_s * POINTWISE_SHARE,
        found.optimizer_bytes_per_s,
        found.launch_s,
        attention,
        calibrated=True,
    )


def _fit_products(found: Calibration) -> float:
    """Seconds of one operation, beyond what moving takes, from products that are long enough to be of arithmetic."""
    size = 2 if found.device != "cpu" else 4
    shares = []
    for p in found.products:
        flops = 2 * p.rows * p.inner * p.columns
        moved = (p.rows * p.inner + p.inner * p.columns + p.rows * p.columns) * size
        rest = p.seconds - moved / found.copy_bytes_per_s - (3e-6 if size == 2 else 0.0)
        if rest > 0.3 * p.seconds and p.seconds > 3 * found.launch_s:
            shares.append(rest / flops / (size / 2))
    if not shares:
        raise ConfigError("this calibration has no product that took long enough: calibrate again on an idle machine")
    return statistics.median(shares)


def fit_two(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b), neither negative, for which a x + b y is nearest to t, in relative terms, over all (x, y, t)."""
    xx = sum((x / t) ** 2 for x, _, t in points)
    yy = sum((y / t) ** 2 for _, y, t in points)
    xy = sum(x * y / t**2 for x, y, t in points)
    sx, sy = sum(x / t for x, _, t in points), sum(y / t for _, y, t in points)
    determinant = xx * yy - xy * xy
    a = (sx * yy - sy * xy) / determinant if determinant else 0.0
    b = (sy * xx - sx * xy) / determinant if determinant else 0.0
    if a < 0 or not determinant:
        return 0.0, sy / yy
    if b < 0:
        return sx / xx, 0.0
    return a, b
