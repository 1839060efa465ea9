"""Capture: one step, run once on fake tensors, becomes a JointGraph."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import re
import sys
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from graph_trainer.core.capture.refusals.inputs import (
    refuse_batch_with_gradient,
    refuse_shared_memory,
    refuse_state_among_constants,
)
from graph_trainer.core.capture.refusals.second_step import ModuleAttributes, check_second_step
from graph_trainer.core.capture.refusals.side_effects import is_reviewed_file, refuse_leftovers
from graph_trainer.core.capture.repetition.extend import check_left_out_unused, extend
from graph_trainer.core.capture.repetition.repeated_layers import (
    NotRepeated,
    Repetition,
    repetition_in,
)
from graph_trainer.core.capture.tracing.exchanged_counts import trace_counts
from graph_trainer.core.capture.tracing.fake_mode import fake_mode
from graph_trainer.core.capture.tracing.fsdp_roles import find_fsdp_roles
from graph_trainer.core.capture.tracing.model_state import ModelState, state_of
from graph_trainer.core.capture.tracing.offload_regions import tag_offload_regions
from graph_trainer.core.capture.tracing.rng_replay import refuse_draws_of_python
from graph_trainer.core.capture.tracing.trace import LossFn, Step, StepTrace
from graph_trainer.core.graph.annotations import set_input_name
from graph_trainer.core.graph.captured_call import (
    CapturedBatch,
    CapturedCall,
    CapturedModel,
    flatten,
)
from graph_trainer.core.graph.data_sizes import storage_bytes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.returned import scalar_loss
from graph_trainer.core.graph.signature import Signature, with_parts
from graph_trainer.core.graph.subclasses import unwrap, wrap
from graph_trainer.core.graph.writes import writes_of
from graph_trainer.core.torch_private import fake_like, hooks_of, rename_node, storage_id
from graph_trainer.errors import CaptureError

logger = logging.getLogger(__name__)

_NOT_MODELS = {"torch", *sys.stdlib_module_names}
"""Packages whose classes are bases of modules and hold no state of a step."""


def capture(
    model: nn.Module,
    loss_fn: LossFn,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool = True,
    meta_as: torch.device | str = "meta",
    full_capture: bool | None = None,
) -> JointGraph:
    """Trace forward, loss and backward of one step into one flat graph.

    Args:
        model: any module; its parameters and buffers become inputs of the graph. They may be
            DTensors (see `simple_fsdp`) and may be on meta. It is left as it was:
            attributes that forward changes, and entries of dicts and lists that are attributes,
            are restored. What it changes elsewhere in Python, as in globals, stays changed.
        loss_fn: `loss_fn(model, *args, **kwargs)` -> scalar loss.
        args, kwargs: one batch. Tensors become inputs; everything else is baked in and
            checked at every later call.
        backward: whether gradients are computed. If not, forward and loss run as under
            `torch.no_grad()` and the loss is the graph's only output: for validation. Call
            `model.eval()` first where that is meant: a graph keeps the mode it was captured in.
        meta_as: the device that replaces meta: ops are chosen as on that device.
        full_capture: whether all layers are traced. If not, and the model has a stack of more than
            four layers of one kind, four are traced and the others are copies of their nodes:
            what layers do must then be seen in their attributes and arguments. None
            trusts torchtitan and transformers as they are installed, and traces all layers of what
            is code of the user's own.

    Returns:
        The graph: inputs are the model's tensors and the batch, outputs the loss and the
        gradient of every parameter that requires one and that the loss reaches (none without
        `backward`). Gradients of batch tensors are not returned.

    Runs on fake tensors: no tensor storage is allocated, no kernel and no collective runs. A
    model that asks whether its tensors are fake and then computes otherwise (transformers
    does where it would look into a mask) is captured as it computes with fake ones.

    Raises:
        CaptureError: something in the step cannot be traced; the message names the module.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"model is a {type(model).__name__}; capture takes a module, then a function of it and "
            "the batch: capture(model, loss_fn, args)"
        )
    if not isinstance(args, (tuple, list)):
        raise CaptureError(
            f"args is a {type(args).__name__}; it must be a tuple of loss_fn's arguments after "
            "the model, for example (batch,)"
        )
    step = Step(model, loss_fn, args, dict(kwargs or {}), backward, meta_as, scalar_loss)
    return capture_step(step, full_capture)


def capture_step(step: Step, full_capture: bool | None = None) -> JointGraph:
    """Trace a step, or of its alike layers some and copy their nodes; see `capture`."""
    state = state_of(step.model)
    users_own = _users_own(step.model, step.loss_fn)
    why: object = f"a module, a hook or the loss is code of your own, in {users_own}"
    if full_capture is None and not users_own or full_capture is False:
        why = "no layer, or sequence of layers, is repeated five times"
        try:
            repetition = repetition_in(step.model, state.tensors)
            if repetition is not None:
                return _captured(step, state, bool(users_own), repetition)
        except Exception as error:  # of any kind: layers may not expect to be looked into
            why = error
    if not full_capture:
        logger.info("Tracing all layers: %s", why)
    return _captured(step, state, bool(users_own), None)


def _users_own(model: nn.Module, loss_fn: LossFn) -> str:
    """Return a file, of no package that is known, with a class of modules, one of its methods, a
    hook or the loss, or "".

    A step with such code is traced twice, for it may keep state in Python.
    """
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    functions: list[Any] = [loss_fn, *hooks_of(model.modules())]
    homes = set()
    for kind in kinds:
        if kind.__module__.partition(".")[0] not in _NOT_MODELS:
            homes.add(kind.__module__)
            # one of the user's own may have been put in the place of a class's method
            functions += (each for each in vars(kind).values() if callable(each))
    files = set()
    for function in functions:
        code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
        if code is not None:
            files.add(code.co_filename)
        elif not isinstance(function, type):
            homes.add(type(function).__module__)
    homes = {home for home in homes if home.partition(".")[0] not in _NOT_MODELS}
    files |= {getattr(sys.modules.get(home), "__file__", None) or home for home in homes}
    written = (file for file in sorted(files) if not file.startswith("<"))  # by dataclasses
    return next((file for file in written if not is_reviewed_file(file)), "")


def _captured(
    step: Step, state: ModelState, users_own: bool, repetition: Repetition | None
) -> JointGraph:
    model, backward = step.model, step.backward
    batch = CapturedBatch(step.args, step.kwargs)
    leaves, _ = flatten(step.args, step.kwargs)
    batch_tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    of_batch = batch.inputs(batch_tensors)
    traced_state, left_out_state = state.parted(repetition.left_out() if repetition else set())

    captured_model = CapturedModel.of(model)
    for spec, tensor in zip(of_batch, batch_tensors, strict=True):
        refuse_batch_with_gradient(spec, tensor, backward)

    mode = fake_mode()
    # Detached one by one: a tensor that is passed twice becomes two inputs, since the next call
    # may pass two tensors.
    real = _parts([*traced_state.tensors, *batch_tensors])
    made: list[weakref.ref[torch.Tensor]] = []

    meta_as = torch.device(step.meta_as)
    storages = Counter(map(storage_id, _parts(state.tensors) if repetition else ()))

    def fake_of(part: torch.Tensor) -> torch.Tensor:
        """Make the fake tensor of a plain one."""
        if part.is_meta and meta_as.type != "meta":
            return fake_like(part, part.shape, part.stride(), mode, meta_as)
        return mode.from_tensor(part)

    def fake_of_left_out(part: torch.Tensor) -> torch.Tensor:
        """As `fake_of`, in a tenth of the time where nothing else is in the storage."""
        part = part.detach()
        is_shared = storages[storage_id(part)] > 1
        fills = not part.storage_offset() and storage_bytes(part) == part.untyped_storage().nbytes()
        if is_shared or not fills or part.is_conj() or part.is_neg():
            return fake_of(part)
        device = meta_as if part.is_meta else part.device
        return fake_like(part, part.shape, part.stride(), mode, device)

    def traced() -> tuple[fx.GraphModule, StepTrace]:
        left_out = []
        for spec, tensor in zip(left_out_state.inputs, left_out_state.tensors, strict=True):
            stand_in = wrap(list(map(fake_of_left_out, unwrap(tensor)[0])), spec.layout)
            stand_in.requires_grad_(spec.requires_grad)
            left_out.append((spec, stand_in, tensor))
        inputs = [*traced_state.inputs, *of_batch]
        trace = StepTrace(step, inputs, traced_state, left_out, batch)
        skipping = contextlib.nullcontext() if repetition is None else repetition.skipping()
        with refuse_draws_of_python(), skipping:
            graph_module = trace.graph_of(list(map(fake_of, real)), mode)
        made.extend(trace.made)
        return graph_module, trace

    with ModuleAttributes(model) as attributes:
        graph_module, trace = traced()
        check_left_out_unused(graph_module, trace.left_out)
        refuse_state_among_constants(graph_module, state.inputs, state.tensors)
        changes = attributes.changes()
        if changes or users_own:
            check_second_step(graph_module, traced()[0], trace.inputs, changes)
    # what it writes: a layer that is left out writes what its sample does
    graph, written = graph_module.graph, writes_of(graph_module.graph).written_inputs()
    trace.inputs = [
        dataclasses.replace(spec, mutated=not written.isdisjoint(nodes))
        for spec, nodes in with_parts(trace.inputs, graph.find_nodes(op="placeholder"))
    ]
    if repetition is not None:
        if changes:
            raise NotRepeated(f"forward changes {', '.join(changes)}")
        graph_module = extend(graph_module, trace, repetition, state, fake_of_left_out)
    trace_counts(graph_module.graph)
    # placeholders are named after their inputs: 'layers_0_wo_weight', not 'arg0_17'
    graph = graph_module.graph
    for spec, nodes in with_parts(trace.inputs, graph.find_nodes(op="placeholder")):
        for node in nodes:
            set_input_name(node, spec.name)
            rename_node(graph, node, re.sub(r"\W+", "_", spec.name).strip("_") or "input")
    outputs, without_grad = tuple(trace.outputs), tuple(trace.without_grad)
    signature = Signature(tuple(trace.inputs), outputs, without_grad, backward)
    refuse_shared_memory(signature.inputs, _parts([*state.tensors, *batch_tensors]))
    del trace
    refuse_leftovers(made)
    graph_module.recompile()
    joint = JointGraph(
        graph_module,
        signature,
        CapturedCall(batch, captured_model.without(changes)),
        type(model).__name__,
        weakref.ref(model),
    )
    find_fsdp_roles(joint)
    tag_offload_regions(joint)
    joint.validate()
    return joint


def _parts(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the plain tensors that tensors consist of, as tensors of their own."""
    return [part.detach() for tensor in tensors for part in unwrap(tensor)[0]]
