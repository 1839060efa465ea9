"""A train step that captures itself: one graph for each shape of batch, a bounded number."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graph_trainer.core.capture.call_signature import Batch, constant_key
from graph_trainer.core.capture.capture import LossFn, capture
from graph_trainer.core.capture.subclasses import unwrap
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.ordering.exchange import (
    LargestOfAllRanks,
    check_all_compiled,
    check_order_across_ranks,
    check_same_collectives,
)
from graph_trainer.core.passes.pipeline import PassConfig, passes_like, run_passes
from graph_trainer.core.passes.report import Report
from graph_trainer.core.runtime.collective_failure import publish_failure, published_failure
from graph_trainer.core.runtime.step import Gradients, Step, compile
from graph_trainer.core.sharding.process_groups import groups_agreed_on, no_new_groups
from graph_trainer.core.torch_private import pytree
from graph_trainer.errors import CollectiveError, VerificationError

_ERROR_SHOWN = 4000

OnEvent = Callable[[str], None]


class TrainStep:
    """`loss, gradients = step(model, *args, **kwargs)`, captured at the first call.

    Another shape, dtype or constant in the batch is captured again, and so is another model,
    set of trainable parameters, training mode or autocast; the least recently used graph
    beyond `max_graphs` is dropped.

    Batches may differ from rank to rank, so a rank that meets a new one talks to no other:
    its graph must issue what the first one did. If it has none to issue, it leaves word before
    it fails, and the others, whose collectives fail when it ends, raise what it said. All else
    is the program's own doing and must happen on every rank in the same step: the first graph
    for it is checked against the other ranks'.

    Arguments:
        loss_fn: `loss_fn(model, *args, **kwargs)` -> scalar loss.
        backward: whether gradients are computed; if not, the step gives none, as `capture` says.
        passes: which passes run, and how.
        backend: "eager" or "inductor".
        max_graphs: how many captured graphs are kept.
        on_event: called with a line before the first capture and one after every capture.
        on_report: called with the report of every new graph.
        check: called with the first graph, its passes run, before it communicates; what it raises
            on one rank ends the step on all.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        *,
        backward: bool = True,
        passes: PassConfig | None = None,
        backend: str = "eager",
        max_graphs: int = 8,
        on_event: OnEvent = lambda line: None,
        on_report: Callable[[JointGraph, Report], None] = lambda joint, report: None,
        check: Callable[[JointGraph], None] = lambda joint: None,
    ) -> None:
        self._loss_fn = loss_fn
        self._backward = backward
        self._passes = passes or PassConfig()
        self._backend = backend
        self._max_graphs = max_graphs
        self._on_event = on_event
        self._on_report = on_report
        self._check = check
        self._steps: OrderedDict[object, Step] = OrderedDict()
        self._firsts: OrderedDict[object, JointGraph] = OrderedDict()

    def __call__(
        self, model: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Gradients]:
        """Run the step on a batch, capturing it first if no graph fits.

        Raises:
            CaptureError: the step cannot be captured.
            VerificationError: the ranks' graphs differ, or another rank has no graph.
            CollectiveError: a collective timed out or lost its connection (gloo; see `stall`).
        """
        program = _program_key(model, args, kwargs)
        key = (program, _batch_key(args, kwargs))
        try:
            step = self._steps.get(key)
        except TypeError:
            Batch(args, kwargs)  # says which constant cannot be hashed
            raise
        if step is None:
            step = self._prepare(program, model, args, kwargs)
        self._keep(program, key, step)
        try:
            return step(model, *args, **kwargs)
        except CollectiveError as error:
            failure = published_failure()
            if failure:
                raise VerificationError(failure) from error
            raise

    def joint_graphs(self) -> list[JointGraph]:
        """The graphs that are kept now, least recently used first."""
        return [step.joint for step in self._steps.values()]

    def _keep(self, program: object, key: object, step: Step) -> None:
        """Note that a step is used now, and forget those used least recently."""
        self._steps[key] = step
        self._firsts.setdefault(program, step.joint)
        self._steps.move_to_end(key)
        self._firsts.move_to_end(program)
        # every rank sees the same programs in the same order, so all forget the same first one
        for kept in (self._steps, self._firsts):
            while len(kept) > self._max_graphs:
                kept.popitem(last=False)

    def _prepare(self, program: object, model: nn.Module, args: Any, kwargs: Any) -> Step:
        again = bool(self._firsts)
        if not again:
            what = "train step" if self._backward else "step without backward"
            self._on_event(f"Capturing the {what}")
        # only the first graph of a program is captured on all ranks at once
        together = program not in self._firsts
        largest = LargestOfAllRanks()
        start = time.perf_counter()
        try:
            joint = capture(model, self._loss_fn, args, kwargs, backward=self._backward)
            captured = time.perf_counter()
            if together:
                with groups_agreed_on(largest):
                    report = run_passes(joint, self._passes, all_reduce_max=largest)
            else:
                passes = passes_like(self._passes, self._firsts[program])
                with groups_agreed_on(no_new_groups):
                    report = run_passes(joint, passes, roll_back=False)
            passed = time.perf_counter()
            if not again:
                self._check(joint)
            if not together:
                check_same_collectives(self._firsts[program], joint)
        except Exception as error:
            if together and not largest.received_failure:
                check_order_across_ranks(error)
            publish_failure(f"could not capture the step again, {_said(error)}")
            raise
        if together:
            check_order_across_ranks(joint)
        checked = time.perf_counter()
        try:
            step = compile(joint, self._backend)
        except Exception as error:
            if together:
                check_all_compiled(error)
            publish_failure(f"could not compile the step again, {_said(error)}")
            raise
        compiled = time.perf_counter()
        if together:
            check_all_compiled(None)
        what = f"Captured again for batch {_shapes(args, kwargs)}: " if again else ""
        self._on_event(
            f"{what}{report.last.nodes:,} nodes: captured in {captured - start:.1f} s, passes "
            f"{passed - captured:.1f} s, order check {checked - passed:.1f} s, backend "
            f"'{self._backend}' {compiled - checked:.1f} s"
        )
        self._on_report(joint, report)
        return step


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_ERROR_SHOWN]


def _program_key(model: nn.Module, args: Any, kwargs: Any) -> object:
    """Everything that makes another graph and does not come from the batch."""
    leaves, _ = pytree.tree_flatten((args, kwargs))
    modules = list(model.modules())
    trainable = tuple(
        p.requires_grad for m in modules for p in m._parameters.values() if p is not None
    )
    training = tuple(m.training for m in modules)
    devices = {v.device.type for v in leaves if isinstance(v, torch.Tensor)} | {"cpu"}
    casts = tuple((d, torch.get_autocast_dtype(d)) for d in sorted(devices) if _autocast_enabled(d))
    # a model is its own key: another one of the same class may have other hyperparameters
    return (weakref.ref(model), trainable, training, casts)


def _batch_key(args: Any, kwargs: Any) -> object:
    """Equal for two batches exactly when one graph serves both."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    described = tuple(
        (unwrap(v)[1], v.requires_grad) if isinstance(v, torch.Tensor) else constant_key(v)
        for v in leaves
    )
    return (tree, described)


def _autocast_enabled(device_type: str) -> bool:
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _shapes(args: Any, kwargs: Any) -> list[tuple[int, ...]]:
    leaves, _ = pytree.tree_flatten((args, kwargs))
    return [tuple(v.shape) for v in leaves if isinstance(v, torch.Tensor)]
