"""Capture a model without a loss, or a stage of a pipeline: backward takes gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from graph_trainer.core.capture.capture import capture_step
from graph_trainer.core.capture.tracing.trace import LossFn, Step
from graph_trainer.core.graph.annotations import loss_gradient_of, set_input_name, value_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.returned import ModelOutputs, scalar_loss
from graph_trainer.core.graph.signature import Input, InputKind, OutputKind, with_parts
from graph_trainer.core.graph.subclasses import wrap


def capture_forward(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    meta_as: torch.device | str = "meta",
) -> JointGraph:
    """Trace forward and backward of a model into one flat graph, without a loss.

    Args:
        model, args, kwargs, meta_as: as of `capture`; the model is called with the batch.

    Returns:
        The graph: inputs are the model's tensors, the batch and a gradient for each output that
        depends on a parameter; outputs are what the model returns and the gradients of the
        parameters. Gradients of batch tensors are not returned. The same passes run on it;
        `partition` makes it a module that returns what the model does.

    Raises:
        CaptureError: as of `capture`; or the model returns no tensor.

    Example::

        joint = gt.capture_forward(model, (tokens,))
        forward = gt.partition(joint)
        loss_fn(forward(tokens), labels).backward()
    """
    outputs = ModelOutputs()
    step = Step(
        model=model,
        loss_fn=_call,
        args=args,
        kwargs=dict(kwargs or {}),
        backward=True,
        meta_as=meta_as,
        returned=outputs,
    )
    return _with_gradients_as_inputs(capture_step(step), outputs)


def capture_stage(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFn | None = None,
    backward: bool = True,
    meta_as: torch.device | str = "meta",
    full_capture: bool | None = None,
) -> JointGraph:
    """Trace forward and backward of one stage of a pipeline into one flat graph.

    Args:
        module: the layers of the stage.
        args: what the stage receives from the stage before; the first stage takes its batch here.
        kwargs: what every stage has of the batch, such as positions and labels.
        loss_fn: of the last stage, `loss_fn(module, *args, **kwargs)` -> scalar loss; None for the
            other stages, which are called with the batch.
        backward: whether gradients are computed. If not, the graph has the outputs alone: for
            validation.
        meta_as, full_capture: as of `capture`.

    Returns:
        The graph: inputs are the module's tensors, the batch and, without a loss, a gradient for
        each output; outputs are the loss or what the module returns, the gradients of the floating
        point tensors of `args`, then those of the parameters. The same passes run on it.

    Raises:
        CaptureError: as of `capture`; or no output depends on a tensor of `args`.
    """
    outputs = ModelOutputs()
    step = Step(
        model=module,
        loss_fn=loss_fn or _call,
        args=args,
        kwargs=dict(kwargs or {}),
        backward=backward,
        meta_as=meta_as,
        returned=scalar_loss if loss_fn else outputs,
        is_stage=backward,
    )
    joint = capture_step(step, full_capture)
    return joint if loss_fn or not backward else _with_gradients_as_inputs(joint, outputs)


def output_tensors(joint: JointGraph) -> list[torch.Tensor]:
    """Return the tensors, without storage, that the model of a graph returns."""
    outputs = with_parts(joint.signature.outputs, joint.output_values())
    return [
        wrap([value_of(node) for node in nodes], spec.layout)
        for spec, nodes in outputs
        if spec.kind is OutputKind.OUTPUT
    ]


def _call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _with_gradients_as_inputs(joint: JointGraph, outputs: ModelOutputs) -> JointGraph:
    """Make the gradients of the outputs, with which backward begins, inputs of the graph."""
    joint.outputs = outputs
    # backward begins with tensors of ones, which become inputs
    graph = joint.graph
    ones: dict[int, fx.Node] = {}
    for node in graph.nodes:
        index = loss_gradient_of(node)
        if index is not None:
            ones[index] = node
    specs = {o.name: o for o in joint.signature.outputs if o.kind is OutputKind.OUTPUT}
    placeholder = joint.placeholders()[-1]
    inputs = list(joint.signature.inputs)
    for index, node in sorted(ones.items()):
        output = specs[outputs.differentiable[index]]
        with graph.inserting_after(placeholder):
            placeholder = graph.placeholder(f"gradient_of_{output.name.replace(' ', '_')}")
        placeholder.meta["val"] = value_of(node)
        set_input_name(placeholder, output.name)
        inputs.append(Input(InputKind.OUTPUT_GRADIENT, output.name, output.layout))
        node.replace_all_uses_with(placeholder)
        graph.erase_node(node)
    joint.signature = replace(joint.signature, inputs=tuple(inputs))
    joint.graph_module.recompile()
    joint.validate()
    return joint
