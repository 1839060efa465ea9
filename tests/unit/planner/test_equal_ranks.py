"""Ranks that share a plan have the plan that they would have made for themselves."""

import copy
import dataclasses
import sys

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.graph.annotations import (
    clear_recompute_policy,
    copy_annotations,
    set_offload,
    set_recompute_policy,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import Signature
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.torch_private_groups import group_ranks
from graph_trainer.planner import saved_plan
from graph_trainer.planner.agreement import decided_by
from graph_trainer.planner.equal_ranks import plan_key, shortened
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.plan import make_plan
from graph_trainer.planner.saved_plan import plan_every_class
from graph_trainer.planner.verify_order import rank_classes
from graph_trainer.titan.config.load import load_config

FLAGS = ["--training.seq_len", "64", "--training.local_batch_size", "2"]
HARDWARE = load_hardware("h100-sxm")
OPS = torch.ops.aten
TP2 = ("--parallelism.tensor_parallel_degree", "2")
HSDP = ("--parallelism.data_parallel_replicate_degree", "2")
EP2 = ("--module", "graph_trainer.deepseek_v3", "--parallelism.expert_parallel_degree", "2")
CP2 = ("--parallelism.context_parallel_degree", "2")
CP2 += ("--parallelism.context_parallel_method", "all_gather")
BUDGET = ("--activation_checkpoint.type", "budget", "--compile.memory_limit_gib", "2.05")
MESHES = {
    "tp2": (4, TP2, 1),
    "slices": (2, (*TP2, "--loss.type", "chunked_cross_entropy"), 1),
    "uneven": (3, (), 2),
    "hsdp": (4, HSDP, 1),
    "cp2": (4, CP2, 2),
    "ep2": (4, EP2, 1),
    "budget": (4, (*TP2, *BUDGET), 1),
}
"""Ranks, flags, and how many plans are different."""
QUICK = {"uneven"}
MARKED = [pytest.param(n, id=n, marks=() if n in QUICK else pytest.mark.full) for n in MESHES]


@pytest.mark.parametrize("mesh", MARKED)
def test_plans_that_are_shared_are_those_of_each_rank(mesh, monkeypatch):
    world_size, flags, different = MESHES[mesh]
    made = []

    def counted(*args, **kwargs):
        made.append(kwargs["rank"])
        return make_plan(*args, **kwargs)

    monkeypatch.setattr(saved_plan, "make_plan", counted)
    config = load_config([*FLAGS, *flags], world_size=world_size)
    config.model_spec.model.layers = config.model_spec.model.layers[:4]
    plan = make_plan(config, world_size, HARDWARE, every_pass=False)
    shared = plan_every_class(plan)
    assert len(made) == different - 1
    monkeypatch.setattr(saved_plan, "plan_key", lambda joint, rank, *more: rank)
    alone = plan_every_class(dataclasses.replace(plan, rank=-1))
    assert len(made) == different - 1 + len(alone.classes) > different
    assert shared == alone


@pytest.fixture
def captured():
    """A step, and a function that computes the key of one like it."""
    config = load_config([*FLAGS, *TP2], world_size=4)
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    run = FakeRank(config, 4, 0)
    classes = rank_classes(run)
    run = FakeRank(config, 4, 0)
    return run.capture(), lambda joint, per_node=8: plan_key(joint, 0, classes, per_node)


def first(joint, target):
    return next(n for n in joint.graph.nodes if n.target is target)


def reads_another(joint):
    node = first(joint, OPS.mm.default)
    node.replace_input_with(node.args[1], joint.placeholders()[0])


def number_of_a_view(joint):
    node = first(joint, OPS.view.default)
    node.update_arg(1, [1, *node.args[1]])


def another_op(joint):
    first(joint, OPS.mul.Tensor).target = OPS.div.Tensor


def another_module(joint):
    node = first(joint, OPS.mm.default)
    copy_annotations(first(joint, OPS.embedding.default), node)


def another_dtype(joint):
    node = first(joint, OPS.mm.default)
    node.meta["val"] = node.meta["val"].to(torch.float64)


def another_layout(joint):
    node = first(joint, OPS.mm.default)
    value = node.meta["val"]
    node.meta["val"] = value.new_empty(value.t().shape).t()
    assert node.meta["val"].shape == value.shape and node.meta["val"].dtype == value.dtype


def another_group(joint):
    gathers = joint.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
    )
    names = list(dict.fromkeys(node.args[2] for node in gathers))
    gathers[0].update_arg(2, names[1])


def another_group_of_equal_ranks(joint):
    node = first(joint, torch.ops._c10d_functional.all_gather_into_tensor.default)
    group = dist.new_group(list(group_ranks(node.args[2])))
    node.update_arg(2, group.group_name)


def a_frozen_parameter(joint):
    inputs = list(joint.signature.inputs)
    inputs[0] = dataclasses.replace(inputs[0], requires_grad=False)
    joint.signature = dataclasses.replace(joint.signature, inputs=tuple(inputs))


def a_gradient_less(joint):
    outputs = joint.signature.outputs
    joint.signature = dataclasses.replace(joint.signature, outputs=outputs[:-1])


def a_recompute_tag(joint):
    set_recompute_policy(first(joint, OPS.mm.default), CheckpointPolicy.MUST_SAVE)


def an_offload_tag(joint):
    node = first(joint, OPS.mm.default)
    set_offload(node)
    clear_recompute_policy(node)


CHANGES = (a_recompute_tag, an_offload_tag)
CHANGES += (reads_another, number_of_a_view, another_op, another_module, another_dtype)
CHANGES += (
    another_group_of_equal_ranks,
    another_layout,
    another_group,
    a_frozen_parameter,
    a_gradient_less,
)


def test_what_passes_read_is_in_the_key(captured):
    joint, key_of = captured
    for change in CHANGES:
        changed = copy_graph(joint)
        assert key_of(changed) == key_of(joint)
        change(changed)
        assert key_of(changed) != key_of(joint), change.__name__
    assert key_of(joint) != key_of(joint, 1), "where nodes end"


def test_numbers_of_elementwise_ops_count_as_equal_or_not(captured):
    joint, key_of = captured
    keys = []
    for numbers in ((3, 3), (5, 5), (3, 5)):
        changed = copy_graph(joint)
        node = first(changed, OPS.ge.Scalar)
        with changed.graph.inserting_after(node):
            second = changed.graph.node_copy(node)
        for each, number in zip((node, second), numbers, strict=True):
            each.update_arg(1, number)
        keys.append(key_of(changed))
    assert keys[0] == keys[1] != keys[2]


def test_code_that_asks_for_its_rank_is_planned_for_each():
    config = load_config([*FLAGS, *TP2], world_size=4)
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    keys = []
    classes = rank_classes(FakeRank(config, 4, 0))
    for rank in (0, 2):
        run = FakeRank(config, 4, rank)
        if rank == 2:
            run.model.norm.register_forward_hook(lambda module, given, result: result * 2)
        keys.append(plan_key(run.capture(), rank, classes, 8))
    assert keys[0] != keys[1]


@pytest.mark.parametrize("reads", [False, True])
def test_what_a_graph_has_beside_its_nodes_is_no_other_ranks(reads):
    graph, root = fx.Graph(), torch.nn.Module()
    root.held = torch.nn.Identity()
    graph.output((graph.get_attr("held"),) if reads else ())
    joint = JointGraph(fx.GraphModule(root, graph), Signature((), ()))
    classes = RankClasses(("fsdp",), ((0, 1),))
    keys = {plan_key(joint, rank, classes, 8) for rank in (0, 1)}
    assert len(keys) == (2 if reads else 1)


MODELS = {
    "llama3": ("llama3", "70b", 3),
    "deepseek_v3": ("deepseek_v3", "16b", 1 + 3),
    "qwen3": ("qwen3", "30b-a3b", 3),
}


@pytest.mark.parametrize("module, flavor, layers", MODELS.values(), ids=MODELS)
def test_of_layers_that_are_alike_three_are_traced(module, flavor, layers):
    config = load_config(["--module", f"graph_trainer.{module}", "--config", flavor], world_size=8)
    whole = list(config.model_spec.model.layers)
    short = shortened(config).model_spec.model.layers
    assert len(short) == layers < len(whole) == len(config.model_spec.model.layers)
    assert [type(layer) for layer in short] == [type(layer) for layer in whole[:layers]]
    assert short[0] is not whole[0], "building a model writes to its config"
    config.compile.full_capture = True
    assert shortened(config).model_spec.model.layers == whole


def test_of_a_model_of_ones_own_all_layers_are_traced(monkeypatch):
    config = load_config([*FLAGS], world_size=2)
    assert shortened(config) is not config
    home = sys.modules[type(config.model_spec.model).__module__]
    monkeypatch.setattr(home, "__file__", __file__)
    assert shortened(config) is config


def test_layers_that_differ_are_all_traced():
    config = load_config([*FLAGS], world_size=2)
    layers = config.model_spec.model.layers
    layers[3] = copy.deepcopy(layers[3])
    layers[3].attention.n_heads *= 2
    short = shortened(config).model_spec.model.layers
    assert [layer.attention.n_heads for layer in short] == [16, 16, 16, 32, 16, 16]


def test_decisions_by_group_are_compared_without_the_groups_names():
    graph = fx.Graph()
    graph.output(())
    decided = []
    for caps in ({"21": 4.0, "35": 8.0}, {"22": 4.0, "34": 8.0}, {"21": 8.0, "35": 4.0}):
        joint = JointGraph(fx.GraphModule({}, graph), Signature((), ()))
        joint.decisions["bucket_collectives"] = caps
        decided.append(decided_by(joint))
    assert decided[0] == decided[1] != decided[2]
