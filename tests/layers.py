"""Models cut down to what has every kind of layer and every kind of neighbour."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

OF_EACH_KIND = 2
EXPERTS, CHOSEN = 16, 2


def with_few_layers(config: Any) -> None:
    """Leave two layers of each kind in every list of layers of the config's model, in place.

    A mixture of more than sixteen experts is left with sixteen, of which a token chooses two.
    """
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
                    set_experts(moe, EXPERTS, CHOSEN)
        if kept:
            setattr(model, name, kept)


def kind_of(layer: Any) -> object:
    """Return what equal layers have in common: the class of every part, and which are left out."""
    if not dataclasses.is_dataclass(layer):
        return type(layer)
    parts = [kind_of(getattr(layer, each.name)) for each in dataclasses.fields(layer)]
    return (type(layer), *parts)


def set_experts(moe: Any, count: int, chosen: int) -> None:
    """Give the config of a mixture so many experts, of which a token chooses some, in place."""
    router, routed = moe.router, moe.routed_experts
    for part in (moe, router, routed.token_dispatcher, routed.inner_experts):
        part.num_experts = count
    router.gate.out_features = count
    router.top_k = routed.token_dispatcher.top_k = chosen
