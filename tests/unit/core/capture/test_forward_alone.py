"""gt.capture_forward: a model without its loss, partitioned, trained by a loss outside of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graph_trainer as gt
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.testing import become
from tests.unit.core.capture.steps import batch
from tests.unit.core.partition.test_partitioned_step import gradients


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()


class Several(nn.Module):
    """Returns tensors in a nest, one that depends on no parameter, and a constant."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return {"pair": (self.second(hidden), hidden.t()), "mask": x > 0, "name": "several"}


def loss_of(outputs, y):
    first, second = outputs["pair"]
    assert outputs["name"] == "several"
    return F.mse_loss(first.sum(1, keepdim=True), y) + second.square().sum() * outputs["mask"].sum()


def both():
    torch.manual_seed(0)
    return Several(), torch.manual_seed(0) and Several()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_outside_of_the_graph_trains_as_in_eager(compiled):
    become(0, 1)
    model, other = both()
    x, y = batch()
    joint = gt.capture_forward(model, (x,))
    gt.run_passes(joint)
    step = gt.partition(joint)
    if compiled:
        step = torch.compile(step, backend=gt.backend("eager"))
    for _ in range(2):
        found, wanted = step(x), other(x)
        assert not found["mask"].requires_grad
        for key in ("pair", "mask"):
            torch.testing.assert_close(found[key], wanted[key], rtol=0, atol=0, check_stride=True)
        for outputs in (found, wanted):
            loss_of(outputs, y).backward()
        torch.testing.assert_close(gradients(model), gradients(other), rtol=0, atol=0)


def test_an_output_that_the_loss_leaves_out_has_no_gradient():
    become(0, 1)
    model, other = both()
    x, _ = batch()
    step = gt.partition(gt.capture_forward(model, (x,)))
    for each in (step, other):
        each(x)["pair"][1].sum().backward()
    found = gradients(model)
    assert not found["second.weight"].any()
    wanted = gradients(other)
    torch.testing.assert_close({n: found[n] for n in wanted}, wanted, rtol=0, atol=0)
    with torch.no_grad():
        assert torch.equal(step(x)["pair"][0], other(x)["pair"][0])


def test_gradients_are_inputs_of_the_graph():
    become(1, 2)
    model = gt.simple_fsdp(Several(), init_device_mesh("cpu", (2,)))
    joint = gt.capture_forward(model, (batch()[0],))
    kinds = [spec.kind for spec in joint.signature.inputs]
    assert kinds[-2:] == 2 * [InputKind.OUTPUT_GRADIENT] and kinds.count(kinds[-1]) == 2
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always"))
    halves = gt.partition(joint).halves
    assert not [s for s in halves.forward.signature.inputs if s.kind is kinds[-1]]
    (loss_of(gt.partition(joint, compare_ranks=False)(batch()[0]), batch()[1])).backward()
    assert gradients(model).keys() == dict(model.named_parameters()).keys()


def test_a_model_without_tensors_is_refused():
    class Nothing(nn.Linear):
        def forward(self, x):
            return "nothing"

    with pytest.raises(gt.CaptureError, match="returned a str without tensors"):
        gt.capture_forward(Nothing(4, 4), batch()[:1])


def test_it_is_no_step_of_gt_compile():
    become(0, 1)
    model = Several()
    joint = gt.capture_forward(model, batch()[:1])
    with pytest.raises(gt.CaptureError, match=r"use gt.partition\(joint\)"):
        gt.compile(joint)
