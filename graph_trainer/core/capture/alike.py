"""Whether two layers of a model are the same program, and which of their tensors correspond."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.torch_private import tensor_hooks

Tensors = dict[int, torch.Tensor]

_ATOMS = {type(None), bool, int, float, complex, str, bytes, type}
_INITIAL = "_param_init"
"""Where torchtitan's modules keep how to draw their initial values, which no step reads. The scale
of these depends on a layer's depth."""


def counterparts(
    first: nn.Module, second: nn.Module, names: tuple[str, str], inputs: Mapping[int, torch.Tensor]
) -> Tensors | None:
    """Compare what two modules are made of: classes, attributes, hooks, functions, tensors.

    Tensors correspond if they have equal layouts and are inputs of the step, or if they are one
    tensor. Texts may differ by the names of the modules. Linear in what the modules hold.

    Args:
        first, second: the modules.
        names: their FQNs.
        inputs: the tensors that are inputs of the step, by id.

    Returns:
        By id of each tensor of `first` the one of `second`; None where the modules differ.
    """
    walk = _Walk(names, inputs)
    return walk.tensors if walk.are_alike(first, second) else None


class _Walk:
    """One comparison. Two objects that were met together are taken for alike when met again."""

    def __init__(self, names: tuple[str, str], inputs: Mapping[int, torch.Tensor]) -> None:
        self.tensors: Tensors = {}
        self._names = names
        self._inputs = inputs
        self._partners: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self._alive: list[Any] = []  # or another object could get an id that was met

    def are_alike(self, first: Any, second: Any) -> bool:
        stack = [(first, second)]
        while stack:
            one, other = stack.pop()
            if type(one) is not type(other):
                return False
            if type(one) in _ATOMS:
                if one != other and (type(one) is not str or self._renamed(one) != other):
                    return False
                continue
            there, back = self._partners
            met = id(one) in there or id(other) in back
            if met and (there.get(id(one)) is not other or back.get(id(other)) is not one):
                return False
            if met:
                continue
            there[id(one)], back[id(other)] = other, one
            self._alive += one, other
            if isinstance(one, torch.Tensor):
                if not self._are_alike_tensors(one, other):
                    return False
                self.tensors[id(one)] = other
            elif one is other and isinstance(one, nn.Module):
                stack += ((t, t) for t in itertools.chain(one.parameters(), one.buffers()))
                continue
            elif one is other:
                continue
            contents = [list(_contents(each)) for each in (one, other)]
            if len(contents[0]) != len(contents[1]):
                return False
            if not contents[0] and not isinstance(one, torch.Tensor) and one != other:
                return False
            stack += zip(*contents, strict=True)
        return True

    def _renamed(self, text: str) -> str:
        """Replace the first module's FQN at the beginning of a text by the second's."""
        first, second = self._names
        is_within = text == first or text.startswith(f"{first}.")
        return second + text.removeprefix(first) if is_within else text

    def _are_alike_tensors(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        if one is other:
            return True
        are_inputs = id(one) in self._inputs and id(other) in self._inputs
        same_kind = one.requires_grad == other.requires_grad
        return are_inputs and same_kind and unwrap(one)[1] == unwrap(other)[1]


def _contents(value: Any) -> Iterable[Any]:
    """List what an object is made of, in an order that is the same for one that is alike."""
    if isinstance(value, torch.Tensor):
        return (vars(value), *tensor_hooks(value))
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if isinstance(value, (list, tuple, deque)):
        return value
    if isinstance(value, FunctionType):
        cells = (cell.cell_contents for cell in value.__closure__ or ())
        return (value.__code__, value.__defaults__, value.__kwdefaults__, vars(value), *cells)
    if isinstance(value, weakref.ref):
        return (value(),)
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    attributes = dict(getattr(value, "__dict__", {}))
    if isinstance(value, nn.Module):
        attributes.pop(_INITIAL, None)
        # by handle, which is another one for each hook
        attributes.update({n: list(h.values()) for n, h in attributes.items() if _holds_hooks(n, h)})
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                attributes[name] = getattr(value, name)
    return (*attributes.keys(), *attributes.values())


def _holds_hooks(name: str, value: object) -> bool:
    return "hooks" in name and isinstance(value, dict)
