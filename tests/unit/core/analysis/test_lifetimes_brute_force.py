"""`lifetimes` against runs that really allocate, on random graphs of ops that view, copy, write in
place or into buffers, return several results or communicate."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from torch import fx

from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_collective
from graph_trainer.core.graph.signature import Signature
from graph_trainer.testing import Builder
from tests.examples import examples
from tests.unit.core.analysis.run_and_count import RANKS, Allocating, measured, predicted
from tests.unit.graphs import aten, c10d


def val(node: fx.Node) -> torch.Tensor:
    return node.meta["val"]


class Program:
    """A graph that grows by steps. A step that its operands do not fit does nothing."""

    def __init__(self) -> None:
        self.b = Builder()
        self.values = [self.b.input("x", 4, 6), self.b.input("y", 4, 6), self.b.input("z", 24)]
        self.untaken: list[tuple[fx.Node, int]] = []
        self.unwaited: list[fx.Node] = []

    def step(self, name: str, one: int, two: int) -> None:
        x = self.values[one % len(self.values)]
        alike = [v for v in self.values if _like(val(v)) == _like(val(x))]
        y = alike[two % len(alike)]
        made = STEPS[name](self, x, y, two)
        self.values += [n for n in made if val(n).dtype is not torch.bool]  # no arithmetic

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.b.call(op, *args, **kwargs)

    def several(self, node: fx.Node) -> list[fx.Node]:
        """A node with several results, which are taken out at once, later or never."""
        self.untaken += [(node, place) for place in range(len(node.meta["val"]))]
        return []

    def take(self, which: int) -> list[fx.Node]:
        if not self.untaken:
            return []
        node = self.call(operator.getitem, *self.untaken.pop(which % len(self.untaken)))
        if any(map(is_collective, node.all_input_nodes)):
            self.unwaited.append(node)  # a coalesced one is waited for part by part
            return []
        return [node]

    def issued(self, node: fx.Node) -> list[fx.Node]:
        self.unwaited.append(node)
        return []

    def wait(self, which: int) -> list[fx.Node]:
        if not self.unwaited:
            return []
        started = self.unwaited.pop(which % len(self.unwaited))
        return [self.call(c10d.wait_tensor.default, started)]

    def into_buffers(self, op: Any, out: Any, names: tuple[str, ...], *args: Any) -> list[fx.Node]:
        """The `out=` variant of an op, into buffers of what the op itself gives."""
        with self.b.mode:
            like = op(*fx.map_arg(args, val))
        like = like if isinstance(like, tuple) else (like,)
        buffers = [
            self.call(aten.empty.memory_format, list(t.shape), dtype=t.dtype, device="cpu")
            for t in like
        ]
        node = self.call(out, *args, **dict(zip(names, buffers, strict=True)))
        return [node] if len(like) == 1 else self.several(node)

    def joint(self, returned: list[int]) -> JointGraph:
        while self.unwaited:
            self.values += self.wait(0)
        self.b.graph.output(tuple(self.values[i % len(self.values)] for i in returned))
        module = fx.GraphModule(self.b.root, self.b.graph)
        return JointGraph(module, Signature(tuple(self.b._inputs), ()))


def _like(tensor: torch.Tensor) -> object:
    return tensor.shape, tensor.dtype


def _no_overlap(node: fx.Node) -> bool:
    """Whether no two elements share memory, so that the node may be written in place."""
    return all(step for size, step in zip(val(node).shape, val(node).stride(), strict=True))


def _floating(node: fx.Node) -> bool:
    return val(node).dtype.is_floating_point


def _floating_elements(node: fx.Node) -> bool:
    return _floating(node) and _no_overlap(node)


Step = Callable[[Program, fx.Node, fx.Node, int], list[fx.Node]]
STEPS: dict[str, Step] = {}


def step(fits: Callable[[fx.Node], bool] = lambda x: True) -> Callable[[Step], Step]:
    def add(function: Step) -> Step:
        STEPS[function.__name__] = lambda p, x, y, n: function(p, x, y, n) if fits(x) else []
        return function

    return add


def simple(name: str, op: Any, *args: Any, fits=lambda x: True, **kwargs: Any) -> None:
    """A step that calls one op on x, with one tensor for a result."""
    STEPS[name] = lambda p, x, y, n: [p.call(op, x, *args, **kwargs)] if fits(x) else []


def several(name: str, op: Any, *args: Any, fits=lambda x: True) -> None:
    STEPS[name] = lambda p, x, y, n: p.several(p.call(op, x, *args)) if fits(x) else []


def rows(node: fx.Node) -> bool:
    return val(node).ndim > 0 and len(val(node)) > 1


def small_rows(node: fx.Node) -> bool:
    return rows(node) and val(node).numel() < 200


def even_rows(node: fx.Node) -> bool:
    return rows(node) and len(val(node)) % RANKS == 0 and val(node).is_contiguous()


def matrix(node: fx.Node) -> bool:
    return val(node).ndim == 2 and _floating(node)


def large(node: fx.Node) -> bool:
    return contiguous(node) and val(node).numel() > 8


def contiguous(node: fx.Node) -> bool:
    return val(node).is_contiguous()


NORM = (None, None, None, None, True, 0.1, 1e-5)
"""No weight, bias and statistics; training, momentum and epsilon."""

simple("neg", aten.neg.default)
simple("clone", aten.clone.default)
simple("detach", aten.detach.default)
simple("alias", aten.alias.default)
simple("turned", aten.transpose.int, 0, -1, fits=rows)
simple("permuted", aten.permute.default, [1, 0], fits=matrix)
simple("t", aten.t.default, fits=matrix)
simple("half", aten.slice.Tensor, 0, 0, 2, fits=rows)
simple("every_other", aten.slice.Tensor, 0, 0, 100, 2, fits=rows)
simple("select", aten.select.int, 0, 1, fits=rows)
simple("unsqueeze", aten.unsqueeze.default, 0, fits=lambda x: val(x).ndim < 4)
simple("squeeze", aten.squeeze.default)
simple("diagonal", aten.diagonal.default, fits=matrix)
simple("as_strided", aten.as_strided.default, [2, 2], [2, 1], 0, fits=large)
simple("flat_view", aten.view.default, [-1], fits=contiguous)
simple("unsafe_view", aten._unsafe_view.default, [-1], fits=contiguous)
simple("reshape", aten.reshape.default, [-1])
simple("flatten", aten.flatten.using_ints)
simple("contiguous", aten.contiguous.default)
simple("to_copy_same", aten._to_copy.default, dtype=torch.float32)
simple("to_copy_wider", aten._to_copy.default, dtype=torch.float64)
simple("to_float32", aten.to.dtype, torch.float32)
simple("to_float64", aten.to.dtype, torch.float64)
simple("add_", aten.add_.Tensor, 1, fits=_no_overlap)
simple("zero_", aten.zero_.default, fits=_no_overlap)
simple("sum", aten.sum.default)
simple("sum_rows", aten.sum.dim_IntList, [0], fits=rows)
simple("pad", aten.constant_pad_nd.default, [0, 0], fits=rows)
simple("softmax", aten._softmax.default, -1, False, fits=matrix)
several("split", aten.split.Tensor, 2, fits=rows)
several("unsafe_split", aten.unsafe_split.Tensor, 2, fits=rows)
several("unbind", aten.unbind.int, fits=rows)
several("sort", aten.sort.default, fits=rows)
several("topk", aten.topk.default, 1, fits=rows)
several("max", aten.max.dim, 0, fits=rows)
several("var_mean", aten.var_mean.correction, [0], fits=matrix)
several("aminmax", aten._aminmax.default)
several("batch_norm", aten.native_batch_norm.default, *NORM, fits=lambda x: matrix(x) and rows(x))
several("dropout", aten.native_dropout.default, 0.5, True, fits=_floating)
several("dropout_off", aten.native_dropout.default, 0.0, False, fits=_floating_elements)


@step()
def mul(p, x, y, n):
    return [p.call(aten.mul.Tensor, x, y)]


@step(_no_overlap)
def mul_(p, x, y, n):
    apart = p.call(aten.clone.default, y)  # what overlaps may not be written
    return [p.call(aten.mul_.Tensor, x, apart)]


@step(_no_overlap)
def copy_(p, x, y, n):
    apart = p.call(aten.clone.default, y)
    return [p.call(aten.copy_.default, x, apart)]


@step(lambda x: rows(x) and _no_overlap(x) and _floating(x) and val(x).dtype == torch.float32)
def index_put_(p, x, y, n):
    where = p.call(aten.zeros.default, [1], dtype=torch.int64, device="cpu")
    part = p.call(aten.select.int, p.call(aten.clone.default, y), 0, 0)
    return [p.call(aten.index_put_.default, x, [where], part)]


@step()
def expand(p, x, y, n):
    total = p.call(aten.sum.default, x)
    return [p.call(aten.expand.default, total, [3, 4])]


@step(small_rows)
def cat(p, x, y, n):
    return [p.call(aten.cat.default, [x, y])]


@step(matrix)
def split_with_sizes(p, x, y, n):
    return p.several(p.call(aten.split_with_sizes.default, x, [1, len(val(x)) - 1]))


@step(matrix)
def layer_norm(p, x, y, n):
    shape = [val(x).shape[1]]
    return p.several(p.call(aten.native_layer_norm.default, x, shape, None, None, 1e-5))


def writes(
    name: str,
    op: Any,
    out: Any,
    results: tuple[str, ...],
    args=lambda x, y: (x,),
    fits=lambda x: True,
) -> None:
    """A step that calls the `out=` variant of an op."""
    STEPS[name] = lambda p, x, y, n: (
        p.into_buffers(op, out, results, *args(x, y)) if fits(x) else []
    )


writes("mul_out", aten.mul.Tensor, aten.mul.out, ("out",), lambda x, y: (x, y))
writes("cat_out", aten.cat.default, aten.cat.out, ("out",), lambda x, y: ([x, y],), small_rows)
writes("sort_out", aten.sort.default, aten.sort.values, ("values", "indices"), fits=rows)
MAX, MEAN = (
    (aten.max.dim, aten.max.dim_max),
    (aten.var_mean.correction, aten.var_mean.correction_out),
)
writes("max_out", *MAX, ("max", "max_values"), lambda x, y: (x, 0), rows)
writes("var_mean_out", *MEAN, ("out0", "out1"), lambda x, y: (x, [0]), matrix)


@step()
def empty_strided(p, x, y, n):
    return [p.call(aten.empty_strided.default, [3, 4], [8, 2], device="cpu")]


STEPS["take"] = lambda p, x, y, n: p.take(n)
STEPS["wait"] = lambda p, x, y, n: p.wait(n)


@step(small_rows)
def gather_out(p, x, y, n):
    shape = [len(val(x)) * RANKS, *val(x).shape[1:]]
    out = p.call(aten.empty.memory_format, shape, dtype=val(x).dtype, device="cpu")
    op = c10d.all_gather_into_tensor_out.default
    return p.issued(p.call(op, x, RANKS, "0", out=out))


def communicates(name: str, op: Any, *args: Any, fits=lambda x: True) -> None:
    """A step that starts a collective of x, or of x and y together."""
    if "coalesced" in name:
        STEPS[name] = lambda p, x, y, n: p.several(p.call(op, [x, y], *args)) if fits(x) else []
    else:
        STEPS[name] = lambda p, x, y, n: p.issued(p.call(op, x, *args)) if fits(x) else []


communicates("gather", c10d.all_gather_into_tensor.default, RANKS, "0", fits=small_rows)
communicates(
    "gather_coalesced", c10d.all_gather_into_tensor_coalesced.default, RANKS, "0", fits=small_rows
)
communicates(
    "reduce_scatter", c10d.reduce_scatter_tensor.default, "sum", RANKS, "0", fits=even_rows
)
communicates("all_reduce", c10d.all_reduce.default, "sum", "0")
communicates("all_reduce_", c10d.all_reduce_.default, "sum", "0", fits=_no_overlap)
communicates("all_reduce_coalesced", c10d.all_reduce_coalesced.default, "sum", "0")

LIKELY = sorted(STEPS) + ["take"] * 16 + ["wait"] * 4
numbers = st.integers(0, 40)
programs = st.tuples(
    st.lists(st.tuples(st.sampled_from(LIKELY), numbers, numbers), min_size=12, max_size=30),
    st.lists(numbers, max_size=4),
)


def build(program) -> JointGraph:
    steps, returned = program
    built = Program()
    for name, one, two in steps:
        built.step(name, one, two)
    return built.joint(returned)


def assert_predicted(joint: JointGraph) -> None:
    runs = lifetimes(joint).live_bytes, Allocating(joint).live
    pairs = zip(joint.graph.nodes, *runs, strict=True)
    wrong = [f"{n.format_node()}: predicted {p}, measured {m}" for n, p, m in pairs if p != m]
    assert not wrong, "\n".join([*wrong, str(joint.graph)])
    if not any(map(is_collective, joint.graph.nodes)):  # the generated code runs in one process
        in_code, expected = measured(joint), predicted(joint)
        if len(in_code) == len(expected):  # no op is composed of others, which are counted instead
            assert in_code == expected


# Programs by hand: the first result of a step is value 3, as there are three inputs.
@examples(150, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs)
@example(([("neg", 0, 0), ("sort_out", 3, 0), ("take", 0, 1), ("sum", 0, 0)], [0]))
@example(([("every_other", 0, 0), ("dropout_off", 3, 0)], []))
# inputs are not counted
@example(([("flat_view", 0, 0), ("sum", 3, 0)], [4]))
# a view keeps the whole storage
@example(([("neg", 0, 0), ("half", 3, 0), ("sum", 4, 0), ("sum", 4, 0)], [6]))
# unused results live as long as their tuple
@example(([("sort", 0, 0), ("neg", 0, 0), ("take", 0, 0), ("sum", 4, 0)], [5]))
# a collective keeps its input until the wait, or to the end
@example(([("neg", 0, 0), ("gather", 3, 0), ("neg", 0, 0), ("wait", 0, 0), ("sum", 5, 0)], [6]))
@example(([("neg", 0, 0), ("all_reduce_coalesced", 3, 0), ("neg", 0, 0)], [4]))
def test_predicted_memory_is_what_a_run_allocates(program):
    assert_predicted(build(program))
