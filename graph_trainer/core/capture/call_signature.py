"""The captured (args, kwargs): which values are tensors, and what the others must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from graph_trainer.core.capture.subclasses import unwrap
from graph_trainer.core.graph.joint_graph import Input, InputKind
from graph_trainer.core.torch_private import pytree
from graph_trainer.errors import CaptureError


class Batch:
    """The structure of a call, its tensors' names and the constants baked into the graph.

    Raises:
        CaptureError: a constant that later calls could not be checked against.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        leaves, self.tree = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        self.paths = [_path_name(path) for path, _ in leaves]
        self.is_tensor = [isinstance(value, torch.Tensor) for _, value in leaves]
        self.constants = [None if isinstance(v, torch.Tensor) else v for _, v in leaves]
        for path, constant in zip(self.paths, self.constants, strict=True):
            _check_constant(path, constant)

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[Input]:
        """Describe the tensors of the captured call for the graph's signature."""
        names = [p for p, is_tensor in zip(self.paths, self.is_tensor, strict=True) if is_tensor]
        return [
            Input(InputKind.BATCH, name, unwrap(tensor, name)[1], tensor.requires_grad)
            for name, tensor in zip(names, tensors, strict=True)
        ]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return (args, kwargs) with these tensors in place of the captured ones."""
        rest = iter(tensors)
        leaves = [
            next(rest) if is_tensor else constant
            for is_tensor, constant in zip(self.is_tensor, self.constants, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.tree)

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """List the tensors of a later call, in order.

        Raises:
            CaptureError: another structure, or another value where one was baked in.
        """
        leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if tree != self.tree:
            raise CaptureError(self._structure_differs(args, kwargs))
        tensors = []
        for leaf, is_tensor, constant, path in zip(
            leaves, self.is_tensor, self.constants, self.paths, strict=True
        ):
            if is_tensor and isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
            elif is_tensor or isinstance(leaf, torch.Tensor) or not _same(leaf, constant):
                raise CaptureError(
                    f"'{path}' was {'a tensor' if is_tensor else repr(constant)} when the graph "
                    f"was captured and is {_short(leaf)} now; capture again for another value"
                )
        return tensors

    def _structure_differs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        leaves, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        found = [_path_name(path) for path, _ in leaves]
        missing = [f"'{p}'" for p in self.paths if p not in found]
        new = [f"'{p}'" for p in found if p not in self.paths]
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

    1, 1.0 and True are equal in Python and give different graphs; so do 0.0 and -0.0. A NaN
    is not equal to itself and gives the same graph. The key is hashable if the value is.
    """
    return (type(value), repr(value) if isinstance(value, (float, complex)) else value)


def _same(a: Any, b: Any) -> bool:
    return a is b or constant_key(a) == constant_key(b)


def _check_constant(path: str, value: Any) -> None:
    if any(isinstance(inner, torch.Tensor) for inner in _contents(value)):
        raise CaptureError(
            f"'{path}' is a {type(value).__name__} that holds tensors, and torch's pytree does "
            "not know how to take it apart: pass its tensors in a dict, list or tuple, or "
            "register the class with torch.utils._pytree.register_pytree_node"
        )
    try:
        hash(value)
    except TypeError:
        raise CaptureError(
            f"'{path}' is a {type(value).__name__}, which can change without notice, so that "
            "later calls cannot be checked against the captured one: pass a tensor or a "
            "hashable value, a frozenset for a set for example"
        ) from None


def _contents(value: Any) -> Iterable[Any]:
    """List the values inside a container or data object that pytree took for a leaf."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (set, frozenset)):
        return value
    if callable(value):
        return ()  # tensors inside a function, a class or a module are not looked for
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *slots]


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
