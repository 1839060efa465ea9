"""Find the hardware profile of the machine that is there, from its device's name and properties."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.simulation.hardware import Hardware, known_hardware, load_hardware
from graph_trainer.core.units import GIB

HARDWARE = "PassConfig.hardware"
"""The setting that names a profile, for messages."""

_OF_CAPABILITY = {8: "a100-80g", 9: "h100-sxm", 10: "b200"}
"""The profile of a data-center GPU by the major compute capability of its chip."""
_SAME_MEMORY = 0.03
"""Drivers and ECC keep part of a device's memory, and how much changes with their versions."""


class Detected(NamedTuple):
    """A profile that was chosen for a device."""

    hardware: Hardware
    why: str
    """Its name and the reason for the choice; if `exact` is False, also the setting to change."""
    exact: bool
    """Whether the profile describes this device, and does not replace that of an unknown one."""


def detect_hardware(device: torch.device | None = None) -> Detected:
    """Choose the profile for a device of this machine.

    A GPU gets the profile whose name begins with its model (A100, H100, H200, B200, MI300X); of
    several profiles those for its form (a PCIe card or a board), and of these that with the nearest
    memory. Any other GPU gets the profile of the data-center chip of its compute capability, or of
    its vendor if that is AMD, and any other device gets `cpu`; `why` reports the replacement.

    Args:
        device: the device that the step runs on; None or meta for the current GPU, or the CPU if
            there is no GPU.

    Raises:
        ConfigError: the profiles that come with graph_trainer are missing.
    """
    kind = "" if device is None or device.type == "meta" else device.type
    if kind == "cpu" or not (kind or torch.cuda.is_available()):
        profile = load_hardware("cpu", HARDWARE)
        return Detected(profile, "cpu, as the step runs on CPU", exact=True)
    if kind not in ("", "cuda"):
        return _replacement("cpu", f"a device of type '{kind}'")
    if not torch.cuda.is_available():  # a graph made for another machine
        return _replacement("h100-sxm", "a GPU that is not here")
    properties = torch.cuda.get_device_properties(device if kind else None)
    name = str(properties.name)
    memory = properties.total_memory / GIB
    model = {word.lower() for word in re.findall(r"[A-Za-z]+\d+[A-Za-z]*", name)}
    profiles = [
        load_hardware(profile, HARDWARE)
        for profile in known_hardware()
        if profile.partition("-")[0] in model
    ]
    if not profiles and torch.version.hip is not None:
        return _replacement("mi300x", name)
    if not profiles:
        major = min(max(properties.major, min(_OF_CAPABILITY)), max(_OF_CAPABILITY))
        capability = f"{properties.major}.{properties.minor}"
        return _replacement(_OF_CAPABILITY[major], f"{name} (compute capability {capability})")
    of_form = [profile for profile in profiles if _form(profile.name) == _form(name)]
    nearest = min(of_form or profiles, key=lambda profile: abs(profile.memory_gib - memory))
    if not of_form or abs(nearest.memory_gib - memory) > _SAME_MEMORY * memory:
        return _replacement(nearest.name, f"{name} ({memory:.1f} GiB)")
    return Detected(nearest, f"{nearest.name}, as the device is {name}", exact=True)


def _form(name: str) -> str:
    """Return the form in the name of a device or profile, empty for an SXM or OAM board."""
    form = re.search(r"PCIe|NVL\b", name, re.IGNORECASE)
    return "" if form is None else form.group().lower()


def _replacement(profile: str, device: str) -> Detected:
    """Return a profile for a device that has none."""
    why = (
        f"{profile} in place of {device}, which has no profile: set {HARDWARE} to one of "
        f"{', '.join(known_hardware())}, or to the path of a profile of your own"
    )
    return Detected(load_hardware(profile, HARDWARE), why, exact=False)


def detect_for(joint: JointGraph) -> Detected:
    """Choose the profile for the device that a graph's inputs are on, as `detect_hardware`."""
    devices = [t.device for node in joint.placeholders() for t in tensors_of(node)]
    # the step of a GPU may read a few numbers on the CPU
    on_device = [device for device in devices if device.type != "cpu"]
    return detect_hardware(next(iter(on_device or devices), None))
