"""The Python state that a step can change: found before it is traced, compared, and restored.

Forward and the loss may count calls, fill caches and keep results: in attributes, in containers, in
the variables that functions close over, in globals. A graph does none of it.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from graph_trainer.core.capture.side_effects import is_installed_file, kept_tensor
from graph_trainer.core.torch_private import FakeTensor, pytree, tensor_dicts

# Their objects and functions hold no state of a step.
_LIBRARIES = {"torch", "numpy", "graph_trainer", *sys.stdlib_module_names}
_PLAIN = {type(None), bool, int, float, str, bytes, torch.Tensor, nn.Parameter, *weakref.ProxyTypes}
_SKIPPED = (torch.Tensor, ModuleType)
_LARGE, _MOST = 1000, 200_000

_ENTRY = "[]"
Names = tuple[Any, ...]
"""Names of attributes and variables; a key of a container follows `_ENTRY`."""
Contents = Mapping[Any, Any]
Part = tuple[Names, Callable[[], Contents], Callable[[Contents], None]]
"""The path that keys follow, how to read the contents, and how to put them back."""


class PythonState:
    """A context in which the Python state that a model and its loss can reach may change.

    It is restored at the end, on errors too. Seen are attributes of modules, of their classes and
    of objects of the user's own, entries of dicts, lists, sets and deques, variables that functions
    close over, and globals that functions name, but for those of installed packages. A container of
    more than 1,000 entries is compared, but what its entries hold is not looked at. Linear in what
    is seen, which is at most 200,000 entries.

    Args:
        model: the model. Its parameters, buffers and modules are left out.
        functions: what else a step calls.
    """

    def __init__(self, model: nn.Module, *functions: Callable[..., Any]) -> None:
        self._holders: list[_Holder] = []
        modules = list(model.named_modules())
        own = [each for _, module in modules for each in tensor_dicts(module)]
        seen = {id(each): each for each in own}  # kept alive: no other object may get its id
        queue: deque[tuple[Names, bool, Any]] = deque(
            ((name,), True, module) for name, module in modules
        )
        queue.extend(((), False, each) for each in functions)
        entries = 0
        while queue and entries < _MOST:
            path, of_model, value = queue.popleft()
            if id(value) in seen or isinstance(value, _SKIPPED):
                continue
            seen[id(value)] = value
            # what functions reach beside the model's attributes is not the model's own
            of_model = of_model and not isinstance(value, (type, FunctionType))
            for where, read, restore in _parts(value, path):
                before = dict(read())
                entries += len(before)
                self._holders.append(_Holder(where, of_model, before, read, restore))
                if len(before) <= _LARGE or isinstance(value, nn.Module):
                    for key, each in before.items():
                        if type(each) not in _PLAIN:
                            queue.append(((*where, key), of_model, each))

    def __enter__(self) -> PythonState:
        return self

    def __exit__(self, *error: Any) -> None:
        for holder in self._holders:
            if holder.changed():
                holder.restore(holder.before)

    def keep_as_it_is(self) -> None:
        """Compare and restore nothing at the end: `changes` has found none, and no step follows."""
        self._holders.clear()

    def changes(self) -> list[str]:
        """Return the names of what differs by now, sorted.

        Raises:
            CaptureError: a tensor of the trace is kept outside of the model.
        """
        changed = set()
        for holder in self._holders:
            for key, now in holder.changed():
                name = _text((*holder.path, key))
                fakes = [leaf for leaf in pytree.tree_leaves(now) if isinstance(leaf, FakeTensor)]
                if fakes and not holder.of_model:
                    raise kept_tensor(fakes[0], name)
                changed.add(name)
        return sorted(changed)


class _Holder(NamedTuple):
    """Something whose contents a step can change."""

    path: Names
    of_model: bool
    before: Contents
    read: Callable[[], Contents]
    restore: Callable[[Contents], None]

    def changed(self) -> list[tuple[Any, Any]]:
        """Return the keys whose entries are others than before, and what they are now."""
        now = self.read()
        # most are as they were: compared in C
        same_keys = self.before.keys() == now.keys()
        if same_keys and all(map(operator.is_, self.before.values(), map(now.get, self.before))):
            return []
        return [
            (key, now.get(key))
            for key in self.before.keys() | now.keys()
            if (key in self.before) != (key in now) or self.before.get(key) is not now.get(key)
        ]


def _parts(value: Any, path: Names) -> Iterator[Part]:
    """Yield what can change in a value, and what leads to other values."""
    if isinstance(value, (dict, list, set, deque)):
        yield (*path, _ENTRY), lambda: _by_key(value), lambda before: _refill(value, before)
    elif isinstance(value, (tuple, frozenset)):
        yield (*path, _ENTRY), lambda: dict(enumerate(value)), _nothing
    elif isinstance(value, FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, (MethodType, functools.partial, property, staticmethod, classmethod)):
        names = ("__self__", "__func__", "func", "args", "keywords", "fget")
        yield path, lambda: {n: getattr(value, n) for n in names if hasattr(value, n)}, _nothing
    elif isinstance(value, type):
        if not _of_library(value.__module__):

            def reset(before: Contents) -> None:
                now = _own(value)
                for name in now.keys() - before.keys():
                    delattr(value, name)
                for name in before:
                    if now.get(name) is not before[name]:
                        setattr(value, name, before[name])

            yield (value.__qualname__,), lambda: _own(value), reset
    elif isinstance(value, (nn.Module, SimpleNamespace)) or not _of_library(type(value).__module__):
        yield path, lambda: {"": type(value).__mro__}, _nothing
        try:
            contents = object.__getattribute__(value, "__dict__")
        except Exception:  # a property of the user's, which may raise anything
            contents = {}
        if not isinstance(contents, dict):  # a class that keeps its attributes otherwise
            contents = {}
        yield path, lambda: contents, lambda before: _refill(contents, before)


def _function_parts(function: FunctionType) -> Iterator[Part]:
    path = (function.__qualname__,)
    defaults = (function.__defaults__, function.__kwdefaults__)
    yield path, lambda: {"defaults": defaults}, _nothing
    if not _of_library(function.__module__):
        yield path, lambda: vars(function), lambda before: _refill(vars(function), before)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def close_over(before: Contents) -> None:
        for name, entry in before.items():
            cells[name].cell_contents = entry

    def closed_over() -> Contents:
        contents = {}
        for name, cell in cells.items():
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                contents[name] = cell.cell_contents
        return contents

    yield path, closed_over, close_over
    if is_installed_file(function.__code__.co_filename):
        return  # from the globals of an installed package one would reach all of it
    names = _names(function.__code__)
    named = [function.__globals__.get(name) for name in names]
    modules = [m for m in named if isinstance(m, ModuleType) and not _of_library(m.__name__)]
    for space in (function.__globals__, *map(vars, modules)):

        def restore(before: Contents, space: dict[str, Any] = space) -> None:
            for name in names:
                space.pop(name, None)
            space.update(before)

        def read(space: dict[str, Any] = space) -> Contents:
            return {name: space[name] for name in names & space.keys()}

        yield (space.get("__name__"),), read, restore


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and in those within it."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _own(kind: type) -> Contents:
    return {
        name: value
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType) or not name.startswith("__")
    }


# The methods of the built-in types: a subclass may have changed its own.


def _by_key(container: Any) -> Contents:
    if isinstance(container, dict):
        return dict(dict.items(container))  # dict.copy calls a subclass's methods
    if isinstance(container, set):
        return dict.fromkeys(set.__iter__(container))
    kind = list if isinstance(container, list) else deque
    return dict(enumerate(kind.__iter__(container)))


def _refill(container: Any, before: Contents) -> None:
    """Give a container the entries that it had, by the methods of the built-in types."""
    if isinstance(container, dict):
        # an OrderedDict stores the order apart from the entries: dict.clear would leave it
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        for key, entry in before.items():
            kind.__setitem__(container, key, entry)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, before)
    else:
        sequence: Any = list if isinstance(container, list) else deque
        sequence.clear(container)
        sequence.extend(container, before.values())


def _nothing(before: Contents) -> None:
    """Restore nothing: this value only leads to others, which are restored."""


def _of_library(module: object) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _text(path: Names) -> str:
    names = zip(("", *path), path, strict=False)
    parts = (f"[{name!r}]" if last == _ENTRY else f".{name}" for last, name in names if name != "")
    return "".join(part for part in parts if part != f".{_ENTRY}").removeprefix(".")
