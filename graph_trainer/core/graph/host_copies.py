"""Copies of tensors to host memory and back, as ops: each has a start and a wait.

    copy = offload(tensor)                   starts a copy to host memory
    stored = wait_copy(copy, tensor)         returns `copy` when it is complete
    copy = reload(stored, device)            starts a copy back
    tensor = wait_copy(copy, stored)         returns `copy` when it is complete

A wait reads the source too, so that the source stays alive until the copy is complete, whatever
runs the graph. On a GPU copies run on two separate streams, one for each direction, and host memory
is pinned: torch's allocator of pinned memory is the pool, and reuses a block for a new tensor once
all copies of the old one are complete. On CPU, host memory is the device's, and a copy is complete
when its start returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_EVENT = "copy_event"  # attribute of a tensor that a copy on a GPU writes

_library = torch.library.Library("graph_trainer", "DEF")
_library.define("offload(Tensor tensor) -> Tensor")
_library.define("reload(Tensor stored, Device device) -> Tensor")
# The result is `copy` itself. A schema that declared it would be refused where torch functionalizes
# a graph; that of the collectives' wait_tensor does not declare it either.
_library.define("wait_copy(Tensor copy, Tensor source) -> Tensor")
# Compilers that follow writes in place call this op instead: it completes `copy`.
_library.define("wait_copy_(Tensor(a!) copy, Tensor source) -> ()")

_ops = torch.ops.graph_trainer
OFFLOAD = _ops.offload.default
RELOAD = _ops.reload.default
WAIT_COPY = _ops.wait_copy.default


def is_copy_to_host(node: fx.Node) -> bool:
    """Return whether a node starts a copy to host memory: its result is stored there."""
    return node.target is OFFLOAD


def starts_copy(node: fx.Node) -> bool:
    """Return whether a node starts a copy to host memory or back."""
    return node.target in (OFFLOAD, RELOAD)


def waits_for_copy(node: fx.Node) -> bool:
    """Return whether a node waits for a copy: its result is its first input, complete."""
    return node.target is WAIT_COPY


def is_host_copy(node: fx.Node) -> bool:
    """Return whether a node starts a copy to host memory or back, or waits for one."""
    return starts_copy(node) or waits_for_copy(node)


@functools.cache
def _stream(device: torch.device, to_host: bool) -> torch.cuda.Stream:
    """Return the stream of a GPU's copies in one direction: the link carries both at once."""
    return torch.cuda.Stream(device)


def _start(copy: torch.Tensor, source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy on the stream of its direction, after the work that is already on the current stream."""
    stream = _stream(device, copy.device.type == "cpu")
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy.copy_(source, non_blocking=True)
        setattr(copy, _EVENT, stream.record_event())
    return copy


def _offload(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return _start(copy, tensor, tensor.device)


def _reload(stored: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return stored.clone()
    # allocated on the current stream, which waits for the copy: the allocator need not know that
    # another stream writes it
    copy = torch.empty_like(stored, device=device)
    return _start(copy, stored, copy.device)


def complete_copy(copy: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return `copy` once later work on the current stream may read it: the op `wait_copy`."""
    device = copy.device if copy.is_cuda else source.device
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_event(getattr(copy, _EVENT))
    return copy


def _wait_copy_in_place(copy: torch.Tensor, source: torch.Tensor) -> None:
    complete_copy(copy, source)


_KERNELS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("offload", _offload, lambda tensor: torch.empty_like(tensor, device="cpu")),
    ("reload", _reload, lambda stored, device: torch.empty_like(stored, device=device)),
    ("wait_copy", complete_copy, lambda copy, source: torch.empty_like(copy)),
    ("wait_copy_", _wait_copy_in_place, lambda copy, source: None),
)
"""The name of each op, its implementation, and its implementation on fake tensors."""

for _name, _function, _fake in _KERNELS:
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graph_trainer::{_name}", _fake, lib=_library)
