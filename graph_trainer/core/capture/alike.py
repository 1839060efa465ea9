"""Whether two layers of a model are the same program, and which of their tensors correspond.

What is not known for alike counts as different: a difference costs a longer capture, and a
likeness that does not hold would give a wrong graph.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from graph_trainer.core.graph.call_signature import slots_of
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.torch_private import tensor_hooks

Tensors = dict[int, torch.Tensor]

Attribute = tuple[type, str]
"""A class of modules and the name of an attribute."""

ATOMS = {type(None), bool, int, float, complex, str, bytes}
_INITIAL = "_param_init"
"""Where torchtitan's modules keep how to draw their initial values, which no step reads. The scale
of these depends on a layer's depth."""
_HOOKS = {name for name in vars(nn.Module()) if "hooks" in name}
_HEAP_TYPE = 1 << 9  # a flag of classes that Python code defines


class Alike(NamedTuple):
    """What two modules that are alike have in the same places."""

    tensors: Tensors
    """By id of each input of the step in the first module the one in the second."""
    positions: set[Attribute]
    """Attributes in which each has its own number in the stack of layers. The modules are alike
    only if no step reads these."""


class _Different(Exception):
    pass


def compare(
    first: nn.Module, second: nn.Module, names: tuple[str, str], inputs: Mapping[int, torch.Tensor]
) -> Alike | None:
    """Compare what two modules are made of: classes, attributes, hooks, functions, tensors.

    Tensors are alike if they are one tensor, or if they are inputs of the step and have equal
    layouts. Linear in what the modules hold.

    Args:
        names: the modules' FQNs; a number at the end is that in the stack.
        inputs: the tensors that are inputs of the step, by id.

    Returns:
        What corresponds; None where the modules differ, or hold what is not understood.
    """
    walk = _Walk(names, inputs)
    try:
        walk.check(first, second)
    except Exception:  # _Different, or what a method of the user's own classes raises
        return None
    return Alike(walk.tensors, walk.positions)


class _Walk:
    """One comparison. Two objects that were met together are taken for alike when met again."""

    def __init__(self, names: tuple[str, str], inputs: Mapping[int, torch.Tensor]) -> None:
        self.tensors: Tensors = {}
        self.positions: set[Attribute] = set()
        self._names = names
        self._inputs = inputs
        self._partners: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self._alive: list[Any] = []  # or another object could get an id that was met

    def check(self, first: Any, second: Any) -> None:
        """Raise an exception where the two differ."""
        # with whether a text may have the layer's FQN: only this package's objects do, unread
        stack = [(first, second, False)]
        there, back = self._partners
        while stack:
            one, other, may_name = stack.pop()
            if type(one) is not type(other):
                raise _Different
            if type(one) in ATOMS:
                is_name = may_name and type(one) is str and self._renamed(one) == other
                if one is not other and repr(one) != repr(other) and not is_name:
                    raise _Different  # -0.0 is not 0.0
                continue
            known, known_back = there.get(id(one)), back.get(id(other))
            if known is not None or known_back is not None:
                if known is not other or known_back is not one:
                    raise _Different
                continue
            there[id(one)], back[id(other)] = other, one
            self._alive += one, other
            if type(one) in (dict, list) and not one and not other:  # as many are
                continue
            if isinstance(one, torch.Tensor):
                self._check_tensors(one, other)
            elif one is other:
                if isinstance(one, nn.Module):
                    stack += ((t, t, False) for t in (*one.parameters(), *one.buffers()))
                continue
            elif is_compared_by_torch(one):
                if one != other:
                    raise _Different
                continue
            apart = self._positions_of(one, other) if isinstance(one, nn.Module) else set()
            contents = _contents(one, apart), _contents(other, apart)
            may_name = type(one).__module__.startswith("graph_trainer.") or (
                may_name and isinstance(one, dict)
            )
            for a, b in zip(*contents, strict=True):
                if a is not b or type(a) not in ATOMS:
                    stack.append((a, b, may_name))

    def _renamed(self, text: str) -> str:
        """Replace the first module's FQN at the beginning of a text by the second's."""
        first, second = self._names
        is_within = text == first or text.startswith(f"{first}.")
        return second + text.removeprefix(first) if is_within else text

    def _check_tensors(self, one: torch.Tensor, other: torch.Tensor) -> None:
        are_inputs = id(one) in self._inputs and id(other) in self._inputs
        if are_inputs:
            self.tensors[id(one)] = other
        if one is other:
            return
        same_kind = one.requires_grad == other.requires_grad
        if not (are_inputs and same_kind and unwrap(one)[1] == unwrap(other)[1]):
            raise _Different

    def _positions_of(self, one: nn.Module, other: nn.Module) -> set[str]:
        """Return the attributes of two modules that are their layers' numbers in the stack."""
        numbers = [name.rpartition(".")[2] for name in self._names]
        contents = vars(other)
        positions = set()
        for name, value in vars(one).items():
            its = contents.get(name)
            are_numbers = type(value) is int and type(its) is int and value != its
            if are_numbers and [str(value), str(its)] == numbers:
                positions.add(name)
        self.positions.update((type(one), name) for name in positions)
        return positions


def is_compared_by_torch(value: Any) -> bool:
    """Tell whether == compares whole contents: of dtypes, sizes, placements, sets of ops."""
    kind: Any = type(value)
    if kind in (set, frozenset):
        return all(each is str or not _has_own_eq(each) for each in map(type, value))
    return kind.__module__.partition(".")[0] == "torch" and _has_own_eq(kind)


@functools.lru_cache
def _has_own_eq(kind: Any) -> bool:
    return any("__eq__" in vars(base) for base in kind.__mro__ if base is not object)


def _contents(value: Any, apart: set[str]) -> tuple[Any, ...]:
    """List what an object is made of but for some attributes, in an order that is the same for one
    that is alike.

    Raises:
        _Different: for a kind of object that is not understood.
    """
    kind: Any = type(value)
    if isinstance(value, torch.Tensor):
        return (vars(value), *tensor_hooks(value))
    if kind in (dict, OrderedDict):
        return (*value.keys(), *value.values())
    if kind is defaultdict:
        return (value.default_factory, *value.keys(), *value.values())
    if kind in (list, tuple):
        return tuple(value)
    if kind is deque:
        return (value.maxlen, *value)
    if kind is FunctionType:
        cells = (cell.cell_contents for cell in value.__closure__ or ())
        return (
            *(value.__code__, id(value.__globals__), value.__defaults__, value.__kwdefaults__),
            *(vars(value), *cells),
        )
    if kind is weakref.ref:
        return (value(),)
    if kind is MethodType:
        return (value.__func__, value.__self__)
    if kind is functools.partial:
        return (value.func, value.args, value.keywords, vars(value))
    slots = _slots_of(kind)
    if slots is None:
        raise _Different
    attributes = dict(getattr(value, "__dict__", {}))
    if isinstance(value, nn.Module):
        unread = apart | {_INITIAL} if _is_of_torchtitan(kind) else apart
        attributes = {
            name: each
            for name, each in attributes.items()
            if name not in unread and (name not in _HOOKS or each)
        }
        attributes.update(_hooks_in(value))
    for name in slots:
        if hasattr(value, name):
            attributes[name] = getattr(value, name)
    return (*attributes.keys(), *attributes.values())


@functools.lru_cache
def _is_of_torchtitan(kind: Any) -> bool:
    return any(base.__module__.startswith("torchtitan.") for base in kind.__mro__)


@functools.lru_cache
def _slots_of(kind: Any) -> list[str] | None:
    """List the attributes of a class that are slots; None for a class of C++, or one derived
    from it, in which there is more to see than attributes."""
    bases = [base for base in kind.__mro__ if base is not object]
    if kind is CodeType or not all(base.__flags__ & _HEAP_TYPE for base in bases):
        return None
    return slots_of(kind)


def _hooks_in(module: nn.Module) -> dict[str, Any]:
    """Return the hooks that a module has, by place instead of by handle: each hook has its own."""
    hooks: dict[str, Any] = {}
    for name in _HOOKS & vars(module).keys():
        of_kind = vars(module)[name]
        if of_kind and isinstance(of_kind, dict):
            main = name.replace("_with_kwargs", "").replace("_always_called", "")
            places = {handle: place for place, handle in enumerate(vars(module).get(main, {}))}
            hooks[name] = [(places.get(handle), hook) for handle, hook in of_kind.items()]
    return dict(sorted(hooks.items()))
