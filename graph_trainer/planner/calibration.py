"""Fit a hardware profile to measured times of ops, launches, collectives and the host."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch

from graph_trainer.core.graph.collective_kinds import CollectiveKind, kind_named
from graph_trainer.core.simulation.collective_costs import collective_parts, collective_seconds
from graph_trainer.core.simulation.hardware import (
    Calibration,
    Efficiency,
    Hardware,
    Link,
    OpKind,
    Protocol,
)
from graph_trainer.core.simulation.op_costs import Curves
from graph_trainer.errors import ConfigError

_MOST_POINTS = 12
"""Points of a curve in a profile: two for each factor of ten over six orders of magnitude."""
_OWN_CURVE = 0.005
"""The part of the measured time of all ops from which an op has a curve of its own."""
_PRIOR = 1e-3
"""Weight of the base profile's latencies and bandwidths against one sample: only what samples leave
undecided, such as the latency of a step where all groups have one size, stays near the base."""
_LEAST_BANDWIDTH_TIME = 1e-3
"""A fit that explains all samples by latency leaves this part of a transfer's time."""
_FOLDS = 10
"""Parts into which sizes are divided, each predicted from the others (Kohavi, A Study of
Cross-Validation and Bootstrap for Accuracy Estimation and Model Selection, 1995)."""

CurveKey = tuple[OpKind, str | None, str | None]
"""Kind, op and dtype of a curve, as in `Efficiency`."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSample:
    """The measured time of an op at one size."""

    kind: OpKind
    op: str
    """As `op_costs.measured_name`."""
    dtype: str
    """Of its first tensor, without "torch."."""
    size: float
    """FLOPs of a matmul or of attention, bytes of other ops."""
    model_seconds: float
    """Predicted with the base profile's efficiency of the kind, without launches. That of a matmul
    or of attention is without its bytes."""
    seconds: float
    bytes: int = 0
    """Bytes that a matmul or attention moves."""
    launches: int = 1
    count: int = 1
    """How often a step runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """The measured time of a collective."""

    kind: str
    """As `Collective.kind`."""
    ranks: tuple[int, ...]
    input_bytes: int
    output_bytes: int
    seconds: float
    largest_split_bytes: int = 0
    count: int = 1

    @property
    def row(self) -> CollectiveKind:
        """The row of `collective_kinds` for its kind."""
        return kind_named(self.kind)


class OverlapSample(NamedTuple):
    """A kernel and a collective, measured one after the other and at once, in seconds."""

    compute: float
    collective: float
    together: float


@dataclass(slots=True)
class Samples:
    """What was measured of a machine. Anything may be empty."""

    ops: list[OpSample] = field(default_factory=list)
    collectives: list[CollectiveSample] = field(default_factory=list)
    launches: list[float] = field(default_factory=list)
    """Seconds of kernels that do almost nothing."""
    overlaps: list[OverlapSample] = field(default_factory=list)
    host: dict[str, list[float]] = field(default_factory=dict)
    """Seconds by field of `Host`."""

    def __len__(self) -> int:
        measured = len(self.ops) + len(self.collectives) + len(self.launches) + len(self.overlaps)
        return measured + sum(len(values) for values in self.host.values())


class Figure(NamedTuple):
    """A value of the profile, before and after."""

    key: str
    samples: int
    before: float
    after: float
    spread_before: float | None
    """Standard deviation of log(measured / predicted) by the base; None of what is no model."""
    spread: float
    """The same where each size is predicted from the samples of others; of a median, the standard
    deviation of log(measured / median)."""


class CurveFit(NamedTuple):
    """What a curve of efficiencies is fitted to."""

    samples: int
    spread: float
    """As that of `Figure`."""


class Calibrated(NamedTuple):
    """A profile with measured values."""

    hardware: Hardware
    figures: list[Figure]
    """In the order of the profile's keys."""
    curves: dict[CurveKey, CurveFit]
    """Without those of the base that were not measured again."""


def calibrated(
    base: Hardware, samples: Samples, *, device_name: str, date: str, name: str = "measured"
) -> Calibrated:
    """Replace the values of a profile that samples determine. n log n in samples.

    Spreads are those of predictions from samples of other sizes, because a curve may have as many
    points as samples and then goes through all of them.

    Args:
        base: the profile with which the samples' `model_seconds` were predicted.
        device_name: of the measured device, with its number of cores for a CPU.
        date: of the measurement.

    Raises:
        ConfigError: no sample took any time, or a matmul exceeded the peak of a GPU's profile.
    """
    ops = [s for s in samples.ops if s.seconds > 0 and s.model_seconds > 0]
    issued = [s for s in samples.collectives if s.seconds > 0 and len(s.ranks) > 1]
    if not ops and not issued:
        raise ConfigError(
            "calibration: no op and no collective of more than one rank was measured: raise "
            "--seconds or --most, or read a trace of whole steps"
        )
    hardware, figures = replace(base, name=name), list[Figure]()
    of_issued: list[tuple[CollectiveSample, float]] = []
    if samples.launches:
        value = statistics.median(samples.launches)
        figures.append(_of_values("launch_seconds", base.launch_seconds, samples.launches))
        hardware = replace(hardware, launch_seconds=value)
    unfitted = hardware
    hardware = _with_efficiencies(base, hardware, ops)
    _check_peak(base, hardware)
    predicted, by_kind = _predicted_held_out(base, unfitted, ops)
    of_base = Curves(base)
    before = {id(s): _predicted(s, s.op, base, base, of_base) for s in ops}
    curves = {}
    for curve, fitted_to in _samples_by_curve(ops).items():
        held_out = predicted if curve[1] else by_kind
        spread = _spread((s, held_out[id(s)]) for s in fitted_to)
        curves[curve] = CurveFit(len(fitted_to), spread)
    for kind in OpKind:
        of_kind = [s for s in ops if s.kind is kind]
        if of_kind:
            old, new = base.scalar_efficiency(kind), hardware.scalar_efficiency(kind)
            key = f"{kind}_efficiency"
            if kind is OpKind.ROWS:
                key = f"[[efficiencies]] {kind}"  # curves alone
                new = old * _total(of_kind, "model_seconds") / _total(of_kind, "seconds")
            spreads = (_spread((s, p[id(s)]) for s in of_kind) for p in (before, predicted))
            figures.append(Figure(key, len(of_kind), old, new, *spreads))
    if issued:
        fitted = _with_links(hardware, issued)
        of_issued = _collectives_held_out(hardware, issued)
        figures += _link_figures(hardware, fitted, issued, of_issued)
        hardware = fitted
    if samples.overlaps:
        shares = [(s.together - s.compute) / s.collective for s in samples.overlaps]
        shares = [min(max(share, 0.0), 0.95) for share in shares]
        old = base.collective_compute_share
        figures.append(_of_values("collective_compute_share", old, shares))
        hardware = replace(hardware, collective_compute_share=statistics.median(shares))
    of_host = {key: values for key, values in samples.host.items() if values}
    for key, values in of_host.items():
        figures.append(_of_values(f"host.{key}", getattr(base.host, key), values))
    medians: dict[str, Any] = {key: statistics.median(v) for key, v in of_host.items()}
    hardware = replace(hardware, host=replace(base.host, **medians))
    pairs: list[tuple[OpSample | CollectiveSample, float]] = []
    pairs += [(s, predicted[id(s)]) for s in _with_other_sizes(ops)]
    pairs += of_issued
    pairs = pairs or [(s, predicted[id(s)]) for s in ops]
    record = Calibration(
        samples=len(ops) + len(issued),
        spread=round(_spread(pairs), 4),
        device_name=device_name,
        date=date,
        torch=torch.__version__,
    )
    return Calibrated(replace(hardware, calibration=record), figures, curves)


def _folds(
    samples: Sequence[T], size_of: Callable[[T], Hashable]
) -> Iterator[tuple[list[T], list[T]]]:
    """Divide samples by size; yield each part with all other samples.

    Args:
        size_of: equal for samples of which none is predicted from another. Neighbours in the
            samples' order are in different parts.
    """
    sizes = {size: place for place, size in enumerate(dict.fromkeys(map(size_of, samples)))}
    for fold in range(min(_FOLDS, len(sizes))):
        chosen, others = list[T](), list[T]()
        for sample in samples:
            is_chosen = sizes[size_of(sample)] % _FOLDS == fold
            (chosen if is_chosen else others).append(sample)
        yield chosen, others


def _predicted_held_out(
    base: Hardware, hardware: Hardware, ops: list[OpSample]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return what is predicted of each op, by id, from the samples of other sizes of its kind: by
    the curve of the op where it has one, and by that of its kind. Without other sizes it is what
    the base predicts.

    Args:
        hardware: the profile before its efficiencies are fitted.
    """
    by_op, by_kind = dict[int, float](), dict[int, float]()
    ordered = sorted(ops, key=lambda s: (s.kind, s.size))
    for chosen, others in _folds(ordered, lambda s: (s.kind, s.size)):
        fitted = _with_efficiencies(base, hardware, others)
        curves = Curves(fitted)
        for sample in chosen:
            by_op[id(sample)] = _predicted(sample, sample.op, base, fitted, curves)
            by_kind[id(sample)] = _predicted(sample, "", base, fitted, curves)
    return by_op, by_kind


def _predicted(
    sample: OpSample, op: str, base: Hardware, hardware: Hardware, curves: Curves
) -> float:
    """Return the time that a profile predicts of an op, as `costs` does.

    Args:
        op: by whose curve; empty for that of the kind.
        base: the profile of the sample's `model_seconds`.
        curves: of `hardware`.
    """
    seconds = sample.model_seconds * base.scalar_efficiency(sample.kind)
    seconds /= hardware.scalar_efficiency(sample.kind)
    seconds *= curves.slowdown(sample.kind, op, sample.dtype, sample.size)
    speed = hardware.memory_bytes_per_second * hardware.memory_efficiency
    return max(seconds, sample.bytes / speed, sample.launches * hardware.launch_seconds)


def _total(samples: Iterable[OpSample], of: str) -> float:
    return sum(sample.count * float(getattr(sample, of)) for sample in samples)


def _spread(pairs: Iterable[tuple[OpSample | CollectiveSample, float]]) -> float:
    """Return the root of the mean square of log(measured / predicted), weighted by the samples'
    part of the measured step. It contains what is wrong with the mean, too."""
    weights = squares = 0.0
    for sample, predicted in pairs:
        weight = sample.count * sample.seconds
        weights += weight
        squares += weight * math.log(sample.seconds / predicted) ** 2
    return math.sqrt(squares / weights) if weights else 0.0


def _of_values(key: str, before: float, values: Sequence[float]) -> Figure:
    """Return the figure of a value that is measured as such: the median."""
    middle = statistics.median(values)
    deviations = [math.log(v / middle) ** 2 for v in values if v > 0 and middle > 0]
    spread = math.sqrt(statistics.fmean(deviations)) if deviations else 0.0
    return Figure(key, len(values), before, middle, None, spread)


def _with_efficiencies(base: Hardware, hardware: Hardware, ops: list[OpSample]) -> Hardware:
    """Return the profile with the efficiencies of all kinds: the scalar one is that of all the time
    of the kind in a step, the curves are by size."""
    scalars: dict[str, float] = {}
    for kind in (OpKind.MATMUL, OpKind.ATTENTION, OpKind.MEMORY):
        of_kind = [s for s in ops if s.kind is kind]
        if of_kind:
            mean = _total(of_kind, "model_seconds") / _total(of_kind, "seconds")
            scalars[f"{kind}_efficiency"] = min(1.0, base.scalar_efficiency(kind) * mean)
    entries = []
    curves = _samples_by_curve(ops)
    for (kind, op, dtype), group in curves.items():
        for size, efficiency in _curve(group, base.scalar_efficiency(kind)):
            entry = Efficiency(kind=kind, op=op, dtype=dtype, size=size, efficiency=efficiency)
            entries.append(entry)
    kept = [e for e in base.efficiencies if (OpKind(e.kind), e.op, e.dtype) not in curves]
    return replace(hardware, efficiencies=(*kept, *entries), **scalars)  # type: ignore[arg-type]


def _samples_by_curve(ops: list[OpSample]) -> dict[CurveKey, list[OpSample]]:
    """Return the samples that each curve is fitted to."""
    curves: dict[CurveKey, list[OpSample]] = defaultdict(list)
    by_op: dict[CurveKey, list[OpSample]] = defaultdict(list)
    for s in ops:
        if s.kind in (OpKind.MATMUL, OpKind.ATTENTION):
            curves[s.kind, None, s.dtype].append(s)
        else:
            curves[s.kind, None, None].append(s)
        by_op[s.kind, s.op, s.dtype].append(s)
    total = _total(ops, "seconds")
    for key, of_op in by_op.items():
        if _total(of_op, "seconds") >= _OWN_CURVE * total:
            curves[key] = of_op
    return curves


def _with_other_sizes(ops: list[OpSample]) -> list[OpSample]:
    """Return the samples that samples of other sizes predict: without ops whose curve is one point.

    The curve of the kind, which is of other ops, says little of how well such a point predicts.
    """
    curves = _samples_by_curve(ops)
    predictable = []
    for sample in ops:
        alike = curves.get((sample.kind, sample.op, sample.dtype))
        if alike is None or len({s.size for s in alike}) > 1:
            predictable.append(sample)
    return predictable


def _check_peak(base: Hardware, hardware: Hardware) -> None:
    """Refuse a matmul that exceeded the peak of a GPU's profile."""
    if base.device == "cpu":
        return
    for entry in hardware.efficiencies:
        if entry.kind == OpKind.MATMUL and entry.efficiency > 1.1:
            raise ConfigError(
                f"calibration: a matmul of {entry.size:.3g} FLOPs in {entry.dtype} reaches "
                f"{entry.efficiency:.2f} times the peak of {base.name}: name the profile of the "
                "measured device with --base"
            )


def _curve(samples: list[OpSample], scalar: float) -> list[tuple[float, float]]:
    """Return efficiencies by ascending size.

    Larger products use a device better, so that the efficiency of matmuls and attention grows with
    their size. That of ops bound by memory falls where the data leave a cache, but their time
    grows. Both are isotonic regressions of logarithms, weighted by the time in a step.
    """
    from scipy.optimize import isotonic_regression

    by_size: dict[float, list[OpSample]] = defaultdict(list)
    for sample in samples:
        by_size[sample.size].append(sample)
    sizes = sorted(by_size)
    weights, models, measured = [], [], []
    for size in sizes:
        group = by_size[size]
        of_group = [s.count * s.seconds for s in group]
        weights.append(sum(of_group))
        logs = [(math.log(s.model_seconds), math.log(s.seconds)) for s in group]
        pairs = list(zip(of_group, logs, strict=True))
        models.append(sum(weight * log for weight, (log, _) in pairs) / weights[-1])
        measured.append(sum(weight * log for weight, (_, log) in pairs) / weights[-1])
    if samples[0].kind in (OpKind.MATMUL, OpKind.ATTENTION):
        ratios = [model - time for model, time in zip(models, measured, strict=True)]
        fitted = isotonic_regression(ratios, weights=weights).x
    else:
        times = isotonic_regression(measured, weights=weights).x
        fitted = [model - time for model, time in zip(models, times, strict=True)]
    places = range(len(sizes))
    if len(sizes) > _MOST_POINTS:
        step = (len(sizes) - 1) / (_MOST_POINTS - 1)
        places = sorted({round(place * step) for place in range(_MOST_POINTS)})  # type: ignore[assignment]
    return [(sizes[place], scalar * math.exp(fitted[place])) for place in places]


def _with_links(hardware: Hardware, issued: list[CollectiveSample]) -> Hardware:
    """Return the profile with other latencies and bandwidths of collectives.

    All protocols keep their proportions: one factor is that of the shortest time of a collective,
    one that of a step's latency, and one the time of a byte on each link. They are the least
    squares of relative errors that are not negative. The fastest protocol of a size depends on the
    factors, so the fit repeats.
    """
    import numpy
    from scipy.optimize import lsq_linear

    links = (Link.NODE, Link.NETWORK)
    for _ in range(4):
        rows, targets = [], []
        for sample in issued:
            protocol, latency, transfer, link = _fastest(sample, hardware)
            row = [protocol.base_seconds, latency - protocol.base_seconds]
            row += [transfer if link is other else 0.0 for other in links]
            weight = math.sqrt(sample.count) / sample.seconds
            rows.append([weight * part for part in row])
            targets.append(weight * sample.seconds)
        prior = _PRIOR * math.sqrt(sum(s.count for s in issued) / len(issued))
        matrix = numpy.vstack([numpy.array(rows), prior * numpy.eye(4)])
        # a link of a GPU reaches its bandwidth at most
        most = [getattr(hardware, f"{link}_efficiency") for link in links]
        least = [0.0, 0.0, *(most if hardware.device != "cpu" else [0.0, 0.0])]
        wanted = numpy.array([*targets, *[prior] * 4])
        factors = lsq_linear(matrix, wanted, bounds=(least, numpy.inf)).x
        base, step, node, network = map(float, factors)
        hardware = replace(
            _with_bandwidth(_with_bandwidth(hardware, "node", node), "network", network),
            protocols=tuple(_scaled(p, base, step) for p in hardware.protocols),
        )
    return hardware


def _fastest(sample: CollectiveSample, hardware: Hardware) -> tuple[Protocol, float, float, Link]:
    """Return the fastest protocol of a collective, with latency, transfer and link."""
    usable = [p for p in hardware.protocols if p.sends_pairs or not sample.row.pairwise]
    ways = []
    for protocol in usable:
        parts = collective_parts(sample, replace(hardware, protocols=(protocol,)))
        ways.append((protocol, *parts))
    return min(ways, key=lambda way: way[1] + way[2])


def _scaled(protocol: Protocol, base: float, step: float) -> Protocol:
    tree = protocol.tree_latency_seconds
    return replace(
        protocol,
        base_seconds=protocol.base_seconds * base,
        node_latency_seconds=protocol.node_latency_seconds * step,
        network_latency_seconds=protocol.network_latency_seconds * step,
        post_seconds=protocol.post_seconds * step,
        tree_latency_seconds=None if tree is None else tree * step,
    )


def _with_bandwidth(hardware: Hardware, link: str, factor: float) -> Hardware:
    """Return the profile with a link on which a byte takes `factor` times as long.

    A bandwidth from a datasheet is the most that a link reaches; that of a CPU's profile is an
    estimate, and grows.
    """
    key, speed_key = f"{link}_efficiency", f"{link}_bytes_per_second"
    efficiency = getattr(hardware, key) / max(factor, _LEAST_BANDWIDTH_TIME)
    changes: dict[str, Any] = {key: min(1.0, efficiency)}
    if efficiency > 1 and hardware.device == "cpu":
        changes[speed_key] = getattr(hardware, speed_key) * efficiency
    return replace(hardware, **changes)


def _collectives_held_out(
    hardware: Hardware, issued: list[CollectiveSample]
) -> list[tuple[CollectiveSample, float]]:
    """Return collectives with what is predicted of each from those of other groups and sizes;
    without any it is what the base predicts.

    Args:
        hardware: the profile before its links are fitted.
    """
    pairs = []
    for chosen, others in _folds(issued, lambda s: (s.ranks, s.input_bytes + s.output_bytes)):
        fitted = _with_links(hardware, others) if others else hardware
        pairs += [(s, collective_seconds(s, fitted)) for s in chosen]
    return pairs


def _link_figures(
    before: Hardware,
    after: Hardware,
    issued: list[CollectiveSample],
    predicted: list[tuple[CollectiveSample, float]],
) -> list[Figure]:
    """Return the values of links that a fit changed.

    Args:
        predicted: as `_collectives_held_out`.
    """
    spreads = (_spread((s, collective_seconds(s, before)) for s in issued), _spread(predicted))
    figures = []
    for key in ("node_bytes_per_second", "node_efficiency"):
        figures.append((key, getattr(before, key), getattr(after, key)))
    for key in ("network_bytes_per_second", "network_efficiency"):
        figures.append((key, getattr(before, key), getattr(after, key)))
    for old, new in zip(before.protocols, after.protocols, strict=True):
        for key in ("base_seconds", "node_latency_seconds", "network_latency_seconds"):
            figures.append((f"{new.name}.{key}", getattr(old, key), getattr(new, key)))
    return [
        Figure(key, len(issued), old, new, *spreads)
        for key, old, new in figures
        if not math.isclose(old, new)
    ]
