"""Compare a call with the one that a graph was captured with, and take the graph's inputs of it.

Compared are, in every call: the structure of the batch, the layouts of its tensors and the values
of its constants; the layouts of the model's parameters and buffers, which of these are one tensor,
and which parameters require a gradient; the class, mode, hooks and plain attributes of every
module; torch's default dtype and autocast. All else that a step reads is a constant of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import nn

from graph_trainer.core.capture.refusals.inputs import (
    refuse_batch_with_gradient,
    refuse_shared_memory,
)
from graph_trainer.core.graph.captured_call import CapturedModule, defaults_of_torch, flatten
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import Input, InputKind
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.names import clean_fqn, unwrapped
from graph_trainer.core.torch_private import BUFFERS, PARAMETERS, hooks_of
from graph_trainer.errors import CaptureError

_Place = tuple[int, str, str]
"""Number of a module in `model.modules()`, `PARAMETERS` or `BUFFERS`, and the name in that dict."""


class OtherCall(CaptureError):
    """Raised for a call that a graph was not captured for.

    Attributes:
        difference: what differs.
    """

    def __init__(self, difference: str) -> None:
        super().__init__(f"{difference}: capture again")
        self.difference = difference


class ModelGuard:
    """Compares a model with the captured one, and takes its tensors in the order of the graph."""

    def __init__(self, joint: JointGraph) -> None:
        self._captured = joint.captured_call.model
        self._specs = [i for i in joint.signature.inputs if i.kind in _OF_MODEL]
        self._places: list[list[_Place]] | None = None

    def tensors(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the model's parameters and buffers, in the order of the graph's inputs.

        Raises:
            OtherCall: with what differs first.
        """
        modules = self._modules_of(model)
        if self._places is None:
            self._places = self._find_places(modules)
        tensors = self._tensors_at(self._places, modules)
        for module, captured in zip(modules, self._captured.modules, strict=True):
            if module.training is not captured.training or type(module) is not captured.kind:
                raise OtherCall(_other_module(module, captured))
            contents = vars(module)
            for name, before in captured.attributes.items():
                now = contents.get(name)
                if now is not before and not _is_same_attribute(before, now):
                    raise OtherCall(
                        f"'{f'{captured.name}.{name}'.strip('.')}' was {before!r} when the graph "
                        f"was captured and is {now!r} now"
                    )
        if hooks_of(modules) != self._captured.hooks:
            raise OtherCall(
                "the hooks of the model's modules or parameters, or replaced forwards, are others "
                "than when the graph was captured, which has what they did in it"
            )
        defaults = defaults_of_torch()
        if defaults != self._captured.defaults:
            raise OtherCall(
                f"torch's default dtype and autocast are {defaults}, and were "
                f"{self._captured.defaults} when the graph was captured"
            )
        return tensors

    def places(self, model: nn.Module) -> list[tuple[tuple[str, ...], str, str]]:
        """Return where a model has each of its tensors: the names of the modules on the way,
        `PARAMETERS` or `BUFFERS`, and the name in that dict."""
        places = []
        for (number, kind, name), *_ in self._find_places(self._modules_of(model)):
            path = self._captured.modules[number].name
            places.append((tuple(path.split(".")) if path else (), kind, name))
        return places

    def _modules_of(self, model: nn.Module) -> list[nn.Module]:
        modules = list(model.modules())
        if len(modules) != len(self._captured.modules):
            modules = list(unwrapped(model).modules())  # torch.compile may be around it
        if len(modules) != len(self._captured.modules):
            raise OtherCall(
                f"the model has {len(modules)} modules and had {len(self._captured.modules)} when "
                "the graph was captured"
            )
        return modules

    def _tensors_at(
        self, places: list[list[_Place]], modules: list[nn.Module]
    ) -> list[torch.Tensor]:
        tensors = []
        for spec, (first, *aliases) in zip(self._specs, places, strict=True):
            number, kind, name = first
            tensor = vars(modules[number])[kind].get(name)
            if tensor is None:
                raise OtherCall(
                    f"{spec.kind.value} '{spec.name}' was a tensor when the graph was captured and "
                    "is None now"
                )
            for number, kind, name in aliases:
                if vars(modules[number])[kind].get(name) is not tensor:
                    raise OtherCall(
                        f"'{spec.name}' and '{self._captured.modules[number].name}.{name}' were "
                        "one tensor when the graph was captured and are two now"
                    )
            if spec.kind is InputKind.PARAMETER and tensor.requires_grad != spec.requires_grad:
                raise OtherCall(
                    f"parameter '{spec.name}' was {'trainable' if spec.requires_grad else 'frozen'}"
                    " when the graph was captured and is not now"
                )
            if not spec.layout.matches(tensor):
                raise OtherCall(_other_layout(spec, tensor))
            tensors.append(tensor)
        if len(set(map(id, tensors))) < len(tensors):
            owners: dict[int, str] = {}
            for spec, tensor in zip(self._specs, tensors, strict=True):
                owner = owners.setdefault(id(tensor), spec.name)
                if owner != spec.name:
                    raise OtherCall(
                        f"'{spec.name}' and '{owner}' were two tensors when the graph was captured "
                        "and are one now"
                    )
        return tensors

    def _find_places(self, modules: list[nn.Module]) -> list[list[_Place]]:
        """Find each tensor under its name and its aliases: what takes longer than all the rest."""
        places: dict[str, _Place] = {}
        for number, (module, captured) in enumerate(
            zip(modules, self._captured.modules, strict=True)
        ):
            for kind in (PARAMETERS, BUFFERS):
                for name in vars(module)[kind]:
                    places[clean_fqn(f"{captured.name}.{name}".strip("."))] = (number, kind, name)
        of_inputs = []
        for spec in self._specs:
            # a module with two names has its tensors under the first
            names = [name for name in (spec.name, *spec.aliases) if name in places]
            if not names:
                raise OtherCall(
                    f"the model has no {spec.kind.value} '{spec.name}', which the graph was "
                    "captured with"
                )
            of_inputs.append([places[name] for name in names])
        return of_inputs


class BatchGuard:
    """Compares a batch with the captured one, and takes its tensors.

    Args:
        under_autograd: the gradients are autograd's, where it is enabled, and not of this graph.
    """

    def __init__(self, joint: JointGraph, *, under_autograd: bool = False) -> None:
        self._captured = joint.captured_call.batch
        self._specs = [i for i in joint.signature.inputs if i.kind is InputKind.BATCH]
        self._backward = joint.signature.backward
        self._under_autograd = under_autograd

    def tensors(self, leaves: Sequence[Any], tree: Any) -> list[torch.Tensor]:
        """Return the tensors of a batch that `flatten` has taken apart.

        Raises:
            OtherCall: with what differs first.
            CaptureError: a tensor whose gradient a step would lose.
        """
        captured = self._captured
        if tree != captured.tree:
            raise OtherCall(
                "the arguments have another structure than those the graph was captured for "
                f"({captured.describe_structure(leaves, tree)})"
            )
        backward = self._backward or (self._under_autograd and torch.is_grad_enabled())
        specs = iter(self._specs)
        tensors = []
        for leaf, is_tensor, constant, path in zip(
            leaves, captured.is_tensor, captured.constants, captured.paths, strict=True
        ):
            if not is_tensor or not isinstance(leaf, torch.Tensor):
                if is_tensor or not _is_same(constant, leaf):
                    raise OtherCall(
                        f"'{path}' was {'a tensor' if is_tensor else repr(constant)} when the "
                        f"graph was captured and is {_short(leaf)} now"
                    )
                continue
            spec = next(specs)
            refuse_batch_with_gradient(spec, leaf, backward)
            if not spec.layout.matches(leaf):
                raise OtherCall(_other_layout(spec, leaf))
            tensors.append(leaf)
        return tensors


class Guard:
    """Compares a call with the captured one, and takes the values of the placeholders of it."""

    def __init__(self, joint: JointGraph, *, under_autograd: bool = False) -> None:
        self.model = ModelGuard(joint)
        self.batch = BatchGuard(joint, under_autograd=under_autograd)
        # those of a call: a part of a graph takes saved values and gradients too
        self._inputs = [spec for spec in joint.signature.inputs if spec.kind in _OF_CALL]

    def tensors(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Return the tensor of each input of the graph.

        Raises:
            OtherCall: the graph was not captured for this call.
            CaptureError: a batch whose gradient the step would lose.
        """
        return [*self.model.tensors(model), *self.batch.tensors(*flatten(args, kwargs))]

    def values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the value of each placeholder: plain tensors that require no gradient.

        Raises:
            CaptureError: a batch in memory that the step writes.
        """
        # part by part: detaching a DTensor would dispatch an op
        values = [
            part.detach()
            for spec, tensor in zip(self._inputs, tensors, strict=True)
            for part in spec.layout.parts_of(tensor)
        ]
        refuse_shared_memory(self._inputs, values)
        return values


_OF_MODEL = (InputKind.PARAMETER, InputKind.BUFFER)
_OF_CALL = (*_OF_MODEL, InputKind.BATCH)


def _is_same(captured: Any, now: Any) -> bool:
    """Return whether one graph is right for two constants.

    1, 1.0 and True are equal in Python and give different graphs; so do 0.0 and -0.0. A NaN is not
    equal to itself and gives the same graph.
    """
    if type(now) is not type(captured):
        return False
    if isinstance(now, Number):  # by all its digits and its sign
        return repr(now) == repr(captured)
    return now is captured or bool(now == captured)


def _is_same_attribute(captured: Any, now: Any) -> bool:
    """Return whether one graph is right for two values of an attribute: constants, or flat lists,
    tuples and dicts of them."""
    if type(now) is not type(captured):
        return False
    if isinstance(now, list | tuple):
        return len(now) == len(captured) and all(map(_is_same, captured, now))
    if isinstance(now, dict):
        return now.keys() == captured.keys() and all(
            _is_same(value, now[key]) for key, value in captured.items()
        )
    return _is_same(captured, now)


def _other_module(module: nn.Module, captured: CapturedModule) -> str:
    if type(module) is not captured.kind:
        return (
            f"module '{captured.name}' was a {captured.kind.__name__} when the graph was captured "
            f"and is a {type(module).__name__} now"
        )
    return (
        f"module '{captured.name}' was in {'train' if captured.training else 'eval'}() mode when "
        "the graph was captured and is not now; dropout and norms are another graph then"
    )


def _other_layout(spec: Input, tensor: torch.Tensor) -> str:
    return (
        f"{spec.kind.value} '{spec.name}' is {unwrap(tensor, spec.name)[1].describe()}; the graph "
        f"was captured with {spec.layout.describe()}"
    )


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)} {value.dtype}"
    return repr(value)
