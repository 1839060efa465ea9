"""Refuse side effects of a step that no graph records, while the step is traced.

A graph computes outputs from inputs. Any other effect of a step would happen once, at capture, and
never again. Errors show the line of the user's code and the remedy.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import weakref
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import CellType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from graph_trainer.core.graph.annotations import module_of, tensors_of, value_of
from graph_trainer.core.graph.collective_kinds import IN_PLACE_NAMESPACE
from graph_trainer.core.graph.data_sizes import has_data_sizes
from graph_trainer.core.graph.ops import (
    OpOverload,
    Storage,
    may_write,
    storage_roots,
    written_arguments,
    written_values,
)
from graph_trainer.core.torch_private import FakeTensor, TorchDispatchMode, pytree
from graph_trainer.errors import CaptureError

_INSTALLED = ("site-packages", "dist-packages")
REVIEWED = ("torchtitan", "transformers")
"""Packages whose models, as they are installed, are known to keep no state in a step."""
_UNKNOWN_HOLDER = "an object that Python does not show"
# Frames of torch and of this package are not the user's code.
_LIBRARIES = tuple(
    f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[3])
)


class SideEffects(TorchDispatchMode):
    """Refuse ops whose effect a graph would lose, and list the fake tensors that ops return."""

    supports_higher_order_operators = True

    def __init__(self, results: list[weakref.ref[torch.Tensor]]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(kind not in (torch.Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # the subclass calls again, with the plain tensors inside it
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            self._check(func, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, FakeTensor):
                self._results.append(weakref.ref(tensor))
        return result

    def _check(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if op.namespace == IN_PLACE_NAMESPACE:
            raise CaptureError(
                f"the step calls {op._opname} of torch.distributed{user_line()}, which writes its "
                "result into a tensor while the step goes on, and a graph does not record that. "
                "Call the function of torch.distributed._functional_collectives that returns its "
                "result instead"
            )
        if op is torch.ops.aten.mkldnn_rnn_layer_backward.default:
            raise CaptureError(
                "oneDNN's LSTM passes a workspace to its backward that fake tensors do not have: "
                "run capture and steps within torch.backends.mkldnn.flags(enabled=False)"
            )
        if not may_write(op):
            return
        for tensor in pytree.tree_leaves(written_values(op, args, kwargs)):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                raise CaptureError(
                    f"{op} writes{user_line()} into a tensor of {tuple(tensor.shape)} "
                    f"{tensor.dtype} that is neither a parameter or buffer of the model nor in "
                    "the batch: capture would write it once, and later steps never. Register it "
                    "as a buffer of the model"
                )


class Assignments(TorchFunctionMode):
    """Refuse `tensor.data = other`, which no op records."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise CaptureError(
                f"the step assigns .data of a tensor{user_line()}, which a graph does not record. "
                "Write in place with copy_ under torch.no_grad(), or make a new tensor"
            )
        return func(*args, **(kwargs or {}))


def refuse_uninitialised(graph: fx.Graph) -> None:
    """Refuse a read of memory that no op has written. Linear in nodes.

    Checkpointing can cause one: it stops a recomputation as soon as all tensors that backward needs
    exist, even if the op that would write one of them has not run.

    Raises:
        CaptureError: with the op that reads.
    """
    storages = storage_roots(graph)
    empty: set[Storage] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name = getattr(node.target, "_opname", "")
        empty.difference_update(storages[written] for written in written_arguments(node))
        if "empty" in name:
            value = value_of(node)
            if isinstance(value, torch.Tensor) and (has_data_sizes(value) or value.numel()):
                empty.add(storages[node])
        elif storages[node] not in empty and not name.endswith("_like") and "new_" not in name:
            for source in node.all_input_nodes:
                if storages[source] in empty and name in ("_to_copy", "clone"):
                    empty.add(storages[node])  # a copy, which may be filled later
                elif storages[source] in empty:
                    raise CaptureError(
                        f"{node.target} (module '{module_of(node)}') reads memory of an empty "
                        "tensor that no op has written, in eager too: fill it first. If a "
                        "checkpointed block draws its noise into it, leave the block out of "
                        "checkpointing, or use torch.utils.checkpoint.set_checkpoint_early_stop"
                        "(False)"
                    )


def refuse_sparse(graph: fx.Graph) -> None:
    """Refuse ops that make sparse tensors, whose bytes no analysis knows. Linear in nodes.

    Raises:
        CaptureError: with the op.
    """
    for node in graph.nodes:
        for tensor in tensors_of(node):
            if tensor.layout is not torch.strided:
                raise CaptureError(
                    f"{node.target} (module '{module_of(node)}') makes a sparse tensor, and a "
                    "graph has dense tensors only: compute with dense ones"
                )


def user_line() -> str:
    """Return the innermost line of the stack that is not a library's: " at file.py:12", or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_library_file(file) and not file.startswith("<"):
            return f" at {file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_library_file(file: str) -> bool:
    """Return whether a file of Python code is torch's or this package's."""
    return file.startswith(_LIBRARIES)


def is_installed_file(file: str) -> bool:
    """Return whether a file of Python code is of an installed package, torch's or this one's."""
    return is_library_file(file) or not set(_INSTALLED).isdisjoint(Path(file).parts)


def is_reviewed_file(file: str) -> bool:
    """Return whether a file of Python code is torch's, this package's, or of an installed package
    in `REVIEWED`. Other installed packages may be the user's own."""
    folders = pairwise(Path(file).parts)
    of_package = any(parent in _INSTALLED and name in REVIEWED for parent, name in folders)
    return is_library_file(file) or of_package


def refuse_leftovers(results: Sequence[weakref.ref[torch.Tensor]]) -> None:
    """Refuse a step that has stored a tensor of its trace outside of the model.

    Args:
        results: the fake tensors that the ops of the trace returned. The trace itself must not
            refer to them any more.

    Raises:
        CaptureError: with the object that stores one.
    """
    if not any(ref() is not None for ref in results):
        return
    gc.collect()
    for ref in results:
        tensor = ref()
        if tensor is not None:
            raise kept_tensor(tensor, f"{_holder(tensor)}, which must be cleared now")


def kept_tensor(tensor: torch.Tensor, where: str) -> CaptureError:
    """Return the error for a tensor of the trace that the step keeps outside of the model."""
    return CaptureError(
        f"the step keeps a tensor of {tuple(tensor.shape)} {tensor.dtype} in {where}. Capture "
        "makes this tensor once and without data, and later code would read it. Let the step "
        "return it through the loss function, make it a buffer of the model, or compute it before "
        "the step"
    )


def _holder(value: object, ignored: tuple[object, ...] = ()) -> str:
    """Describe an object that refers to a value, as far as Python shows it.

    Looks through containers, at most four levels deep. `ignored` are the lists of referrers, which
    refer to the value too.
    """
    referrers = gc.get_referrers(value)
    ignored = (*ignored, referrers)
    if len(ignored) == 5:
        return _UNKNOWN_HOLDER
    for referrer in referrers:
        if isinstance(referrer, FrameType) or _key(dict(enumerate(ignored)), referrer) is not None:
            continue
        if isinstance(referrer, functools._lru_cache_wrapper):
            return f"the cache of the function {referrer.__qualname__}"
        if isinstance(referrer, CellType):
            return "a variable that a function closes over"
        if isinstance(referrer, dict):
            key = _key(referrer, value)
            module = sys.modules.get(str(referrer.get("__name__")))
            if module is not None and vars(module) is referrer:
                return f"the global {key!r} of module {module.__name__}"
            for owner in gc.get_referrers(referrer):
                if getattr(owner, "__dict__", None) is referrer:
                    return f"attribute {key!r} of a {type(owner).__name__}"
            return f"[{key!r}] of a dict, {_holder(referrer, ignored)}"
        if isinstance(referrer, (list, tuple, set)):
            return f"a {type(referrer).__name__}, {_holder(referrer, ignored)}"
        name = _key(getattr(referrer, "__dict__", {}), value)
        if name is not None:
            return f"attribute {name!r} of a {type(referrer).__name__}"
        return f"a {type(referrer).__name__}"
    return _UNKNOWN_HOLDER


def _key(entries: dict[Any, Any], value: object) -> object:
    """Return the key of a value, None if there is none."""
    # a loop: the cell of a generator expression would refer to the value too
    for key, entry in entries.items():
        if entry is value:
            return key
    return None
