"""The tensors of a model that a captured step takes as inputs."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import nn

from graph_trainer.core.graph.signature import Input, InputKind
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.names import clean_fqn
from graph_trainer.errors import CaptureError


@dataclass(slots=True)
class ModelState:
    """The model's tensors, each once, with every name it has."""

    tensors: list[torch.Tensor]
    inputs: list[Input]

    def parted(self, ids: Set[int]) -> tuple[ModelState, ModelState]:
        """Return the tensors without those of some ids, and these, each in their order."""
        parts = ModelState([], []), ModelState([], [])
        for tensor, spec in zip(self.tensors, self.inputs, strict=True):
            part = parts[id(tensor) in ids]
            part.tensors.append(tensor)
            part.inputs.append(spec)
        return parts


def state_of(model: nn.Module) -> ModelState:
    """List parameters, then buffers, each tensor once under its first name.

    Raises:
        CaptureError: a tensor that no graph can hold, or a module that is not in Python.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"module '{clean_fqn(name)}' is scripted or traced by torch.jit, which hides its "
                "operators: capture the Python module that it was made of"
            )
    known: dict[int, tuple[InputKind, torch.Tensor, list[str]]] = {}
    for kind, named in (
        (InputKind.PARAMETER, model.named_parameters(remove_duplicate=False)),
        (InputKind.BUFFER, model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            known.setdefault(id(tensor), (kind, tensor, []))[2].append(clean_fqn(name))
    state = ModelState([], [])
    for kind, tensor, (name, *aliases) in known.values():
        _, layout = unwrap(tensor, name)
        state.tensors.append(tensor)
        state.inputs.append(Input(kind, name, layout, tensor.requires_grad, tuple(aliases)))
    return state
