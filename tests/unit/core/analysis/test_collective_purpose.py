"""What collectives are for, on meshes of one and two dimensions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graph_trainer.core.analysis.collective_purpose import Traffic, traffic_of
from graph_trainer.core.graph.annotations import Role, annotate_node, annotation
from tests.unit.graphs import collective

UNSHARD, REDUCE = Role.UNSHARD, Role.REDUCE_GRAD
FSDP, TP, WORLD = (0, 2), (0, 1), (0, 1, 2, 3)


SHARD, REPLICATE = (0, 2), (0, 4)  # two dimensions of hybrid sharding
CASES = {
    "collectives with a role belong to fsdp": (
        [(FSDP, UNSHARD), (FSDP, REDUCE)],
        [Traffic.UNSHARD, Traffic.REDUCE_GRAD],
    ),
    "tensor parallelism shares one rank with fsdp, others share more": (
        [(FSDP, UNSHARD), (TP, None), (FSDP, None), (WORLD, None)],
        [Traffic.UNSHARD, Traffic.TENSOR_PARALLEL, Traffic.OTHER, Traffic.OTHER],
    ),
    "what comes before the first collective of fsdp is known too": (
        [(TP, None), (FSDP, None), (FSDP, UNSHARD)],
        [Traffic.TENSOR_PARALLEL, Traffic.OTHER, Traffic.UNSHARD],
    ),
    "both dimensions of hybrid sharding are data parallel": (
        [(SHARD, UNSHARD), (REPLICATE, REDUCE), (TP, None), (REPLICATE, None)],
        [Traffic.UNSHARD, Traffic.REDUCE_GRAD, Traffic.TENSOR_PARALLEL, Traffic.OTHER],
    ),
    "without fsdp every group is tensor parallel": (
        [(TP, None), (WORLD, None)],
        [Traffic.TENSOR_PARALLEL, Traffic.TENSOR_PARALLEL],
    ),
}


@pytest.mark.parametrize(("issued", "expected"), CASES.values(), ids=CASES)
def test_the_purpose_of_collectives(issued, expected):
    entries = [collective(ranks=ranks, role=role) for ranks, role in issued]
    found = traffic_of(entries)
    assert [found[each.node] for each in entries] == expected


def test_context_parallelism_says_what_its_collectives_are_for():
    """Its group may have the ranks of fsdp's."""
    entries = [collective(ranks=FSDP, role=UNSHARD), collective(ranks=FSDP), collective(ranks=FSDP)]
    annotate_node(entries[1].node, annotation(context_parallel=True))
    found = traffic_of(entries)
    expected = [Traffic.UNSHARD, Traffic.CONTEXT_PARALLEL, Traffic.OTHER]
    assert [found[each.node] for each in entries] == expected


@pytest.mark.parametrize("gathered", [True, False], ids=["fsdp", "ddp"])
def test_a_group_that_reduces_some_gradients_is_tensor_parallel(gathered):
    """Norms are whole on every rank of tensor parallelism: their gradients are summed there."""
    entries = [
        *([collective(ranks=FSDP, role=UNSHARD)] * gathered),
        collective(ranks=TP),
        replace(collective(ranks=TP, role=REDUCE), parameter="norm"),
        replace(collective(ranks=FSDP, role=REDUCE), parameter="norm"),
        replace(collective(ranks=FSDP, role=REDUCE), parameter="linear"),
        collective(ranks=FSDP),
    ]
    found = traffic_of(entries)
    assert [found[e.node] for e in entries[gathered:]] == [
        Traffic.TENSOR_PARALLEL,
        *[Traffic.REDUCE_GRAD] * 3,
        Traffic.OTHER,
    ]


def test_a_group_that_alone_reduces_gradients_and_not_all_is_tensor_parallel():
    """Without data parallelism nothing else reduces; with DDP the only group reduces them all."""
    entries = [collective(ranks=TP), replace(collective(ranks=TP, role=REDUCE), parameter="norm")]
    for gradients, expected in (
        (("norm", "linear"), Traffic.TENSOR_PARALLEL),
        (("norm",), Traffic.OTHER),
    ):
        found = traffic_of(entries, gradients)
        assert [found[e.node] for e in entries] == [expected, Traffic.REDUCE_GRAD]
