"""Run a graph on real tensors and count, after every op, the bytes that it has made and keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_wait
from graph_trainer.testing import values_for
from tests.unit.graphs import c10d

RANKS = 2


class _Made:
    """Storages by address, with their bytes while a tensor refers to them."""

    def __init__(self) -> None:
        self._given: set[int] = set()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def give(self, value: torch.Tensor) -> None:
        """Do not count this one: an input."""
        self._given.add(_storage(value)._cdata)

    def add(self, value: Any) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                storage = _storage(tensor)
                if storage._cdata not in self._given:
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def count(self) -> int:
        self._made = {k: v for k, v in self._made.items() if not v[0].expired()}
        return sum(size for _, size in self._made.values())


class _Counting(TorchDispatchMode):
    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.made = _Made()
        self.live: list[int] = []
        for tensor in inputs:
            self.made.give(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.made.add(result)
        self.live.append(self.made.count())
        return result


def measured(joint: JointGraph) -> list[int]:
    """Bytes alive after every op of the generated code, which frees after the last use."""
    inputs = values_for(joint)
    module = fx.GraphModule(joint.graph_module, joint.graph)
    with torch.no_grad(), _Counting(inputs) as counting:
        kept = module(*inputs)
        counting.live.append(counting.made.count())
    assert kept is not None
    return counting.live


def predicted(joint: JointGraph) -> list[int]:
    """The same as `lifetimes` predicts it."""
    found = lifetimes(joint).live_bytes
    return [
        live
        for node, live in zip(joint.graph.nodes, found, strict=True)
        if node.op == "output" or isinstance(node.target, torch._ops.OpOverload)
    ]


class Allocating(fx.Interpreter):
    """Runs a graph node by node, drops every value after its last reader, and counts bytes.

    `live` has the bytes alive when a node has run and its inputs are not dropped yet. The work of
    a collective keeps its inputs and results until the wait.
    """

    def __init__(self, joint: JointGraph) -> None:
        super().__init__(joint.graph_module, graph=joint.graph)
        for node in joint.graph.nodes:
            if not node.users and node.op != "output":
                self.user_to_last_uses.setdefault(node, []).append(node)
        self._works: dict[int, list[Any]] = defaultdict(list)
        self._made = _Made()
        self.live: list[int] = []
        inputs = values_for(joint)
        for value in inputs:
            self._made.give(value)
        with torch.no_grad():
            self.run(*inputs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            self._made.add(result)
        self.live.append(self._made.count())
        if is_wait(n):
            self._works.pop(_storage(result)._cdata, None)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in SIMULATED:
            return target(*args, **kwargs)
        result = SIMULATED[target](*args, **kwargs)
        if target is not c10d.wait_tensor.default:
            for tensor in tree_leaves(result):
                self._works[_storage(tensor)._cdata].append((args, result))
        return result


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _gather(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.cat([x] * RANKS)


def _reduce(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x[: len(x) // RANKS].clone()


SIMULATED: dict[Any, Callable[..., Any]] = {
    c10d.wait_tensor.default: lambda x: x,
    c10d.all_gather_into_tensor.default: _gather,
    c10d.all_gather_into_tensor_out.default: lambda x, *_, out: out.copy_(_gather(x)),
    c10d.all_gather_into_tensor_coalesced.default: lambda xs, *_: [_gather(x) for x in xs],
    c10d.reduce_scatter_tensor.default: _reduce,
    c10d.reduce_scatter_tensor_coalesced.default: lambda xs, *_: [_reduce(x) for x in xs],
    c10d.all_reduce.default: lambda x, *_: x.clone(),
    c10d.all_reduce_.default: lambda x, *_: x.mul_(2),
    c10d.all_reduce_coalesced.default: lambda xs, *_: [x.clone() for x in xs],
    c10d.all_reduce_coalesced_.default: lambda xs, *_: xs,
}
