"""What a captured step holds at its peak and between forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from graph_trainer.core.analysis.unshard_chains import last_bucket, unshard_chains
from graph_trainer.core.graph.annotations import (
    Phase,
    annotate_node,
    annotation,
    is_backward,
)
from graph_trainer.core.graph.joint_graph import compute_nodes
from graph_trainer.core.runtime.live_storages import LiveStorages
from graph_trainer.core.runtime.step import compile
from tests.integration.recorded import Recorded

BORDER_BYTES = 1_234_560  # a size that nothing else allocates


def mark_border() -> None:
    """Allocate a tensor of a size of its own: a mark that WithBorder sees."""
    torch.empty(BORDER_BYTES, dtype=torch.uint8)


class WithBorder(LiveStorages):
    """Also keeps what is held where the mark stands, and does not count the mark."""

    def __init__(self) -> None:
        super().__init__()
        self.border_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format and list(args[0]) == [BORDER_BYTES]:
            self.border_bytes = self.live_bytes
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def measure_memory(recorded: Recorded) -> dict[str, int]:
    """Bytes at the peak of a captured step and at the border between forward and backward,
    where a marking allocation is put into the graph; and of its weights, gathered."""
    joint = recorded.joint()
    first = next(n for n in compute_nodes(joint.graph) if is_backward(n))
    with joint.graph.inserting_before(first):
        mark = joint.graph.call_function(mark_border)
    annotate_node(mark, annotation(phase=Phase.BACKWARD))
    marked = compile(joint, "eager")
    inputs, labels = recorded.next_batch()
    tokens = torch.tensor(labels.numel(), device=labels.device)
    with WithBorder() as live:
        marked(
            recorded.trainer.model_parts[0],
            *(inputs["input"], labels, tokens),
            positions=inputs["positions"],
        )
    kept = last_bucket(joint, unshard_chains(joint))
    read = {c.parameter for c in unshard_chains(joint) if c.parameter != "tok_embeddings.weight"}
    sizes = {name: p.numel() * torch.bfloat16.itemsize for name, p in recorded.parameters()}
    return {
        "peak": live.peak_bytes,
        "border": live.border_bytes,
        "unsharded": sum(sizes[name] for name in read),
        "last_bucket": sum(sizes[name] for name in kept),
    }
