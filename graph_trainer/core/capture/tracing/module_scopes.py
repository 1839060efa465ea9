"""Annotate every node with the running phase and module while a step is traced.

In forward, hooks on every module push and pop its FQN. In backward, an autograd node has the
sequence number that it got in forward, which leads to the FQN that was current then.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx.traceback import get_current_meta, preserve_node_meta

from graph_trainer.core.graph.annotations import Phase, annotation
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.torch_private import (
    autograd_sequence_number,
    current_sequence_number,
)
from graph_trainer.errors import CaptureError

LOSS_MODULE = "loss"
"""The module name of ops that the loss function runs outside of any module."""


class Scopes:
    """The current annotations of a trace, and the module that made each autograd node."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        """Autograd's sequence number at each change of the current module."""
        self._modules: list[str] = []
        """The current module from each of these numbers on."""
        self._module = LOSS_MODULE
        self._failed: str | None = None
        self._stack: list[tuple[str, dict[str, Any]]] = []
        """The modules around the current one, with the annotations that were current there."""

    @contextlib.contextmanager
    def trace(self, model: nn.Module) -> Iterator[None]:
        """Annotate everything that runs inside. Removes its hooks from `model` at the end."""
        with preserve_node_meta(), contextlib.ExitStack() as hooks:
            names = {module: clean_fqn(fqn) for fqn, module in model.named_modules()}
            for module, name in names.items():
                enter = functools.partial(self._enter, name)
                leave = functools.partial(self._leave, name)
                hooks.enter_context(module.register_forward_pre_hook(enter, prepend=True))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
            self._write(annotation(phase=Phase.LOSS, module=LOSS_MODULE))
            self._remember(LOSS_MODULE)
            yield

    @contextlib.contextmanager
    def backward(self, *roots: torch.Tensor) -> Iterator[None]:
        """Annotate the backward of `roots` that runs inside."""
        nodes = _walk(roots)
        if any(node.name().removesuffix("Backward") == "CheckpointFunction" for node in nodes):
            # it calls backward() inside backward, and autograd.grad returns no gradients of that
            raise CaptureError(
                "the model uses torch.utils.checkpoint with use_reentrant=True, whose gradients a "
                "captured step would lose: pass use_reentrant=False"
            )
        with contextlib.ExitStack() as hooks:
            for node in nodes:
                hooks.enter_context(node.register_prehook(self._enter_backward_of(node)))
            self._write(annotation(phase=Phase.BACKWARD, module=LOSS_MODULE))
            yield

    def failed_module(self) -> str:
        """Return the FQN of the innermost module whose forward raised, else of the current one."""
        return self._module if self._failed is None else self._failed

    def _enter(self, fqn: str, *_: Any) -> None:
        self._failed = None  # an earlier exception was caught by the model
        custom = dict(get_current_meta().get("custom", {}))
        self._stack.append((self._module, custom))
        # checkpointing runs forward again inside backward: those nodes belong to backward
        in_backward = custom.get("phase") == Phase.BACKWARD.value
        if in_backward:
            self._write(annotation(module=fqn, recomputed=True))
        else:
            self._write(annotation(phase=Phase.FORWARD, module=fqn))
        self._remember(fqn)

    def _leave(self, fqn: str, *inputs_and_output: Any) -> None:
        # torch calls this without an output when forward raised, the innermost module first
        output = inputs_and_output[-1]
        if self._failed is None and output is None and sys.exc_info()[1] is not None:
            self._failed = fqn
        module_before, custom = self._stack.pop()
        get_current_meta()["custom"] = custom
        self._remember(module_before)

    def _enter_backward_of(self, node: Any) -> Any:
        position = bisect.bisect_right(self._starts, autograd_sequence_number(node)) - 1
        module = self._modules[max(position, 0)]

        def enter(_: tuple[Any, ...]) -> None:
            self._module = module
            self._failed = None
            self._write(annotation(phase=Phase.BACKWARD, module=module))

        return enter

    def _write(self, entry: dict[str, str]) -> None:
        meta = get_current_meta()
        meta["custom"] = {**meta.get("custom", {}), **entry}

    def _remember(self, module: str) -> None:
        self._module = module
        self._starts.append(current_sequence_number())
        self._modules.append(module)


def _walk(roots: tuple[torch.Tensor, ...]) -> list[Any]:
    """List every autograd node that backward of `roots` runs; autograd.grad runs no leaves."""
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    nodes = []
    while stack:
        node = stack.pop()
        nodes.append(node)
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return [node for node in nodes if node.name() != "torch::autograd::AccumulateGrad"]
