"""Side effects of a step that no graph records, found while the step is traced.

A graph computes outputs from inputs. What a step does beside that would happen once, at capture,
and never again: it is refused with the line of the user's code and the remedy.
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
# Frames of torch and of this package are not the user's code.
_LIBRARIES = tuple(
    f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[3])
)


class SideEffects(TorchDispatchMode):
    """Refuse ops whose effect a graph would lose, and remember the fake tensors that ops make."""

    supports_higher_order_operators = True

    def __init__(self, made: list[weakref.ref[torch.Tensor]]) -> None:
        super().__init__()
        self._made = made

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
                self._made.append(weakref.ref(tensor))
        return result

    def _check(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if op.namespace == IN_PLACE_NAMESPACE:
            raise CaptureError(
                f"{op._opname} of torch.distributed is called{user_line()}: it writes its result "
                "into a tensor while the step goes on, which no graph records. Call the function "
                "of torch.distributed._functional_collectives that returns its result instead"
            )
        if op is torch.ops.aten.mkldnn_rnn_layer_backward.default:
            raise CaptureError(
                "oneDNN's LSTM hands its backward a workspace that fake tensors do not have: run "
                "capture and steps within torch.backends.mkldnn.flags(enabled=False)"
            )
        if not may_write(op):
            return
        for tensor in pytree.tree_leaves(written_values(op, args, kwargs)):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                raise CaptureError(
                    f"{op} writes{user_line()} into a tensor of {tuple(tensor.shape)} "
                    f"{tensor.dtype} that is neither a parameter or buffer of the model nor in "
                    "the batch: it would be written once, now, and never by a later step. "
                    "Register it as a buffer of the model"
                )


class Assignments(TorchFunctionMode):
    """Refuse `tensor.data = other`, which no op records."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise CaptureError(
                f".data of a tensor is assigned{user_line()}, which no graph records. Write in "
                "place with copy_ under torch.no_grad(), or make a new tensor"
            )
        return func(*args, **(kwargs or {}))


def refuse_uninitialised(graph: fx.Graph) -> None:
    """Refuse a read of memory that nothing has written. Linear in nodes.

    Checkpointing can cause one: it stops a recomputation as soon as it has what backward needs, by
    shape, before the op that would write into it.

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
            for read in node.all_input_nodes:
                if storages[read] in empty and name in ("_to_copy", "clone"):
                    empty.add(storages[node])  # a copy, which may be filled later
                elif storages[read] in empty:
                    raise CaptureError(
                        f"{node.target} (module '{module_of(node)}') reads memory of an empty "
                        "tensor that nothing has written, in eager too: fill it first. If a "
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
                    f"{node.target} (module '{module_of(node)}') makes a sparse tensor; a graph "
                    "has dense ones only: compute with dense tensors"
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
    """Return whether a file of Python code is torch's, this package's, or of a package whose models
    keep no state; a package of the user's own is not, though it may be installed."""
    folders = pairwise(Path(file).parts)
    of_package = any(above in _INSTALLED and name in REVIEWED for above, name in folders)
    return is_library_file(file) or of_package


def refuse_leftovers(made: Sequence[weakref.ref[torch.Tensor]]) -> None:
    """Refuse a step that has stored a tensor of its trace somewhere outside of the model.

    Args:
        made: the fake tensors that the trace made; nothing of the trace refers to them any more.

    Raises:
        CaptureError: with the object that holds one.
    """
    if not any(ref() is not None for ref in made):
        return
    gc.collect()
    for ref in made:
        tensor = ref()
        if tensor is not None:
            raise kept_tensor(tensor, f"{_holder(tensor)}, which must be cleared now")


def kept_tensor(tensor: torch.Tensor, where: str) -> CaptureError:
    """Return the error for a tensor of the trace that the step keeps outside of the model."""
    return CaptureError(
        f"the step keeps a tensor of {tuple(tensor.shape)} {tensor.dtype} in {where}: it would be "
        "made once, while the step is captured, without data, and read by whatever reads it "
        "later. Let the step return it through the loss function, make it a buffer of the model, "
        "or compute it before the step"
    )


def _holder(value: object, ignored: tuple[object, ...] = ()) -> str:
    """Describe what refers to an object, as well as Python can tell."""
    referrers = gc.get_referrers(value)
    ignored = (*ignored, referrers)
    for referrer in referrers if len(ignored) < 5 else ():
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
        return f"{f'attribute {name!r} of ' if name else ''}a {type(referrer).__name__}"
    return "an object that Python does not show"


# A loop, since a generator expression would refer to the value by a cell of its own.
def _key(entries: dict[Any, Any], value: object) -> object:
    for key, entry in entries.items():
        if entry is value:
            return key
    return None
