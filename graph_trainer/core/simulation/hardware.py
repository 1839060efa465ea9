"""Hardware profiles: what a machine can do, in numbers that name their sources."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch

from graph_trainer.core.shipped_configs import config_folders
from graph_trainer.core.suggest import did_you_mean, nearest
from graph_trainer.core.units import GIB
from graph_trainer.errors import ConfigError


class Link(StrEnum):
    """What connects a device to others and to its host."""

    NODE = "node"
    """To the other devices of its node: NVLink, xGMI or PCIe."""
    NETWORK = "network"
    """To other nodes, through its network card."""
    HOST = "host"
    """To host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A way of the communication library to move data: an entry of a profile's `protocols`.

    A step is one message from a rank to the next.
    """

    name: str
    """As the library calls it, such as "LL128"."""
    base_seconds: float
    """The shortest time of a collective, with its launch."""
    node_latency_seconds: float
    """Latency of a step between two devices of a node."""
    network_latency_seconds: float
    """Latency of a step between two nodes."""
    post_seconds: float = 0.0
    """The least time between two messages of a rank whose group spans nodes: what its host takes
    to post one."""
    bandwidth_share: float = 1.0
    """Part of what a link reaches (its bandwidth times its efficiency) that data get; the rest
    are flags between the data."""
    node_limit_bytes_per_second: float | None = None
    """The most that a rank sends within a node; None for what the link and the share allow."""
    network_limit_bytes_per_second: float | None = None
    """The most that passes from a node to the next; None for what the links and the share allow."""
    tree_latency_seconds: float | None = None
    """Latency of a step between two nodes where steps do not overlap: in a tree, and in a ring with
    one rank of each node. None if the library has no trees."""
    tree_bandwidth_share: float | None = None
    """As `bandwidth_share`, in a tree."""
    sends_pairs: bool = True
    """Whether messages between two ranks use it, as in an all-to-all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the process of a rank takes, in seconds, to issue work to its device: table [host]."""

    view_seconds: float
    """An op that launches no kernel, such as a view."""
    op_seconds: float
    """An op of PyTorch that launches a kernel, called from Python without autograd."""
    autograd_seconds: float
    """What recording an op for backward adds."""
    backward_seconds: float
    """An op that launches a kernel, called by autograd's engine."""
    dtensor_seconds: float
    """What an op on DTensors adds."""
    checkpoint_seconds: float
    """What checkpointing adds to an op: hooks on the tensors that autograd saves."""
    selective_seconds: float
    """What selective checkpointing adds to that: a dispatch mode of Python."""
    next_kernel_seconds: float
    """A further kernel of the same op."""
    compiled_seconds: float
    """A kernel of a compiled program."""
    graph_seconds: float
    """A call of a compiled program: its guards and its arguments."""
    start_collective_seconds: float
    """The start of a collective."""
    fsdp_seconds: float
    """FSDP2's hooks around a group of parameters: to gather it, or to reduce its gradients."""
    read_seconds: float
    """Reading a value of the device, after the device has computed it."""
    clip_seconds: float
    """Clipping the gradient of one parameter, a DTensor."""
    optimizer_seconds: float
    """Updating one parameter, a DTensor, by a fused optimizer."""


class OpKind(StrEnum):
    """What an op's time is measured by in a calibrated profile."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"
    ROWS = "rows"
    """Moves rows of a table by index, or sorts: the ops of `kernel_launches`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """A measured efficiency at one size: an entry of a profile's `efficiencies`.

    It takes the place of `matmul_efficiency`, `attention_efficiency` or, for memory and rows, of
    `memory_efficiency`. Between two sizes it is interpolated in the logarithm of the size; beyond
    them it is that of the nearest.
    """

    kind: str
    """An `OpKind`."""
    size: float
    """FLOPs of a matmul or of attention, bytes of the others."""
    efficiency: float
    """Above 1 where data stay in caches."""
    dtype: str | None = None
    """Of the op's first tensor; None for any."""
    op: str | None = None
    """Name of the op's schema, such as "aten::cat", with the order in memory of the operands of a
    matmul: "aten::mm nt" for rows and columns. None for all ops of the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Where the measured values of a profile come from: table [calibration]."""

    samples: int
    """Measured ops, kernels and collectives."""
    spread: float
    """Standard deviation of log(measured / predicted) of the samples, each predicted from those of
    other sizes, weighted by their part of the measured step."""
    device_name: str
    date: str
    torch: str
    """Version of PyTorch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device and its network, read from a TOML file such as those of configs/hardware."""

    name: str
    """Name of the file without its suffix."""
    device: str
    """ "cuda" or "cpu": the device for which a step is captured."""
    memory_gib: float
    """Memory of one device that programs can allocate, GiB."""
    memory_reserved_gib: float
    """Part of it that the driver, the context and the communication library use, GiB."""
    memory_bytes_per_second: float
    """Bandwidth of the device's memory."""
    compute_units: int
    """Units that compute parts of a kernel on their own, such as the SMs of a GPU; 1 for a device
    whose products are not divided into tiles."""
    compute_capability: float
    """CUDA's version of the chip, by which PyTorch chooses kernels; 0 for another chip."""
    memory_latency_seconds: float
    """How long a kernel waits for data from memory while other kernels' blocks read too."""
    peak_flops: dict[str, float]
    """Dense FLOP/s by dtype name, such as "bfloat16", at `power_watts`."""
    matmul_efficiency: float
    """Part of `peak_flops` that large square products reach at `power_watts`."""
    attention_efficiency: float
    """Part of `peak_flops` that fused attention reaches at `power_watts`."""
    memory_efficiency: float
    """Part of `memory_bytes_per_second` that elementwise and reducing kernels reach."""
    launch_seconds: float
    """The shortest time of a kernel, with its launch."""
    power_watts: float
    """The power limit at which `peak_flops` and the efficiencies hold. It belongs to the source of
    the peak: if a datasheet has a lower peak for a part with a lower limit, this is that limit."""
    power_limit_watts: float
    """The power limit of this machine, at most `power_watts`."""
    power_idle_watts: float
    """Power of an idle device."""
    speed_spread: float
    """Standard deviation of the speed of devices of one kind, as a part of their mean."""
    devices_per_node: int
    """Number of devices of one node."""
    node_bytes_per_second: float
    """Bandwidth of a device's link to the others of its node, each direction."""
    node_efficiency: float
    """Part of it that collectives reach."""
    network_bytes_per_second: float
    """Bandwidth of a device's link to other nodes, each direction."""
    network_efficiency: float
    """Part of it that collectives reach."""
    host_bytes_per_second: float
    """Bandwidth of a device's link to host memory, each direction."""
    host_efficiency: float
    """Part of it that copies reach."""
    host_memory_gib: float
    """Host memory of a node, which its devices share, GiB."""
    shared_links: tuple[Link, ...]
    """Links that are one physical link, such as a GPU's 16 lanes of PCIe: transfers over them share
    its time. Empty if every link is separate."""
    protocols: tuple[Protocol, ...]
    """Protocols of the communication library; a collective uses the fastest."""
    collective_compute_share: float
    """Part of the device's compute units that a collective occupies while it runs."""
    host: Host
    """What the process of a rank takes to issue work."""
    efficiencies: tuple[Efficiency, ...] = ()
    """Measured efficiencies by kind and size; empty for the same efficiency at every size."""
    calibration: Calibration | None = None
    """None for a profile that was not measured."""

    @property
    def clock(self) -> float:
        """Part of the full clock at which matmuls run under the power limit.

        Dynamic power is proportional to the clock times the square of the voltage, and the
        voltage about linear in the clock: power above idle grows with the cube of the clock.
        """
        limit = self.power_limit_watts - self.power_idle_watts
        return (limit / (self.power_watts - self.power_idle_watts)) ** (1 / 3)

    def slowest_of(self, count: int) -> float:
        """Return how many times longer than on average the slowest of `count` devices takes.

        Speeds are normally distributed. The mean of the least of `count` values is that of Blom,
        Statistical Estimates and Transformed Beta-Variables, 1958: the quantile of
        (count - 3/8) / (count + 1/4), exact to 0.03 standard deviations.
        """
        if count == 1:
            return 1.0
        return 1 + self.speed_spread * NormalDist().inv_cdf((count - 0.375) / (count + 0.25))

    def flops(self, dtype: torch.dtype) -> float:
        """Return the peak FLOP/s for a dtype, those of float32 if the profile has none."""
        name = str(dtype).removeprefix("torch.")
        return self.peak_flops.get(name, self.peak_flops["float32"])

    def host_copy_seconds(self, size: int) -> float:
        """Return the seconds of a copy of some bytes to host memory or back."""
        return size / (self.host_bytes_per_second * self.host_efficiency)

    def scalar_efficiency(self, kind: OpKind) -> float:
        """Return the efficiency of a kind at sizes that were not measured."""
        if kind is OpKind.MATMUL:
            return self.matmul_efficiency
        return self.attention_efficiency if kind is OpKind.ATTENTION else self.memory_efficiency

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device, of which a step needs some and `reserved_bytes`."""
        return int(self.memory_gib * GIB)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the driver, the context and the communication library use."""
        return int(self.memory_reserved_gib * GIB)


def known_hardware() -> dict[str, Path]:
    """Return the files of the profiles that come with graph_trainer, by name."""
    folder = next(iter(config_folders("hardware")), None)
    return {} if folder is None else {p.stem: p for p in sorted(folder.glob("*.toml"))}


def load_hardware(name: str, key: str = "--hardware") -> Hardware:
    """Read a profile by its name, or by the path of a TOML file.

    Args:
        key: the flag or key that names the profile, for messages.

    Raises:
        ConfigError: there is no such profile, or it has an unknown or missing key or a wrong
            value.
    """
    profiles = known_hardware()
    path = profiles.get(name, Path(name))
    if path.suffix != ".toml" and not path.is_file():
        hint = did_you_mean(name, profiles, "did you mean '{}'? ")
        raise ConfigError(
            f"{key} {name}: there is no such profile; {hint}Known profiles: "
            f"{', '.join(profiles)}; a file of your own is named by a path that ends in .toml"
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no TOML
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{key} {path}: cannot be read: {reason}. Name a TOML file, such as a changed copy of "
            "one of configs/hardware"
        ) from error
    names = [f.name for f in fields(Hardware) if f.name != "name"]
    if table and table.keys().isdisjoint(names):
        raise ConfigError(
            f"{key} {path}: it has none of the keys of a hardware profile. Name a run's config "
            f"with --config, and here one of {', '.join(profiles)} or a changed copy of its file"
        )
    problems = list(_table_problems(table, Hardware, ignored="name"))
    if problems:
        raise ConfigError("\n".join(f"{key} {path}: {problem}" for problem in problems))
    table["shared_links"] = tuple(map(Link, table["shared_links"]))
    table["host"] = Host(**table["host"])
    table["protocols"] = tuple(Protocol(**entry) for entry in table["protocols"])
    table["efficiencies"] = tuple(Efficiency(**e) for e in table.get("efficiencies", ()))
    if "calibration" in table:
        table["calibration"] = Calibration(**table["calibration"])
    hardware = Hardware(name=path.stem, **table)
    if hardware.power_limit_watts > hardware.power_watts:
        raise ConfigError(
            f"{key} {path}: power_limit_watts = {hardware.power_limit_watts} is above power_watts "
            f"= {hardware.power_watts}, at which peak_flops and the efficiencies hold: a higher "
            "limit does not raise a peak. Set both to the same number, or give peak_flops and the "
            "efficiencies at the higher power"
        )
    if hardware.power_idle_watts >= hardware.power_limit_watts:
        raise ConfigError(
            f"{key} {path}: power_idle_watts = {hardware.power_idle_watts} is not below "
            f"power_limit_watts = {hardware.power_limit_watts}"
        )
    if hardware.memory_reserved_gib >= hardware.memory_gib:
        raise ConfigError(
            f"{key} {path}: memory_reserved_gib = {hardware.memory_reserved_gib} leaves "
            f"nothing of memory_gib = {hardware.memory_gib}"
        )
    return hardware


_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")

_MAY_BE_ZERO = {
    "memory_reserved_gib",
    "compute_capability",
    "memory_latency_seconds",
    "launch_seconds",
    "power_idle_watts",
    "base_seconds",
    "node_latency_seconds",
    "network_latency_seconds",
    "post_seconds",
    "tree_latency_seconds",
    "collective_compute_share",
    "speed_spread",
    "spread",
    *(field.name for field in fields(Host)),
}


def _table_problems(table: dict[str, Any], of: type, ignored: str = "") -> Iterator[str]:
    """Describe what is wrong with the keys and values of a table that becomes a dataclass.

    Args:
        of: the dataclass. A field without a default is a key that the table must have.
        ignored: a field that is not a key.
    """
    known = {field.name: field for field in fields(of) if field.name != ignored}
    suggested: set[str] = set()
    for key, value in table.items():
        if key in known:
            yield from _problems(key, value)
        else:
            suggested.update(nearest(key, known, 1))
            hint = did_you_mean(key, known, "did you mean '{}'?", "leave it out")
            yield f"unknown key '{key}': {hint}"
    needed = [key for key, field in known.items() if field.default is MISSING]
    missing = [key for key in needed if key not in table and key not in suggested]
    if missing:
        yield f"{', '.join(missing)} missing; copy a profile of configs/hardware and change it"


def _protocols_problems(value: Any) -> Iterator[str]:
    """Describe what is wrong with the protocols of a profile."""
    if not (isinstance(value, list) and value and all(isinstance(p, dict) for p in value)):
        yield f"protocols = {value!r}: write one or more tables [[protocols]]"
        return
    for number, entry in enumerate(value, 1):
        for problem in _table_problems(entry, Protocol):
            yield f"protocols, table {number}: {problem}"
        if ("tree_latency_seconds" in entry) != ("tree_bandwidth_share" in entry):
            yield (
                f"protocols, table {number}: tree_latency_seconds and tree_bandwidth_share belong "
                "together: write both or none"
            )
    if not any(entry.get("sends_pairs", True) for entry in value):
        yield "protocols: all have sends_pairs = false, so there is none for an all-to-all"


def _efficiencies_problems(value: Any) -> Iterator[str]:
    """Describe what is wrong with the measured efficiencies of a profile."""
    if not (isinstance(value, list) and all(isinstance(entry, dict) for entry in value)):
        yield f"efficiencies = {value!r}: write tables [[efficiencies]], or leave it out"
        return
    numbers: dict[str, list[int]] = {}
    for number, entry in enumerate(value, 1):
        for problem in _table_problems(entry, Efficiency):
            numbers.setdefault(problem, []).append(number)
    for problem, (first, *others) in numbers.items():
        also = f" and {len(others)} more" if others else ""
        yield f"efficiencies, table {first}{also}: {problem}"


def _problems(key: str, value: Any) -> Iterator[str]:
    """Describe what is wrong with the value of a key."""
    setting = f"{key} = {value!r}"
    least = 0 if key in _MAY_BE_ZERO else 1e-30
    if key == "device":
        if value not in ("cuda", "cpu"):
            yield f'{setting}: write "cuda" or "cpu"'
    elif key == "peak_flops":
        if not isinstance(value, dict) or "float32" not in value:
            yield f"{setting}: write a table of FLOP/s by dtype, with float32"
            return
        for dtype, number in value.items():
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                known = f": {', '.join(_DTYPES)}"
                hint = did_you_mean(dtype, _DTYPES, "; did you mean {}?", known, cutoff=0.3)
                yield f"peak_flops.{dtype}: not a dtype of torch{hint}"
            yield from _problems(f"peak_flops.{dtype}", number)
    elif key == "host":
        if not isinstance(value, dict):
            yield f"{key}: write a table of seconds"
            return
        yield from (f"host: {problem}" for problem in _table_problems(value, Host))
    elif key == "protocols":
        yield from _protocols_problems(value)
    elif key == "efficiencies":
        yield from _efficiencies_problems(value)
    elif key == "calibration":
        if not isinstance(value, dict):
            yield f"{key}: write a table, or leave it out"
            return
        yield from (f"calibration: {problem}" for problem in _table_problems(value, Calibration))
    elif key == "kind":
        if value not in list(OpKind):
            yield f"{setting}: write {', '.join(OpKind)}"
    elif key == "dtype":
        if not isinstance(getattr(torch, str(value), None), torch.dtype):
            yield f"{setting}: not a dtype of torch"
    elif key == "shared_links":
        if not isinstance(value, list) or not {*map(str, value)} <= {*Link}:
            yield f"{setting}: write a list of {', '.join(Link)}, or an empty one"
    elif key in ("name", "op", "device_name", "date", "torch"):
        if not isinstance(value, str):
            yield f"{setting}: write a text"
    elif key == "sends_pairs":
        if not isinstance(value, bool):
            yield f"{setting}: write true or false"
    elif type(value) is int and value.bit_length() > 1000:
        yield f"{key}: a number that no machine has"
    elif type(value) not in (int, float) or not least <= value < float("inf"):
        yield f"{setting}: not a positive number"
    elif key == "collective_compute_share" and value >= 1:
        yield f"{setting}: leaves nothing to compute with; write a number below 1"
    elif key.endswith(("_efficiency", "bandwidth_share")) and value > 1:
        yield f"{setting}: a part of the peak, between 0 and 1"
    elif key in ("compute_units", "devices_per_node", "samples") and value != int(value):
        yield f"{setting}: not a whole number"
