"""gt.compile: what the step frees, what it refuses, and that nothing but plain ops runs in it."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import graph_trainer as gt
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.runtime.backends.eager import compile_graph
from graph_trainer.core.runtime.step import Step
from graph_trainer.testing import become
from tests.unit.core.capture.steps import allocated_during, batch, check_step, eager, squares


def net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, width),
        nn.LayerNorm(width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Linear(width, 1),
    )


def captured(model, args, *, backward=True):
    joint = gt.capture(model, squares, args, backward=backward)
    gt.run_passes(joint)
    return joint


class Ops(TorchDispatchMode):
    """Every op that runs, and the types of its tensors."""

    def __init__(self):
        super().__init__()
        self.ops = []
        self.tensors = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        result = func(*args, **(kwargs or {}))
        flat = torch.utils._pytree.tree_leaves((args, kwargs, result))
        self.tensors |= {type(t) for t in flat if isinstance(t, torch.Tensor)}
        return result


# --- the eager backend --------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [True, False])
def test_every_intermediate_is_freed_at_its_last_use(backward):
    """What really is allocated is what the order of nodes says, to a few percent."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    model.append(nn.Linear(64, 1)).insert(0, nn.Linear(4, 64))
    args = batch(4096)
    joint = captured(model, args, backward=backward)
    predicted = lifetimes(joint).peak_bytes
    run = compile_graph(joint)
    values = [t.detach() for t in (*model.parameters(), *args)]
    run(list(values))  # caches of kernels
    found = allocated_during(lambda: run(list(values)))
    kept = sum(
        t.numel() * 4 for n in joint.graph.nodes if isinstance(t := n.meta.get("val"), torch.Tensor)
    )
    assert kept > 2 * predicted, "a backend that frees nothing would be seen"
    assert found == pytest.approx(predicted, rel=0.03)


def test_inputs_are_boxed():
    """The caller gives its tensors away: what only the step holds is freed inside it."""
    become(0, 1)
    model, args = net(), batch()
    joint = captured(model, args)
    run = compile_graph(joint)
    values = [t.detach().clone() for t in (*model.parameters(), *args)]
    watched = weakref.ref(values[-1])
    alive = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            alive.append(watched() is not None)
            return result

    with Watch():
        run(values)
    assert values == []
    assert alive[0] and not alive[-1]


def test_compiling_leaves_the_joint_graph_as_it_was():
    model, args = net(), batch()
    joint = captured(model, args)
    code, module = joint.graph_module.code, joint.graph_module
    first = gt.compile(joint)
    gt.compile(joint)
    assert joint.graph.owning_module is module
    joint.graph_module.recompile()
    assert joint.graph_module.code == code
    assert torch.equal(first(model, *args)[0], squares(model, *args))


@pytest.mark.parametrize("sharded", [False, True])
def test_no_subclass_and_no_autograd_inside(sharded):
    model, args = net(), batch()
    if sharded:
        become(1, 3)
        gt.simple_fsdp(model, init_device_mesh("cpu", (3,)))
    joint = captured(model, args)
    run = compile_graph(joint)
    given = []

    def recording(values):
        given.extend(values)
        return run(values)

    with Ops() as seen:
        loss, gradients = Step(joint, recording)(model, *args)
    assert {type(t) for t in given} == {torch.Tensor}
    assert not any(t.requires_grad for t in given)
    expected = [n.target for n in joint.graph.nodes if n.op == "call_function"]
    expected = [op for op in expected if isinstance(op, torch._ops.OpOverload)]
    # each input is detached before, and nothing else is dispatched: no DTensor
    assert [op for op in seen.ops if op is not torch.ops.aten.detach.default] == [
        op for op in expected if op is not torch.ops.aten.detach.default
    ]
    assert seen.tensors <= {torch.Tensor, nn.Parameter}
    for tensor in (loss, *gradients.values()):
        assert not tensor.requires_grad
        assert tensor.grad_fn is None
    for name, parameter in model.named_parameters():
        assert type(gradients[name]) is (DTensor if sharded else torch.Tensor)
        assert not sharded or gradients[name].placements == parameter.placements
        assert gradients[name].shape == parameter.shape
        assert parameter.grad is None
    # run without a step, on tensors that require a gradient
    assert not any(
        t.requires_grad for t in run([torch.ones_like(t).requires_grad_() for t in given])
    )


def test_autocast_does_not_cast_a_second_time():
    model, args = net(), batch()

    def loss(model, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = model(x)
        # a product in float32 of what bfloat16 cannot hold
        return F.mse_loss((result.float() + 0.1234567) @ torch.ones(1, 1), y)

    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            check_step(gt.compile(gt.capture(model, loss, args)), model, loss, *args)


# --- the model that is passed -------------------------------------------------------------------


def test_another_model_of_the_same_layout_and_replaced_modules():
    model, args = net(), batch()
    step = gt.compile(captured(model, args))
    step(model, *args)
    other = net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert torch.equal(step(other, *args)[0], squares(other, *args))
    model[3] = nn.Linear(8, 8)
    model[4].weight = nn.Parameter(torch.ones(1, 8))
    assert torch.equal(step(model, *args)[0], squares(model, *args))
    wrapped = nn.ModuleDict({"_orig_mod": model})
    loss, _ = step(wrapped, *args)
    assert torch.equal(loss, squares(model, *args)), "found under a wrapper's name too"
    assert torch.equal(step(model, *args)[0], loss), "and without it again"


def test_a_model_that_no_longer_fits_is_refused_by_name():
    become(0, 2)
    args = batch()
    step = gt.compile(captured(net(), args))
    wider, without, double = net(9), net(), net().double()
    sharded = gt.simple_fsdp(net(), init_device_mesh("cpu", (2,)))
    del without[4]
    for model, message in [
        (wider, r"parameter '0\.weight' is Tensor \(9, 4\).*captured with Tensor \(8, 4\)"),
        (without, "the model has 5 modules and had 6"),
        (double, r"parameter '0\.weight'.*float64"),
        (sharded, r"'0\.weight' is DTensor"),
    ]:
        with pytest.raises(gt.CaptureError, match=message):
            step(model, *args)


def test_parameters_that_are_no_longer_tied_are_refused():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x)).sum(1, keepdim=True)

    model, args = Tied(), batch()
    step = gt.compile(captured(model, args))
    step(model, *args)
    model.b.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(gt.CaptureError, match=r"'a\.weight' and 'b\.weight' were one tensor"):
        step(model, *args)


# --- backends -----------------------------------------------------------------------------------


def test_an_unknown_backend_names_the_nearest():
    joint = captured(net(), batch())
    with pytest.raises(gt.ConfigError, match="'inductr'; did you mean 'inductor'"):
        gt.compile(joint, backend="inductr")


def test_an_invalid_graph_is_refused():
    joint = captured(net(), batch())
    output = joint.graph.output_node()
    output.args = (output.args[0][:-1],)
    with pytest.raises(gt.VerificationError):
        gt.compile(joint)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x)).sum(1, keepdim=True)


def test_inductor_on_one_process():
    """Buffers, gradients and loss within float32 rounding of reordered sums."""
    model, args = Normed(), batch(16)
    joint = captured(model, args)
    code = joint.graph_module.code
    step = gt.compile(joint, backend="inductor")
    joint.graph_module.recompile()
    assert joint.graph_module.code == code, "compiling leaves the joint graph as it was"
    other = copy.deepcopy(model)
    loss, gradients = step(model, *args)
    expected, expected_gradients = eager(other, squares, *args)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-4)
    assert model.norm.num_batches_tracked == 1
    torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))
