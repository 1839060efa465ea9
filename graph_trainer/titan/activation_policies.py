"""What [activation_checkpoint] may choose beside torchtitan's own policies, and what each means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    SelectiveAC,
)

from graph_trainer.core.passes.context import ActivationPolicy
from graph_trainer.titan.config.toml_file import read_toml
from graph_trainer.titan.memory_table_file import memory_table_of


class LayersAC(FullAC):
    """Recompute every nth whole block, counted from 1."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        layers: int = 2
        """Which blocks keep their input only: every nth, counted from 1, as torchtitan counts: 3
        for the third, the sixth and so on. 1 for all."""

    blocks_seen = 0

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        self.blocks_seen += 1
        if self.blocks_seen % self.config.layers:
            return module
        return super()._wrap_block(module, base_fqn=base_fqn)


class BudgetAC(ActivationCheckpointing):
    """Keep what makes the step fastest within compile.memory_limit_gib. Captured steps only."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        pass


class FileAC(ActivationCheckpointing):
    """Keep what a table lists, such as "budget" writes. Captured steps only."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        path: str = ""
        """The table: a TOML file, as `graph-trainer plan` and a run with "budget" write it."""


class UserAC(ActivationCheckpointing):
    """Recompute what torch.utils.checkpoint in the model marks, and nothing else."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        pass

    def apply(self, model: nn.Module) -> None:
        """Leave the model as it is."""


POLICIES: dict[type, ActivationPolicy] = {
    SelectiveAC.Config: "selective",
    FullAC.Config: "full",
    LayersAC.Config: "layers",
    BudgetAC.Config: "budget",
    FileAC.Config: "file",
    UserAC.Config: "user",
}
"""What the passes do with a captured step instead of wrapping modules."""

Section: TypeAlias = (
    SelectiveAC.Config
    | FullAC.Config
    | LayersAC.Config
    | BudgetAC.Config
    | FileAC.Config
    | UserAC.Config
    | None
)
"""What [activation_checkpoint] may be; or a subclass of one of these."""

NEEDS_CAPTURE = (BudgetAC.Config, FileAC.Config)
"""Sections that act on a captured step only."""


def activation_settings(section: Section) -> dict[str, Any]:
    """Return the settings of the passes for [activation_checkpoint].

    Empty for a class of a user's own: `parallelize_decoder` applies that to the modules, and what
    it recomputes is in the captured graph.

    Raises:
        ConfigError: the table that the section names cannot be read.
    """
    policy = POLICIES.get(type(section))
    if policy is None:
        return {}
    settings: dict[str, Any] = {"activation_policy": policy}
    if isinstance(section, SelectiveAC.Config):
        settings["recompute_matmuls_of"] = tuple(section.force_recompute_mm_shapes_by_fqns)
    elif isinstance(section, LayersAC.Config):
        settings["recompute_every_nth_block"] = section.layers
    elif isinstance(section, FileAC.Config):
        key = "activation_checkpoint.path"
        table = read_toml(Path(section.path), key)
        settings["memory_table"] = memory_table_of(table, f"{key} {section.path}")
    return settings
