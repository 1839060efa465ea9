"""From a parameter's placeholder to what compute reads, and who reads it."""

import operator

import pytest
import torch
from torch import nn

import graph_trainer as gt
from graph_trainer.core.analysis.unshard_chains import last_bucket, unshard_chains
from graph_trainer.core.graph.annotations import Role
from graph_trainer.testing import Builder, captured
from tests.unit.graphs import BACKWARD, GATHER, aten, c10d, captured_decoder

UNSHARD = {"role": Role.UNSHARD, "parameter": "w"}


class Graph(Builder):
    def __init__(self):
        super().__init__()
        self.x = self.input("x", 4)
        self.w = self.parameter("w", 2)

    def gather(self, shard, group="0", size=2):
        return self.waited(GATHER, shard, size, group, **UNSHARD)

    def chain(self, read, *more):
        total = self.call(aten.sum.default, read)
        for node in more:
            total = self.call(aten.add.Tensor, total, node)
        (found,) = unshard_chains(self.joint(total))
        return found


def targets_of(chain):
    return [n.target for n in chain.nodes]


def test_a_chain_runs_from_cast_to_the_last_view():
    g = Graph()
    half = g.call(aten._to_copy.default, g.w, dtype=torch.bfloat16, **UNSHARD)
    view = g.call(aten.view.default, g.gather(half), [2, 2])
    turned = g.call(aten.t.default, view)
    mm = g.call(aten.mm.default, turned, turned)
    chain = g.chain(mm)
    assert targets_of(chain) == [
        aten._to_copy.default,
        c10d.all_gather_into_tensor.default,
        c10d.wait_tensor.default,
        aten.view.default,
        aten.t.default,
    ]
    assert chain.forward_readers == [mm] and chain.backward_readers == []


def test_nested_gathers_on_two_mesh_dimensions_are_one_chain():
    g = Graph()
    chain = g.chain(g.gather(g.gather(g.w, "0"), "1"))
    assert targets_of(chain).count(c10d.all_gather_into_tensor.default) == 2


def test_split_getitem_cat_is_part_of_the_chain():
    g = Graph()
    parts = g.call(aten.split.Tensor, g.gather(g.w), 3)
    pieces = [g.call(operator.getitem, parts, i) for i in (0, 1)]
    whole = g.call(aten.cat.default, [pieces[1], pieces[0]])
    reader = g.call(aten.neg.default, whole)
    chain = g.chain(reader)
    assert chain.nodes[-1] is whole and {*pieces, parts} < set(chain.nodes)
    assert chain.forward_readers == [reader]


ENDS = {
    "something is computed": lambda g: g.call(aten.mul.Tensor, g.gather(g.w), 2),
    "another tensor joins": lambda g: g.call(aten.cat.default, [g.gather(g.w), g.x]),
    "what was gathered is written": lambda g: g.call(aten.mul_.Tensor, g.gather(g.w), 2),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_chain_ends_where(name):
    g = Graph()
    end = ENDS[name](g)
    chain = g.chain(g.call(aten.view.default, end, [2, end.meta["val"].numel() // 2]))
    assert chain.forward_readers == [end] and end not in chain.nodes


def test_readers_of_the_shard_itself_keep_nothing_gathered_alive():
    g = Graph()
    norm = g.call(aten.norm.Scalar, g.w, phase=BACKWARD)
    assert g.chain(g.gather(g.w), norm).backward_readers == []


def test_backward_readers_are_listed_apart():
    g = Graph()
    full = g.gather(g.w)
    forward = g.call(aten.mul.Tensor, full, g.x)
    backward = g.call(aten.mul.Tensor, full, g.x, phase=BACKWARD)
    in_backward = g.call(aten.view.default, full, [2, 2], phase=BACKWARD)
    sums = [g.call(aten.sum.default, n, phase=BACKWARD) for n in (backward, in_backward)]
    chain = g.chain(forward, *sums)
    assert chain.backward_readers == [backward, in_backward]


def test_a_parameter_that_is_not_gathered_has_no_chain():
    b = Builder()
    w = b.parameter("w", 4)
    b2 = b.joint(b.call(aten.sum.default, b.call(aten.t.default, w)))
    assert unshard_chains(b2) == []


def test_chains_come_in_the_order_of_their_gathers():
    joint = captured_decoder()
    names = [c.parameter for c in unshard_chains(joint)]
    assert names[0] == "embedding.weight" and names[-1] == "head.weight"
    assert names.index("layers.0.down.weight") < names.index("layers.1.norm.weight")


@pytest.mark.parametrize("rank", range(4))
def test_uneven_shards_have_whole_chains_on_every_rank(rank):
    """Five rows on four ranks: two, two, one, none."""
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
    joint = captured(model, torch.randn(2, 5), rank=rank)
    gt.run_passes(joint, gt.PassConfig(passes=["normalize_views"]))
    for chain in unshard_chains(joint):
        assert aten.slice.Tensor in targets_of(chain)
        assert chain.nodes[-1].meta["val"].shape == (5, 5)
        assert {r.target for r in chain.forward_readers} == {aten.mm.default}


# --- the last bucket -----------------------------------------------------------------------


def bucket(joint):
    gt.run_passes(joint, gt.PassConfig(passes=["normalize_views", "deduplicate_unshards"]))
    return last_bucket(joint, unshard_chains(joint))


def test_the_last_bucket_is_what_forward_reads_after_the_last_block():
    assert bucket(captured_decoder()) == {"norm.weight", "head.weight"}
    assert bucket(captured_decoder(tied=True)) == {"norm.weight", "embedding.weight"}
    assert bucket(captured_decoder(checkpointed=True)) == {"norm.weight", "head.weight"}


def test_without_parameters_after_the_blocks_it_is_the_module_read_last():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert bucket(captured(model, torch.randn(2, 4))) == {"1.weight", "1.bias"}


def test_no_chains_no_bucket():
    joint = gt.capture(nn.Linear(4, 4), lambda m, x: m(x).sum(), [torch.randn(2, 4)])
    assert bucket(joint) == set()
