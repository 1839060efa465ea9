"""Estimate a run by the same run of two models of few layers."""

# The idea: layers of one kind take the same time and keep the same bytes, so what two short models
# differ by, a layer, is what each further layer adds. A plan of a few layers takes a second.

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from graph_trainer.core.analysis.memory import Category
from graph_trainer.planner.plan import Plan
from graph_trainer.planner.search.costs import Needs
from graph_trainer.titan.config.run_config import GraphTrainerConfig

SHORT = (3, 6)
"""Layers of each kind of the two models."""


def with_budget(none: Needs, full: Needs, allowed_bytes: int) -> Needs:
    """Estimate a run with a memory budget, from the same run that recomputes nothing, and all.

    Time falls with memory from the one to the other. A budget keeps first what saves most, so this
    is rather too slow.
    """
    if none.needed_bytes <= allowed_bytes:
        return none
    if full.needed_bytes >= allowed_bytes:
        return full
    between = (allowed_bytes - full.needed_bytes) / (none.needed_bytes - full.needed_bytes)
    return Needs(full.seconds + between * (none.seconds - full.seconds), allowed_bytes)


def estimate(config: GraphTrainerConfig, plan: Callable[[GraphTrainerConfig], Plan]) -> Needs:
    """Estimate step time and memory of a config without a pipeline and a memory budget.

    A model that is not longer than the longer one is planned as it is.

    Args:
        plan: makes the plan of a config.

    Raises:
        GraphTrainerError: as `plan`.
    """
    layers = _layers_of(config)
    short, longer = (_shortened(layers, count) for count in SHORT)
    if len(longer) == len(layers):
        planned = plan(config)
        return Needs(planned.step_seconds, planned.need.total)
    few, more = (plan(_with_layers(config, part)) for part in (short, longer))
    missing = (len(layers) - len(longer)) / (len(longer) - len(short))
    seconds = more.step_seconds + missing * (more.step_seconds - few.step_seconds)
    # of a peak not all grows from a few layers on: what is alive between forward and backward does
    grown = (_kept_bytes(more) - _kept_bytes(few)) * more.need.allocated / more.need.alive
    return Needs(seconds, more.need.total + missing * grown)


def _kept_bytes(plan: Plan) -> float:
    """Return the bytes that are alive as backward begins, and at all times."""
    at_peak = plan.simulation.memory.peak_by_category()
    return sum(at_peak.get(category, 0) for category in _KEPT)


_KEPT = (*(Category.PARAMETERS, Category.BUFFERS, Category.OPTIMIZER_STATE, Category.ACTIVATIONS),)


def _layers_of(config: GraphTrainerConfig) -> Sequence[object]:
    assert config.model_spec is not None
    return getattr(config.model_spec.model, "layers", ())


def _shortened(layers: Sequence[object], count: int) -> list[object]:
    """Return the first layers of each kind, in order."""
    seen: Counter[object] = Counter()
    kept = []
    for layer in layers:
        seen[kind := _kind_of(layer)] += 1
        if seen[kind] <= count:
            kept.append(layer)
    return kept


def _kind_of(layer: Any) -> object:
    """Return what equal layers have in common: the classes of their parts."""
    if not dataclasses.is_dataclass(layer):
        return type(layer)
    parts = (_kind_of(getattr(layer, field.name)) for field in dataclasses.fields(layer))
    return (type(layer), *parts)


def _with_layers(config: GraphTrainerConfig, layers: list[object]) -> GraphTrainerConfig:
    assert config.model_spec is not None
    model = copy.copy(config.model_spec.model)
    model.layers = layers
    changed = copy.copy(config)
    changed.model_spec = replace(config.model_spec, model=model)
    return changed
