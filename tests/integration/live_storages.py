"""What a captured step holds at its peak and between forward and backward."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graph_trainer.analysis.unshard_chains import last_bucket, unshard_chains
from graph_trainer.compile import compile
from graph_trainer.joint_graph import (
    Phase,
    annotate_node,
    annotation,
    compute_nodes,
    is_backward,
)
from tests.integration.recorded import Recorded

BORDER_BYTES = 1_234_560  # a size that nothing else allocates


def mark_border() -> None:
    """Allocate a tensor of a size of its own: a mark that LiveStorages sees."""
    torch.empty(BORDER_BYTES, dtype=torch.uint8)


class LiveStorages(TorchDispatchMode):
    """Bytes of the storages that a running step holds: their peak, and those at the border.

    The allocator counts more: what gloo's threads still hold of collectives that are over.
    With eight ranks on two cores that is megabytes, and a matter of scheduling and not of the
    graph. (tests/unit/test_compile.py compares the allocator's peak with the predicted one
    where no other thread allocates.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.border = 0
        self._live = 0
        self._tensors: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if _is_tensor(t)}
        for tensor in filter(_is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            pointer, size = storage.data_ptr(), storage.nbytes()
            if size == BORDER_BYTES:
                self.border = self._live
                continue
            if not self._tensors[pointer]:
                if pointer in given:
                    continue  # a view of an input of the step, which is not the step's own
                self._live += size
            self._tensors[pointer] += 1
            weakref.finalize(tensor, self._drop, pointer, size)
        self.peak = max(self.peak, self._live)
        return result

    def _drop(self, pointer: int, size: int) -> None:
        self._tensors[pointer] -= 1
        if not self._tensors[pointer]:
            self._live -= size


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


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
    with LiveStorages() as live:
        marked(
            recorded.trainer.model_parts[0],
            *(inputs["input"], labels, tokens),
            positions=inputs["positions"],
        )
    kept = last_bucket(joint, unshard_chains(joint))
    read = {c.parameter for c in unshard_chains(joint) if c.parameter != "tok_embeddings.weight"}
    sizes = {name: p.numel() * torch.bfloat16.itemsize for name, p in recorded.parameters()}
    return {
        "peak": live.peak,
        "border": live.border,
        "unsharded": sum(sizes[name] for name in read),
        "last_bucket": sum(sizes[name] for name in kept),
    }
