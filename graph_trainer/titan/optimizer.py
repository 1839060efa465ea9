"""[optimizer]: torchtitan's parameter groups, and the settings that they share."""

import copy
from dataclasses import dataclass, fields, replace
from typing import Any

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

SHARED = ("lr", "betas", "weight_decay", "eps")
"""The keys of [optimizer] that set every group which does not set its own."""


@dataclass(kw_only=True, slots=True)
class SharedOptimizerConfig(OptimizersContainer.Config):
    """torchtitan's [optimizer], with settings that all its parameter groups share."""

    lr: float | None = None
    """The learning rate of every parameter group whose optimizer_kwargs have none."""

    betas: tuple[float, float] | None = None
    """Adam's two decay rates in every parameter group whose optimizer_kwargs have none."""

    weight_decay: float | None = None
    """The weight decay of every parameter group whose optimizer_kwargs have none."""

    eps: float | None = None
    """Adam's addend of the denominator in every parameter group whose optimizer_kwargs have
    none."""

    def shared(self) -> dict[str, Any]:
        """Return the settings of `SHARED` that have a value."""
        values = {name: getattr(self, name) for name in SHARED}
        return {name: value for name, value in values.items() if value is not None}

    def resolved_groups(self) -> list[ParamGroupConfig]:
        """Return the parameter groups with all that they are trained with."""
        shared = self.shared()
        return [
            replace(group, optimizer_kwargs=_taken(group, shared) | group.optimizer_kwargs)
            for group in self.param_groups
        ]

    def build(self, **components: Any) -> Any:
        """Make torchtitan's optimizers of the resolved groups."""
        resolved = copy.copy(self)
        resolved.param_groups = self.resolved_groups()
        return OptimizersContainer(resolved, **components)


def with_shared_settings(config: Any) -> Any:
    """Return torchtitan's [optimizer] as ours: what all groups have in common is theirs no more.

    Any other config, one of a user's own optimizers for example, is returned as it is.
    """
    if type(config) is not OptimizersContainer.Config:
        return config
    shared = {}
    for name in SHARED:
        taking = [g.optimizer_kwargs for g in config.param_groups if _taken(g, {name: ...})]
        values = [kwargs.get(name) for kwargs in taking]
        if values and values[0] is not None and all(each == values[0] for each in values):
            shared[name] = values[0]
    groups = []
    for group in config.param_groups:
        moved = _taken(group, shared)
        kept = {k: v for k, v in group.optimizer_kwargs.items() if k not in moved}
        groups.append(replace(group, optimizer_kwargs=kept))
    named = {f.name: getattr(config, f.name) for f in fields(config)} | {"param_groups": groups}
    return SharedOptimizerConfig(**named, **shared)


def _taken(group: ParamGroupConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Return those of the settings that the optimizer of a group takes."""
    muon = group.optimizer_name == "DistMuon"
    return {k: v for k, v in settings.items() if not muon or k in ("lr", "weight_decay")}
