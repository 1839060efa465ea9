"""Write a calibrated hardware profile as TOML, with a comment beside each measured value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from graph_trainer.core.simulation.hardware import Hardware, Host, OpKind
from graph_trainer.planner.calibration import Calibrated, Figure

_TABLES = ("peak_flops", "calibration", "host", "protocols", "efficiencies")


def profile_to_toml(result: Calibrated, base: Hardware, how: str) -> str:
    """Return the text of a profile that `load_hardware` reads.

    Args:
        base: the profile whose values those are that were not measured.
        how: the command that measured them.
    """
    hardware = result.hardware
    measured = {figure.key: figure for figure in result.figures}
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
    lines += [f"{dtype} = {_exact_text(peak)}" for dtype, peak in hardware.peak_flops.items()]
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
    lines += _efficiency_lines(result, base)
    return "\n".join(lines) + "\n"


def _efficiency_lines(result: Calibrated, base: Hardware) -> Iterator[str]:
    curve: object = None
    for entry in result.hardware.efficiencies:
        key = (OpKind(entry.kind), entry.op, entry.dtype)
        fit = result.curves.get(key)
        if key != curve:
            curve = key
            name = f"{entry.op or entry.kind}{f' in {entry.dtype}' if entry.dtype else ''}"
            source = base.name if fit is None else _measured_text(fit.samples, fit.spread)
            yield ""
            yield f"# {name}: {source}"
        yield "[[efficiencies]]"
        for field in fields(entry):
            value = getattr(entry, field.name)
            if value is not None:
                yield f"{field.name} = {_exact_text(value) if fit is None else _text(value)}"


def _line(key: str, value: Any, old: Any, measured: dict[str, Figure], prefix: str = "") -> str:
    """Return a key with its value and, where it was measured, by how many samples."""
    figure = measured.get(prefix + key)
    if figure is not None:
        return f"{key} = {_text(value)}  # {_measured_text(figure.samples, figure.spread)}"
    is_number = isinstance(value, float) and old is not None
    if value == old or is_number and math.isclose(value, old):
        return f"{key} = {_exact_text(old)}"
    return f"{key} = {_text(value)}  # scaled with the measured values"


def _measured_text(samples: int, spread: float) -> str:
    count = "1 sample" if samples == 1 else f"{samples} samples"
    return f"measured: {count}, spread {spread:.0%}"


def _text(value: Any) -> str:
    """Return a value as TOML, a measured number with four digits."""
    return f"{value:.4g}" if isinstance(value, float) and value else _exact_text(value)


def _exact_text(value: Any) -> str:
    """Return a value as TOML, from which the same value is read."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:.4g}"
        return short if float(short) == value and value else repr(value)
    if isinstance(value, tuple):
        return json.dumps([str(item) for item in value])
    return json.dumps(value) if isinstance(value, str) else str(value)
