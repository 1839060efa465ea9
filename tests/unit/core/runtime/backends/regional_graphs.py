"""Random graphs with all that a cut into regions could break."""

import operator

from hypothesis import strategies as st

from graph_trainer.testing import Builder
from tests.unit.graphs import ALL_REDUCE, aten, c10d


def as_it_stands(module, examples):
    """In place of Inductor: the ops of the region one by one."""

    def run(boxed):
        values = tuple(boxed)
        boxed.clear()
        return module(*values)

    return run


SIDE = 4  # every value is a square matrix, so that any op takes any value

OPS = (
    *("sin", "add", "twins", "mean", "constant", "mm"),
    *("max", "split", "later", "take"),  # tuples, and results taken out of them later
    *("transpose", "expand", "flat", "none"),  # views
    *("write", "write a row", "random", "assert", "reduce"),
)
step = st.tuples(st.sampled_from(OPS), *[st.integers(0, 30)] * 2, st.integers(0, 1))
programs = st.lists(step, min_size=2, max_size=24)
"""(op, first operand, second operand, layer) of each node; operands count from the last value."""


def apply(b, op, x, y, layer):
    """Add the nodes of one step, and return the last."""

    def call(target, *args):
        return b.call(target, *args, module=f"layers.{layer}")

    def item(source, index):
        return call(operator.getitem, source, index)

    match op:
        case "sin":
            return call(aten.sin.default, x)
        case "add":
            return call(aten.add.Tensor, x, y)
        case "twins":  # equal results that are read in different places
            return call(aten.mul.Tensor, call(aten.cos.default, x), call(aten.cos.default, x))
        case "mean":
            return call(aten.sub.Tensor, x, call(aten.mean.dim, y, [-1], True))
        case "constant":
            return call(aten.mul.Tensor, x, call(aten.full.default, [SIDE], 0.5))
        case "mm":
            return call(aten.mm.default, x, y)
        case "max":
            return call(aten.add.Tensor, x, item(call(aten.max.dim, y, 0, True), 0))
        case "later":
            b.tuples.append(call(aten.max.dim, x, 0, True))
        case "take" if b.tuples:
            return call(aten.add.Tensor, x, item(b.tuples.pop(), 0))
        case "split":
            halves = call(aten.split.Tensor, x, 2)
            return call(aten.cat.default, [item(halves, 1), item(halves, 0)])
        case "transpose":
            return call(aten.t.default, x)
        case "expand":
            return call(aten.expand.default, call(aten.slice.Tensor, x, 0, 1, 2), [SIDE, SIDE])
        case "flat":
            return call(aten.view.default, call(aten.reshape.default, x, [-1]), [SIDE, SIDE])
        case "write":
            written = writable(call, x)
            memory = [n.meta["val"].untyped_storage()._cdata for n in (written, y)]
            if memory[0] == memory[1] and y is not written:  # torch refuses its parts
                y = call(aten.clone.default, y)
            return call(aten.add_.Tensor, written, y)
        case "write a row":
            call(aten.mul_.Tensor, call(aten.select.int, writable(call, x), 0, 1), 0.5)
        case "random":
            return call(aten.mul.Tensor, x, call(aten.rand_like.default, y))
        case "assert":
            call(aten._assert_async.msg, call(aten.all.default, call(aten.eq.Tensor, x, x)), "nan")
        case "reduce":
            started = call(ALL_REDUCE, x, "sum", b.group)
            return call(c10d.wait_tensor.default, started)
    return x


def writable(call, x):
    """The value, or a copy where it repeats its elements."""
    return call(aten.clone.default, x) if 0 in x.meta["val"].stride() else x


def random_graph(program, group):
    """Run a program of `programs` on a parameter, a batch and a buffer; two values come out."""
    b = Builder()
    b.group, b.tuples = group, []
    values = [b.parameter("p", SIDE, SIDE), b.input("x", SIDE, SIDE), b.buffer("s", SIDE, SIDE)]
    for op, first, second, layer in program:
        x, y = (values[-1 - place % len(values)] for place in (first, second))
        values.append(apply(b, op, x, y, layer))
    return b.joint(b.total(*values[-3:]), p=values[-1])
