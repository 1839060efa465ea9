"""[optimizer]: torchtitan's parameter groups, and the settings that they share."""

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from graph_trainer.errors import ConfigError

SHARED = ("lr", "betas", "weight_decay", "eps")
"""The keys of [optimizer] that set every group which does not set its own."""


@dataclass(kw_only=True, slots=True)
class ParameterGroup(ParamGroupConfig):
    """torchtitan's parameter group, which need not name AdamW nor what [optimizer] sets."""

    optimizer_name: str = "AdamW"
    """The optimizer of this group."""

    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of this group's optimizer, beside and before those that [optimizer] has for all
    groups: lr, betas, weight_decay, eps."""


@dataclass(kw_only=True, slots=True)
class SharedOptimizerConfig(OptimizersContainer.Config):
    """torchtitan's [optimizer], with settings that all its parameter groups share."""

    param_groups: list[ParameterGroup] = field(default_factory=list)
    """Parameters by name, each group with an optimizer and settings of its own; of the patterns
    that match a name the first counts."""

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

    def resolved_groups(self) -> list[ParameterGroup]:
        """Return the parameter groups with all that they are trained with."""
        shared = self.shared()
        return [
            replace(group, optimizer_kwargs=_taken(group, shared) | group.optimizer_kwargs)
            for group in self.param_groups
        ]

    def build(self, *, model_parts: list[nn.Module]) -> Any:
        """Make torchtitan's optimizers of the resolved groups.

        Raises:
            ConfigError: groups leave out a trained parameter, or one of them has none.
        """
        for part in model_parts:
            named = part.named_parameters()
            names = [name for name, parameter in named if parameter.requires_grad]
            if wrong := wrong_groups(self.param_groups, names):
                raise ConfigError("{}: {}. {}".format(*wrong))
        resolved = copy.copy(self)
        resolved.param_groups = self.resolved_groups()
        return OptimizersContainer(resolved, model_parts=model_parts)


def wrong_groups(
    groups: Sequence[ParamGroupConfig], names: Iterable[str]
) -> tuple[str, str, str] | None:
    """Return key, problem and remedy of groups that leave out one of the trained parameters with
    these names, or of a group without any."""
    left = list(names)
    for i, group in enumerate(groups):
        others = [name for name in left if not re.search(group.pattern, name)]
        if len(others) == len(left):
            problem = "it finds none of the parameters that the groups before it leave"
            return f"optimizer.param_groups[{i}].pattern", problem, "Correct it, or take it out."
        left = others
    if not left:
        return None
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return (
        f"optimizer.param_groups[{len(groups) - 1}].pattern",
        f"neither it nor a group before it finds {left[0]}{more}, which would not be trained",
        'Add a last [[optimizer.param_groups]] with pattern = ".*".',
    )


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
        if values and values[0] is not None and all(value == values[0] for value in values):
            shared[name] = values[0]
    groups = []
    for group in config.param_groups:
        moved = _taken(group, shared)
        kept = {k: v for k, v in group.optimizer_kwargs.items() if k not in moved}
        named = {f.name: getattr(group, f.name) for f in fields(group)}
        groups.append(ParameterGroup(**named | {"optimizer_kwargs": kept}))
    named = {f.name: getattr(config, f.name) for f in fields(config)} | {"param_groups": groups}
    return SharedOptimizerConfig(**named, **shared)


def _taken(group: ParamGroupConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Return those of the settings that the optimizer of a group takes."""
    muon = group.optimizer_name == "DistMuon"
    return {k: v for k, v in settings.items() if not muon or k in ("lr", "weight_decay")}
