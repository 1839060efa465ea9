"""The optimizer's parameter groups, checked as far as that goes without a model."""

import re
from typing import Any

import torch

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.messages import Origin, bad_value, did_you_mean, join_or, show

# torchtitan looks a name up here first, in a private function, and only when it builds them.
_OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "DistMuon": None}


def check_optimizer(groups: list[Any], where: Origin) -> None:
    """Refuse parameter groups that torchtitan could not make an optimizer of.

    Arguments:
        groups: torchtitan's ParamGroupConfig objects, `optimizer.param_groups`.
    Raises:
        ConfigError: none at all, an unknown optimizer, a pattern that is no regular expression,
            or arguments that the optimizer does not take.
    """
    if not groups:
        raise bad_value(
            where,
            "optimizer.param_groups",
            groups,
            "no parameter would be trained",
            'Add a [[optimizer.param_groups]] with pattern = ".*", or leave the key out.',
        )
    for i, group in enumerate(groups):
        key = f"optimizer.param_groups[{i}]"
        if group.optimizer_name not in _OPTIMIZERS:
            raise bad_value(
                where,
                f"{key}.optimizer_name",
                group.optimizer_name,
                "not an optimizer of torchtitan's",
                f"{did_you_mean(group.optimizer_name, _OPTIMIZERS)}"
                f"Write {join_or(show(name) for name in _OPTIMIZERS)}.",
            )
        try:
            re.compile(group.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise bad_value(
                where,
                f"{key}.pattern",
                group.pattern,
                f"not a regular expression ({error})",
                'Write one that finds the names of the group\'s parameters, such as ".*".',
            ) from error
        _check_arguments(group, key, where)


def _check_arguments(group: Any, key: str, where: Origin) -> None:
    optimizer = _OPTIMIZERS[group.optimizer_name]
    if optimizer is None:  # it looks at the shapes of real parameters
        return
    try:
        optimizer([torch.nn.Parameter(torch.empty(1))], **group.optimizer_kwargs)
    except Exception as error:  # whatever torch says about an argument
        raise ConfigError(
            f"{where.of('optimizer.param_groups')}: {key}.optimizer_kwargs = "
            f"{show(group.optimizer_kwargs)}: {group.optimizer_name} does not take them: {error}. "
            f"Write what torch.optim.{group.optimizer_name} takes, such as {{ lr = 1e-3 }}."
        ) from error
