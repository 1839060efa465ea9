"""An own slice of a gather is read from what was sent, by all ranks of a group or by none."""

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import (
    annotate_node,
    annotation,
    is_saved_for_backward,
    local_slice_group,
    set_saved_for_backward,
)
from graph_trainer.core.passes.eliminate_round_trips import eliminate_round_trips
from graph_trainer.core.passes.verify import verify_values
from graph_trainer.core.torch_private import clear_sharding_cache, group_ranks
from tests.unit.graphs import (
    Builder,
    assert_same,
    aten,
    c10d,
    code,
    fake_world,
    targets,
    values_for,
)

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
CLEAN = gt.PassConfig(passes=["normalize_views", "eliminate_dead_code"])


class AsRank(fx.Interpreter):
    """Runs collectives as if every other rank had sent another multiple of this rank's input."""

    def call_function(self, target, args, kwargs):
        name = str(target)
        if "wait_tensor" in name:
            return args[0]
        if "all_gather_into_tensor" in name:
            own = group_ranks(args[2]).index(dist.get_rank())
            return torch.cat([args[0] * (1 + member - own) for member in range(args[1])])
        if "all_reduce" in name:
            return args[0] * 3
        assert "c10d" not in name, name
        return super().call_function(target, args, kwargs)


def run(joint):
    values = values_for(joint)
    with torch.no_grad():
        outputs = AsRank(joint.graph_module).run(*values)
    return [o.clone() for o in outputs] + values


def fires(joint):
    """Run the pass twice; numbers and metadata must hold, and the second run change nothing."""
    before, text = run(joint), code(joint)
    eliminate_round_trips(joint)
    joint.validate()
    verify_values(joint)
    first = code(joint)
    assert_same(before, run(joint))
    eliminate_round_trips(joint)
    assert code(joint) == first, "the second run changed the graph"
    return first != text


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
    clear_sharding_cache()
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


# --- fires -------------------------------------------------------------------------------------


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


def test_a_graph_of_forward_alone():
    joint = walked(S0, R, S0, read=read_last, backward=False)
    assert len(communication(joint)) == 1
    assert fires(joint)
    assert communication(joint) == []


def test_reading_the_slice_twice():
    joint = walked(S0, R, S0, read=lambda x, full, back: (back + back).square().sum())
    assert fires(joint)
    assert communication(joint) == []
    first, *_ = joint.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert first.args[0] is first.args[1] and first.args[0].target is aten.sin.default


def test_reading_what_was_sent_and_the_slice():
    joint = walked(S1, R, S1, read=lambda x, full, back: (x + back).square().sum())
    assert fires(joint)
    assert communication(joint) == []


def test_back_by_two_ways():
    """Two readers, each with a slice of its own."""
    joint = walked(S0, R, S0, R, S0, read=lambda x, a, b, c, d: (b.cos() * d.sin()).sum())
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


# --- hand-made graphs --------------------------------------------------------------------------


def gathered(b, source, ranks=2, group="0"):
    return b.call(
        c10d.wait_tensor.default,
        b.call(c10d.all_gather_into_tensor.default, source, ranks, group),
    )


def cut(b, whole, start, stop, dim=0, group="0"):
    """A slice that capture marked."""
    node = b.call(aten.slice.Tensor, whole, dim, start, stop)
    annotate_node(node, annotation(local_slice=group))
    return node


def copied(b, node):
    return b.call(aten.clone.default, node)


def total(b, *nodes):
    """What depends on every element and its place."""
    terms = []
    for node in nodes:
        size = node.meta["val"].numel()
        flat = b.call(aten.reshape.default, node, [size])
        terms.append(b.call(aten.sum.default, b.call(aten.cumsum.default, flat, 0)))
    result = terms[0]
    for term in terms[1:]:
        result = b.call(aten.add.Tensor, result, term)
    return result


@pytest.fixture(params=[0, 1])
def rank(request):
    fake_world(2, request.param)
    return request.param


def test_another_view_of_the_same_elements(rank):
    b = Builder()
    x = b.call(aten.sin.default, b.input("x", 2, 6))
    whole = b.call(aten.view.default, b.call(aten.alias.default, gathered(b, x)), [8, 3])
    back = copied(b, cut(b, whole, 4 * rank, 4 * rank + 4))
    joint = b.joint(total(b, back))
    assert fires(joint)
    assert communication(joint) == []
    (view,) = joint.graph.find_nodes(op="call_function", target=aten.view.default)
    assert view.args == (x, [4, 3])


def test_views_of_a_slice_without_a_copy_know_where_they_begin(rank):
    b = Builder()
    x = b.call(aten.sin.default, b.input("x", 4, 6))
    own = cut(b, gathered(b, x), 4 * rank, 4 * rank + 4)
    part = b.call(aten.slice.Tensor, own, 0, 1, 3)
    joint = b.joint(total(b, part, b.call(aten.t.default, part)))
    assert part.meta["val"].storage_offset() == 24 * rank + 6
    assert fires(joint)
    assert part.args[0] is x and part.meta["val"].storage_offset() == 6


def test_what_backward_saved_is_saved_now_too(rank):
    b = Builder()
    x = b.call(aten.sin.default, b.input("x", 2, 6))
    back = copied(b, cut(b, gathered(b, x), 2 * rank, 2 * rank + 2))
    set_saved_for_backward(back)
    assert fires(b.joint(total(b, back)))
    assert is_saved_for_backward(x)


# --- near misses: left alone, on every rank ----------------------------------------------------


def test_the_first_rows_may_be_what_every_rank_reads():
    """Rank 0's graph looks as if it read its own slice: the mark tells the two apart."""
    said = []
    for rank in range(4):
        joint = walked(S0, R, rank=rank, read=lambda x, full: full.chunk(4)[0].square().sum())
        assert not fires(joint)
        said.append(communication(joint))
    assert said[0] and said.count(said[0]) == 4


@pytest.mark.parametrize("shape", [(7, 12), (5, 12)])
def test_shards_of_unlike_sizes_stay_on_all_ranks(shape):
    said = []
    for rank in range(4):
        joint = walked(S0, R, S0, rank=rank, read=read_last, shape=shape)
        assert not fires(joint)
        said.append(communication(joint))
    assert said[0] and said.count(said[0]) == 4


@pytest.mark.parametrize("rank", range(4))
def test_a_slice_over_another_group_is_another_slice(rank):
    """On ranks 0 and 3 it is the rank's own all the same."""
    layouts = (S0, R), (R, R), (R, S0)
    assert not fires(walked(*layouts, mesh=(2, 2), rank=rank, read=read_last))


def test_a_slice_that_is_gathered_again_stays():
    """The ranks may hold other bits where they should hold the same: it is no rank's own."""
    assert not fires(walked(R, S0, R, read=lambda x, part, whole: whole.square().sum()))


def test_a_third_layout_stays():
    assert not fires(walked(S0, R, S1, read=read_last, rank=0))


def test_a_smaller_slice_stays(rank):
    b = Builder()
    x = b.call(aten.sin.default, b.input("x", 2, 6))
    own = cut(b, gathered(b, x), 2 * rank, 2 * rank + 1)
    assert not fires(b.joint(total(b, copied(b, own))))


def test_another_ranks_slice_stays(rank):
    b = Builder()
    x = b.call(aten.sin.default, b.input("x", 2, 6))
    other = cut(b, gathered(b, x), 2 - 2 * rank, 4 - 2 * rank)
    assert not fires(b.joint(total(b, copied(b, other))))


def test_an_local_slice_of_a_slice_stays(rank):
    """Marked, but what it was cut out of was cut before by something that is not."""
    b = Builder()
    x = b.call(aten.sin.default, b.input("x", 2, 6))
    first = b.call(aten.slice.Tensor, gathered(b, x), 0, 2 * rank, 2 * rank + 2)
    assert not fires(b.joint(total(b, copied(b, cut(b, first, 0, 2)))))


PARTS = {
    "turned": lambda a, z: [z, a],
    "one twice": lambda a, z: [a, a],
    "one missing": lambda a, z: [a],
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_not_put_together_in_order_stay(name, rank):
    b = Builder()
    x = b.call(aten.sin.default, b.input("x", 2, 6))
    full = gathered(b, x)
    parts = [b.call(aten.slice.Tensor, full, 0, 2 * i, 2 * i + 2) for i in range(2)]
    whole = b.call(aten.cat.default, PARTS[name](*parts), 1)
    own = 6 * rank if name != "one missing" else 0
    assert not fires(b.joint(total(b, copied(b, cut(b, whole, own, own + 6, dim=1)))))


def test_parts_of_two_gathers_stay(rank):
    b = Builder()
    sent = b.input("x", 2, 6), b.input("y", 2, 6)
    fulls = [gathered(b, each) for each in sent]
    parts = [b.call(aten.slice.Tensor, full, 0, 2 * i, 2 * i + 2) for i, full in enumerate(fulls)]
    whole = b.call(aten.cat.default, parts, 1)
    own = cut(b, whole, 6 * rank, 6 * rank + 6, dim=1)
    assert not fires(b.joint(total(b, copied(b, own))))


def test_what_reads_a_slice_in_its_own_layout_stays(rank):
    """Columns of a whole lie apart, what was sent does not: readers would lay out theirs anew."""
    b = Builder()
    x = b.call(aten.sin.default, b.input("x", 2, 6))
    full = gathered(b, x)
    parts = [b.call(aten.slice.Tensor, full, 0, 2 * i, 2 * i + 2) for i in range(2)]
    own = cut(b, b.call(aten.cat.default, parts, 1), 6 * rank, 6 * rank + 6, dim=1)
    joint = b.joint(total(b, b.call(aten.cos.default, own), copied(b, own)))
    assert fires(joint), "the copy is what was sent"
    (cosine,) = joint.graph.find_nodes(op="call_function", target=aten.cos.default)
    assert cosine.args == (own,)


def test_the_same_bytes_as_other_numbers_stay(rank):
    b = Builder()
    x = b.call(aten.sin.default, b.input("x", 2, 6))
    whole = b.call(aten.view.dtype, gathered(b, x), torch.int32)
    assert not fires(b.joint(total(b, copied(b, cut(b, whole, 2 * rank, 2 * rank + 2)))))


def test_a_slice_of_a_view_that_repeats_elements_stays(rank):
    """It is rank 0's own, and half rank 0's on rank 1."""
    b = Builder()
    x = b.call(aten.sin.default, b.input("x", 2, 6))
    whole = b.call(aten.as_strided.default, gathered(b, x), [2, 12], [6, 1])
    assert not fires(b.joint(total(b, copied(b, cut(b, whole, 6 * rank, 6 * rank + 6, dim=1)))))


def test_parts_that_are_turned_stay(rank):
    b = Builder()
    x = b.call(aten.sin.default, b.input("x", 3, 3))
    full = gathered(b, x)
    parts = [b.call(aten.slice.Tensor, full, 0, 3 * i, 3 * i + 3) for i in range(2)]
    whole = b.call(aten.cat.default, [b.call(aten.t.default, part) for part in parts], 1)
    own = cut(b, whole, 3 * rank, 3 * rank + 3, dim=1)
    assert not fires(b.joint(total(b, copied(b, own))))


def test_what_was_sent_out_of_another_layout_stays(rank):
    b = Builder()
    x = b.call(aten.t.default, b.call(aten.sin.default, b.input("x", 6, 2)))
    whole = b.call(aten.view.default, gathered(b, x), [8, 3])
    assert not fires(b.joint(total(b, copied(b, cut(b, whole, 4 * rank, 4 * rank + 4)))))


def test_what_draws_random_numbers_still_draws_them(rank):
    b = Builder()
    x = b.input("x", 2, 6)
    drawn = b.call(aten.rand_like.default, x)
    copied(b, cut(b, gathered(b, drawn), 2 * rank, 2 * rank + 2))
    joint = b.joint(total(b, x))
    eliminate_round_trips(joint)
    joint.validate()
    assert communication(joint) == [] and drawn in joint.graph.nodes


def test_an_local_slice_of_a_sum_stays(rank):
    b = Builder()
    x = b.call(aten.sin.default, b.input("x", 4, 6))
    reduced = b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, x, "sum", "0"))
    assert not fires(b.joint(total(b, copied(b, cut(b, reduced, 2 * rank, 2 * rank + 2)))))


@pytest.mark.parametrize("written", ["sent", "gathered", "copy"])
def test_what_is_written_in_place_stays(written, rank):
    b = Builder()
    nodes = {"sent": b.call(aten.sin.default, b.input("x", 2, 6))}
    nodes["gathered"] = gathered(b, nodes["sent"])
    own = cut(b, nodes["gathered"], 2 * rank, 2 * rank + 2)
    nodes["copy"] = copied(b, own)
    early = b.call(aten.mul_.Tensor, nodes[written], 2) if written != "copy" else nodes["copy"]
    late = b.call(aten.mul_.Tensor, nodes["copy"], 3) if written == "copy" else nodes["copy"]
    assert not fires(b.joint(total(b, early, late, nodes["sent"])))


def test_what_is_returned_keeps_its_own_storage(rank):
    """A gradient in the parameter's own storage would change with it."""
    b = Builder()
    w = b.parameter("w", 2, 6)
    back = copied(b, cut(b, gathered(b, w), 2 * rank, 2 * rank + 2))
    joint = b.joint(total(b, w), w=back)
    assert fires(joint)
    assert communication(joint) == []
    assert joint.output_values()[1] is back and back.args == (w,)


def test_a_returned_slice_stays(rank):
    b = Builder()
    w = b.parameter("w", 2, 6)
    back = cut(b, gathered(b, w), 2 * rank, 2 * rank + 2)
    assert not fires(b.joint(total(b, w), w=back))


def test_a_graph_without_local_slices_needs_no_process_group():
    b = Builder()
    joint = b.joint(total(b, gathered(b, b.input("x", 2, 6))))
    eliminate_round_trips(joint)


# --- any walk ----------------------------------------------------------------------------------

LAYOUTS = strategies.sampled_from([(R, R), (S0, R), (R, S0), (S1, R), (S0, S1), (S1, S0), (S0, S0)])


@hypothesis.given(
    strategies.lists(LAYOUTS, min_size=1, max_size=3),
    strategies.lists(strategies.booleans(), min_size=7, max_size=7),
)
@hypothesis.settings(max_examples=5, deadline=None, derandomize=True)
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
