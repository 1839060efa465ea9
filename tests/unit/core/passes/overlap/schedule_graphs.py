"""Random graphs of training steps to schedule: sharded parameters, gathers, reductions, tensor
parallelism, writes in place, random numbers, results that several read."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from hypothesis import strategies as st
from torch import fx

from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.annotations import SEPARATOR, Role, role_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_wait
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.context import PassContext, RunSettings
from graph_trainer.core.passes.overlap.schedule_graph import ScheduleGraph
from graph_trainer.core.passes.overlap.schedule_overlap import (
    ScheduleOverlapOptions,
    put_in_order,
    schedule_overlap,
)
from graph_trainer.core.passes.overlap.scheduler import Scheduler
from graph_trainer.core.simulation.collective_costs import scratch_bytes
from graph_trainer.core.simulation.simulate import OtherMemory
from graph_trainer.testing import Builder
from tests.unit.core.simulation.machines import machine
from tests.unit.graphs import ALL_REDUCE, BACKWARD, FORWARD, GATHER, SCATTER, aten, c10d, fake_world

FSDP, REPLICATE, TENSOR = (0, 1), (0, 2), (0, 4)


def make_groups() -> dict[tuple[int, ...], str]:
    """Names of the groups of rank 0 in a world of eight, which stays until the test ends."""
    fake_world(8)
    return {ranks: dist.new_group(ranks).group_name for ranks in (FSDP, REPLICATE, TENSOR)}


_OPS = (
    "gather", "gather", "bucket", "use", "use", "reduce", "reduce", "reduce_twice", "reduce_tensor",
    "reduce_late", "reduce_late", "start", "tensor", "tensor", "wait", "add", "relu", "transpose",
    "split", "write", "random", "sum", "open", "take", "take",
)  # fmt: skip

_number = st.integers(0, 99)
programs = st.tuples(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(_OPS), _number, _number), min_size=1, max_size=40),
    st.integers(0, 40),
)
"""Rows of each parameter's shard; what happens, and with which of the values; where backward
begins."""

late_reductions = st.tuples(
    st.lists(st.integers(1, 2), min_size=1, max_size=3),
    st.lists(
        st.tuples(
            st.sampled_from(
                ["gather", "use", "use", "reduce_late", "reduce_late", "start", "tensor", "wait"]
            ),
            _number,
            _number,
        ),
        min_size=15,
        max_size=40,
    ).map(lambda steps: [("gather", 0, 0), *steps]),
    st.just(0),
)
"""Programs of backward alone, whose reductions start at its end."""

Program = tuple[list[int], list[tuple[str, int, int]], int]


class _Step:
    def __init__(self, rows: list[int], groups: dict[tuple[int, ...], str]) -> None:
        self.b = Builder()
        self.groups = groups
        self.call = self.b.call
        self.rows = rows
        self.shards = [self.b.parameter(f"p{i}", r, 4) for i, r in enumerate(rows)]
        self.values = [self.b.input("x", 3, 4), self.b.input("y", 2, 4)]
        self.weights: list[tuple[int, fx.Node]] = []
        self.under_way: list[fx.Node] = []
        self.grads: dict[int, fx.Node] = {}
        self.to_start: list[Callable[[], None]] = []
        self.tuples: list[fx.Node] = []

    def value(self, number: int) -> fx.Node:
        return self.values[number % len(self.values)]

    def gather(self, one: int, two: int) -> None:
        index = one % len(self.rows)
        how = {"role": Role.UNSHARD, "parameter": f"p{index}"}
        shard = self.shards[index]
        for _ in range(two % 3):
            shard = self.call(aten.clone.default, shard, **how)
        self.weights.append((index, self.b.waited(GATHER, shard, 2, self.groups[FSDP], **how)))

    def bucket(self, one: int, two: int) -> None:
        """Two parameters in one gather."""
        indices = [one % len(self.rows), two % len(self.rows)]
        how = {"role": Role.UNSHARD, "parameter": SEPARATOR.join(f"p{i}" for i in indices)}
        sizes = [self.rows[i] * 4 for i in indices]
        copies = [self.call(aten.clone.default, self.shards[i], **how) for i in indices]
        flat = [
            self.call(aten.view.default, copied, [size], **how)
            for copied, size in zip(copies, sizes, strict=True)
        ]
        packed = self.call(aten.cat.default, flat, **how)
        full = self.b.waited(GATHER, packed, 2, self.groups[FSDP], **how)
        both = self.call(aten.view.default, full, [2, sum(sizes)], **how)
        parts = self.call(aten.split_with_sizes.default, both, sizes, 1, **how)
        for place, index in enumerate(indices):
            part = self.call(operator.getitem, parts, place, **how)
            part = self.call(aten.clone.default, part, **how)
            part = self.call(aten.view.default, part, [2 * self.rows[index], 4], **how)
            self.weights.append((index, part))

    def use(self, one: int, two: int) -> None:
        if self.weights:
            _, weight = self.weights[one % len(self.weights)]
            turned = self.call(aten.t.default, weight)
            hidden = self.call(aten.mm.default, self.value(two), turned)
            self.values.append(self.call(aten.mm.default, hidden, weight))

    def reduce(
        self, one: int, two: int, first: Any = None, then: Any = None, late: bool = False
    ) -> None:
        """Scatter a gradient, after or before a sum over another group, now or late."""
        whole = first is not None  # only the first parameter is as large on every rank of TENSOR
        weights = [each for each in self.weights if each[0] == 0 or not whole]
        if not weights:
            return
        index, weight = weights[one % len(weights)]
        value = self.value(two)
        hidden = self.call(aten.mm.default, weight, self.call(aten.t.default, value))
        grad = self.call(aten.mm.default, hidden, value)
        self.to_start.append(lambda: self._start(index, grad, two, first, then))
        if not late:
            self.to_start.pop()()

    def start(self, one: int, _: int) -> None:
        """Start a reduction that is late."""
        if self.to_start:
            self.to_start.pop(one % len(self.to_start))()

    def _start(self, index: int, grad: fx.Node, two: int, first: Any, then: Any) -> None:
        how = {"role": Role.REDUCE_GRAD, "parameter": f"p{index}"}
        if two % 2:
            grad = self.call(aten.clone.default, grad, **how)
        grad = self.summed(grad, first, how)
        mine = self.b.waited(SCATTER, grad, "sum", 2, self.groups[FSDP], **how)
        mine = self.summed(mine, then, how)
        mine = self.call(aten.div.Scalar, mine, 2.0, **how)
        if index in self.grads:  # a tied parameter
            mine = self.call(aten.add.Tensor, self.grads[index], mine, **how)
        self.grads[index] = mine

    def summed(self, grad: fx.Node, ranks: Any, how: dict[str, Any]) -> fx.Node:
        if ranks is None:
            return grad
        return self.b.waited(ALL_REDUCE, grad, "sum", self.groups[ranks], **how)

    def tensor(self, one: int, two: int) -> None:
        group, value = self.groups[TENSOR], self.value(one)
        rows = value.meta["val"].shape[0]
        if two % 3 == 0:
            start = self.call(ALL_REDUCE, value, "sum", group)
        elif two % 3 == 1 or rows % 2:
            start = self.call(GATHER, value, 2, group)
        else:
            start = self.call(SCATTER, value, "sum", 2, group)
        self.under_way.append(start)
        if two % 2:
            self.wait(two, 0)

    def wait(self, one: int, _: int) -> None:
        if self.under_way:
            start = self.under_way.pop(one % len(self.under_way))
            self.values.append(self.call(c10d.wait_tensor.default, start))

    def other(self, op: str, one: int, two: int) -> None:
        x = self.value(one)
        if op == "add":
            row = self.call(aten.sum.dim_IntList, self.value(two), [0], True)
            self.values.append(self.call(aten.add.Tensor, x, row))
        elif op == "transpose":
            twice = self.call(aten.t.default, self.call(aten.t.default, x))
            self.values.append(twice)
        elif op == "split":
            parts = self.call(aten.split.Tensor, x, 1)
            self.values.append(self.call(operator.getitem, parts, 0))
        elif op == "open":
            self.tuples.append(self.call(aten.max.dim, x, 0, True))
        elif op == "take":  # a result of a tuple that another value of the step may lie before
            if self.tuples:
                best = self.call(operator.getitem, self.tuples.pop(two % len(self.tuples)), 0)
                self.values.append(self.call(aten.add.Tensor, x, best))
        elif op == "write":
            self.values.append(self.call(aten.add_.Tensor, x, 1))
        elif op == "random":
            self.values.append(self.call(aten.rand_like.default, x))
        elif op == "sum":
            self.values.append(self.call(aten.mul.Tensor, x, self.call(aten.sum.default, x)))
        else:
            self.values.append(self.call(aten.relu.default, x))

    def joint(self) -> JointGraph:
        self.b.phase = BACKWARD
        while self.under_way:
            self.wait(0, 0)
        while self.to_start:
            self.start(0, 0)
        loss = self.call(aten.sum.default, self.values[-1])
        return self.b.joint(loss, **{f"p{i}": grad for i, grad in self.grads.items()})


def step_of(program: Program, groups: dict[tuple[int, ...], str]) -> JointGraph:
    """The graph of a program."""
    rows, steps, backward_from = program
    step = _Step(rows, groups)
    for place, (op, one, two) in enumerate(steps):
        step.b.phase = BACKWARD if place >= backward_from else FORWARD
        if op == "reduce_twice":
            step.reduce(one, two, then=REPLICATE)
        elif op == "reduce_tensor":
            step.reduce(one, two, first=TENSOR)
        elif op == "reduce_late":
            step.reduce(one, two, late=True)
        elif op in ("gather", "bucket", "use", "reduce", "start", "tensor", "wait"):
            getattr(step, op)(one, two)
        else:
            step.other(op, one, two)
    return step.joint()


def options(**changes: Any) -> tuple[ScheduleOverlapOptions, PassContext]:
    """Options of the pass, and its context on some machine."""
    hardware = machine(**changes.pop("machine", {}))
    other = OtherMemory(fused=changes.pop("fused", False))
    context = PassContext(settings=RunSettings(other_memory=lambda joint: other), hardware=hardware)
    return ScheduleOverlapOptions(**changes), context


def peak_bytes(joint: JointGraph, device: str = "cuda") -> int:
    """The most bytes that the graph has allocated at once."""
    return lifetimes(joint, scratch=scratch_bytes(joint, device)).peak_bytes


def scheduled(joint: JointGraph, growth: int | None = None, **changes: Any) -> JointGraph:
    """A copy, scheduled: with a growth in the order in which the peak of what the graph allocates
    grows by that many bytes at most, whatever the machine has."""
    joint = copy_graph(joint)
    given, context = options(**changes)
    if growth is None:
        schedule_overlap(joint, given, context)
    else:
        fused = context.settings.other_memory(joint).fused
        graph = ScheduleGraph(joint, context.hardware_for(joint), fused)
        put_in_order(graph, Scheduler(graph, given, growth).run())
    joint.validate()
    return joint


def reductions(joint: JointGraph) -> list[fx.Node]:
    """Those of gradients that nothing else has reduced before."""
    return [
        c.node
        for c in collectives(joint)
        if c.role is Role.REDUCE_GRAD and c.ranks == FSDP and not is_wait(c.node.args[0])
    ]


def products_before_starts(joint: JointGraph) -> dict[str, tuple[int, int]]:
    """By reduction, the matrix products that run before it starts: since all that it reads is
    there and the reduction before it has started, and since all that it reads is there."""
    place = {node: index for index, node in enumerate(joint.graph.nodes)}
    is_product = [node.target is aten.mm.default for node in joint.graph.nodes]
    found = {}
    last = 0
    for node in reductions(joint):
        prepares, inputs = [node], []
        for each in prepares:
            for source in each.all_input_nodes:
                (prepares if role_of(source) is Role.REDUCE_GRAD else inputs).append(source)
        there = max(place[source] for source in inputs) + 1
        start = place[node]
        found[node.name] = sum(is_product[max(there, last) : start]), sum(is_product[there:start])
        last = start
    return found
