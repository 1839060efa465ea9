"""Capture: run one step on fake tensors, and return its JointGraph."""

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
from graph_trainer.core.capture.tracing.trace import LossFn, StandIn, Step, StepTrace
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
            DTensors (see `simple_fsdp`) and may be on meta. Attributes that forward changes, and
            entries of dicts and lists that are attributes, are restored. Other Python state that it
            changes, such as globals, stays changed.
        loss_fn: `loss_fn(model, *args, **kwargs)` -> scalar loss.
        args, kwargs: one batch. Tensors become inputs; everything else becomes a constant of the
            graph, which every later call is compared with.
        backward: whether gradients are computed. If not, forward and loss run as under
            `torch.no_grad()` and the loss is the graph's only output: for validation. Call
            `model.eval()` first to validate without dropout: a graph keeps the mode it was captured
            in.
        meta_as: the device that replaces meta: ops are chosen as on that device.
        full_capture: whether all layers are traced. If not, and the model has a stack of more than
            four layers of one kind, four are traced and the others are copies of their nodes: the
            attributes and arguments of layers must then show what they compute. None means False if
            all code of the step is that of torchtitan and transformers as installed, else True.

    Returns:
        The graph: inputs are the model's tensors and the batch, outputs the loss and the
        gradient of every parameter that requires one and that the loss depends on (none without
        `backward`). Gradients of batch tensors are not returned.

    Runs on fake tensors: no tensor storage is allocated, no kernel and no collective runs. A
    model that checks whether its tensors are fake and then computes something else (transformers
    does where it would read a mask) is captured as it computes with fake ones.

    Raises:
        CaptureError: something in the step cannot be traced; the message names the module.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"model is a {type(model).__name__}, and must be a module: pass the module, then a "
            "function of it and the batch, as in capture(model, loss_fn, args)"
        )
    if not isinstance(args, (tuple, list)):
        raise CaptureError(
            f"args is a {type(args).__name__}, and must be a tuple of loss_fn's arguments after "
            "the model: pass (batch,) for one argument"
        )
    step = Step(
        model=model,
        loss_fn=loss_fn,
        args=args,
        kwargs=dict(kwargs or {}),
        backward=backward,
        meta_as=meta_as,
        returned=scalar_loss,
    )
    return capture_step(step, full_capture)


def capture_step(step: Step, full_capture: bool | None = None) -> JointGraph:
    """Trace a step, or trace some of its equal layers and copy their nodes; see `capture`."""
    state = state_of(step.model)
    user_file = _user_file(step.model, step.loss_fn)
    trace_all = bool(user_file) if full_capture is None else full_capture
    reason: object = f"a module, a hook or the loss is code of your own, in {user_file}"
    if not trace_all:
        reason = "no layer, or sequence of layers, is repeated five times"
        try:
            repetition = repetition_in(step.model, state.tensors)
            if repetition is not None:
                return _captured(step, state, repetition, trace_twice=bool(user_file))
        except Exception as error:  # of any kind: comparing layers runs their code, as __eq__
            reason = error
    if not full_capture:
        logger.info("Tracing all layers: %s", reason)
    return _captured(step, state, None, trace_twice=bool(user_file))


def _user_file(model: nn.Module, loss_fn: LossFn) -> str:
    """Return a file with code of the user's own that the step runs, or "".

    Looks at the classes of modules, their methods, hooks and the loss. A step with such code is
    traced twice, because it may keep state in Python. Code of torch, of this package and of the
    installed packages in `REVIEWED` keeps none.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    functions: list[Any] = [loss_fn, *hooks_of(model.modules())]
    python_modules = set()
    for class_ in classes:
        if class_.__module__.partition(".")[0] not in _NOT_MODELS:
            python_modules.add(class_.__module__)
            # a method may have been replaced by a function of the user's
            functions += filter(callable, vars(class_).values())
    files = set()
    for function in functions:
        code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
        if code is not None:
            files.add(code.co_filename)
        elif not isinstance(function, type):  # an object with __call__
            python_modules.add(type(function).__module__)
    for name in python_modules:
        if name.partition(".")[0] not in _NOT_MODELS:
            files.add(getattr(sys.modules.get(name), "__file__", None) or name)
    for file in sorted(files):
        # dataclasses generates methods in "<string>"
        if not file.startswith("<") and not is_reviewed_file(file):
            return file
    return ""


def _captured(
    step: Step, state: ModelState, repetition: Repetition | None, *, trace_twice: bool
) -> JointGraph:
    model = step.model
    batch = CapturedBatch(step.args, step.kwargs)
    leaves, _ = flatten(step.args, step.kwargs)
    batch_tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    batch_inputs = batch.inputs(batch_tensors)
    traced_state, left_out_state = state.split(repetition.left_out() if repetition else set())

    captured_model = CapturedModel.of(model)
    for spec, tensor in zip(batch_inputs, batch_tensors, strict=True):
        refuse_batch_with_gradient(spec, tensor, step.backward)
    if step.is_stage:
        num_received = sum(isinstance(leaf, torch.Tensor) for leaf in flatten(step.args, {})[0])
        for place, tensor in enumerate(batch_tensors[:num_received]):
            differentiable = tensor.is_floating_point()
            batch_inputs[place] = dataclasses.replace(
                batch_inputs[place], requires_grad=differentiable
            )

    mode = fake_mode()
    # Detached one by one: a tensor that is passed twice becomes two inputs, since the next call
    # may pass two tensors.
    real = _parts([*traced_state.tensors, *batch_tensors])
    results: list[weakref.ref[torch.Tensor]] = []  # the fake tensors that the step's ops return

    meta_as = torch.device(step.meta_as)
    num_in_storage = Counter(map(storage_id, _parts(state.tensors) if repetition else ()))

    def fake_of(part: torch.Tensor) -> torch.Tensor:
        """Make the fake tensor of a plain one."""
        if part.is_meta and meta_as.type != "meta":
            return fake_like(part, part.shape, part.stride(), mode, meta_as)
        return mode.from_tensor(part)

    def fake_of_left_out(part: torch.Tensor) -> torch.Tensor:
        """Make a fake tensor as `fake_of`, in a tenth of the time if its storage has no other."""
        part = part.detach()
        is_shared = num_in_storage[storage_id(part)] > 1
        fills_storage = (
            part.storage_offset() == 0 and storage_bytes(part) == part.untyped_storage().nbytes()
        )
        if is_shared or not fills_storage or part.is_conj() or part.is_neg():
            return fake_of(part)
        device = meta_as if part.is_meta else part.device
        return fake_like(part, part.shape, part.stride(), mode, device)

    def run_trace() -> tuple[fx.GraphModule, StepTrace]:
        left_out = []
        for spec, tensor in zip(left_out_state.inputs, left_out_state.tensors, strict=True):
            stand_in = wrap(list(map(fake_of_left_out, unwrap(tensor)[0])), spec.layout)
            stand_in.requires_grad_(spec.requires_grad)
            left_out.append(StandIn(spec, stand_in, tensor))
        inputs = [*traced_state.inputs, *batch_inputs]
        trace = StepTrace(step, inputs, traced_state, left_out, batch)
        skipping = contextlib.nullcontext() if repetition is None else repetition.skipping()
        with refuse_draws_of_python(), skipping:
            graph_module = trace.graph_of(list(map(fake_of, real)), mode)
        results.extend(trace.results)
        return graph_module, trace

    with ModuleAttributes(model) as attributes:
        graph_module, trace = run_trace()
        check_left_out_unused(graph_module, trace.left_out)
        refuse_state_among_constants(graph_module, state.inputs, state.tensors)
        changes = attributes.changes()
        if changes or trace_twice:
            # without a variable: it would keep the tensors of the second trace alive
            check_second_step(graph_module, run_trace()[0], trace.inputs, changes)
    # Mark the inputs that the step writes. `extend` marks those of left out layers.
    written = writes_of(graph_module.graph).written_inputs()
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    trace.inputs = [
        dataclasses.replace(spec, mutated=not written.isdisjoint(nodes))
        for spec, nodes in with_parts(trace.inputs, placeholders)
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
    signature = Signature(
        inputs=tuple(trace.inputs),
        outputs=tuple(trace.outputs),
        parameters_without_grad=tuple(trace.without_grad),
        backward=step.backward,
    )
    refuse_shared_memory(signature.inputs, _parts([*state.tensors, *batch_tensors]))
    del trace  # it refers to tensors of the trace, which must be freed now
    refuse_leftovers(results)
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
    """Return the plain tensors that tensors consist of, detached."""
    return [part.detach() for tensor in tensors for part in unwrap(tensor)[0]]
