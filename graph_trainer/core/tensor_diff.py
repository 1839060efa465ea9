"""Compare tensors bit by bit, and measure how far apart they are."""

from __future__ import annotations

import ctypes
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch

Results = dict[str, list[torch.Tensor]]
"""Result of one run of a step on this rank: by name, the plain tensors of the loss, of each
gradient and of each buffer."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One value whose bits are not the expected ones."""

    name: str
    """ "loss", "gradient of FQN" or "buffer FQN"."""
    max_abs: float
    """The largest |actual - wanted|; NaN where one of the two is not a number."""
    max_rel: float
    """The largest |actual - wanted| / max(|actual|, |wanted|)."""
    note: str = ""
    """A difference in shape or dtype, or that one of the two values is missing."""


def digest(value: Any) -> str:
    """Digest a value: equal for two values exactly when bits, shapes and dtypes are equal.

    NaNs are compared as bits, and 0.0 differs from -0.0. A value that is not a tensor is
    compared by its text.
    """
    if isinstance(value, torch.Tensor):
        data = _contiguous(value)
        size = data.numel() * data.itemsize
        code = hashlib.blake2b(digest_size=16)
        if size:
            code.update((ctypes.c_char * size).from_address(data.data_ptr()))
        return f"{tuple(data.shape)} {data.dtype} {code.hexdigest()}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(digest, value))})"
    return repr(value) if isinstance(value, (int, float, bool, str)) else type(value).__name__


def compare(wanted: Results, actual: Results) -> list[Difference]:
    """List every value that differs: in the order of `wanted`, then those only in `actual`."""
    differences: list[Difference | None] = []
    for name in dict.fromkeys((*wanted, *actual)):
        if name in wanted and name in actual:
            differences.append(distance(name, wanted[name], actual[name]))
        else:
            note = "missing" if name in wanted else "not expected"
            differences.append(Difference(name, math.nan, math.nan, note))
    return [difference for difference in differences if difference is not None]


def distance(name: str, wanted: Any, actual: Any) -> Difference | None:
    """Measure how far two values are apart; None where their bits are equal. A value is a tensor or
    a list of tensors; anything else counts by its text."""
    if digest(wanted) == digest(actual):
        return None
    pairs = list(zip(tensors_in(wanted), tensors_in(actual), strict=False))
    notes = [f"{_kind(b)} instead of {_kind(a)}" for a, b in pairs if _kind(a) != _kind(b)]
    if len(tensors_in(wanted)) != len(tensors_in(actual)):
        notes.append(f"{len(tensors_in(actual))} tensors instead of {len(tensors_in(wanted))}")
    distances = [_distance(a, b) for a, b in pairs if a.shape == b.shape]
    if not distances:
        return Difference(name, math.nan, math.nan, "; ".join(notes) or "not a tensor")
    return Difference(
        name, _most(a for a, _ in distances), _most(r for _, r in distances), "; ".join(notes)
    )


def _distance(wanted: torch.Tensor, actual: torch.Tensor) -> tuple[float, float]:
    if wanted.numel() == 0:
        return 0.0, 0.0
    wide = torch.complex128 if wanted.is_complex() or actual.is_complex() else torch.float64
    a, b = _contiguous(wanted).to(wide), _contiguous(actual).to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    absolute = torch.where(same, 0.0, (a - b).abs())
    relative = torch.where(same, 0.0, absolute / torch.maximum(a.abs(), b.abs()))
    return float(absolute.max()), float(relative.max())


def _most(values: Any) -> float:
    """Return the largest; NaN where one is NaN, which Python's max does not."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors of a value: a tensor, a list or tuple with some, or anything else."""
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
