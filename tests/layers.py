"""Models cut down to what has every kind of layer and every kind of neighbour, and few experts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

OF_EACH_KIND = 2
EXPERTS = 16
"""The most of a mixture: twice as many as a token chooses, and more than the ranks of a mesh."""


def with_few_layers(config: Any) -> None:
    """Leave two layers of each kind in every list of layers of the config's model, and in their
    mixtures at most EXPERTS, in place."""
    model = config.model_spec.model
    for name in ("layers", "mtp_layers"):
        seen: Counter[object] = Counter()
        kept = []
        for layer in getattr(model, name, None) or ():
            seen[kind := kind_of(layer)] += 1
            if seen[kind] <= OF_EACH_KIND:
                kept.append(layer)
                moe = getattr(layer, "moe", None)
                if moe is not None and moe.router.num_experts > EXPERTS:
                    set_experts(moe, EXPERTS)
        if kept:
            setattr(model, name, kept)


def set_experts(moe: Any, count: int) -> None:
    """Give a mixture so many experts, in place."""
    moe.num_experts = moe.router.num_experts = moe.router.gate.out_features = count
    moe.routed_experts.inner_experts.num_experts = count
    moe.routed_experts.token_dispatcher.num_experts = count


def kind_of(layer: Any) -> object:
    """Return what equal layers have in common: the class of every part, and which are left out."""
    if not dataclasses.is_dataclass(layer):
        return type(layer)
    parts = [kind_of(getattr(layer, each.name)) for each in dataclasses.fields(layer)]
    return (type(layer), *parts)
