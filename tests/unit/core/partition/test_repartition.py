"""repartition on joint graphs that AOTAutograd traced from marked functions."""

import operator

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.graph.annotations import (
    Role,
    annotation,
    is_marked_saved,
    set_recompute_policy,
)
from graph_trainer.core.partition.repartition import repartition
from graph_trainer.testing import become
from tests.unit.graphs import GATHER, aten

FORWARD = annotation(phase="forward")
MARK = {"partition_saved": "True", **FORWARD}


def names(nodes):
    return [str(n.target) for n in nodes if n.op == "call_function"]


def targets(module):
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def keep(module, inputs):
    return make_boxed_func(module.forward)


def compiled(function, args, change=lambda joint: None, **options):
    """Results, gradients, and the two graphs of a function whose joint graph `change` may change;
    forward and backward results are compared with eager's."""
    graphs = []

    def partition(joint, inputs, **rest):
        change(joint)
        joint.recompile()
        graphs.extend(repartition(joint, inputs, **rest))
        return tuple(graphs)

    with preserve_node_meta():
        call = aot_function(function, keep, keep, partition_fn=partition, **options)
        outcomes = []
        for each in (call, function):
            torch.manual_seed(0)
            given = [a.detach().requires_grad_(a.requires_grad) for a in args]
            result = each(*given)
            result.backward()
            outcomes.append((result.detach(), [g.grad for g in given]))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)
    return graphs


def saved_by(graphs):
    """The ops whose results are saved."""
    forward, backward = graphs
    taken = {n.name for n in backward.graph.find_nodes(op="placeholder")}
    returned = forward.graph.output_node().all_input_nodes
    return [
        n.args[0].target if n.target is operator.getitem else n.target
        for n in returned
        if n.name in taken and n.op == "call_function"
    ]


def two_layers(x):
    with annotate(MARK):
        hidden = x.tanh()
    with annotate(FORWARD):
        return (hidden.sin().exp()).sum()


def x(*shape):
    return torch.randn(*(shape or (4,)), requires_grad=True)


def test_what_is_marked_is_saved_and_all_else_is_computed_again():
    graphs = compiled(two_layers, [x()])
    assert saved_by(graphs) == [aten.tanh.default]
    assert {aten.sin.default, aten.exp.default} <= set(targets(graphs[1]))


def test_what_is_computed_again_comes_right_before_its_reader():
    forward, backward = compiled(two_layers, [x()])
    order = targets(backward)
    assert order.index(aten.expand.default) < order.index(aten.sin.default)
    assert aten.cos.default not in targets(forward)


@pytest.mark.parametrize("policy", ["MUST_RECOMPUTE", "PREFER_RECOMPUTE"])
def test_a_policy_of_recomputation_wins_over_a_mark(policy):
    def tag(joint):
        (tanh,) = joint.graph.find_nodes(op="call_function", target=aten.tanh.default)
        assert is_marked_saved(tanh)
        set_recompute_policy(tanh, CheckpointPolicy[policy])

    graphs = compiled(two_layers, [x()], tag)
    assert saved_by(graphs) == []
    assert aten.tanh.default in targets(graphs[1])


def test_to_save_an_output_wins_over_preferring_to_compute_its_op_again():
    def function(x, weight):
        out, mean, rstd = torch.native_layer_norm(x, [4], weight, None, 1e-5)
        return out.sum()

    def tag(joint):
        (norm,) = joint.graph.find_nodes(
            op="call_function", target=aten.native_layer_norm.default, sort=True
        )
        set_recompute_policy(norm, CheckpointPolicy.PREFER_RECOMPUTE)
        for part in norm.users:
            set_recompute_policy(part, CheckpointPolicy.MUST_SAVE)

    forward, backward = compiled(function, [x(3, 4), x(4)], tag)
    assert aten.native_layer_norm.default not in targets(backward)


def test_a_mark_on_an_op_of_several_results_is_one_on_them():
    def function(x, weight):
        with annotate(MARK):
            out, mean, rstd = torch.native_layer_norm(x, [4], weight, None, 1e-5)
        return out.sum()

    graphs = compiled(function, [x(3, 4), x(4)])
    assert set(saved_by(graphs)) == {aten.native_layer_norm.default}
    assert aten.native_layer_norm.default not in targets(graphs[1])


def test_random_numbers_are_never_drawn_again():
    def function(x):
        with annotate(MARK):
            hidden = x.tanh()
        return (hidden * torch.rand_like(hidden)).sum()

    graphs = compiled(function, [x()])
    assert aten.rand_like.default in saved_by(graphs)
    assert not any("rand" in name for name in names(graphs[1].graph.nodes))


def test_ops_around_the_step_are_saved_as_autograd_saves_them():
    """A matrix product after the step is not computed again."""

    def function(x, weight):
        return ((two_layers(x) + x).exp() @ weight).tanh().sum()

    graphs = compiled(function, [x(3, 4), x(4, 4)])
    assert set(saved_by(graphs)) == {aten.exp.default, aten.tanh.default}
    assert targets(graphs[1]).count(aten.mm.default) == 2  # the two of backward


def test_a_step_that_saves_nothing_saves_nothing_again():
    def function(x):
        with annotate(FORWARD):
            return x.tanh().sin().sum()

    assert saved_by(compiled(function, [x()])) == []


def test_sizes_are_saved_as_sizes():
    def function(x, y):
        with annotate(MARK):
            hidden = x.tanh()
        return (hidden.view(-1) * y.shape[0]).sum() / x.shape[0]

    forward, backward = compiled(function, [x(6, 4), x(5)], dynamic=True)
    saved = [op for op in saved_by((forward, backward)) if "sym_size" not in str(op)]
    assert saved == [aten.tanh.default]
    sizes = [
        n
        for n in backward.graph.find_nodes(op="placeholder")
        if isinstance(n.meta["val"], torch.SymInt)
    ]
    assert sizes
    returned = forward.graph.output_node().all_input_nodes
    order = [isinstance(n.meta["val"], torch.SymInt) for n in returned]
    assert order == sorted(order), "tensors first, as AOTAutograd expects"


def test_a_write_of_forwards_stays_in_forward():
    def function(x, statistics):
        with annotate(MARK):
            hidden = x.tanh()
        statistics.add_(hidden.detach())
        return hidden.sin().sum()

    forward, backward = compiled(function, [x(), torch.zeros(4)])
    assert saved_by((forward, backward)) == [aten.tanh.default]
    assert aten.add.Tensor in targets(forward) and aten.add.Tensor not in targets(backward)


# --- gathers --------------------------------------------------------------------------------------


def gathered_twice(x, weight):
    """Two chains of one parameter, of which the second is marked."""

    def gather():
        return torch.ops._c10d_functional.wait_tensor(GATHER(weight, 2, "0"))

    unshard = annotation(phase="forward", role=Role.UNSHARD, parameter="weight")
    with annotate(unshard), torch.no_grad():
        first = gather()
        with annotate(MARK):
            second = gather()
    return (x * first * second * x).sum()


def test_equal_gathers_of_one_side_are_one_and_keep_marks_and_tags():
    become(0, 2)
    joints = []

    def tag(joint):
        joints.append(joint)
        late = joint.graph.find_nodes(op="call_function", target=GATHER)[1]
        set_recompute_policy(late, CheckpointPolicy.MUST_SAVE)

    graphs = []

    def partition(joint, inputs, **rest):
        tag(joint)
        graphs.extend(repartition(joint, inputs, **rest))
        return tuple(graphs)

    with preserve_node_meta():
        call = aot_function(gathered_twice, keep, keep, partition_fn=partition)
        call(x(8), torch.randn(4)).backward()
    forward, backward = graphs
    assert targets(forward).count(GATHER) == 1
    assert GATHER not in targets(backward)
    (gather,) = joints[0].graph.find_nodes(op="call_function", target=GATHER)
    assert is_marked_saved(gather)
    assert gather.meta["recompute"] is CheckpointPolicy.MUST_SAVE


def test_a_gather_of_backwards_is_not_merged_with_forwards():
    """Nor run in forward, although nothing in it depends on a gradient."""
    become(0, 2)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return x * torch.ops._c10d_functional.wait_tensor(GATHER(weight, 2, "0"))

        @staticmethod
        def backward(ctx, gradient):
            (weight,) = ctx.saved_tensors
            return gradient * torch.ops._c10d_functional.wait_tensor(GATHER(weight, 2, "0")), None

    graphs = []

    def partition(joint, inputs, **rest):
        for node in joint.graph.nodes:
            if node.target is GATHER:
                node.meta["custom"] = annotation(role=Role.UNSHARD, parameter="weight")
        graphs.extend(repartition(joint, inputs, **rest))
        return tuple(graphs)

    def function(x, weight):
        with annotate(MARK):
            hidden = x.tanh()
        return Again.apply(hidden, weight).sum()

    with preserve_node_meta():
        call = aot_function(function, keep, keep, partition_fn=partition)
        call(x(8), torch.randn(4)).backward()
    for module in graphs:
        assert targets(module).count(GATHER) == 1


def test_the_graphs_are_graph_modules():
    assert all(isinstance(g, fx.GraphModule) for g in compiled(two_layers, [x()]))
