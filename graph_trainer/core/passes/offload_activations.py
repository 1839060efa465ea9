"""Keep tagged activations in host memory between forward and backward."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graph_trainer.core.analysis.blocks import block_inputs
from graph_trainer.core.analysis.fusible import is_free
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
from graph_trainer.core.graph.host_copies import OFFLOAD, RELOAD, WAIT_COPY, starts_copy
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    Storage,
    is_collective,
    is_wait,
    storages_in,
    value_storages,
)
from graph_trainer.core.graph.writes import writes_of
from graph_trainer.core.passes.base import Stage, graph_pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.rematerialize import recompute
from graph_trainer.core.units import gib
from graph_trainer.errors import PassError


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
    """Offload the inputs of every block too, tagged or not: all that the activation
    policy "full" keeps."""

    def __post_init__(self) -> None:
        for name in ("prefetch_blocks", "finish_blocks", "min_bytes"):
            value = getattr(self, name)
            if value < 0:
                raise PassError(
                    f"OffloadActivationsOptions.{name} is {value}; it must be 0 or more"
                )


_Value = list[fx.Node]
"""A storage to offload: the first node whose value is the whole storage, complete, and after it the
other nodes of forward and loss with that storage, views, in order."""


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
        tagged += [node for nodes in block_inputs(joint).values() for node in nodes]
    if not tagged:
        return
    staying: Counter[str] = Counter()
    values = _values(joint, tagged, options.min_bytes, staying)
    places = _Places(joint.graph, options)
    copied: list[tuple[_Value, fx.Node]] = []
    for value in sorted(values, key=lambda nodes: nodes[0]):
        base = value[0]
        nodes = set(value).union(*(view.users for view in value))
        last = max(places.last(n) for n in nodes if not is_backward(n) and n in places.at)
        reader = min(n for n in nodes if is_backward(n))
        first = places.at[reader]
        end, back = places.waits(last, first)
        if max(back, end) > first or end >= back:
            staying["backward needs them before a copy would be complete"] += 1
            continue
        device, phase = tensor_of(base).device, phase_of(base)
        out = _insert(joint, places.order[last + 1], base, phase, OFFLOAD, base)
        stored = _insert(joint, places.order[end], base, phase, WAIT_COPY, out, base)
        start = places.order[back] if back < first else reader
        reload = _insert(joint, start, base, Phase.BACKWARD, RELOAD, stored, device)
        read = _insert(joint, reader, base, Phase.BACKWARD, WAIT_COPY, reload, stored)
        copied.append((value, read))
    recompute(joint, {view for value, _ in copied for view in value[1:]})
    for (base, *_), read in copied:
        for reader in [n for n in base.users if is_backward(n)]:
            reader.replace_input_with(base, read)
    size = sum(tensor_of(read).nbytes for _, read in copied)
    joint.remarks.append(
        f"{len(copied)} values ({gib(size)} GiB) are in host memory between forward and backward"
    )
    joint.remarks += [f"{count} tagged values stay: {why}" for why, count in staying.items()]


def _values(
    joint: JointGraph, tagged: list[fx.Node], min_bytes: int, staying: Counter[str]
) -> list[_Value]:
    """Return the storages of the tagged nodes that can be offloaded; count why others cannot."""
    storages = value_storages(joint.graph)
    shown: dict[Storage, list[fx.Node]] = {s: [] for n in tagged for s in storages_in(storages[n])}
    for node in joint.graph.nodes:
        for storage in {s for s in storages_in(storages[node]) if s in shown}:
            shown[storage].append(node)
    writes = writes_of(joint.graph)
    parameters = {n for chain in unshard_chains(joint) for n in chain.nodes}
    returned = set(joint.output_node().all_input_nodes)
    devices = {t.device.type for n in joint.placeholders() for t in tensors_of(n)}

    def why_not(storage: Storage, nodes: list[fx.Node], complete: list[fx.Node]) -> str:
        # `nodes` have the storage; `complete` are those of forward whose result is all of it
        if storage[0].op != "call_function":
            return "memory of an input"
        if not any(is_backward(user) for node in nodes for user in node.users):
            return "backward does not read them, or computes them again"
        if not parameters.isdisjoint(nodes):
            return "parameters, which are gathered again instead"
        if not returned.isdisjoint(nodes):
            return "memory of an output"
        # backward may read the collective or the tuple from which the tensor came, or the tensor's
        # memory may be communicated again
        place = nodes.index(complete[0]) if complete else 0
        source_read = any(is_backward(user) for node in nodes[:place] for user in node.users)
        sent_again = any(is_wait(n) or is_collective(n) for n in nodes[place + 1 :])
        if not complete or source_read or sent_again:
            return "read in other ways than through one tensor"
        if writes.is_written(complete[0]):
            return "written in place"
        tensor = tensor_of(complete[0])
        if any(isinstance(size, torch.SymInt) for size in tensor.shape):
            return "of a size that is not fixed"
        if tensor.nbytes < min_bytes:
            return "smaller than OffloadActivationsOptions.min_bytes"
        if tensor.device.type == "cpu" and not devices <= {"cpu"}:
            return "in host memory already"
        if torch.empty_like(tensor).stride() != tensor.stride():
            return "with gaps in memory"
        return ""

    values = []
    for storage, nodes in shown.items():
        forward = [n for n in nodes if not is_backward(n)]
        tensors = [n for n in forward if isinstance(value_of(n), torch.Tensor)]
        complete = [n for n in tensors if not is_collective(n)]
        if why := why_not(storage, nodes, complete):
            staying[why] += 1
            continue
        values.append(forward[forward.index(complete[0]) :])
    return values


class _Places:
    """Where copies start and end: by number, before which of the nodes that compute. Views and
    copies are not counted, so that a graph with copies has the same places."""

    def __init__(self, graph: fx.Graph, options: OffloadActivationsOptions) -> None:
        self._options = options
        self.order: list[fx.Node] = []
        """The nodes that compute."""
        self.at: dict[fx.Node, int] = {}
        """By node, its number; of a view that of the next node that computes."""
        for node in graph.nodes:
            self.at[node] = len(self.order)
            if not is_free(node) and not starts_copy(node):
                self.order.append(node)
        forward = [n for n in self.order if not is_backward(n)]
        backward = [n for n in self.order if is_backward(n)]
        self._end = self.at[backward[0]] if backward else len(self.order) - 1
        """Where backward begins."""
        # where each block begins in forward, where the last one ends, and where each begins in
        # backward
        begins: list[dict[str, int]] = [{}, {}]
        for first, nodes in zip(begins, (forward, backward), strict=True):
            for node in nodes:
                if (block := block_of(module_of(node))) is not None:
                    first.setdefault(block, self.at[node])
        self._forward, self._backward = (sorted(first.values()) for first in begins)
        blocks = [n for n in forward if block_of(module_of(n)) is not None]
        self._forward += [self.at[n] + 1 for n in blocks[-1:]]

    def last(self, node: fx.Node) -> int:
        """Return the number of the last node that computes up to this one."""
        return self.at[node] - (self.order[self.at[node]] is not node)

    def waits(self, last: int, first: int) -> tuple[int, int]:
        """Return where a copy to the host is waited for and where the copy back starts, of a value
        that forward reads last at `last` and backward first at `first`."""
        place = bisect.bisect_right(self._forward, last) + self._options.finish_blocks
        end = self._forward[place] if place < len(self._forward) else max(self._end, last + 1)
        ahead = self._options.prefetch_blocks
        back = first
        if ahead and self._backward:
            place = bisect.bisect_right(self._backward, first) - 1 - ahead
            back = self._backward[place] if place >= 0 else min(self._end, first)
        return end, max(back, last + 1)


def _insert(
    joint: JointGraph, place: fx.Node, base: fx.Node, phase: Phase | None, op: Any, *args: Any
) -> fx.Node:
    """Insert a node of a value's copies before `place`."""
    with joint.graph.inserting_before(place):
        node = joint.graph.call_function(op, args)
    copy_annotations(base, node, phase=phase)
    infer_value(node)
    return node
