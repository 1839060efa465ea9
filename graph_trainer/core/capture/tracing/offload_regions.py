"""Regions of a model whose activations the model itself marks to be kept in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from graph_trainer.core.analysis.unshard_chains import unshard_chains
from graph_trainer.core.graph.annotations import (
    Phase,
    annotation,
    in_offload_region,
    phase_of,
    set_offload,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_wait, storages_in, value_storages


@contextlib.contextmanager
def offload() -> Iterator[None]:
    """Keep activations that a model computes inside in host memory until backward.

    For use in a model's forward. Tags nodes of a captured step, and no activation policy overrides
    the tag. The pass `offload_activations` acts on it, and reports what stays on the device and
    why. Without effect on a model that is not captured, and on gathered parameters.

    Example::

        def forward(self, x):
            with gt.offload():
                hidden = self.up(x)
            return self.down(torch.relu(hidden))
    """
    with torch.fx.traceback.annotate(annotation(offload=True)):
        yield


def tag_offload_regions(joint: JointGraph) -> None:
    """Tag what forward allocated inside `offload()`, without parameters. Linear in nodes."""
    inside = [
        node
        for node in joint.graph.nodes
        if phase_of(node) is Phase.FORWARD and in_offload_region(node)
    ]
    if not inside:
        return
    storages = value_storages(joint.graph)
    parameters = {node for chain in unshard_chains(joint) for node in chain.nodes}
    for node in inside:
        allocates = any(storage[0] is node for storage in storages_in(storages[node]))
        if node not in parameters and (allocates or is_wait(node)):
            set_offload(node)
