"""What a graph records of the call that it was captured with, beside the layouts of its inputs.

`core/runtime/guard.py` compares later calls with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graph_trainer.core.graph.signature import Input, InputKind
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.torch_private import hooks_of, pytree
from graph_trainer.errors import CaptureError

_SCALARS = {bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size}
OF_EVERY_MODULE = vars(nn.Module()).keys()
"""What torch keeps in every module: modes, tensors, modules, hooks."""


class CapturedBatch:
    """The structure of the captured (args, kwargs), its tensors' names and its constants.

    Every value that is not a tensor is a constant of the graph. It must be hashable, and it must
    not change while the graph is used.

    Attributes:
        tree: the structure, as pytree describes it.
        paths: the name of each leaf: 'args[0]' or 'labels'.
        is_tensor: whether each leaf is a tensor.
        constants: the leaves that are not tensors, with None in the places of the tensors.

    Raises:
        CaptureError: a constant that is not hashable, or that holds tensors.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        leaves, _ = pytree.tree_flatten_with_path(arguments(args, kwargs))
        self.tree = flatten(args, kwargs)[1]
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

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """Return (args, kwargs) with these in place of the captured tensors."""
        rest = iter(tensors)
        leaves = [
            next(rest) if is_tensor else constant
            for is_tensor, constant in zip(self.is_tensor, self.constants, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.tree)

    def describe_structure(self, leaves: Sequence[Any], tree: Any) -> str:
        """Describe how another batch's structure differs."""
        with_paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, tree))
        paths = [_path_name(path) for path, _ in with_paths]
        missing = [f"'{p}'" for p in self.paths if p not in paths]
        new = [f"'{p}'" for p in paths if p not in self.paths]
        details = [f"missing: {', '.join(missing)}"] if missing else []
        details += [f"new: {', '.join(new)}"] if new else []
        # the same paths in other containers, a tuple for a list for one
        return "; ".join(details) or f"captured for {self.tree}"


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what pytree takes apart; the order of keyword arguments has no meaning."""
    return tuple(args), dict(sorted(kwargs.items()))


def flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return the tensors and constants of a batch, and its structure."""
    return pytree.tree_flatten(arguments(args, kwargs))


def _check_constant(path: str, value: Any) -> None:
    """Refuse a constant that holds tensors, or that cannot be compared with later ones."""
    inside = list(value) if isinstance(value, (set, frozenset)) else []
    inside += getattr(value, "__dict__", {}).values()
    if not callable(value) and any(isinstance(entry, torch.Tensor) for entry in inside):
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


def _path_name(path: Any) -> str:
    """Format a pytree path into (args, kwargs): 'args[0]' or 'labels'."""
    head, *rest = path
    if head.idx == 0:
        return "args" + pytree.keystr(tuple(rest))
    first, *more = rest
    return str(first.key) + pytree.keystr(tuple(more))


@dataclass(frozen=True, slots=True)
class CapturedModule:
    """One module of the captured model."""

    name: str
    kind: type[nn.Module]
    training: bool
    attributes: dict[str, Any]
    """The module's own numbers, switches and texts, and copies of flat lists, tuples and dicts of
    them. What is deeper is a constant of the graph that no later call is compared with."""


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """The modes, hooks and attributes of the captured model, and torch's defaults."""

    modules: tuple[CapturedModule, ...]
    """In the order of `model.modules()`."""
    hooks: tuple[Any, ...]
    """See `hooks_of`."""
    defaults: tuple[Any, ...]
    """See `defaults_of_torch`."""

    @classmethod
    def of(cls, model: nn.Module) -> CapturedModel:
        """Read them from a model."""
        modules = [
            CapturedModule(name, type(module), module.training, _attributes(module))
            for name, module in model.named_modules()
        ]
        return cls(tuple(modules), hooks_of(model.modules()), defaults_of_torch())

    def without(self, changed: Iterable[str]) -> CapturedModel:
        """Leave out the attributes that forward itself changes, by "module.attribute"."""
        names = set(changed)
        modules = []
        for module in self.modules:
            attributes = {
                name: value
                for name, value in module.attributes.items()
                if f"{module.name}.{name}".strip(".") not in names
            }
            modules.append(replace(module, attributes=attributes))
        return replace(self, modules=tuple(modules))


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """What later calls are compared with, beside the layouts in the signature."""

    batch: CapturedBatch
    model: CapturedModel


def defaults_of_torch() -> tuple[Any, ...]:
    """Return the default dtype, and the dtype of autocast by type of device where it is on."""
    casts = (
        (d, torch.get_autocast_dtype(d)) for d in device_types() if torch.is_autocast_enabled(d)
    )
    return (torch.get_default_dtype(), *casts)


def device_types() -> list[str]:
    """Return the types of device that a step may run on here."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _attributes(module: nn.Module) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in OF_EVERY_MODULE:
            continue
        if type(value) in _SCALARS:
            attributes[name] = value
        elif type(value) in (list, tuple) and _all_scalars(value):
            attributes[name] = type(value)(value)
        elif type(value) is dict and _all_scalars(value) and _all_scalars(value.values()):
            attributes[name] = dict(value)
    return attributes


def _all_scalars(values: Iterable[Any]) -> bool:
    return all(type(value) in _SCALARS for value in values)
