"""What a captured step depends on beside the model's tensors: modes and hooks of its modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from graph_trainer.core.names import clean_fqn
from graph_trainer.core.torch_private import hooks_of
from graph_trainer.errors import CaptureError


@dataclass(frozen=True, slots=True)
class ModuleSettings:
    """The modes and hooks of a model's modules, which its graph was captured with."""

    training: dict[str, bool]
    """The mode of every module, by its name."""
    hooks: tuple[Any, ...]
    """Every hook of a module and of a parameter and every forward that is an attribute of a
    module, in order."""

    @classmethod
    def of(cls, model: nn.Module) -> ModuleSettings:
        """Read them from a model."""
        training = {clean_fqn(name): module.training for name, module in model.named_modules()}
        return cls(training, hooks_of(model))

    def check(self, model: nn.Module) -> None:
        """Refuse a model with other modes or hooks. A model may be wrapped otherwise.

        Raises:
            CaptureError: with the first module whose mode differs, or for the hooks.
        """
        modes = [module.training for module in model.modules()]
        if modes != list(self.training.values()):
            for name, training in ModuleSettings.of(model).training.items():
                if self.training.get(name, training) != training:
                    raise CaptureError(
                        f"module '{name}' was in {'eval' if training else 'train'}() mode when the "
                        "graph was captured and is not now; dropout and norms are another graph "
                        "then: capture again"
                    )
        if hooks_of(model) != self.hooks:
            raise CaptureError(
                "the hooks of the model's modules or parameters, or replaced forwards, are others "
                "than when the graph was captured, which has what they did in it: capture again"
            )
