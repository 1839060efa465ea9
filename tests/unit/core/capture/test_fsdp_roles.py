"""Roles found by structure alone, in graphs that nothing annotated."""

import pytest
import torch
from torch import nn

from graph_trainer.core.capture.tracing.fsdp_roles import find_fsdp_roles
from graph_trainer.core.graph.annotations import (
    Role,
    annotate_node,
    annotation,
    parameter_of,
    role_of,
)
from graph_trainer.testing import Builder, captured, code
from tests.unit.graphs import BACKWARD, aten, c10d, captured_decoder

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
    found = {n.target for n in joint.graph.nodes if role_of(n) is Role.UNSHARD}
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


@pytest.mark.parametrize(
    "source",
    [
        lambda g: g.x,
        lambda g: g.call(aten.mul.Tensor, g.w, g.x),
        lambda g: g.call(aten.cat.default, [g.w, g.v]),
        lambda g: g.call(aten.add.Tensor, g.w, g.call(aten.neg.default, g.w)),
        lambda g: g.call(aten.copy_.default, g.call(aten.clone.default, g.x), g.w),
    ],
    ids=["activation", "with activation", "two parameters", "with itself", "written buffer"],
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


def divided(g, reduced, by=4):
    return g.call(aten.div.Tensor, reduced, by, phase=BACKWARD)


def also_read(g, reduced):
    g.call(aten.sum.default, reduced, phase=BACKWARD)
    return {"w": reduced}


@pytest.mark.parametrize(
    ("gradients", "found"),
    [
        (lambda g, r: {"w": divided(g, r)}, {(Role.REDUCE_GRAD, "w")}),
        (lambda g, r: {"w": g.call(aten.add.Tensor, r, g.x, phase=BACKWARD)}, set()),
        (lambda g, r: {"w": divided(g, r, 2), "v": divided(g, r, 3)}, set()),
        (lambda g, r: {"w": r, "v": r}, set()),
        (also_read, set()),
    ],
    ids=["one gradient", "joined by another tensor", "two gradients", "for two", "read too"],
)
def test_a_reduction_that_alone_reaches_one_gradient_is_its_own(gradients, found):
    g = Graph()
    assert g.found(**gradients(g, g.reduce(g.x))) == found
