"""A local slice of a gather is read from what was sent, by all ranks of a group or by none."""

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import local_slice_group
from graph_trainer.core.passes.eliminate_round_trips import eliminate_round_trips
from graph_trainer.core.passes.verify_numbers import verify_values
from graph_trainer.testing import check_pass, targets
from tests.examples import examples
from tests.unit.graphs import aten, fake_world

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
CLEAN = gt.PassConfig(passes=["normalize_views", "eliminate_dead_code"])


def fires(joint):
    changed = check_pass(eliminate_round_trips, joint)
    verify_values(joint)
    return changed


class Walk(nn.Module):
    """A value that goes from layout to layout; every place it comes to is read by `read`."""

    def __init__(self, mesh, layouts, read, shape):
        super().__init__()
        self.mesh, self.layouts, self.read, self.shape = mesh, layouts, read, torch.Size(shape)
        meta = torch.empty(shape, device="meta")
        for size, coordinate, placement in zip(
            mesh.shape, mesh.get_coordinate(), layouts[0], strict=True
        ):
            if isinstance(placement, Shard):
                rows = -(-meta.shape[placement.dim] // size)
                parts = meta.split(rows, placement.dim)
                meta = parts[coordinate] if coordinate < len(parts) else meta[:0]
        self.weight = nn.Parameter(torch.zeros(meta.shape))

    def forward(self):
        stride = torch.empty(self.shape, device="meta").stride()
        value = DTensor.from_local(
            self.weight.sin(),
            self.mesh,
            self.layouts[0],
            run_check=False,
            shape=self.shape,
            stride=stride,
        )
        visited = [value]
        for layout in self.layouts[1:]:
            visited.append(visited[-1].redistribute(self.mesh, layout))
        return self.read(*(v.to_local() for v in visited))


def walked(*layouts, read, mesh=(4,), rank=1, shape=(8, 12), backward=True):
    layouts = [each if isinstance(each, tuple) else (each,) for each in layouts]
    fake_world(4, rank)
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
    model = Walk(device_mesh, layouts, read, shape)
    joint = gt.capture(model, lambda m: m(), backward=backward)
    gt.run_passes(joint, CLEAN)
    return joint


def read_last(*visited):
    return (visited[-1] * visited[-1].cos()).sum()


def read_all(*visited):
    return sum((v * v.cos() * (i + 1)).sum() for i, v in enumerate(visited))


def communication(joint):
    return [c.entry() for c in collectives(joint)]


def slices(joint):
    return [n for n in joint.graph.nodes if local_slice_group(n) is not None]


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("there", [S0, S1, S2])
def test_there_and_back_is_no_communication_at_all(there, rank):
    joint = walked(there, R, there, read=read_last, rank=rank, shape=(4, 8, 12))
    assert [kind for kind, *_ in communication(joint)] == ["all_gather_into_tensor"] * 2
    assert fires(joint)  # in forward, and in backward, which goes the same way
    assert communication(joint) == [] and slices(joint) == []
    assert {aten.split.Tensor, aten.clone.default, aten.cat.default}.isdisjoint(targets(joint))


@pytest.mark.parametrize("there", [S0, S1])
def test_what_others_read_stays(there):
    joint = walked(there, R, there, read=read_all)
    before = communication(joint)
    cut = [n for n in slices(joint) if n.target is aten.clone.default and "forward" in str(n.meta)]
    assert len(cut) == 1
    assert fires(joint)
    assert communication(joint) == before
    assert cut[0] not in joint.graph.nodes


WALKS = {
    "forward alone": ((S0, R, S0), read_last, {"backward": False}),
    "the slice twice": ((S0, R, S0), lambda x, full, back: (back + back).square().sum(), {}),
    "what was sent, and the slice": ((S1, R, S1), lambda x, full, y: (x + y).square().sum(), {}),
    "two readers": ((S0, R, S0, R, S0), lambda x, a, b, c, d: (b.cos() * d.sin()).sum(), {}),
}


@pytest.mark.parametrize("name", WALKS)
def test_no_reader_of_a_slice_needs_the_gather(name):
    layouts, read, how = WALKS[name]
    joint = walked(*layouts, read=read, **how)
    assert communication(joint)
    assert fires(joint)
    assert communication(joint) == []


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("there", [(S0, S1), (S1, S0), (S0, S0)])
def test_two_mesh_dimensions_are_two_round_trips(there, rank):
    joint = walked(there, (R, R), there, read=read_last, mesh=(2, 2), rank=rank)
    assert len(communication(joint)) == 4
    assert fires(joint)
    assert communication(joint) == []


def test_a_third_layout_on_the_way_back_saves_one_half():
    joint = walked((S0, S1), (R, R), (S0, R), read=read_last, mesh=(2, 2), rank=2)
    before = len([c for c in collectives(joint) if c.ranks == (0, 2)])
    assert before > 0
    assert fires(joint)
    assert {c.ranks for c in collectives(joint)} == {(2, 3)}, "the other dimension's is needed"


# --- near misses: not changed, on every rank ---------------------------------------------------


def first_rows(x, full):
    """What every rank may read; rank 0's graph looks as if it read its local slice."""
    return full.chunk(4)[0].square().sum()


@pytest.mark.parametrize(
    "layouts, read, shape",
    [((S0, R), first_rows, (8, 12)), *(((S0, R, S0), read_last, (n, 12)) for n in (7, 5))],
    ids=["first rows", "seven rows", "five rows"],
)
def test_first_rows_and_shards_of_unlike_sizes_stay_on_all_ranks(layouts, read, shape):
    issued = []
    for rank in range(4):
        joint = walked(*layouts, rank=rank, read=read, shape=shape)
        assert not fires(joint)
        issued.append(communication(joint))
    assert issued[0] and issued.count(issued[0]) == 4


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    "layouts, mesh",
    [
        pytest.param([(S0, R), (R, R), (R, S0)], (2, 2), id="over another group"),
        pytest.param([R, S0, R], (4,), id="gathered again, perhaps from unlike bits"),
        pytest.param([S0, R, S1], (4,), id="along another dimension"),
    ],
)
def test_another_slice_stays(layouts, mesh, rank):
    assert not fires(walked(*layouts, mesh=mesh, rank=rank, read=read_last))


LAYOUTS = strategies.sampled_from([(R, R), (S0, R), (R, S0), (S1, R), (S0, S1), (S1, S0), (S0, S0)])


@hypothesis.given(
    strategies.lists(LAYOUTS, min_size=1, max_size=3),
    strategies.lists(strategies.booleans(), min_size=7, max_size=7),
)
@examples(5, derandomize=True)
def test_any_walk_keeps_its_numbers_and_every_rank_decides_alike(layouts, reads):
    path = [layouts[0]]
    for layout in layouts[1:]:
        path += [(R, R), layout]
    path += [(R, R), layouts[0]]

    def read(*visited):
        chosen = [v for v, wanted in zip(visited, reads, strict=False) if wanted] + [visited[-1]]
        return read_all(*chosen)

    said = []
    for rank in (0, 1, 3):
        joint = walked(*path, read=read, mesh=(2, 2), rank=rank)
        fires(joint)
        said.append(
            [(kind, inputs, reduction) for kind, _, inputs, reduction in communication(joint)]
        )
    assert said.count(said[0]) == 3
