"""What collectives are for, on meshes of one and two dimensions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graph_trainer.core.analysis.collective_purpose import Traffic, traffic_of
from graph_trainer.core.graph.annotations import Role
from tests.unit.graphs import collective

UNSHARD, REDUCE = Role.UNSHARD, Role.REDUCE_GRAD
FSDP, TP, WORLD = (0, 2), (0, 1), (0, 1, 2, 3)


def traffic(*issued):
    entries = [collective(ranks=ranks, role=role) for ranks, role in issued]
    found = traffic_of(entries)
    return [found[each.node] for each in entries]


def test_fsdp_says_so_itself():
    assert traffic((FSDP, UNSHARD), (FSDP, REDUCE)) == [Traffic.UNSHARD, Traffic.REDUCE_GRAD]


def test_tensor_parallelism_is_what_shares_one_rank_with_fsdp():
    assert traffic((FSDP, UNSHARD), (TP, None), (FSDP, REDUCE)) == [
        Traffic.UNSHARD,
        Traffic.TENSOR_PARALLEL,
        Traffic.REDUCE_GRAD,
    ]


@pytest.mark.parametrize("ranks", [FSDP, WORLD])
def test_anything_else_among_data_parallel_ranks_is_other(ranks):
    assert traffic((FSDP, UNSHARD), (TP, None), (ranks, None))[-1] is Traffic.OTHER


def test_what_comes_before_the_first_of_fsdps_is_known_as_well():
    assert traffic((TP, None), (FSDP, None), (FSDP, UNSHARD))[:2] == [
        Traffic.TENSOR_PARALLEL,
        Traffic.OTHER,
    ]


def test_both_dimensions_of_hybrid_sharding_are_data_parallel():
    shard, replicate, tp = (0, 2), (0, 4), (0, 1)
    assert traffic((shard, UNSHARD), (replicate, REDUCE), (tp, None), (replicate, None))[2:] == [
        Traffic.TENSOR_PARALLEL,
        Traffic.OTHER,
    ]


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


def test_without_fsdp_every_group_is_tensor_parallel():
    assert traffic((TP, None), (WORLD, None)) == [Traffic.TENSOR_PARALLEL] * 2
