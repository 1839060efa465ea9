"""Keep tagged activations in host memory between forward and backward."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graph_trainer.core.analysis.unshard_chains import unshard_chains
from graph_trainer.core.graph.annotations import (
    Phase,
    block_of,
    copy_annotations,
    infer_value,
    is_backward,
    module_of,
    offload_tag,
    phase_of,
    tensor_of,
    tensors_of,
    value_of,
)
from graph_trainer.core.graph.host_copies import OFFLOAD, RELOAD, WAIT_COPY, is_host_copy
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.last_writes import LastWrites
from graph_trainer.core.graph.ops import (
    Storage,
    is_collective,
    is_getitem,
    is_wait,
    storages_in,
    value_storages,
)
from graph_trainer.core.passes.base import Stage, graph_pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.rematerialize import recompute
from graph_trainer.core.units import gib
from graph_trainer.errors import PassError

KEY = "compile.offload_activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadActivationsOptions:
    """When copies run, and what is worth one."""

    prefetch_blocks: int = 1
    """How many blocks ahead of the first backward reader a copy back starts; 0 for right before
    that reader, which then waits for all of it."""

    finish_blocks: int = 1
    """How many blocks after its last forward reader a value's copy to the host is waited for, which
    frees the value; 0 for the end of the block of that reader."""

    min_bytes: int = 1 << 20
    """Values of fewer bytes stay on the device."""

    block_inputs: bool = False
    """Offload the inputs of every block too, tagged or not: all that activation_checkpoint.type =
    "full" keeps."""

    def __post_init__(self) -> None:
        for name in ("prefetch_blocks", "finish_blocks", "min_bytes"):
            value = getattr(self, name)
            if value < 0:
                raise PassError(f"{KEY}.{name} is {value}; it must be 0 or more")


@dataclass(slots=True)
class _Value:
    """A storage to offload."""

    base: fx.Node
    """The first node whose value is the whole storage, complete."""
    shown_by: list[fx.Node] = field(default_factory=list)
    """The other nodes of forward and loss with that storage, views, in order."""


@graph_pass(
    stage=Stage.REMATERIALIZE,
    summary="Keep tagged activations in host memory until backward reads them",
    options_type=OffloadActivationsOptions,
)
def offload_activations(
    joint: JointGraph, options: OffloadActivationsOptions, context: PassContext
) -> None:
    """Copy every value with an offload tag to host memory, and back for its backward readers.

    Four nodes a value: the start of the copy after the value's last reader in forward, its wait
    `finish_blocks` blocks later, the start of the copy back `prefetch_blocks` blocks ahead of the
    first reader in backward, and its wait right before that reader. The device has the value's
    memory for something else between that first wait and the start of the copy back. A storage is
    copied once, whichever of its views are tagged; views that backward reads are made again.

    Left on the device, with a remark that says why: what backward does not read or is recomputed,
    inputs, outputs and views of them, parameters, what is written in place, values below
    `min_bytes`, and values that backward needs before their copy would be complete.

    Relies on phases, modules and tags, after `rematerialize`. Guarantees equal bits. A second run
    finds nothing that backward reads. n log n in nodes.
    """
    tagged = [n for n in joint.graph.nodes if offload_tag(n) and not is_backward(n)]
    if options.block_inputs:
        tagged += _block_inputs(joint)
    if not tagged:
        return
    left: Counter[str] = Counter()
    values = _values(joint, tagged, options.min_bytes, left)
    recompute(joint, {view for value in values for view in value.shown_by})
    copied = _insert_copies(joint, values, options, left)
    joint.remarks.append(
        f"{copied.total()} values ({gib(sum(size * n for size, n in copied.items()))} GiB) are in "
        "host memory between forward and backward"
    )
    joint.remarks += [f"{count} tagged values stay: {why}" for why, count in left.items()]


def _block_inputs(joint: JointGraph) -> list[fx.Node]:
    """Return what a block reads in forward and another block, or none, has made."""
    parameters = {node for chain in unshard_chains(joint) for node in chain.nodes}

    def reads_from_outside(user: fx.Node, made_in: str | None) -> bool:
        block = block_of(module_of(user))
        return phase_of(user) is Phase.FORWARD and block is not None and block != made_in

    return [
        node
        for node in joint.graph.nodes
        if phase_of(node) is Phase.FORWARD
        and node not in parameters
        and isinstance(value_of(node), torch.Tensor)
        and any(reads_from_outside(user, block_of(module_of(node))) for user in node.users)
    ]


# --- what is offloaded -----------------------------------------------------------------------


def _values(
    joint: JointGraph, tagged: list[fx.Node], min_bytes: int, left: Counter[str]
) -> list[_Value]:
    """Return the storages of the tagged nodes that can be offloaded, and count why others not."""
    storages = value_storages(joint.graph)
    shown: dict[Storage, list[fx.Node]] = {s: [] for n in tagged for s in storages_in(storages[n])}
    for node in joint.graph.nodes:
        for storage in {s for s in storages_in(storages[node]) if s in shown}:
            shown[storage].append(node)
    refusal = _Refusal(joint, min_bytes)
    found = []
    for storage, nodes in shown.items():
        forward = [n for n in nodes if not is_backward(n)]
        whole = [n for n in forward if _is_tensor(n) and not is_collective(n)]
        why = refusal.of(storage, nodes, whole)
        if why:
            left[why] += 1
            continue
        base = whole[0]
        found.append(_Value(base, forward[forward.index(base) + 1 :]))
    return found


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def _is_also_read_elsewhere(whole: list[fx.Node], nodes: list[fx.Node]) -> bool:
    """Return whether backward reads the collective or the tuple from which the tensor came, or the
    tensor's memory is communicated again."""
    before = nodes[: nodes.index(whole[0])]
    return any(is_wait(n) or is_collective(n) for n in nodes[len(before) + 1 :]) or any(
        is_backward(user) for node in before for user in node.users
    )


class _Refusal:
    """Says why a storage cannot be offloaded, or need not be."""

    def __init__(self, joint: JointGraph, min_bytes: int) -> None:
        self._writes = LastWrites(joint.graph)
        self._parameters = {n for chain in unshard_chains(joint) for n in chain.nodes}
        self._returned = set(joint.output_node().all_input_nodes)
        devices = {t.device.type for n in joint.placeholders() for t in tensors_of(n)}
        self._host_is_device = devices <= {"cpu"}
        self._min_bytes = min_bytes

    def of(self, storage: Storage, nodes: list[fx.Node], whole: list[fx.Node]) -> str:
        """Return the reason, empty if there is none.

        Args:
            nodes: all that have the storage.
            whole: those of forward and loss whose value is one tensor, complete.
        """
        if storage[0].op != "call_function":
            return "memory of an input"
        if not any(is_backward(user) for node in nodes for user in node.users):
            return "backward does not read them, or computes them again"
        if not self._parameters.isdisjoint(nodes):
            return "parameters, which are gathered again instead"
        if not self._returned.isdisjoint(nodes):
            return "memory of an output"
        if not whole or _is_also_read_elsewhere(whole, nodes):
            return "read in other ways than through one tensor"
        if self._writes.is_written(whole[0]):
            return "written in place"
        return self._of_tensor(tensor_of(whole[0]))

    def _of_tensor(self, tensor: torch.Tensor) -> str:
        if any(isinstance(size, torch.SymInt) for size in tensor.shape):
            return "of a size that is not fixed"
        if tensor.nbytes < self._min_bytes:
            return f"smaller than {KEY}.min_bytes"
        if tensor.device.type == "cpu" and not self._host_is_device:
            return "in host memory already"
        if torch.empty_like(tensor).stride() != tensor.stride():
            return "with gaps in memory"
        return ""


# --- where copies start and end --------------------------------------------------------------


class _Places:
    """Where the copies of a graph start and end. Positions are those of the graph's nodes."""

    def __init__(self, order: list[fx.Node], options: OffloadActivationsOptions) -> None:
        self._options = options
        self._end = next((i for i, n in enumerate(order) if is_backward(n)), len(order) - 1)
        """Where backward begins."""
        self._forward, last = _first_of_blocks(order, backward=False)
        self._forward += [last + 1] if self._forward else []
        self._backward, _ = _first_of_blocks(order, backward=True)

    def end_of_copy_out(self, last: int) -> int:
        """Return before which node a copy is waited for of a value last read at `last`."""
        number = bisect.bisect_right(self._forward, last) + self._options.finish_blocks
        return self._forward[number] if number < len(self._forward) else max(self._end, last + 1)

    def start_of_copy_back(self, first: int) -> int:
        """Return before which node a value is copied back that backward first reads at `first`."""
        ahead = self._options.prefetch_blocks
        if not ahead or not self._backward:
            return first
        number = bisect.bisect_right(self._backward, first) - 1 - ahead
        return self._backward[number] if number >= 0 else min(self._end, first)


def _first_of_blocks(order: list[fx.Node], *, backward: bool) -> tuple[list[int], int]:
    """Return the position of each block's first node in forward or backward, and that of the last
    node of any of them."""
    first: dict[str, int] = {}
    last = -1
    for place, node in enumerate(order):
        block = block_of(module_of(node))
        # copies run in other blocks than those of their values
        if block is not None and is_backward(node) is backward and not is_host_copy(node):
            first.setdefault(block, place)
            last = place
    return sorted(first.values()), last


def _insert_copies(
    joint: JointGraph,
    values: list[_Value],
    options: OffloadActivationsOptions,
    left: Counter[str],
) -> Counter[int]:
    """Insert the copies of each value, and return how many values of each size have one."""
    order = list(joint.graph.nodes)
    position = {node: place for place, node in enumerate(order)}
    places = _Places(order, options)
    copied: Counter[int] = Counter()
    for value in sorted(values, key=lambda v: position[v.base]):
        base = value.base
        # views that only backward read are gone
        nodes = [base, *(view for view in value.shown_by if view in position)]
        users = {user for node in nodes for user in node.users if user in position}
        readers = [n for n in users if is_backward(n)]
        last = max(position[n] for n in (*nodes, *users) if not is_backward(n))
        while is_getitem(order[last + 1]):
            last += 1
        first = min(position[n] for n in readers)
        back = max(places.start_of_copy_back(first), last + 1)
        end = min(places.end_of_copy_out(last), back)
        if last > first or end == back:
            left["backward needs them before a copy would be complete"] += 1
            continue
        device = tensor_of(base).device
        phase = phase_of(base)
        out = _insert(joint, order[last + 1], base, phase, OFFLOAD, base)
        stored = _insert(joint, order[end], base, phase, WAIT_COPY, out, base)
        again = _insert(joint, order[back], base, Phase.BACKWARD, RELOAD, stored, device)
        read = _insert(joint, order[first], base, Phase.BACKWARD, WAIT_COPY, again, stored)
        for reader in readers:
            reader.replace_input_with(base, read)
        copied[tensor_of(base).nbytes] += 1
    return copied


def _insert(
    joint: JointGraph, place: fx.Node, base: fx.Node, phase: Phase | None, op: Any, *args: Any
) -> fx.Node:
    """Insert a node of a value's copies before `place`."""
    with joint.graph.inserting_before(place):
        node = joint.graph.call_function(op, args)
    copy_annotations(base, node, phase=phase)
    infer_value(node)
    return node
