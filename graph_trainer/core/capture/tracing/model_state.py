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
    """The model's tensors, each once, with all of its names."""

    tensors: list[torch.Tensor]
    inputs: list[Input]

    def split(self, ids: Set[int]) -> tuple[ModelState, ModelState]:
        """Return the tensors without those that have one of the ids, then those that have one."""
        without = ModelState([], [])
        selected = ModelState([], [])
        for tensor, spec in zip(self.tensors, self.inputs, strict=True):
            part = selected if id(tensor) in ids else without
            part.tensors.append(tensor)
            part.inputs.append(spec)
        return without, selected


def state_of(model: nn.Module) -> ModelState:
    """List parameters, then buffers, each tensor once under its first name.

    Raises:
        CaptureError: a tensor that is not dense, or a module of torch.jit.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"module '{clean_fqn(name)}' is scripted or traced by torch.jit, which hides its "
                "operators: capture the Python module that it was made of"
            )
    names: dict[int, list[str]] = {}  # by id of a tensor
    kinds: dict[int, InputKind] = {}
    tensors: dict[int, torch.Tensor] = {}
    for kind, named_tensors in (
        (InputKind.PARAMETER, model.named_parameters(remove_duplicate=False)),
        (InputKind.BUFFER, model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named_tensors:
            kinds.setdefault(id(tensor), kind)
            tensors[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(clean_fqn(name))
    inputs = []
    for key, tensor in tensors.items():
        name, *aliases = names[key]
        _, layout = unwrap(tensor, name)
        inputs.append(Input(kinds[key], name, layout, tensor.requires_grad, tuple(aliases)))
    return ModelState(list(tensors.values()), inputs)
