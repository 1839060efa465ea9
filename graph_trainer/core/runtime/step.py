"""Compile a joint graph into a step that a train loop calls with its model and its batch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graph_trainer.core.capture.model_state import refuse_batch_with_gradient, refuse_shared_memory
from graph_trainer.core.capture.module_settings import autocast_enabled
from graph_trainer.core.capture.subclasses import unwrap, wrap
from graph_trainer.core.graph.joint_graph import Input, InputKind, JointGraph, OutputKind
from graph_trainer.core.graph.ops import argument, is_collective
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.ordering.exchange import check_order_across_ranks
from graph_trainer.core.runtime.backends.base import BoxedFunction
from graph_trainer.core.runtime.backends.registry import find_backend
from graph_trainer.core.runtime.collective_failure import failed_collective
from graph_trainer.core.torch_private_groups import group_backend, group_ranks
from graph_trainer.errors import CaptureError

Gradients = dict[str, torch.Tensor]

_Place = tuple[tuple[str, ...], str, str]
"""Path of module names, "_parameters" or "_buffers", and the name in that dict."""


class Step:
    """A compiled train step: `loss, gradients = step(model, *args, **kwargs)`.

    Gradients are by parameter FQN: DTensors where the parameter is one, and absent for
    parameters that the loss does not depend on. A graph without backward returns none. `.grad`
    is not written; buffers that forward changes are changed in place.

    Args:
        joint: the graph.
        run: the compiled graph.
        compare_ranks: whether the first call compares the collectives of all ranks.

    Attributes:
        joint: the graph.
    """

    def __init__(self, joint: JointGraph, run: BoxedFunction, compare_ranks: bool = False) -> None:
        self.joint = joint
        self._run = run
        self._compare_ranks = compare_ranks
        self._state_inputs = [i for i in joint.signature.inputs if i.kind is not InputKind.BATCH]
        self._batch_inputs = [i for i in joint.signature.inputs if i.kind is InputKind.BATCH]
        self._places: list[list[_Place]] | None = None
        self._device_types = {i.layout.device.type for i in joint.signature.inputs}

    def __call__(
        self, model: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Gradients]:
        """Run the step.

        Raises:
            CaptureError: the model's tensors, modes or hooks, or the batch, differ from those of
                the capture.
            VerificationError: the ranks' graphs issue different collectives (first call only).
            CollectiveError: a collective timed out or lost its connection (gloo; see
                `collective_failure`).
        """
        if not isinstance(model, nn.Module):
            raise CaptureError(
                f"the step's first argument is the model, and it is a {type(model).__name__}"
            )
        if self._compare_ranks:
            check_order_across_ranks(self.joint)
            self._compare_ranks = False
        values = self._state_values(model)
        if self.joint.settings is not None:
            self.joint.settings.check(model, self._device_types)
        values += self._batch_values(args, kwargs)
        refuse_shared_memory(self.joint.signature.inputs, values)
        try:
            with self._without_autocast():
                results = iter(self._run(values))
        except RuntimeError as error:
            failed = failed_collective(error, self.joint)
            if failed is None:
                raise
            raise failed from error
        loss: torch.Tensor | None = None
        gradients: Gradients = {}
        for spec in self.joint.signature.outputs:
            parts = [next(results) for _ in range(spec.layout.num_tensors)]
            tensor = wrap(parts, spec.layout)
            if spec.kind is OutputKind.LOSS:
                loss = tensor
                continue
            if tensor.stride() != spec.layout.stride:
                # A kernel gave other strides than its fake one; a norm sums in their order.
                like = tensor.new_empty_strided(tensor.shape, spec.layout.stride)
                tensor = like.copy_(tensor)
            gradients[spec.name] = tensor
        assert loss is not None
        return loss, gradients

    def _without_autocast(self) -> contextlib.AbstractContextManager[object]:
        """Turn autocast off, because the graph already contains its casts."""
        stack = contextlib.ExitStack()
        for device_type in self._device_types:
            if autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        return stack

    def _state_values(self, model: nn.Module) -> list[torch.Tensor]:
        # Finding all names of a large model costs more than the rest of a call, so the place of
        # each tensor is cached; the tensor at that place is read and checked in every call.
        if self._places is not None:
            with contextlib.suppress(KeyError):
                return self._values_at(self._places, model)
        self._places = self._find_places(model)
        return self._values_at(self._places, model)

    def _find_places(self, model: nn.Module) -> list[list[_Place]]:
        found: dict[str, _Place] = {}
        for kind, named in (
            ("_parameters", model.named_parameters(remove_duplicate=False)),
            ("_buffers", model.named_buffers(remove_duplicate=False)),
        ):
            for name, _ in named:
                *path, last = name.split(".")
                found[clean_fqn(name)] = (tuple(path), kind, last)
        for spec in self._state_inputs:
            for name in (spec.name, *spec.aliases):
                if name not in found:
                    raise CaptureError(
                        f"the model has no {spec.kind.value} '{name}', which the graph was "
                        "captured with"
                    )
        return [[found[n] for n in (spec.name, *spec.aliases)] for spec in self._state_inputs]

    def _values_at(self, places: list[list[_Place]], model: nn.Module) -> list[torch.Tensor]:
        modules: dict[tuple[str, ...], nn.Module] = {(): model}

        def module_at(path: tuple[str, ...]) -> nn.Module:
            if path not in modules:
                modules[path] = module_at(path[:-1])._modules[path[-1]]  # type: ignore[assignment]
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
            values += _parts(spec, tensors[0])
        return values

    def _batch_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        values: list[torch.Tensor] = []
        tensors = self.joint.batch.take(args, kwargs)
        for spec, tensor in zip(self._batch_inputs, tensors, strict=True):
            refuse_batch_with_gradient(spec, tensor)
            values += _parts(spec, tensor)
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
    return [part.detach() for part in unwrap(tensor)[0]]


def compile(joint: JointGraph, backend: str = "eager", *, compare_ranks: bool = True) -> Step:
    """Compile a joint graph into a step.

    Args:
        joint: as captured, or after `run_passes`.
        backend: the name of one of `backends.registry`: "eager", "inductor" or "regional".
        compare_ranks: whether the first call of the step compares the collectives of all ranks
            of the default process group, so that a difference is an error and not a hang. Every
            rank has to make that call then.

    Returns:
        the step, a function of the model and the batch.

    Raises:
        ConfigError: an unknown backend.

    Example::

        step = gt.compile(joint, backend="eager")
        loss, gradients = step(model, tokens, labels)
    """
    joint.validate()
    _warn_of_plain_gloo(joint)
    return Step(joint, find_backend(backend).compile(joint), compare_ranks)


def _warn_of_plain_gloo(joint: JointGraph) -> None:
    groups = {str(argument(n, "group_name")) for n in joint.graph.nodes if is_collective(n)}
    if any(group_backend(g) == "gloo" and len(group_ranks(g)) > 1 for g in groups - {"None"}):
        warnings.warn(
            "the graph communicates over plain gloo, which may crash with several all-gathers in "
            "flight, and is slow: write torch.distributed.init_process_group(gt.cpu_backend())",
            stacklevel=3,
        )
