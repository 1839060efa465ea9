"""The captured (args, kwargs): which values are tensors, and what the others must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from graph_trainer.core.graph.call import Call, arguments
from graph_trainer.core.graph.signature import Input, InputKind
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.torch_private import pytree
from graph_trainer.errors import CaptureError


class Batch:
    """The structure of a call, its tensors' names and the constants baked into the graph.

    Raises:
        CaptureError: a constant that later calls could not be checked against.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        leaves, self.tree = pytree.tree_flatten_with_path(arguments(args, kwargs))
        self._tree_text = repr(self.tree)
        self.paths = [_path_name(path) for path, _ in leaves]
        self.is_tensor = [isinstance(value, torch.Tensor) for _, value in leaves]
        self.constants = [None if isinstance(v, torch.Tensor) else v for _, v in leaves]
        self._keys = [*map(_check_constant, self.paths, self.constants)]

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[Input]:
        """Describe the tensors of the captured call for the graph's signature."""
        names = [p for p, is_tensor in zip(self.paths, self.is_tensor, strict=True) if is_tensor]
        return [
            Input(InputKind.BATCH, name, unwrap(tensor, name)[1], tensor.requires_grad)
            for name, tensor in zip(names, tensors, strict=True)
        ]

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """Return (args, kwargs) with these in place of the captured tensors."""
        rest = iter(tensors)
        leaves = [
            next(rest) if is_tensor else constant
            for is_tensor, constant in zip(self.is_tensor, self.constants, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.tree)

    def take(self, call: Call) -> list[torch.Tensor]:
        """List the tensors of a later call, in order.

        Raises:
            CaptureError: another structure, or another value where one was baked in.
        """
        if call.tree != self.tree or call.tree_text != self._tree_text:
            raise CaptureError(self._structure_differs(call))
        tensors = []
        for leaf, is_tensor, constant, key, path in zip(
            call.leaves, self.is_tensor, self.constants, self._keys, self.paths, strict=True
        ):
            if is_tensor and isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
            elif is_tensor or isinstance(leaf, torch.Tensor) or _key_of(path, leaf) != key:
                raise CaptureError(
                    f"'{path}' was {'a tensor' if is_tensor else repr(constant)} when the graph "
                    f"was captured and is {_short(leaf)} now; capture again for another value"
                )
        return tensors

    def _structure_differs(self, call: Call) -> str:
        given = pytree.tree_unflatten(call.leaves, call.tree)
        leaves, _ = pytree.tree_flatten_with_path(given)
        paths = [_path_name(path) for path, _ in leaves]
        missing = [f"'{p}'" for p in self.paths if p not in paths]
        new = [f"'{p}'" for p in paths if p not in self.paths]
        details = [f"missing: {', '.join(missing)}"] if missing else []
        details += [f"new: {', '.join(new)}"] if new else []
        # the same paths in other containers, a tuple for a list for one
        details = details or [f"captured for {self.tree}"]
        return (
            "the arguments have another structure than those the graph was captured for "
            f"({'; '.join(details)}); capture again for these"
        )


def constant_key(value: Any) -> object:
    """Return a key that two constants share exactly when one graph is right for both.

    1, 1.0 and True are equal in Python and give different graphs; so do 0.0 and -0.0. A NaN is
    not equal to itself and gives the same graph. An object is described by its attributes, as
    deep as they go: it may have changed since. The key is hashable if the value is.

    Raises:
        HoldsTensors: there is a tensor inside.
    """
    return _key(value, {})


def _key(value: Any, seen: dict[int, int]) -> object:
    """Describe a value; an object that occurs again by its number, so that the key is linear."""
    kind = type(value)
    if kind in _PLAIN:
        return (kind, value)
    if isinstance(value, Number):  # by all its digits and its sign
        return (kind, repr(value))
    if isinstance(value, torch.Tensor):
        raise HoldsTensors
    if id(value) in seen:
        return (kind, seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, (set, frozenset)):
        return (kind, frozenset(_key(inner, seen) for inner in value))
    if isinstance(value, Mapping):
        return (kind, tuple((_key(k, seen), _key(v, seen)) for k, v in value.items()))
    if isinstance(value, (tuple, list)):
        return (kind, tuple(_key(inner, seen) for inner in value))
    if callable(value):
        return (kind, value)  # what is inside a function, a class or a module is not looked for
    names = slots_of(kind) + sorted(getattr(value, "__dict__", ()))
    if names:
        return (kind, value, tuple((n, _key(getattr(value, n, None), seen)) for n in names))
    try:  # NumPy's arrays
        view = memoryview(value)
    except (TypeError, ValueError):
        return (kind, value)
    return (kind, view.format, view.shape, view.tobytes())


_PLAIN = (int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, DeviceMesh)


class HoldsTensors(Exception):
    """Raised for a tensor inside a constant."""


def slots_of(kind: type) -> list[str]:
    """List the attributes of a class that are slots, by the names that getattr knows."""
    names = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_mangled = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if is_mangled else name)
    return names


def _key_of(path: str, value: Any) -> object:
    try:
        return constant_key(value)
    except HoldsTensors:
        raise CaptureError(
            f"'{path}' is a {type(value).__name__} that holds tensors, and torch's pytree does "
            "not know how to take it apart: pass its tensors in a dict, list or tuple, or "
            "register the class with torch.utils._pytree.register_pytree_node"
        ) from None


def _check_constant(path: str, value: Any) -> object:
    key = _key_of(path, value)
    try:
        hash(value)
    except TypeError:
        raise CaptureError(
            f"'{path}' is a {type(value).__name__}, which can change without notice, so that "
            "later calls cannot be checked against the captured one: pass a tensor or a "
            "hashable value, a frozenset for a set for example"
        ) from None
    return key


def _path_name(path: Any) -> str:
    """Format a pytree path into (args, kwargs): 'args[0]' or 'labels'."""
    head, *rest = path
    if head.idx == 0:
        return "args" + pytree.keystr(tuple(rest))
    first, *more = rest
    return str(first.key) + pytree.keystr(tuple(more))


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)} {value.dtype}"
    return repr(value)
