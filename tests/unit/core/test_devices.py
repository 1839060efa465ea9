"""A captured step on the device that is there: eager's numbers, and the predicted peak."""

import copy

import pytest
import torch

import graph_trainer as gt
from benchmarks.llama_stack import SIZES, LlamaStack, loss_fn
from graph_trainer.core.analysis.memory import given_bytes
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.simulation.detect import detect_hardware
from graph_trainer.core.simulation.simulate import simulate

BACKENDS = ["eager", "inductor", "regional"]


def model_and_batch(device):
    torch.manual_seed(0)
    tokens = torch.randint(SIZES["tiny"].vocabulary, (2, 2, 48), device=device)
    return LlamaStack(SIZES["tiny"]).to(device), (tokens[0], tokens[1])


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "eager"),  # the tests of the others are with them
        *(pytest.param("cuda", name, marks=pytest.mark.cuda) for name in BACKENDS),
    ],
)
def test_a_step_has_the_numbers_of_eager(device, backend):
    model, batch = model_and_batch(device)
    expected = copy.deepcopy(model)
    expected_loss = loss_fn(expected, *batch)
    expected_loss.backward()
    joint = gt.capture(model, loss_fn, batch)
    gt.run_passes(joint, gt.PassConfig())
    loss, gradients = gt.compile(joint, backend=backend)(model, *batch)
    exact = {"rtol": 0, "atol": 0} if backend == "eager" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(loss, expected_loss, **exact)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, **exact)


@pytest.mark.cuda
def test_the_peak_on_a_gpu_is_the_predicted_one():
    model, batch = model_and_batch("cuda")
    joint = gt.capture(model, loss_fn, batch)
    gt.run_passes(joint, gt.PassConfig())
    found = simulate(joint, detect_hardware(torch.device("cuda")).hardware)
    step = gt.compile(joint)
    step(model, *batch)  # libraries allocate their workspaces
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(model, *batch)
    measured = torch.cuda.max_memory_allocated() - before
    predicted = found.memory.peak_bytes - given_bytes(joint, *InputKind)
    assert measured == pytest.approx(predicted, rel=0.05)
