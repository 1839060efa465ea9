"""What is tagged runs again in backward, and gives what it gave before."""

import operator
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
from graph_trainer.testing import Builder, assert_same, check_pass, run, targets
from tests.examples import examples
from tests.unit.graphs import BACKWARD, FORWARD, LOSS, aten, captured_decoder, unshards

RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE
SAVE = CheckpointPolicy.MUST_SAVE
WHATEVER = torch.ops.higher_order.invoke_subgraph


def tag(*nodes, policy=RECOMPUTE):
    for node in nodes:
        if policy is not None:
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
        total = self.total(*forward, phase=LOSS)
        read = self.call(aten.sum.default, self.backward(*backward), phase=BACKWARD)
        return self.joint(self.call(aten.add.Tensor, total, read, phase=BACKWARD))


def copies_of(joint, op):
    return [n for n in joint.graph.nodes if n.target is op and is_backward(n)]


POLICIES = st.sampled_from([RECOMPUTE, RECOMPUTE, None, *CheckpointPolicy])
NUMBERS = st.integers(0, 9)
STEPS = st.tuples(
    st.sampled_from([aten.exp.default, aten.mul.Tensor, aten.rand_like.default, operator.getitem]),
    *(NUMBERS, NUMBERS, POLICIES, POLICIES),
)


def may_run_again(node):
    if node.target is operator.getitem:
        return recompute_policy(node) in (None, RECOMPUTE) and may_run_again(node.args[0])
    return recompute_policy(node) is RECOMPUTE and node.target is not aten.rand_like.default


@given(
    st.lists(STEPS, min_size=1, max_size=8),
    st.lists(NUMBERS, min_size=1, max_size=2),
    st.lists(NUMBERS, max_size=3),
)
@examples(100)
def test_backward_reads_one_copy_of_all_that_may_run_again(steps, in_loss, in_backward):
    g = Graph()
    values = [g.x]
    for op, one, two, policy, of_part in steps:
        args = values[one % len(values)], values[two % len(values)]
        if op is operator.getitem:
            both = tag(g.f(aten.cat.default, [*args]), policy=policy)
            parts = tag(g.f(aten.split.Tensor, both, 4), policy=policy)
            values.append(tag(g.f(op, parts, two % 2), policy=of_part))
        else:
            args = args if op is aten.mul.Tensor else args[:1]
            values.append(tag(g.f(op, *args), policy=policy))
    loss, read = ([values[i % len(values)] for i in each] for each in (in_loss, in_backward))
    joint = g.done(*loss, backward=read)
    again = {n for n in joint.graph.nodes if n.op == "call_function" and may_run_again(n)}
    needed = [n for n in dict.fromkeys(read) if n in again]
    for node in needed:
        needed += [n for n in node.all_input_nodes if n in again and n not in needed]
    names = {n.name for n in joint.graph.nodes}

    assert check_pass(rematerialize, joint) is bool(needed)
    copies = [n for n in joint.graph.nodes if n.name not in names]
    assert Counter(n.target for n in copies) == Counter(n.target for n in needed)
    assert all(is_backward(n) and recompute_policy(n) is None for n in copies)
    assert all(n.next in n.users or n.next in copies for n in copies), "directly before a reader"
    for node in joint.graph.nodes:
        assert not is_backward(node) or again.isdisjoint(node.all_input_nodes)
        assert node.users or node not in needed, "what only backward reads moves there"


def test_what_stands_in_backward_already_is_left_alone():
    g = Graph()
    made = tag(g.f(aten.exp.default, g.x, phase=BACKWARD))
    assert not check_pass(rematerialize, g.done(g.x, backward=[made]))


def test_dropout_and_the_mask_it_gives_are_saved():
    g = Graph()
    dropped = tag(g.f(aten.native_dropout.default, g.x, 0.5, True))
    mask = tag(g.f(operator.getitem, dropped, 1))
    joint = g.done(g.f(operator.getitem, dropped, 0), backward=[mask])
    assert not check_pass(rematerialize, joint)


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
