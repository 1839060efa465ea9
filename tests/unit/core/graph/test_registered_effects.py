"""An op whose effect torch knows of runs exactly as often as in eager, and in the same order."""

import dataclasses

import pytest
import torch
from torch import nn
from torch._library.effects import EffectType
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import graph_trainer as gt
from graph_trainer.core.graph.annotations import is_backward, set_recompute_policy
from graph_trainer.core.graph.ops import has_effect, runs_once
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.errors import PassError
from graph_trainer.testing import Builder, mean_square
from tests.unit.graphs import aten

RUNS: list[tuple[str, float]] = []


@torch.library.custom_op("test_effects::note", mutates_args=())
def note(x: torch.Tensor, name: str) -> torch.Tensor:
    RUNS.append((name, float(x.sum())))
    return x * 2


note.register_fake(lambda x, name: torch.empty_like(x))
note.register_autograd(
    lambda ctx, grad: (note(grad, ctx.label), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "label", f"{inputs[1]} backward"),
)
note.register_effect(EffectType.ORDERED)


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number

    def forward(self, x):
        note(x.detach(), f"unused {self.number}")
        return note(self.linear(x).relu(), f"used {self.number}") + x


class Blocks(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.layers, self.checkpointed = nn.ModuleList(map(Block, range(2))), checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            torch._assert_async((x == x).all(), "nan")
        return x


def runs_of(step, *args):
    RUNS.clear()
    step(*args)
    return list(RUNS)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("policy", ["none", "selective", "full", "budget", "user"])
def test_effects_run_as_often_as_in_eager_and_in_its_order(policy, checkpointed):
    torch.manual_seed(0)
    model, x = Blocks(checkpointed), torch.randn(3, 4)
    expected = runs_of(lambda: mean_square(model, x).backward())
    joint = gt.capture(model, mean_square, (x,))
    if policy == "user":
        for node in joint.graph.find_nodes(op="call_function", target=note._opoverload):
            if not is_backward(node):
                set_recompute_policy(node, CheckpointPolicy.MUST_RECOMPUTE)
    limit = 1e-9 if policy == "budget" else None
    config = gt.PassConfig(
        activation_policy=policy, hardware=load_hardware("cpu"), memory_limit_gib=limit
    )
    if policy == "budget":
        with pytest.raises(PassError, match="memory_limit_gib to") as refused:
            gt.run_passes(joint, config)
        least = float(str(refused.value).split("memory_limit_gib to ")[1].split(",")[0])
        config = dataclasses.replace(config, memory_limit_gib=least)
        joint = gt.capture(model, mean_square, (x,))
    gt.run_passes(joint, config)
    assert [runs_of(gt.compile(joint), model, x) for _ in range(2)] == [expected] * 2
    step = gt.partition(joint)
    assert runs_of(lambda: step(x).backward()) == expected
    assertions = joint.graph.find_nodes(op="call_function", target=aten._assert_async.msg)
    assert len(assertions) == 2


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten._assert_async.default, ()),
        (aten._assert_async.msg, ("message",)),
        (aten._functional_assert_async.msg, ("message", "x")),
        (aten._print.default, ("message",)),
        (note._opoverload, ("name",)),
    ],
)
def test_what_asserts_or_has_a_registered_effect_runs_once(op, args):
    b = Builder()
    x = b.input("x", 1)
    node = b.graph.call_function(op, (x, *(x if a == "x" else a for a in args)))
    assert runs_once(node) and has_effect(node)
    assert not runs_once(x) and not runs_once(b.call(aten.neg.default, x))


def test_a_higher_order_op_is_as_the_nodes_inside():
    inner, b = Builder(), Builder()
    inner.graph.output(inner.graph.call_function(note._opoverload, (inner.input("x", 4), "inside")))
    x = b.input("x", 4)
    module = torch.fx.GraphModule(nn.Module(), inner.graph)
    node = b.call_higher_order(torch.ops.higher_order.wrap, module, x, val=x)
    b.joint(b.total(x))
    assert runs_once(node) and has_effect(node)
