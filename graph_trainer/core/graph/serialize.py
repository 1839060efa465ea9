"""Write a captured graph as bytes, and read it again without running code of the bytes."""

from __future__ import annotations

import io
import operator
import pickle
import zlib
from collections.abc import Sequence
from enum import Enum
from types import BuiltinFunctionType, MethodType
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import OpOverload
from graph_trainer.core.graph.signature import Input, InputKind, Output, OutputKind, Signature
from graph_trainer.core.graph.subclasses import Layout
from graph_trainer.core.torch_private import (
    FakeTensor,
    FakeTensorMode,
    ShardOrderEntry,
    StridedShard,
    TensorMeta,
    no_dispatch,
    storage_id,
)

_UNREAD = {"eager_input_vals", "original_aten", "tensor_meta", "unbacked_bindings"}
"""Entries of `node.meta` that torch writes for compilers, and no pass or analysis reads."""

_CLASSES: tuple[Any, ...] = (
    *(Signature, Input, InputKind, Output, OutputKind, Layout, CheckpointPolicy),
    *(DTensor, Partial, Replicate, Shard, StridedShard, ShardOrderEntry, TensorMeta),
    *(torch.Size, torch.device, immutable_dict, immutable_list, operator.getitem),
)
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def graph_to_bytes(joint: JointGraph, meshes: Sequence[DeviceMesh]) -> bytes:
    """Write a captured graph, with a checksum (zlib's). Linear in nodes.

    Args:
        joint: as `capture` returns it. What belongs to the process (the model, the batch and the
            settings of modules) is left out: the graph can be planned and not run.
        meshes: those that parameters and batch may lie on.

    Raises:
        PicklingError: the graph has something else than ops on tensors of known sizes.
    """
    file = io.BytesIO()
    writer = _Writer(joint.graph, meshes, file)
    if joint.graph_module.meta or joint.outputs is not None or joint.history:
        raise pickle.PicklingError("not a graph of a whole step as it was captured")
    writer.dump((joint.signature, joint.model_type, len(writer.places)))
    for node in joint.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise pickle.PicklingError(f"'{node.name}' reads an attribute")
        meta = {key: value for key, value in node.meta.items() if key not in _UNREAD}
        writer.dump((node.op, node.name, node.target, node.args, node.kwargs, meta))
    return zlib.compress(file.getvalue(), 1)


def graph_from_bytes(
    content: bytes, mode: FakeTensorMode, meshes: Sequence[DeviceMesh]
) -> JointGraph:
    """Read a graph that `graph_to_bytes` wrote with as many meshes. Linear in nodes.

    Args:
        content: from anywhere: only the classes above, ops and fake tensors are made of it.
        mode: of the fake tensors.
        meshes: of this process.

    Raises:
        Exception: of any kind, for bytes that are something else.
    """
    reader = _Reader(io.BytesIO(zlib.decompress(content)), mode, meshes)
    signature, model_type, count = reader.load()
    graph = fx.Graph()
    for _ in range(count):
        op, name, target, args, kwargs, meta = reader.load()
        if op == "output":
            node = graph.output(args[0])
        else:
            node = graph.create_node(op, target, args, kwargs, name)
        node.meta = meta
        reader.nodes.append(node)
    graph_module = fx.GraphModule(torch.nn.Module(), graph)
    joint = JointGraph(graph_module, signature, model_type=model_type)
    joint.validate()
    return joint


class _Writer(pickle.Pickler):
    """Refuses all but what `_Reader` makes."""

    def __init__(self, graph: fx.Graph, meshes: Sequence[DeviceMesh], file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.places = {node: place for place, node in enumerate(graph.nodes)}
        self._meshes = list(meshes)
        self._storages: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _Reader.node, (self.places[value],)
        if isinstance(value, OpOverload):
            namespace, _, name = value._schema.name.partition("::")
            return _Reader.op, (namespace, name, value._overloadname)
        if isinstance(value, _CONSTANTS):
            return _Reader.constant, (str(value).removeprefix("torch."),)
        if isinstance(value, DeviceMesh) and value in self._meshes:
            return _Reader.mesh, (self._meshes.index(value),)
        if type(value) is FakeTensor and value.constant is None and not value.is_neg():
            place = self._storages.setdefault(storage_id(value), len(self._storages))
            size = value.untyped_storage().nbytes()
            layout = (value.dtype, value.shape, value.stride(), value.storage_offset())
            kind = (value.fake_device, value.requires_grad, value.is_conj())
            return _Reader.tensor, ((place, size), (*layout, *kind))
        if isinstance(value, Enum) and type(value) in _CLASSES:
            return type(value), (value.value,)  # by getattr before Python 3.11.4
        known = isinstance(value, type | BuiltinFunctionType) and value in _CLASSES
        if known or type(value) in _CLASSES or value in _MADE.values():
            return NotImplemented
        raise pickle.PicklingError(f"{type(value).__name__} {value!r}")


class _Reader(pickle.Unpickler):
    """Makes the classes above, ops, and fake tensors that share memory as they did."""

    def __init__(
        self, file: io.BytesIO, mode: FakeTensorMode, meshes: Sequence[DeviceMesh]
    ) -> None:
        super().__init__(file)
        self.nodes: list[fx.Node] = []
        self._mode = mode
        self._meshes = meshes
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._classes = {(c.__module__, c.__qualname__): c for c in _CLASSES}

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in _MADE:
            return MethodType(_MADE[name], self)
        if (module, name) not in self._classes:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a captured graph")
        return self._classes[module, name]

    def node(self, place: int) -> fx.Node:
        return self.nodes[place]

    def op(self, namespace: str, name: str, overload: str) -> Any:
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        return _checked(op, OpOverload)

    def constant(self, name: str) -> Any:
        return _checked(getattr(torch, name), _CONSTANTS)

    def mesh(self, place: int) -> DeviceMesh:
        return self._meshes[place]

    def tensor(self, storage: tuple[int, int], like: tuple[Any, ...]) -> torch.Tensor:
        dtype, shape, stride, offset, device, requires_grad, is_conjugate = like
        place, num = storage
        with no_dispatch():
            if place not in self._storages:
                self._storages[place] = torch.UntypedStorage(num, device="meta")
            tensor = torch.empty(0, dtype=dtype, device="meta")
            tensor.set_(self._storages[place], offset, shape, stride)
            tensor = tensor.conj() if is_conjugate else tensor
            return FakeTensor(self._mode, tensor.requires_grad_(requires_grad), device)


_METHODS = (_Reader.node, _Reader.op, _Reader.constant, _Reader.mesh, _Reader.tensor)
_MADE: dict[str, Any] = {method.__qualname__: method for method in _METHODS}
"""In the bytes, the name of one of these stands for that method of the reader."""


def _checked(value: Any, kinds: Any) -> Any:
    if not isinstance(value, kinds):
        raise pickle.UnpicklingError(f"{value!r} is not part of a captured graph")
    return value
