"""Regions of compute are compiled, equal ones once; all else runs in the graph's order."""

import weakref

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graph_trainer.core.analysis.regions import find_regions
from graph_trainer.core.graph.annotations import tensor_of
from graph_trainer.core.runtime.backends import eager
from graph_trainer.core.runtime.backends.regional.regional import (
    checked,
    compile_graph,
    program_key,
)
from graph_trainer.core.torch_private import FakeTensorMode, TorchDispatchMode
from graph_trainer.testing import Builder
from tests.examples import examples
from tests.unit.core.runtime.backends.regional_graphs import as_it_stands, programs, random_graph
from tests.unit.graphs import ALL_REDUCE, aten, captured_decoder, fake_world


def inputs_of(joint):
    tensors = map(tensor_of, joint.placeholders())
    return [torch.rand(t.shape).to(t.dtype) for t in tensors]


def results_of(run, joint):
    """Outputs of two calls, and what they leave in the inputs."""
    torch.manual_seed(0)
    values = inputs_of(joint)
    first = run(list(values))
    return [t.clone() for t in (*first, *run(list(values)), *values)]


def assert_as_eager(joint, run, **tolerance):
    expected, found = results_of(eager.compile_graph(joint), joint), results_of(run, joint)
    for one, other in zip(expected, found, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, equal_nan=True, **tolerance)


@examples(100, suppress_health_check=list(HealthCheck))
@given(program=programs)
@example(program=[(op, 0, 0, 0) for op in ("sin", "sin", "later", "reduce", "take")])
def test_a_graph_in_regions_is_the_graph(program):
    joint = random_graph(program, group())
    with torch.no_grad():
        assert_as_eager(joint, compile_graph(joint, as_it_stands), rtol=0, atol=0)


@pytest.mark.full
@examples(4, suppress_health_check=list(HealthCheck))
@given(program=programs)
@example(program=[("transpose", 0, 0, 0), ("sin", 0, 0, 0), ("write", 1, 2, 0)])
def test_a_compiled_graph_is_close_to_the_graph(program):
    joint = random_graph(program, group())
    assert_as_eager(joint, compile_graph(joint))


def group():
    """A group of one rank, whose collectives leave every number as it is."""
    fake_world(1)
    return "0"


# --- sharing ------------------------------------------------------------------------------------


def kinds(layers):
    return len(set(map(program_key, find_regions(captured_decoder(layers=layers).graph))))


def test_more_layers_need_no_more_programs():
    assert 0 < kinds(3) == kinds(4)


def test_a_view_before_the_first_result_makes_no_other_program():
    def key(apart):
        b = Builder()
        x, y = b.input("x", 4, 4), b.input("y", 4, 4)
        reduced = b.waited(ALL_REDUCE, b.call(aten.neg.default, y), "sum", "0")
        other = b.call(aten.t.default, x)
        if apart:
            b.waited(ALL_REDUCE, y, "sum", "0")
        b.graph.output(b.call(aten.sin.default, b.call(aten.mul.Tensor, reduced, other)))
        (found,) = find_regions(b.graph)
        return program_key(found)

    assert key(apart=False) == key(apart=True)


@pytest.mark.parametrize(
    "change", ["same", "constant", "type of constant", "operands", "strides", "dtype", "output"]
)
def test_a_program_is_shared_exactly_by_what_it_serves(change):
    def region(changed):
        b = Builder()
        dtype = torch.float64 if change == "dtype" and changed else torch.float32
        x, y = (b.input(name, 4, 4, dtype=dtype) for name in "xy")
        if change == "strides" and changed:
            x = b.call(aten.t.default, x)
        scale = {"constant": 3, "type of constant": 2.0}.get(change, 2) if changed else 2
        first = b.call(aten.mul.Tensor, x, scale)
        pair = (y, first) if change == "operands" and changed else (first, y)
        total = b.call(aten.sum.default, b.call(aten.sub.Tensor, *pair))
        out = first if change == "output" and changed else x
        b.graph.output((total, b.waited(ALL_REDUCE, out, "sum", "0")))
        (found,) = find_regions(b.graph)
        return program_key(found)

    assert (region(False) == region(True)) == (change == "same")


# --- what a program may do ----------------------------------------------------------------------


def test_results_with_memory_or_strides_of_their_own_are_copied():
    def run(boxed):
        (x,) = boxed
        made = x + 1
        return x, made, made[:], (x + 2).t(), x + 3

    call = checked(run, [(2, 1)] * 5)
    for _ in range(2):
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        results = call([x])
        assert len({t.untyped_storage().data_ptr() for t in (x, *results)}) == 6
        assert all(t.stride() == (2, 1) for t in results)
        assert [t[0, 1].item() for t in results] == [2.0, 3.0, 3.0, 5.0, 5.0]


def test_a_result_at_the_address_of_an_input_that_is_gone_is_no_copy():
    memory = np.ones(4, np.float32)
    made = []

    def run(boxed):
        boxed.clear()
        made.append(torch.from_numpy(memory))  # as the allocator may give it: another storage
        return (made[-1],)

    call = checked(run, [(1,)])
    for _ in range(2):
        (result,) = call([torch.from_numpy(memory)])
        assert result is made[-1]


def test_a_program_frees_its_inputs():
    """What only a region reads is alive until the region says so, not until it ends."""
    b = Builder()
    x = b.input("x", 4)
    reduced = b.waited(ALL_REDUCE, x, "sum", group())
    total = b.call(aten.sum.default, b.call(aten.sin.default, b.call(aten.cos.default, reduced)))
    alive = []

    def program(module, examples):
        def run(boxed):
            value = weakref.ref(boxed[0])
            result = as_it_stands(module, examples)([t.clone() for t in boxed])
            boxed.clear()
            alive.append(value() is not None)
            return result

        return run

    compile_graph(b.joint(total), program)([torch.ones(4)])
    assert alive == [False]


def test_collectives_run_in_the_order_of_the_graph():
    joint = captured_decoder(layers=2)
    values = inputs_of(joint)

    def issued(run):
        with Recorded() as recorded:
            run([t.clone() for t in values])
        return recorded.calls

    wanted = issued(eager.compile_graph(joint))
    assert len(wanted) > 10 and issued(compile_graph(joint, as_it_stands)) == wanted


class Recorded(TorchDispatchMode):
    """Notes the collectives and waits, with the shapes that they take."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "_c10d_functional":
            self.calls.append((op, args[0].shape))
        return op(*args, **(kwargs or {}))


def test_what_has_a_shape_that_depends_on_data_runs_as_it_stands():
    b = Builder()
    b.mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    x = b.input("x", 4)
    kept = b.call(aten.masked_select.default, x, b.call(aten.gt.Scalar, x, 0.5))
    short = b.call(aten.cos.default, b.call(aten.sin.default, kept))
    fixed = b.call(aten.cos.default, b.call(aten.sin.default, x))
    joint = b.joint(b.total(short, fixed))
    inside = {node for region in find_regions(joint.graph) for node in region.nodes}
    assert fixed in inside and inside.isdisjoint({kept, short})
    assert_as_eager(joint, compile_graph(joint, as_it_stands), rtol=0, atol=0)


def test_a_conjugated_view_enters_no_region():
    b = Builder()
    x = b.input("x", 4, dtype=torch.complex64)
    view = b.call(aten._conj.default, x)
    b.waited(ALL_REDUCE, view, "sum", "0")
    product = b.call(aten.abs.default, b.call(aten.mul.Tensor, x, view))
    b.graph.output((b.call(aten.neg.default, b.call(aten.sin.default, product)),))
    assert find_regions(b.graph) == []
