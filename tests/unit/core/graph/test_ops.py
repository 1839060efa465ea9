"""What ops do besides computing: writes, aliases, random numbers."""

import operator

import pytest
import torch
from torch import fx

from graph_trainer.core.graph.ops import (
    aliased_input,
    argument,
    draws,
    has_effect,
    is_collective,
    is_random,
    is_wait,
    storage_roots,
    storages_in,
    value_storages,
    written_arguments,
)
from graph_trainer.core.graph.writes import writes_of
from graph_trainer.testing import Builder
from tests.unit.graphs import aten, c10d

FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default


class Graph(Builder):
    def __init__(self):
        super().__init__()
        self.x = self.input("x", 4)
        self.f = self.call

    def roots(self):
        return storage_roots(self.graph)


def test_arguments_are_found_wherever_they_were_passed():
    g = Graph()
    by_place = g.f(aten.slice.Tensor, g.x, 0, 1)
    by_name = g.f(aten.slice.Tensor, g.x, start=1)
    assert argument(by_place, "start") == argument(by_name, "start") == 1
    assert argument(by_name, "dim") == 0 and argument(by_name, "step") == 1
    assert argument(by_name, "nonsense", "default") == "default"
    assert argument(g.x, "self") is None


# --- random --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op, args, random",
    [
        (aten.relu.default, (), False),
        (aten.t.default, (), False),
        (aten.native_dropout.default, (0.5, True), True),
        (aten.native_dropout.default, (0.5, False), False),
        # both draw, whatever the probability
        (aten.native_dropout.default, (0.0, True), True),
        (aten.bernoulli.p, (0.0,), True),
        # these carry torch's tag of random ops even without dropout
        (FLASH, (0.0,), False),
        (FLASH, (0.1,), True),
        (FLASH, (), False),
    ],
)
def test_an_op_is_random_where_it_draws(op, args, random):
    g = Graph()
    inputs = [g.input("q", 1, 2, 4, 8)] * 3 if op is FLASH else [g.x]
    assert is_random(g.f(op, *inputs, *args)) is random
    assert not is_random(g.x)


def test_an_op_that_is_given_what_was_drawn_draws_nothing():
    op = aten._scaled_dot_product_cudnn_attention_backward.default
    assert draws(op, (), {"dropout_p": 0.1})
    assert not draws(op, (), {"dropout_p": 0.1, "philox_seed": object()})


# --- writes --------------------------------------------------------------------------------


def test_writes_that_schemas_declare():
    g = Graph()
    out = g.input("out", 4)
    assert written_arguments(g.f(aten.add_.Tensor, g.x, 1)) == [g.x]
    assert written_arguments(g.f(aten.add.out, g.x, g.x, out=out)) == [out]
    assert written_arguments(g.f(aten._foreach_add_.Scalar, [g.x, out], 1)) == [g.x, out]
    assert written_arguments(g.f(aten.add.Tensor, g.x, 1)) == []


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("keywords", [False, True])
def test_batch_norms_statistics_are_written_while_it_trains(keywords, training):
    op = aten.native_batch_norm.default
    g = Graph()
    x, mean, var = g.input("rows", 3, 4), g.input("mean", 4), g.input("var", 4)
    given = (x, None, None, mean, var, training, 0.1, 1e-5)
    named = dict(zip([a.name for a in op._schema.arguments], given, strict=True))
    node = g.f(op, **named) if keywords else g.f(op, *given)
    assert written_arguments(node) == ([mean, var] if training else [])


def test_synchronised_batch_norm_writes_its_statistics_too():
    g = Graph()
    m, i, mean, var, counts = (g.input(n, 4) for n in ("m", "i", "mean", "var", "counts"))
    op = aten.batch_norm_gather_stats_with_counts.default
    node = g.graph.call_function(op, (g.x, m, i, mean, var, 0.1, 1e-5, counts))
    assert written_arguments(node) == [mean, var]


def test_collectives_of_the_old_kind_write_what_they_are_given():
    g = Graph()
    node = g.graph.call_function(torch.ops.c10d.allreduce_.default, ([g.x], None, None, None))
    assert is_collective(node) and has_effect(node) and written_arguments(node) == [g.x]


def test_last_writes_follow_views_and_places():
    g = Graph()
    made = g.f(aten.exp.default, g.x)
    view = g.f(aten.view.default, made, [2, 2])
    first = g.f(aten.add_.Tensor, view, 1)
    middle = g.f(aten.neg.default, g.x)
    second = g.f(aten.mul_.Tensor, made, 2)
    end = g.f(aten.sum.default, middle)
    g.f(aten.add_.Tensor, g.x, 1)
    writes = writes_of(g.graph)
    assert writes.between(made, None, view) is writes.between(view, None, made) is second
    assert writes.between(made, middle, made) is first
    assert writes.between(first, middle, made) is None
    assert writes.between(first, second, made) is None  # not before itself
    assert writes.between(middle, end, view) is second
    assert writes.between(second, None, made) is None
    assert writes.is_written(made) and not writes.is_written(middle)
    assert writes.written_inputs() == {g.x}


# --- storages ------------------------------------------------------------------------------


def test_views_writes_and_waits_live_in_the_storage_of_what_they_read():
    g = Graph()
    made = g.f(aten.exp.default, g.x)
    gathered = g.f(c10d.all_reduce.default, made, "sum", "0")
    chain = [
        g.f(aten.view.default, made, [2, 2]),
        g.f(aten._unsafe_view.default, made, [2, 2]),
        g.f(aten.add_.Tensor, made, 1),
        g.f(aten.slice.Tensor, made, 0, 1, 3),
        g.f(aten.detach.default, made),
    ]
    wait = g.f(c10d.wait_tensor.default, gathered)
    roots = g.roots()
    assert {roots[n] for n in chain} == {(made, 0)}
    assert roots[wait] == (gathered, 0) and is_wait(wait)
    assert roots[made] == (made, 0) and roots[g.x] == (g.x, 0)


@pytest.mark.parametrize(
    "op, args",
    [
        (aten.split.Tensor, (2,)),
        (aten.split_with_sizes.default, ([1, 3],)),
        (aten.unbind.int, ()),
        (aten.unsafe_split.Tensor, (2,)),
        (aten.unsafe_split_with_sizes.default, ([1, 3],)),
    ],
)
def test_the_parts_of_a_split_live_in_its_input(op, args):
    g = Graph()
    made = g.f(aten.exp.default, g.x)
    parts = g.f(op, made, *args)
    part = g.f(operator.getitem, parts, 1)
    assert aliased_input(parts) is made
    assert g.roots()[part] == g.roots()[parts] == (made, 0)


def test_the_results_of_a_multi_output_op_are_storages_of_their_own():
    g = Graph()
    result = g.f(aten.sort.default, g.x)
    values, indices = (g.f(operator.getitem, result, i) for i in (0, 1))
    roots = g.roots()
    assert (roots[values], roots[indices]) == ((result, 0), (result, 1))


def test_a_collective_in_place_on_a_list_gives_each_storage_back():
    g = Graph()
    one, two = g.f(aten.exp.default, g.x), g.f(aten.neg.default, g.x)
    reduced = g.f(c10d.all_reduce_coalesced_.default, [one, two], "sum", "0")
    parts = [g.f(operator.getitem, reduced, i) for i in (0, 1)]
    assert [g.roots()[p] for p in parts] == [(one, 0), (two, 0)]
    assert written_arguments(reduced) == [one, two]


EVEN, TURNED = torch.randn(2, 3), torch.randn(3, 2).t()


@pytest.mark.parametrize(
    "x, op, args",
    [
        (EVEN, aten._unsafe_view.default, ([6],)),
        (EVEN, aten.split.Tensor, (1,)),
        (EVEN, aten.unsafe_split.Tensor, (1,)),
        (EVEN, aten.unsafe_split_with_sizes.default, ([1, 1],)),
        (EVEN, aten.expand.default, ([2, 3],)),
        # only where they must, they copy
        (EVEN, aten.reshape.default, ([6],)),
        (TURNED, aten.reshape.default, ([6],)),
        (TURNED, aten.reshape.default, ([2, 3, 1],)),
        (EVEN, aten.contiguous.default, ()),
        (TURNED, aten.contiguous.default, ()),
        (EVEN, aten.to.dtype, (torch.float32,)),
        (EVEN, aten.to.dtype, (torch.float64,)),
        (EVEN, aten.to.dtype, (torch.float32, False, True)),
    ],
)
def test_an_op_aliases_its_input_where_its_kernel_does(x, op, args):
    g = Graph()
    made = g.f(aten.exp.default, g.input("square", 2, 3))
    if x is TURNED:
        made = g.f(aten.t.default, g.f(aten.exp.default, g.input("turned", 3, 2)))
    result = op(x, *args)
    first = result[0] if isinstance(result, (list, tuple)) else result
    shared = first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert aliased_input(g.f(op, made, *args)) is (made if shared else None)


def test_a_graph_of_ordinary_functions_is_no_obstacle():
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(operator.add, (x, 1))
    assert written_arguments(node) == [] and aliased_input(node) is None
    assert has_effect(node) and not is_random(node)


# --- several results -----------------------------------------------------------------------


def test_each_out_buffer_is_the_storage_of_its_own_result():
    g = Graph()
    values = g.f(aten.empty.memory_format, [4])
    indices = g.f(aten.empty.memory_format, [4], dtype=torch.int64)
    result = g.f(aten.sort.values, g.x, values=values, indices=indices)
    taken = [g.f(operator.getitem, result, i) for i in (0, 1, -1)]
    roots, held = g.roots(), value_storages(g.graph)
    assert [roots[t] for t in taken] == [(values, 0), (indices, 0), (indices, 0)]
    assert list(storages_in(held[result])) == [(values, 0), (indices, 0)]
