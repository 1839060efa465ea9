"""Models cut down to what has every kind of layer and every kind of neighbour."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

OF_EACH_KIND = 2
EXPERTS, CHOSEN = 8, 2


def with_few_layers(config: Any) -> None:
    """Leave two layers of each kind in every list of layers of the config's model, in place.

    Where a layer has more experts it has eight, of which a token chooses two at most.
    """
    model = config.model_spec.model
    for name in ("layers", "mtp_layers"):
        seen: Counter[object] = Counter()
        kept = []
        for layer in getattr(model, name, None) or ():
            seen[kind := kind_of(layer)] += 1
            if seen[kind] <= OF_EACH_KIND:
                kept.append(layer)
                if getattr(layer, "moe", None) is not None:
                    with_experts(layer.moe, EXPERTS, CHOSEN)
        if kept:
            setattr(model, name, kept)


def kind_of(layer: Any) -> object:
    """Return what equal layers have in common: the class of every part, and which are left out."""
    if not dataclasses.is_dataclass(layer):
        return type(layer)
    parts = [kind_of(getattr(layer, each.name)) for each in dataclasses.fields(layer)]
    return (type(layer), *parts)


def with_experts(moe: Any, most: int, chosen: int) -> None:
    """Leave so many experts at most in the config of torchtitan's mixture, in place.

    Args:
        chosen: the most that a token chooses.
    """
    router, routed = moe.router, moe.routed_experts
    dispatcher = routed.token_dispatcher
    count = min(router.num_experts, most)
    for part in (moe, router, dispatcher, routed.inner_experts):
        part.num_experts = count
    router.gate.out_features = count
    router.top_k = dispatcher.top_k = min(router.top_k, chosen)
