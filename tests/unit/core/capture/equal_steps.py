"""Compare two captured steps node by node."""

import torch
from torch import fx

from graph_trainer.core.graph import data_sizes
from graph_trainer.core.graph.annotations import annotations_of, value_of
from graph_trainer.core.torch_private import pytree


def described(value):
    """What a test compares of a node's value: symbols by what is expected of them."""
    parts = []
    for leaf in pytree.tree_leaves(value):
        parts.append(type(leaf))
        if isinstance(leaf, torch.SymInt):
            parts.append((data_sizes.expected(leaf), data_sizes.bound(leaf)))
        if isinstance(leaf, torch.Tensor):
            layout = (data_sizes.shape_of(leaf), data_sizes.stride_of(leaf))
            offset = data_sizes.expected(leaf.storage_offset())
            kind = (leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_conj())
            parts.append((*layout, offset, *kind))
    return parts


def assert_equal(part, full, *, names=True):
    """Compare two captured steps node by node, with names and everything that is annotated."""
    assert len(part.graph.nodes) == len(full.graph.nodes)
    partner = {}
    for mine, its in zip(part.graph.nodes, full.graph.nodes, strict=True):
        partner[mine] = its
        assert mine.op == its.op
        assert mine.name == its.name or not names
        if mine.op != "get_attr":
            assert mine.target == its.target
        assert fx.map_arg((mine.args, mine.kwargs), partner.get) == (its.args, its.kwargs)
        assert described(value_of(mine)) == described(value_of(its)), mine.name
        assert annotations_of(mine) == annotations_of(its), mine.name
    given = [[value_of(n).untyped_storage() for n in each.placeholders()] for each in (part, full)]
    assert [s.nbytes() for s in given[0]] == [s.nbytes() for s in given[1]]
    assert len({s._cdata for s in given[0]}) == len({s._cdata for s in given[1]})
    assert part.signature == full.signature
