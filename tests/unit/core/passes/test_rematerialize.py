"""What is tagged runs again in backward, and gives what it gave before."""

import operator

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

import graph_trainer as gt
from graph_trainer.core.graph.annotations import (
    Role,
    annotate_node,
    annotation,
    is_backward,
    module_of,
    parameter_of,
    phase_of,
    recompute_policy,
    role_of,
    set_recompute_policy,
)
from graph_trainer.core.passes.rematerialize import rematerialize
from tests.unit.graphs import (
    BACKWARD,
    FORWARD,
    LOSS,
    Builder,
    assert_same,
    aten,
    c10d,
    captured,
    captured_decoder,
    check_pass,
    run,
    targets,
    unshards,
)

RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE
SAVE = CheckpointPolicy.MUST_SAVE
WHATEVER = torch.ops.higher_order.invoke_subgraph


def tag(*nodes, policy=RECOMPUTE):
    for node in nodes:
        set_recompute_policy(node, policy, ac_graph_id=1)
    return nodes[-1]


class Graph(Builder):
    """x -> what a test makes of it -> loss; backward reads what the test says."""

    def __init__(self):
        super().__init__()
        self.x = self.input("x", 4)

    def f(self, op, *args, **kwargs):
        return self.call(op, *args, **kwargs)

    def backward(self, *read):
        """One backward node for each value, in order; the result sums them up."""
        total = self.call(aten.neg.default, self.x, phase=BACKWARD)
        for node in read:
            total = self.call(aten.add.Tensor, total, node, phase=BACKWARD)
        return total

    def done(self, *forward, backward):
        total = self.call(aten.sum.default, forward[0], phase=LOSS)
        for node in forward[1:]:
            total = self.call(aten.add.Tensor, total, self.call(aten.sum.default, node))
        read = self.call(aten.sum.default, self.backward(*backward), phase=BACKWARD)
        return self.joint(self.call(aten.add.Tensor, total, read, phase=BACKWARD))


def copies_of(joint, op):
    return [n for n in joint.graph.nodes if n.target is op and is_backward(n)]


def test_a_copy_stands_directly_before_its_first_reader_and_serves_all_later_ones():
    g = Graph()
    made = tag(g.f(aten.exp.default, g.x))
    joint = g.done(made, backward=[made, made])
    assert check_pass(rematerialize, joint)
    (copy,) = copies_of(joint, aten.exp.default)
    first, second = copy.users
    assert copy.next is first and first.target is second.target is aten.add.Tensor
    assert all(not is_backward(user) for user in made.users)


def test_a_chain_is_copied_in_order_as_far_as_it_is_tagged():
    g = Graph()
    saved = g.f(aten.exp.default, g.x)
    one = tag(g.f(aten.sin.default, saved))
    two = tag(g.f(aten.cos.default, one))
    joint = g.done(two, backward=[two])
    assert check_pass(rematerialize, joint)
    (sine,), (cosine,) = copies_of(joint, aten.sin.default), copies_of(joint, aten.cos.default)
    assert sine.next is cosine and cosine.args == (sine,) and sine.args == (saved,)
    assert not copies_of(joint, aten.exp.default)


def test_a_later_reader_of_a_chains_middle_reads_the_copy_made_for_its_end():
    g = Graph()
    one = tag(g.f(aten.sin.default, g.x))
    two = tag(g.f(aten.cos.default, one))
    joint = g.done(two, backward=[two, one])
    assert check_pass(rematerialize, joint)
    assert len(copies_of(joint, aten.sin.default)) == 1


def test_readers_in_the_loss_keep_the_original():
    g = Graph()
    made = tag(g.f(aten.exp.default, g.x))
    in_loss = g.f(aten.neg.default, made, phase=LOSS)
    joint = g.done(in_loss, backward=[made])
    assert check_pass(rematerialize, joint)
    assert in_loss.args == (made,)


def test_a_chain_that_only_backward_reads_moves_there_whole():
    g = Graph()
    made = tag(g.f(aten.exp.default, g.x))
    joint = g.done(g.x, backward=[made])
    assert check_pass(rematerialize, joint)
    assert made not in joint.graph.nodes and len(copies_of(joint, aten.exp.default)) == 1


@pytest.mark.parametrize("policy", [p for p in CheckpointPolicy if p is not RECOMPUTE])
def test_any_other_tag_is_left_alone(policy):
    g = Graph()
    made = tag(g.f(aten.exp.default, g.x), policy=policy)
    assert not check_pass(rematerialize, g.done(made, backward=[made]))


def test_what_backward_does_not_read_is_left_alone():
    g = Graph()
    made = tag(g.f(aten.exp.default, g.x))
    assert not check_pass(rematerialize, g.done(made, backward=[g.x]))


def test_what_stands_in_backward_already_is_left_alone():
    g = Graph()
    made = tag(g.f(aten.exp.default, g.x, phase=BACKWARD))
    assert not check_pass(rematerialize, g.done(g.x, backward=[made]))


def test_a_random_op_counts_as_saved():
    g = Graph()
    noise = tag(g.f(aten.rand_like.default, g.x))
    scaled = tag(g.f(aten.mul.Tensor, noise, 2))
    joint = g.done(scaled, backward=[scaled])
    assert check_pass(rematerialize, joint)
    assert targets(joint).count(aten.rand_like.default) == 1
    assert targets(joint).count(aten.mul.Tensor) == 2


def test_dropout_and_the_mask_it_gives_are_saved():
    g = Graph()
    dropped = tag(g.f(aten.native_dropout.default, g.x, 0.5, True))
    mask = tag(g.f(operator.getitem, dropped, 1))
    joint = g.done(g.f(operator.getitem, dropped, 0), backward=[mask])
    assert not check_pass(rematerialize, joint)


def test_a_getitem_follows_the_op_that_made_the_tuple():
    g = Graph()
    parts = tag(g.f(aten.split.Tensor, g.f(aten.exp.default, g.x), 2))
    first = g.f(operator.getitem, parts, 0)
    both = g.f(aten.cat.default, [first, first], phase=BACKWARD)
    joint = g.done(first, backward=[both])
    assert check_pass(rematerialize, joint)
    (again,) = copies_of(joint, operator.getitem)
    assert copies_of(joint, aten.split.Tensor) == [again.args[0]]
    assert both.args == ([again, again],)


def test_a_getitem_that_the_user_keeps_is_kept():
    g = Graph()
    parts = tag(g.f(aten.split.Tensor, g.x, 4))
    first = tag(g.f(operator.getitem, parts, 0), policy=SAVE)
    assert not check_pass(rematerialize, g.done(first, backward=[first]))


def test_a_copy_has_annotations_of_its_own_and_no_tag():
    g = Graph()
    made = g.f(aten.exp.default, g.x, role=Role.UNSHARD, parameter="w", module="layers.0")
    tag(made)
    joint = g.done(made, backward=[made])
    assert check_pass(rematerialize, joint)
    (copy,) = copies_of(joint, aten.exp.default)
    assert recompute_policy(copy) is None and recompute_policy(made) is RECOMPUTE
    assert phase_of(copy) is BACKWARD and phase_of(made) is FORWARD
    assert (role_of(copy), parameter_of(copy), module_of(copy)) == (Role.UNSHARD, "w", "layers.0")
    annotate_node(copy, annotation(module="elsewhere"))
    assert module_of(made) == "layers.0"


def test_many_readers_of_many_arguments_are_all_redirected():
    g = Graph()
    made = tag(g.f(aten.exp.default, g.x))
    read = g.f(aten.cat.default, [made, made], phase=BACKWARD)
    joint = g.done(made, backward=[g.f(aten.slice.Tensor, read, 0, 0, 4, phase=BACKWARD)])
    assert check_pass(rematerialize, joint)
    (copy,) = copies_of(joint, aten.exp.default)
    assert read.args == ([copy, copy],)


# --- what may not run again ----------------------------------------------------------------


def refused(joint, *words):
    with pytest.raises(gt.PassError) as caught:
        rematerialize(joint)
    for word in (*words, "MUST_SAVE"):
        assert word in str(caught.value)


def test_an_op_that_writes_is_refused():
    g = Graph()
    made = g.f(aten.exp.default, g.x)
    written = tag(g.f(aten.add_.Tensor, made, 1))
    refused(g.done(written, backward=[written]), written.name, "writes in place")


def test_an_op_whose_input_is_written_before_backward_reads_is_refused():
    g = Graph()
    buffer = g.f(aten.exp.default, g.x)
    made = tag(g.f(aten.mul.Tensor, buffer, 2))
    writer = g.f(aten.add_.Tensor, g.f(aten.view.default, buffer, [2, 2]), 1)
    refused(g.done(made, backward=[made]), made.name, buffer.name, writer.name)


def test_batch_norms_hidden_write_counts():
    g = Graph()
    mean, var = g.f(aten.zeros_like.default, g.x), g.f(aten.ones_like.default, g.x)
    made = tag(g.f(aten.mul.Tensor, mean, 2))
    rows = g.f(aten.expand.default, g.x, [2, 4])
    norm = g.f(aten.native_batch_norm.default, rows, None, None, mean, var, True, 0.1, 1e-5)
    joint = g.done(g.f(operator.getitem, norm, 0), backward=[made])
    refused(joint, made.name, mean.name, norm.name)


def test_an_op_whose_own_result_is_written_afterwards_is_refused():
    g = Graph()
    made = tag(g.f(aten.exp.default, g.x))
    writer = g.f(aten.add_.Tensor, made, 1)
    refused(g.done(made, backward=[made]), made.name, writer.name)


def test_a_write_that_comes_too_late_to_matter_is_no_obstacle():
    g = Graph()
    buffer = g.f(aten.exp.default, g.x)
    made = tag(g.f(aten.mul.Tensor, buffer, 2))
    read = g.f(aten.neg.default, made, phase=BACKWARD)
    g.f(aten.add_.Tensor, buffer, 1, phase=BACKWARD)
    assert check_pass(rematerialize, g.done(made, backward=[read]))


def test_a_view_of_what_is_written_later_is_taken_again():
    g = Graph()
    buffer = g.f(aten.exp.default, g.x)
    view = tag(g.f(aten.view.default, buffer, [4]))
    g.f(aten.add_.Tensor, buffer, 1)
    assert check_pass(rematerialize, g.done(view, backward=[view]))


def test_a_tagged_buffer_mutation_that_nothing_reads_stays():
    g = Graph()
    buffer = g.buffer("steps", 4)
    made = tag(g.f(aten.exp.default, g.x))
    tag(g.f(aten.copy_.default, buffer, made))
    joint = g.done(made, backward=[made])
    assert check_pass(rematerialize, joint)
    assert aten.copy_.default in targets(joint)


# --- higher-order ops ----------------------------------------------------------------------


def body(*ops, constant=None, inner=None):
    """A subgraph: op after op on its one input."""
    root = nn.Module()
    graph = fx.Graph()
    value = graph.placeholder("value")
    for op in ops:
        value = graph.call_function(op, (value,))
    if constant is not None:
        root.register_buffer("constant", constant)
        value = graph.call_function(aten.mul.Tensor, (value, graph.get_attr("constant")))
    if inner is not None:
        root.add_module("inner", inner)
        called = graph.call_function(WHATEVER, (graph.get_attr("inner"), "inner", value))
        value = graph.call_function(operator.getitem, (called, 0))
    graph.output((value,))
    return fx.GraphModule(root, graph)


def with_body(subgraph):
    g = Graph()
    called = g.call_higher_order(WHATEVER, subgraph, "body", g.x, val=g.x)
    result = g.f(operator.getitem, called, 0)
    tag(called)
    return g, called, result, g.done(result, backward=[result])


def test_a_higher_order_ops_subgraphs_are_copied_with_it():
    inner = body(aten.cos.default)
    _, called, _, joint = with_body(body(aten.sin.default, constant=torch.arange(4.0), inner=inner))
    assert check_pass(rematerialize, joint)
    (copy,) = copies_of(joint, WHATEVER)
    assert copy.args[0].target != called.args[0].target
    original = getattr(joint.graph_module, called.args[0].target)
    copied = getattr(joint.graph_module, copy.args[0].target)
    assert copied.constant is original.constant
    assert copied.inner is not original.inner
    # a pass on one of the two never changes the other
    before = run(joint)
    for module in (copied, copied.inner):
        for node in module.graph.nodes:
            if node.target in (aten.sin.default, aten.cos.default):
                node.target = aten.tan.default
        module.recompile()
    assert original.code != copied.code and original.inner.code != copied.inner.code
    assert not torch.equal(before[0], run(joint)[0])


def test_a_higher_order_op_that_only_backward_read_is_removed():
    g = Graph()
    called = g.call_higher_order(WHATEVER, body(aten.sin.default), "body", g.x, val=g.x)
    result = g.f(operator.getitem, called, 0)
    tag(called)
    joint = g.done(g.x, backward=[result])
    assert check_pass(rematerialize, joint)
    assert len(joint.graph.find_nodes(op="get_attr")) == 1
    assert targets(joint).count(WHATEVER) == 1


def test_a_higher_order_op_with_something_random_inside_counts_as_saved():
    _, _, _, joint = with_body(body(aten.rand_like.default))
    assert not check_pass(rematerialize, joint)


def test_a_higher_order_op_that_writes_its_input_is_refused():
    g = Graph()
    subgraph = body()
    graph = subgraph.graph
    (value,) = graph.find_nodes(op="placeholder")
    with graph.inserting_after(value):
        graph.call_function(aten.add_.Tensor, (value, 1))
    made = g.f(aten.exp.default, g.x)
    called = tag(g.call_higher_order(WHATEVER, subgraph, "body", made, val=g.x))
    result = g.f(operator.getitem, called, 0)
    refused(g.done(result, backward=[result]), called.name, "writes in place")


# --- captured steps ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["always", "default", "never"])
def test_reshard_after_forward_gathers_again_what_the_policy_says(policy):
    joint = captured_decoder()
    before = run(joint)
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward=policy, verify_passes=True))
    assert_same(before, run(joint))
    forward, backward = unshards(joint, FORWARD), unshards(joint, BACKWARD)
    read = [name for name in forward if name != "embedding.weight"]
    layers = [name for name in read if name.startswith("layers.")]
    assert sorted(backward) == sorted({"always": read, "default": layers, "never": []}[policy])


def test_predicted_peak_memory_falls_with_every_policy():
    peaks = {}
    for policy in ("never", "default", "always"):
        joint = captured_decoder(layers=4, dim=32, hidden=64)
        config = gt.PassConfig(reshard_after_forward=policy)
        peaks[policy] = gt.run_passes(joint, config).last.peak_bytes
    assert peaks["always"] <= peaks["default"] < peaks["never"]


def test_backward_gathers_in_the_order_in_which_it_reads():
    joint = captured_decoder()
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always"))
    layers = [int(n.split(".")[1]) for n in unshards(joint, BACKWARD) if n.startswith("layers")]
    assert layers == sorted(layers, reverse=True)


def test_the_users_tags_on_ordinary_compute_work():
    joint = captured(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(2, 4))
    for node in joint.graph.nodes:
        if node.target in (aten.addmm.default, aten.gelu.default) and not is_backward(node):
            tag(node)
    before = run(joint)
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always", verify_passes=True))
    assert_same(before, run(joint))
    assert len(copies_of(joint, aten.gelu.default)) == 1
    assert c10d.all_gather_into_tensor.default in targets(joint)
