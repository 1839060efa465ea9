"""Hardware profiles: what a machine can do, in numbers that name their sources."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from graph_trainer.core.shipped_configs import config_folders
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.core.units import GIB
from graph_trainer.errors import ConfigError


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
    """Dense FLOP/s by dtype name, such as "bfloat16"."""
    matmul_efficiency: float
    """Part of `peak_flops` that large square products reach at the full power limit."""
    attention_efficiency: float
    """Part of `peak_flops` that fused attention reaches at the full power limit."""
    memory_efficiency: float
    """Part of `memory_bytes_per_second` that elementwise and reducing kernels reach."""
    launch_seconds: float
    """The shortest time of a kernel, with its launch."""
    power_watts: float
    """The power limit for which `peak_flops` and the efficiencies hold."""
    power_limit_watts: float
    """The power limit of this machine."""
    power_idle_watts: float
    """Power of an idle device."""
    devices_per_node: int
    """Number of devices of one node."""
    node_bytes_per_second: float
    """Bandwidth of a device's link to the others of its node, each direction."""
    node_latency_seconds: float
    """Latency of one message between two devices of a node."""
    network_bytes_per_second: float
    """Bandwidth of a device's link to other nodes, each direction."""
    network_latency_seconds: float
    """Latency of one message between two nodes."""
    link_efficiency: float
    """Part of the links' bandwidth that collectives and copies to host memory reach."""
    host_bytes_per_second: float
    """Bandwidth of a device's link to host memory, each direction."""
    host_memory_gib: float
    """Host memory of a node, which its devices share, GiB."""
    collective_seconds: float
    """The shortest time of a collective, with its launch."""
    collective_compute_share: float
    """Part of the device's compute units that a collective occupies while it runs."""

    @property
    def clock(self) -> float:
        """Part of the full clock at which matmuls run under the power limit.

        Dynamic power is proportional to the clock times the square of the voltage, and the
        voltage about linear in the clock: power above idle grows with the cube of the clock.
        """
        limit = self.power_limit_watts - self.power_idle_watts
        return min(1.0, (limit / (self.power_watts - self.power_idle_watts)) ** (1 / 3))

    def flops(self, dtype: torch.dtype) -> float:
        """Return the peak FLOP/s for a dtype, those of float32 if the profile has none."""
        name = str(dtype).removeprefix("torch.")
        return self.peak_flops.get(name, self.peak_flops["float32"])

    def host_copy_seconds(self, size: int) -> float:
        """Return the seconds of a copy of some bytes to host memory or back."""
        return size / (self.host_bytes_per_second * self.link_efficiency)

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
    problems: list[str] = []
    for entry, value in table.items():
        if entry in names:
            problems += _problems(entry, value)
        else:
            hint = did_you_mean(entry, names, "did you mean '{}'?", "leave it out")
            problems.append(f"unknown key '{entry}': {hint}")
    missing = [entry for entry in names if entry not in table]
    if missing:
        problems.append(
            f"{', '.join(missing)} missing; copy a profile of configs/hardware and change it"
        )
    if problems:
        raise ConfigError("\n".join(f"{key} {path}: {problem}" for problem in problems))
    hardware = Hardware(name=path.stem, **table)
    if hardware.power_idle_watts >= min(hardware.power_watts, hardware.power_limit_watts):
        raise ConfigError(
            f"{key} {path}: power_idle_watts = {hardware.power_idle_watts} is not below "
            "power_watts and power_limit_watts"
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
    "node_latency_seconds",
    "network_latency_seconds",
    "collective_seconds",
    "collective_compute_share",
}


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
    elif type(value) is int and value.bit_length() > 1000:
        yield f"{key}: a number that no machine has"
    elif type(value) not in (int, float) or not least <= value < float("inf"):
        yield f"{setting}: not a positive number"
    elif key == "collective_compute_share" and value >= 1:
        yield f"{setting}: leaves nothing to compute with; write a number below 1"
    elif key.endswith("_efficiency") and value > 1:
        yield f"{setting}: a part of the peak, between 0 and 1"
    elif key in ("compute_units", "devices_per_node") and value != int(value):
        yield f"{setting}: not a whole number"
