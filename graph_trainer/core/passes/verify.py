"""Run a graph again on fake tensors and compare every value: the expensive check."""

from __future__ import annotations

import torch
from torch import fx

from graph_trainer.core.graph.annotations import tensors_of, value_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.torch_private import FakeTensorMode, detect_fake_mode
from graph_trainer.errors import VerificationError


def verify_values(joint: JointGraph) -> None:
    """Check that the result of every node is what its metadata says: shape, stride, dtype, device.

    Runs each op once on fake tensors; linear in nodes, but as slow as capture's second half.

    Raises:
        VerificationError: for the first node that differs, with its result and its metadata, or
            that cannot run at all.
    """
    mode = detect_fake_mode([value_of(n) for n in joint.placeholders()]) or FakeTensorMode()
    # constants in the subgraph of a higher-order op are real tensors
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode, torch.no_grad():
            _Checker(joint.graph_module).run(*[value_of(n) for n in joint.placeholders()])
    finally:
        mode.allow_non_fake_inputs = allowed


class _Checker(fx.Interpreter):
    def run_node(self, n: fx.Node) -> object:
        if isinstance(value_of(n), torch.SymInt):
            return value_of(n)  # another reading would give another symbol
        try:
            result = super().run_node(n)
        except Exception as error:
            raise VerificationError(
                f"node '{n.name}' ({n.target}) cannot run on what it reads: "
                f"{type(error).__name__}: {error}"
            ) from error
        if n.op == "call_function":
            results = result if isinstance(result, (tuple, list)) else [result]
            real = [_describe(t) for t in results if isinstance(t, torch.Tensor)]
            traced = [_describe(t) for t in tensors_of(n)]
            if real != traced:
                raise VerificationError(
                    f"node '{n.name}' ({n.target}) makes {real} and its metadata says {traced}"
                )
        return result


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tuple(tensor.stride())} {tensor.dtype} {tensor.device}"
