"""Annotations at capture: phase and module of every node, backward's from forward's."""

from collections import defaultdict

import pytest
import torch
from torch import fx, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from graph_trainer.core.capture.tracing.module_scopes import LOSS_MODULE
from graph_trainer.core.graph.annotations import Phase, module_of, phase_of
from graph_trainer.core.graph.joint_graph import compute_nodes
from graph_trainer.core.names import clean_fqn

aten = torch.ops.aten


class Layer(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 4)
        self.recompute = recompute

    def forward(self, x):
        if self.recompute:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x):
        return x + self.down(torch.sin(self.norm(self.up(x))))


class Net(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer(recompute) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model, x):
    return model(x).cos().mean()


def captured(model, loss_fn=loss):
    return gt.capture(model, loss_fn, (torch.randn(3, 4),))


def modules_by_op(joint, phase):
    found = defaultdict(list)
    for node in compute_nodes(joint.graph):
        if phase_of(node) is phase:
            found[node.target].append(module_of(node))
    return found


def test_every_node_says_its_phase_and_module():
    joint = captured(Net())
    assert all(phase_of(n) and module_of(n) is not None for n in compute_nodes(joint.graph))
    forward = modules_by_op(joint, Phase.FORWARD)
    assert forward[aten.addmm.default] == [
        *(f"layers.{i}.{name}" for i in range(2) for name in ("up", "down")),
        "head",
    ]
    assert forward[aten.sin.default] == ["layers.0", "layers.1"]
    assert modules_by_op(joint, Phase.LOSS)[aten.cos.default] == [LOSS_MODULE]
    order = [phase_of(n) for n in compute_nodes(joint.graph)]
    assert order == sorted(order, key=[Phase.FORWARD, Phase.LOSS, Phase.BACKWARD].index)


@pytest.mark.parametrize("recompute", [False, True])
def test_backward_nodes_carry_the_module_whose_backward_they_are(recompute):
    joint = captured(Net(recompute))
    backward = modules_by_op(joint, Phase.BACKWARD)
    norms = ["layers.1.norm", "layers.0.norm"]
    assert backward[aten.native_layer_norm_backward.default] == norms
    assert backward[aten.native_layer_norm.default] == (norms if recompute else [])
    # d/dx of sin is cos, of cos it is sin
    assert backward[aten.cos.default] == ["layers.1", "layers.0"]
    of_loss, *recomputed = backward[aten.sin.default]
    assert of_loss == LOSS_MODULE and len(recomputed) == (2 if recompute else 0)
    for name, node in joint.gradients():
        assert module_of(node) == name.rpartition(".")[0], name


def test_a_submodule_that_the_loss_calls_itself_is_forward():
    def partly(model, x):
        hidden = model.layers[0](x)
        return torch.tanh(model.head(torch.exp(hidden))).mean()

    joint = captured(Net(), partly)
    phases = {n.target: (phase_of(n), module_of(n)) for n in compute_nodes(joint.graph)}
    assert phases[aten.sin.default] == (Phase.FORWARD, "layers.0")
    assert phases[aten.exp.default] == (Phase.LOSS, LOSS_MODULE)
    assert modules_by_op(joint, Phase.FORWARD)[aten.addmm.default][-1] == "head"


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return torch.sin(self.inner(torch.exp(self.inner(x))))


def test_a_module_called_twice_keeps_its_name_both_times():
    joint = captured(Twice())
    forward = modules_by_op(joint, Phase.FORWARD)
    assert forward[aten.addmm.default] == ["inner.0", "inner.0"]
    assert forward[aten.exp.default] == forward[aten.sin.default] == [""]
    backward = modules_by_op(joint, Phase.BACKWARD)
    assert backward[aten.tanh_backward.default] == ["inner.1", "inner.1"]


@pytest.mark.parametrize(
    ("fqn", "clean"),
    [
        ("layers.0._checkpoint_wrapped_module.wq.weight", "layers.0.wq.weight"),
        ("_orig_mod.layers.0", "layers.0"),
        ("_orig_mod", ""),
        ("", ""),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_wrapper_names_are_cleaned(fqn, clean):
    assert clean_fqn(fqn) == clean


def test_wrapped_modules_are_known_by_their_clean_names():
    model = Net()
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    joint = captured(model)
    assert "layers.1.up.weight" in {i.name for i in joint.signature.inputs}
    assert "layers.1.up.weight" in gt.compile(joint)(model, torch.randn(3, 4))[1]
    assert modules_by_op(joint, Phase.FORWARD)[aten.sin.default] == ["layers.0", "layers.1"]


def test_hooks_are_gone_and_the_users_annotations_survive():
    model = Net()
    with fx.traceback.preserve_node_meta(), fx.traceback.annotate({"mine": 1}):
        captured(model)
        assert fx.traceback.get_current_meta()["custom"] == {"mine": 1}
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_backward_of_a_llama_carries_modules():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ids = torch.zeros(2, 5, dtype=torch.long)
    joint = gt.capture(
        LlamaForCausalLM(config), lambda m, ids: m(input_ids=ids, labels=ids).loss, (ids,)
    )
    backward = [n for n in compute_nodes(joint.graph) if phase_of(n) is Phase.BACKWARD]
    named = [n for n in backward if module_of(n) not in (None, LOSS_MODULE)]
    assert len(backward) > 200
    # what is left is the very first gradient, of the loss by itself
    assert len(named) >= 0.99 * len(backward)
    for name, node in joint.gradients():
        assert module_of(node) == name.rpartition(".")[0]
