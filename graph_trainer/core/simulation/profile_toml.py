"""Write a calibrated hardware profile as TOML, with a comment beside each measured value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from graph_trainer.core.simulation.calibration import Figure
from graph_trainer.core.simulation.hardware import Hardware, Host

_TABLES = ("peak_flops", "calibration", "host", "protocols", "efficiencies")


def profile_to_toml(hardware: Hardware, base: Hardware, figures: list[Figure], how: str) -> str:
    """Return the text of a profile that `load_hardware` reads.

    Args:
        base: the profile whose values the others are.
        figures: the measured values.
        how: the command that measured them.
    """
    measured = {f.key: f for f in figures}
    record = hardware.calibration
    assert record is not None
    lines = [
        f"# Measured by `{how}`",
        f"# on {record.device_name}, {record.date}, with torch {record.torch}.",
        f"# Values without a comment are those of {base.name}, which names their sources.",
    ]
    for field in fields(Hardware):
        if field.name not in ("name", *_TABLES):
            value = getattr(hardware, field.name)
            lines.append(_line(field.name, value, getattr(base, field.name), measured))
    lines += ["", "[peak_flops]"]
    lines += [f"{dtype} = {_text(peak)}" for dtype, peak in hardware.peak_flops.items()]
    lines += ["", "[calibration]"]
    lines += [f"{f.name} = {_text(getattr(record, f.name))}" for f in fields(record)]
    lines += ["", "[host]"]
    for field in fields(Host):
        value, old = getattr(hardware.host, field.name), getattr(base.host, field.name)
        lines.append(_line(field.name, value, old, measured, "host."))
    for protocol, before in zip(hardware.protocols, base.protocols, strict=True):
        lines += ["", "[[protocols]]"]
        for field in fields(protocol):
            value, old = getattr(protocol, field.name), getattr(before, field.name)
            if value is not None:
                lines.append(_line(field.name, value, old, measured, f"{protocol.name}."))
    lines += _efficiency_lines(hardware)
    return "\n".join(lines) + "\n"


def _efficiency_lines(hardware: Hardware) -> Iterator[str]:
    curve: object = None
    for entry in hardware.efficiencies:
        if (entry.kind, entry.op, entry.dtype) != curve:
            curve = (entry.kind, entry.op, entry.dtype)
            yield ""
            yield f"# {entry.op or entry.kind}{f' in {entry.dtype}' if entry.dtype else ''}"
        yield "[[efficiencies]]"
        for field in fields(entry):
            value = getattr(entry, field.name)
            if value is not None:
                yield f"{field.name} = {_text(value)}"


def _line(key: str, value: Any, old: Any, measured: dict[str, Figure], prefix: str = "") -> str:
    """Return a key with its value and, where it was measured, by how many samples."""
    line = f"{key} = {_text(value)}"
    figure = measured.get(prefix + key)
    if figure is not None:
        return f"{line}  # measured: {samples_text(figure.samples)}, spread {figure.spread:.0%}"
    return line if value == old else f"{line}  # scaled with the measured values"


def samples_text(count: int) -> str:
    """Format a number of samples."""
    return "1 sample" if count == 1 else f"{count} samples"


def _text(value: Any) -> str:
    """Return a value as TOML, a measured number with four digits."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}" if value else "0.0"
    if isinstance(value, tuple):
        return json.dumps([str(item) for item in value])
    return json.dumps(value) if isinstance(value, str) else str(value)
