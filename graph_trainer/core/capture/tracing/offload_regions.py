"""Regions of a model whose activations the model itself wants in host memory."""

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
    """Keep what a model computes inside for backward in host memory, once the step is captured.

    It is the model's own offload tag, which no activation policy overrides; the pass
    `offload_activations` acts on it, and says what stays on the device and why. Without effect on
    a model that is not captured, and on gathered parameters. For use in a model's forward.

    Example::

        def forward(self, x):
            with gt.offload():
                hidden = self.up(x)
            return self.down(torch.relu(hidden))
    """
    with torch.fx.traceback.annotate(annotation(offload=True)):
        yield


def tag_offload_regions(joint: JointGraph) -> None:
    """Tag what forward allocated inside of `offload()`, but for parameters. Linear in nodes."""
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
