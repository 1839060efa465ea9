"""Two equal nodes that become one: the stronger tag holds, and marks survive."""

import itertools
from types import SimpleNamespace

import pytest
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.graph.annotations import (
    Role,
    is_marked_saved,
    mark_saved_in_cut,
    merge_tags,
    offload_tag,
    recompute_policy,
    set_offload,
    set_recompute_policy,
)
from graph_trainer.core.partition.repartition import _merge_gathers
from graph_trainer.core.passes.deduplicate_unshards import deduplicate_unshards
from graph_trainer.testing import Builder, become
from tests.unit.graphs import GATHER

MUST_SAVE, MUST_RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
TAGS = (None, *CheckpointPolicy)


def merged(merge, first, second):
    """The gather that is left of two with these tags, of regions 1 and 2; the tag "offload" is that
    of `gt.offload`, and the second gather is marked."""
    b = Builder()
    shard = b.parameter("w", 4)
    gathers = [b.call(GATHER, shard, 2, "0", role=Role.UNSHARD, parameter="w") for _ in range(2)]
    for number, (node, tag) in enumerate(zip(gathers, (first, second), strict=True), 1):
        if tag == "offload":
            set_offload(node)
        elif tag is not None:
            set_recompute_policy(node, tag, ac_graph_id=number)
    mark_saved_in_cut(gathers[1])
    joint = b.joint(b.total(*gathers))
    merge(joint)
    (left,) = joint.graph.find_nodes(op="call_function", target=GATHER)
    assert left is gathers[0] and is_marked_saved(left)
    return left


MERGES = {
    "second partition": lambda joint: _merge_gathers(joint.graph, set(joint.graph.nodes)),
    "deduplicate_unshards": deduplicate_unshards,
}


def strongest(pair):
    """The rule in words: a must over a may, and among those recomputation over what keeps."""
    tags = [tag for tag in pair if tag is not None]
    must = [t for t in tags if t.name.startswith("MUST")] or tags
    again = [t for t in must if t.name.endswith("RECOMPUTE")] or must
    host = [t for t in again if t.name.endswith("OFFLOAD")] or again
    return host[0] if host else None


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_the_stronger_tag_holds_in_either_order(merge):
    become(0, 2)
    for pair in itertools.product(TAGS, TAGS):
        left = merged(merge, *pair)
        expected = strongest(pair)
        assert recompute_policy(left) is expected, pair
        assert left.meta.get("ac_graph_id") == (expected and pair.index(expected) + 1), pair


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_an_offload_survives_all_but_recomputation(merge):
    become(0, 2)
    for tag, reverse in itertools.product((*TAGS, "offload"), (False, True)):
        pair = ("offload", tag) if reverse else (tag, "offload")
        left = merged(merge, *pair)
        assert offload_tag(left) is (tag is not MUST_RECOMPUTE), pair


def test_a_policy_that_a_newer_torch_adds_is_weaker_than_those_known():
    newer = SimpleNamespace(name="MUST_FLY")
    for known, reverse in itertools.product(TAGS, (False, True)):
        tags = (newer, known) if reverse else (known, newer)
        b = Builder()
        nodes = [b.input(name, 4) for name in "xy"]
        for node, tag in zip(nodes, tags, strict=True):
            if tag is not None:
                set_recompute_policy(node, tag)
        merge_tags(*nodes)
        assert recompute_policy(nodes[0]) is (known or newer)


def test_nodes_without_annotations_stay_so():
    b = Builder()
    nodes = [b.input(name, 4) for name in "xy"]
    for node in nodes:
        node.meta.pop("custom", None)
    merge_tags(*nodes)
    assert "custom" not in nodes[0].meta
