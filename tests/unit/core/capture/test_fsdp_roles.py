"""Roles found by structure alone, in graphs that nothing annotated."""

import pytest
import torch
from torch import nn

from graph_trainer.core.capture.fsdp_roles import find_fsdp_roles
from graph_trainer.core.graph.annotations import (
    Role,
    annotate_node,
    annotation,
    parameter_of,
    role_of,
)
from tests.unit.graphs import BACKWARD, Builder, aten, c10d, captured, captured_decoder, code

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "wait_tensor")


def strip(joint):
    for node in joint.graph.nodes:
        custom = node.meta.get("custom")
        if custom:
            kept = {k: v for k, v in custom.items() if not k.startswith("fsdp")}
            node.meta["custom"] = kept


def roles(joint):
    return {
        n.name: (role_of(n), parameter_of(n))
        for n in joint.graph.nodes
        if any(word in str(n.target) for word in COLLECTIVES)
    }


def prepared(joint):
    """What lies in front of the gathers."""
    return {n.name for n in joint.graph.nodes if role_of(n) is Role.UNSHARD}


def graphs():
    torch.manual_seed(0)
    yield "even", captured_decoder()
    yield "checkpointed", captured_decoder(checkpointed=True)
    uneven = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5))
    yield "uneven", captured(uneven, torch.randn(2, 5), rank=2)
    yield "replicated", captured_decoder(fsdp={"mode": "replicate"})


def test_what_is_found_is_what_capture_wrote():
    for name, joint in graphs():
        written = roles(joint)
        assert written, name
        strip(joint)
        assert not any(role for role, _ in roles(joint).values())
        find_fsdp_roles(joint)
        assert roles(joint) == written, name


def test_what_prepares_a_gather_belongs_to_it():
    joint = captured(nn.Linear(5, 5, bias=False), torch.randn(2, 5), rank=2)
    strip(joint)
    find_fsdp_roles(joint)
    found = {n.target for n in joint.graph.nodes if n.name in prepared(joint)}
    assert {aten.cat.default, aten.new_zeros.default} <= found


def test_roles_that_are_there_stay():
    joint = captured_decoder()
    before = roles(joint)
    first = next(n for n in joint.graph.nodes if "all_gather" in str(n.target))
    annotate_node(first, annotation(parameter="someone's"))
    find_fsdp_roles(joint)
    assert roles(joint) == before | {first.name: (Role.UNSHARD, "someone's")}
    text = code(joint)
    find_fsdp_roles(joint)
    assert code(joint) == text


class Graph(Builder):
    def __init__(self):
        super().__init__()
        self.x = self.input("x", 4)
        self.w = self.parameter("w", 4)
        self.v = self.parameter("v", 4)

    def gather(self, node):
        return self.call(c10d.all_gather_into_tensor.default, node, 2, "0")

    def wait(self, node, **kwargs):
        return self.call(c10d.wait_tensor.default, node, **kwargs)

    def reduce(self, node):
        return self.wait(
            self.call(c10d.all_reduce.default, node, "sum", "0", phase=BACKWARD), phase=BACKWARD
        )

    def found(self, **gradients):
        joint = self.joint(self.call(aten.sum.default, self.x), **gradients)
        find_fsdp_roles(joint)
        return {found for found in roles(joint).values() if found[0]}


def an_activation(g):
    return g.x


def a_result_of_parameter_and_activation(g):
    return g.call(aten.mul.Tensor, g.w, g.x)


def two_parameters(g):
    return g.call(aten.cat.default, [g.w, g.v])


def a_parameter_with_itself_computed(g):
    return g.call(aten.add.Tensor, g.w, g.call(aten.neg.default, g.w))


def a_written_buffer(g):
    return g.call(aten.copy_.default, g.call(aten.clone.default, g.x), g.w)


@pytest.mark.parametrize(
    "source",
    [
        an_activation,
        a_result_of_parameter_and_activation,
        two_parameters,
        a_parameter_with_itself_computed,
        a_written_buffer,
    ],
)
def test_a_gather_of_anything_but_one_parameter_is_no_unshard(source):
    g = Graph()
    g.wait(g.gather(source(g)))
    assert g.found() == set()


def test_a_gather_of_a_cast_and_of_a_gather_is_one():
    g = Graph()
    half = g.call(aten._to_copy.default, g.w, dtype=torch.bfloat16)
    g.wait(g.gather(g.wait(g.gather(half))))
    assert g.found() == {(Role.UNSHARD, "w")}


def test_a_reduction_that_reaches_one_gradient_is_its_own():
    g = Graph()
    scaled = g.call(aten.div.Tensor, g.reduce(g.x), 4, phase=BACKWARD)
    assert g.found(w=scaled) == {(Role.REDUCE_GRAD, "w")}


def test_a_reduction_that_another_tensor_joins_is_none():
    g = Graph()
    joined = g.call(aten.add.Tensor, g.reduce(g.x), g.x, phase=BACKWARD)
    assert g.found(w=joined) == set()


def test_a_reduction_that_reaches_two_gradients_is_none():
    g = Graph()
    reduced = g.reduce(g.x)
    one, two = (g.call(aten.div.Tensor, reduced, by, phase=BACKWARD) for by in (2, 3))
    assert g.found(w=one, v=two) == set()


def test_a_reduction_returned_for_two_parameters_is_none():
    g = Graph()
    reduced = g.reduce(g.x)
    assert g.found(w=reduced, v=reduced) == set()


def test_a_reduction_that_someone_else_reads_too_is_none():
    g = Graph()
    reduced = g.reduce(g.x)
    g.call(aten.sum.default, reduced, phase=BACKWARD)
    assert g.found(w=reduced) == set()
