"""Bind a graph to a model: find, check and take apart the tensors that a call gives it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import nn

from graph_trainer.core.capture.refusals.inputs import (
    refuse_batch_with_gradient,
    refuse_shared_memory,
)
from graph_trainer.core.graph.call import Call
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.module_settings import autocast_enabled
from graph_trainer.core.graph.signature import Input, InputKind, Output
from graph_trainer.core.graph.subclasses import unwrap, with_stride, wrap
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.runtime.backends.base import BoxedFunction
from graph_trainer.core.runtime.collective_failure import failed_collective
from graph_trainer.core.torch_private import BUFFERS, MODULES, PARAMETERS
from graph_trainer.errors import CaptureError

_Place = tuple[tuple[str, ...], str, str]
"""Path of module names, `PARAMETERS` or `BUFFERS`, and the name in that dict."""


class Binding:
    """The inputs of a joint graph, by what a call gives: a model and a batch.

    Args:
        under_autograd: the gradients are autograd's, where it is enabled, and not of this graph.
    """

    def __init__(self, joint: JointGraph, *, under_autograd: bool = False) -> None:
        self._joint = joint
        self._under_autograd = under_autograd
        self._state_inputs = [i for i in joint.signature.inputs if i.kind is not InputKind.BATCH]
        self._batch_inputs = [i for i in joint.signature.inputs if i.kind is InputKind.BATCH]
        self._places: list[list[_Place]] | None = None
        self._device_types = {i.layout.device.type for i in joint.signature.inputs}

    def values(self, call: Call) -> list[torch.Tensor]:
        """Return the value of each placeholder: plain tensors that require no gradient. A
        CaptureError where tensors, modes or hooks of the model, or the batch, are others now."""
        values = self.model_values(call)
        autograds = self._under_autograd and torch.is_grad_enabled()
        backward = autograds or self._joint.signature.backward
        for spec, tensor in zip(
            self._batch_inputs, self._joint.captured_batch.take(call), strict=True
        ):
            refuse_batch_with_gradient(spec, tensor, backward)
            values += _parts(spec, tensor)
        refuse_shared_memory(self._joint.signature.inputs, values)
        return values

    def model_values(self, call: Call) -> list[torch.Tensor]:
        """Return the values of `values` that do not come from the batch, checked like these."""
        values: list[torch.Tensor] = []
        for spec, tensor in zip(self._state_inputs, self.state(call.model), strict=True):
            values += _parts(spec, tensor)
        if self._joint.settings is not None:
            self._joint.settings.check(call, self._device_types)
        return values

    def run(
        self, compiled: BoxedFunction, graph: JointGraph, values: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Run a compiled graph, without autocast, because the graph already contains its casts.
        A CollectiveError names the collective that failed (gloo; see `collective_failure`)."""
        try:
            with contextlib.ExitStack() as stack:
                for device_type in filter(autocast_enabled, self._device_types):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
                return compiled(values)
        except RuntimeError as error:
            failed = failed_collective(error, graph)
            if failed is None:
                raise
            raise failed from error

    def state(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the model's tensor for each parameter and buffer of the graph, in order; a
        CaptureError where it does not have those of the capture."""
        # Finding all names of a large model costs more than the rest of a call, so the place of
        # each tensor is cached; the tensor at that place is read and checked in every call.
        if self._places is not None:
            with contextlib.suppress(KeyError):
                return self._values_at(self._places, model)
        self._places = self._find_places(model)
        return self._values_at(self._places, model)

    def places(self, model: nn.Module) -> list[_Place]:
        """Return where a model has each parameter and buffer of the graph."""
        return [names[0] for names in self._find_places(model)]

    def _find_places(self, model: nn.Module) -> list[list[_Place]]:
        places: dict[str, _Place] = {}
        for kind, named in (
            (PARAMETERS, model.named_parameters(remove_duplicate=False)),
            (BUFFERS, model.named_buffers(remove_duplicate=False)),
        ):
            for name, _ in named:
                *path, last = name.split(".")
                places[clean_fqn(name)] = (tuple(path), kind, last)
        for spec in self._state_inputs:
            for name in (spec.name, *spec.aliases):
                if name not in places:
                    raise CaptureError(
                        f"the model has no {spec.kind.value} '{name}', which the graph was "
                        "captured with"
                    )
        return [[places[n] for n in (spec.name, *spec.aliases)] for spec in self._state_inputs]

    def _values_at(self, places: list[list[_Place]], model: nn.Module) -> list[torch.Tensor]:
        modules: dict[tuple[str, ...], nn.Module] = {(): model}

        def module_at(path: tuple[str, ...]) -> nn.Module:
            if path not in modules:
                modules[path] = vars(module_at(path[:-1]))[MODULES][path[-1]]
            return modules[path]

        values: list[torch.Tensor] = []
        owners: dict[int, str] = {}
        for spec, names in zip(self._state_inputs, places, strict=True):
            tensors = [vars(module_at(path))[kind][last] for path, kind, last in names]
            for alias, tensor in zip(spec.aliases, tensors[1:], strict=True):
                if tensor is not tensors[0]:
                    raise CaptureError(
                        f"'{alias}' and '{spec.name}' were one tensor when the graph was "
                        "captured and are two now: capture again"
                    )
            owner = owners.setdefault(id(tensors[0]), spec.name)
            if owner != spec.name:
                raise CaptureError(
                    f"'{spec.name}' and '{owner}' were two tensors when the graph was captured and "
                    "are one now: capture again"
                )
            values.append(tensors[0])
        return values


def _parts(spec: Input, tensor: torch.Tensor | None) -> list[torch.Tensor]:
    if tensor is None:
        raise CaptureError(
            f"{spec.kind.value} '{spec.name}' was a tensor when the graph was captured and is None "
            "now: capture again"
        )
    if spec.kind is InputKind.PARAMETER and tensor.requires_grad != spec.requires_grad:
        raise CaptureError(
            f"parameter '{spec.name}' was {'trainable' if spec.requires_grad else 'frozen'} when "
            "the graph was captured and is not now: capture again"
        )
    if not spec.layout.matches(tensor):
        raise CaptureError(
            f"{spec.kind.value} '{spec.name}' is {unwrap(tensor)[1].describe()}; the graph was "
            f"captured with {spec.layout.describe()}: capture again for this one"
        )
    # part by part: detaching a DTensor would dispatch an op
    return [part.detach() for part in spec.layout.parts_of(tensor)]


def output_tensor(spec: Output, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put an output of a graph together, with the strides of the capture."""
    # A kernel may have given other strides than its fake one; a norm sums in their order.
    return with_stride(wrap(parts, spec.layout), spec.layout.stride)
