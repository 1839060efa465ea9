"""Which group every rank is in, and over which ranks two collectives in a row are one."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import graph_trainer as gt
from graph_trainer.core.analysis.mesh_groups import joined, meshes_of, partition_of
from graph_trainer.testing import become, mean_square
from tests.examples import examples

MESHES = st.lists(st.integers(2, 4), min_size=2, max_size=3).flatmap(
    lambda sizes: st.permutations(range(math.prod(sizes))).map(
        lambda ranks: torch.tensor(ranks).view(sizes)
    )
)


def along(mesh, *axes):
    """The groups along some axes, by the rule: fix the others, count the last one first."""
    others = [range(mesh.shape[axis]) for axis in range(mesh.ndim) if axis not in axes]
    groups = []
    for place in itertools.product(*others):
        group = []
        for at in itertools.product(*(range(mesh.shape[axis]) for axis in axes)):
            index, rest = dict(zip(axes, at, strict=True)), iter(place)
            where = [index[a] if a in index else next(rest) for a in range(mesh.ndim)]
            group.append(mesh[tuple(where)].item())
        groups.append(tuple(group))
    return tuple(sorted(groups))


@given(MESHES, st.data())
@examples(60)
def test_a_group_along_any_axes_in_any_order_determines_its_partition(mesh, data):
    axes = data.draw(st.lists(st.integers(0, mesh.ndim - 1), min_size=1, unique=True))
    expected = along(mesh, *axes)
    for group in expected:
        assert partition_of([mesh], group) == expected


@given(MESHES, st.data())
@examples(60)
def test_other_ranks_have_no_partition(mesh, data):
    world = range(mesh.numel())
    ranks = tuple(data.draw(st.lists(st.sampled_from(world), min_size=2, unique=True)))
    orders = [o for n in range(mesh.ndim) for o in itertools.permutations(range(mesh.ndim), n + 1)]
    known = any(ranks in along(mesh, *order) for order in orders)
    assert (partition_of([mesh], ranks) is not None) == known


@given(MESHES, st.data())
@examples(100)
def test_a_gather_over_the_joined_groups_is_the_two_in_a_row(mesh, data):
    """Each rank starts with its number; the gathers give it the numbers in their order."""
    first, second = (
        along(mesh, *data.draw(st.lists(st.integers(0, mesh.ndim - 1), min_size=1, unique=True)))
        for _ in range(2)
    )
    of_first, of_second = ({r: g for g in each for r in g} for each in (first, second))
    order = {r: list(of_first[r]) for r in range(mesh.numel())}
    order = {r: [p for q in of_second[r] for p in order[q]] for r in order}
    found = joined(first, second)
    alike = all(order[q] == order[r] for r in order for q in order[r])
    if any(len(set(each)) < len(each) for each in order.values()) or not alike:
        assert found is None
    else:
        assert found is not None
        assert {r: list(g) for g in found for r in g} == order


def test_groups_of_unlike_worlds_are_not_joined():
    assert joined(((0, 1), (2, 3)), ((0, 2), (1, 3))) == ((0, 1, 2, 3),)
    assert joined(((0, 1), (2, 3)), ((0, 4), (1, 5))) is None
    assert joined(((0, 1), (2, 3), (4, 5)), ((0, 2), (1, 3))) is None
    assert joined(((0, 1), (2, 3)), ((0, 2), (3, 1))) is None, "ranks that end up with other orders"


class Sliced(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        whole = torch.ones(2, 2)
        self.weight = nn.Parameter(
            distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
        )

    def forward(self, x):
        return x @ self.weight.to_local()


@pytest.mark.parametrize("rank", [0, 7])
def test_a_slice_of_a_mesh_determines_the_parallel_slices(rank):
    """`DeviceMesh.mesh` is the slice of this rank alone."""
    become(rank, 12)
    mesh = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("a", "b", "c"))
    joint = gt.capture(Sliced(mesh["b", "c"]), mean_square, (torch.ones(1, 2),))
    found = partition_of(meshes_of(joint, 12), (6, 8, 10))
    assert found == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))


def test_a_mesh_without_some_ranks_has_no_partitions():
    become(0, 8)
    mesh = init_device_mesh("cpu", (2, 4))
    joint = gt.capture(Sliced(mesh), mean_square, (torch.ones(1, 2),))
    assert partition_of(meshes_of(joint, 8), (0, 4)) is not None
    assert partition_of(meshes_of(joint, 9), (0, 4)) is None
