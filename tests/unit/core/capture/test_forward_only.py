"""gt.capture(backward=False): forward and loss alone, through every pass, as under no_grad."""

import dataclasses
import itertools
from typing import get_args

import pytest
import torch
from torch import nn

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.analysis.memory import memory_of
from graph_trainer.core.graph.annotations import (
    Phase,
    annotate_node,
    annotation,
    is_backward,
)
from graph_trainer.core.graph.joint_graph import compute_nodes
from graph_trainer.core.graph.signature import InputKind, OutputKind
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.bucketing.bucket_collectives import (
    BucketCollectivesOptions,
    Strategy,
)
from graph_trainer.core.passes.catalogue import registered_passes
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.training.step_cache import TrainStep
from graph_trainer.core.units import GIB
from graph_trainer.testing import assert_same, check_pass, fake_mesh, mean_square, run
from tests.unit.core.capture.steps import check_against_eager, check_step
from tests.unit.graphs import Decoder

TOKENS = torch.arange(6).reshape(2, 3)

OFF = ["bucket_collectives", "schedule_overlap"]
"""What gathers several parameters at a time."""


CAPTURED = {}


def forward_only(*, backward=False, fsdp=None, **model):
    """A decoder sharded over four fake ranks, captured in eval mode the first time: a copy."""
    torch.manual_seed(0)
    mesh, key = fake_mesh(), repr((backward, fsdp, model))
    if key not in CAPTURED:
        decoder = gt.simple_fsdp(Decoder(**model), mesh, **(fsdp or {})).eval()
        CAPTURED[key] = gt.capture(decoder, mean_square, (TOKENS,), backward=backward)
    return copy_graph(CAPTURED[key])


def test_the_loss_is_the_only_output_and_says_so():
    joint = forward_only()
    (output,) = joint.signature.outputs
    assert (output.kind, output.name) == (OutputKind.LOSS, "loss")
    assert not joint.signature.backward
    assert joint.signature.parameters_without_grad == ()
    assert not any(map(is_backward, compute_nodes(joint.graph)))
    assert not any(c.role == "reduce_grad" for c in collectives(joint))
    # what the model has is what it had: a step for another set of trainable ones is another's
    trained = [i.requires_grad for i, _ in joint.inputs_of(InputKind.PARAMETER)]
    assert trained and all(trained)
    assert forward_only(backward=True).signature.backward


class Moody(nn.Module):
    """Everything that another mode would change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        x = self.head(self.dropout(self.norm(x)))
        return x * (2.0 if torch.is_grad_enabled() else 3.0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("users_grad", [False, True])
def test_it_computes_what_eager_does_under_no_grad(training, users_grad):
    with torch.set_grad_enabled(users_grad):
        model = Moody().train(training)
        check_against_eager(model, mean_square, torch.randn(8, 4), backward=False)


def test_a_loss_that_needs_no_gradient_and_hooks_of_backward_are_no_matter():
    model, x = Moody().eval(), torch.randn(8, 4)
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)

    def detached(model, x):
        return mean_square(model, x).detach()

    with pytest.raises(gt.CaptureError, match="a hook that runs after its gradient"):
        gt.capture(model, detached, (x,))
    check_against_eager(model, detached, x, backward=False)


def test_backward_inside_the_loss_is_refused():
    model = Moody().eval()
    with pytest.raises(gt.CaptureError, match="does not require grad"):
        gt.capture(
            model, lambda m, x: mean_square(m, x).backward(), (torch.randn(8, 4),), backward=False
        )
    assert model.head.weight.grad is None


# --- its contract -------------------------------------------------------------------------------


def test_a_node_of_backward_is_refused():
    joint = forward_only()
    node = next(compute_nodes(joint.graph))
    annotate_node(node, annotation(phase=Phase.BACKWARD))
    with pytest.raises(gt.VerificationError, match=f"'{node.name}'.*captured without backward"):
        joint.validate()


@pytest.mark.parametrize("where", ["outputs", "parameters_without_grad"])
def test_a_gradient_in_the_signature_is_refused(where):
    joint, name = forward_only(), "norm.weight"
    trained = forward_only(backward=True)
    signature = joint.signature
    if where == "outputs":
        output = next(o for o in trained.signature.outputs if o.name == name)
        signature = dataclasses.replace(signature, outputs=(*signature.outputs, output))
        (loss,) = joint.output_values()
        (weight,) = next(n for i, n in joint.inputs_of(InputKind.PARAMETER) if i.name == name)
        joint.output_node().args = ((loss, weight),)
    else:
        signature = dataclasses.replace(signature, parameters_without_grad=(name,))
    joint.signature = signature
    with pytest.raises(gt.VerificationError, match=f"'{name}'.*captured without backward"):
        joint.validate()


# --- passes -------------------------------------------------------------------------------------


HARDWARE = load_hardware("cpu", "hardware")


@pytest.mark.parametrize("graph_pass", registered_passes().values(), ids=lambda p: p.name)
@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_each_pass_keeps_numbers_and_the_contract(graph_pass, mode):
    joint = forward_only(fsdp={"mode": mode})
    gt.run_passes(joint)
    check_pass(graph_pass, joint, context=PassContext(hardware=HARDWARE))
    assert not any(map(is_backward, compute_nodes(joint.graph)))


@pytest.mark.parametrize(
    "strategy, policy, checkpointed",
    [
        *itertools.product([None], ["always", "never", "default"], [False, True]),
        *itertools.product(get_args(Strategy), ["always", "never"], [False]),
    ],
)
def test_passes_in_a_row_gather_each_parameter_once(strategy, policy, checkpointed):
    """The default ones, and all of them with each way to make buckets."""
    joint = forward_only(checkpointed=checkpointed)
    before = run(joint)
    names = tuple(registered_passes()) if strategy else ("default",)
    options = {"bucket_collectives": BucketCollectivesOptions(strategy=strategy or "none")}
    config = gt.PassConfig(
        passes=names,
        reshard_after_forward=policy,
        verify_passes=True,
        hardware=HARDWARE,
        options=options,
    )
    gt.run_passes(joint, config)
    assert not strategy or joint.history == list(names)
    assert_same(before, run(joint))
    gathers = [c for c in collectives(joint) if c.role == "unshard"]
    assert sorted(n for c in gathers for n in c.parameters) == sorted(
        spec.name for spec, _ in joint.inputs_of(InputKind.PARAMETER)
    )
    # the embedding, two blocks of three weights, the final norm with the head
    assert len(gathers) == {None: 9, "none": 9, "transformer_block": 4}.get(strategy, len(gathers))


def test_gathered_parameters_are_freed_after_their_last_reader():
    """Weights are so large beside activations that two of them gathered would be seen."""
    size = {"layers": 4, "dim": 64, "hidden": 256}
    weight = 64 * 256 * 4
    alone, trained = forward_only(**size), forward_only(backward=True, **size)
    gt.run_passes(alone, gt.PassConfig(disable_passes=OFF))
    gt.run_passes(trained, gt.PassConfig(reshard_after_forward="always", disable_passes=OFF))
    assert weight <= lifetimes(alone).peak_bytes < 2 * weight
    assert lifetimes(alone).peak_bytes < lifetimes(trained).peak_bytes


def test_the_memory_limit_holds():
    """A pass that only makes it faster is rolled back; what needs more without is refused."""
    size = {"dim": 64, "hidden": 256}
    passes = ("default", "overlap_fsdp")
    plain, overlapped = forward_only(**size), forward_only(**size)
    gt.run_passes(plain, gt.PassConfig(disable_passes=OFF))
    gt.run_passes(overlapped, gt.PassConfig(passes=passes, disable_passes=OFF))
    low, high = (memory_of(joint).peak_bytes for joint in (plain, overlapped))
    assert low < high

    limited = forward_only(**size)
    limit = (high - 1) / GIB
    config = gt.PassConfig(passes=passes, disable_passes=OFF, memory_limit_gib=limit)
    report = gt.run_passes(limited, config)
    assert "rolled back" in report.last.rolled_back
    assert memory_of(limited).peak_bytes == low
    limit = (low - 1) / GIB
    config = gt.PassConfig(passes=passes, disable_passes=OFF, memory_limit_gib=limit)
    with pytest.raises(gt.PassError, match="the step needs"):
        gt.run_passes(forward_only(**size), config)


# --- a step that captures itself ----------------------------------------------------------------


def test_a_train_step_without_backward():
    lines = []
    step = TrainStep(mean_square, backward=False, on_event=lines.append)
    model = Moody().eval()
    for rows in (8, 8, 3):
        check_step(step, model, mean_square, torch.randn(rows, 4), backward=False)
    assert lines[0] == "Capturing the step without backward"
    assert [len(joint.signature.outputs) for joint in step.joint_graphs()] == [1, 1]
