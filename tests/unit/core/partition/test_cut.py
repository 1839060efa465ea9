"""The two halves of a joint graph: what is on which side, what is saved, and in which order."""

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import graph_trainer as gt
from graph_trainer.core.analysis.one_process import OneProcess, same_random_numbers
from graph_trainer.core.analysis.unshard_chains import unshard_chains
from graph_trainer.core.graph.annotations import (
    Phase,
    Role,
    annotate_node,
    annotation,
    is_backward,
    phase_of,
    recompute_policy,
    restore_recompute_policy,
    role_of,
    set_recompute_policy,
)
from graph_trainer.core.graph.joint_graph import compute_nodes
from graph_trainer.core.graph.ops import is_collective, storage_roots
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.partition.cut import cut
from graph_trainer.core.passes.rematerialize import rematerialize
from graph_trainer.testing import Builder, assert_same, run, values_for
from tests.unit.core.graph import test_registered_effects  # noqa: F401  its op
from tests.unit.graphs import ALL_REDUCE, BACKWARD, GATHER, aten, captured_decoder, unshards


def run_halves(halves, values):
    """Run forward, then backward with a gradient of one, as `run` runs the joint graph."""
    values = [value.clone() for value in values]
    with same_random_numbers(), torch.no_grad():
        results = OneProcess(halves.forward.graph_module).run(*values)
        saved = results[len(results) - len(halves.saved()) :]
        given = [values[place] for place in halves.inputs_read]
        ones = torch.ones_like(results[0])
        gradients = OneProcess(halves.backward.graph_module).run(*given, *saved, ones)
    return [results[0], *gradients, *values]


def check(joint):
    """Cut, and compare with the joint graph on the same values."""
    code = joint.graph_module.code
    halves = cut(joint)
    assert joint.graph_module.code == code
    values = values_for(joint)
    assert_same(run(joint, values), run_halves(halves, values))
    return halves


def seed(b, loss):
    node = b.call(aten.ones_like.default, loss, phase=BACKWARD)
    annotate_node(node, annotation(loss_gradient=0))
    return node


def names(nodes):
    return [node.name for node in nodes]


@pytest.mark.parametrize("policy", ["always", "never", "default"])
@pytest.mark.parametrize("world", [4, 3, (2, 2)])
def test_halves_compute_what_the_joint_graph_does(world, policy):
    fsdp = {"mode": "hybrid_shard"} if isinstance(world, tuple) else {}
    joint = captured_decoder(world=world, fsdp=fsdp, tied=True)
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward=policy))
    halves = check(joint)
    for half in (halves.forward, halves.backward):
        half.validate()
    assert not any(is_backward(n) for n in compute_nodes(halves.forward.graph))
    assert {phase_of(n) for n in compute_nodes(halves.backward.graph)} == {Phase.BACKWARD}


@pytest.mark.parametrize("activations", ["none", "selective", "full"])
def test_what_backward_reads_of_forward_is_saved_and_nothing_else(activations):
    joint = captured_decoder()
    gt.run_passes(joint, gt.PassConfig(activation_policy=activations))
    wanted = {
        source.name
        for node in compute_nodes(joint.graph)
        if is_backward(node)
        for source in node.all_input_nodes
        if source.op != "placeholder" and not is_backward(source)
    }
    halves = check(joint)
    assert set(names(halves.saved())) == wanted - {
        # the ones that stand for the gradient of the loss are made of it
        n.name
        for n in joint.output_node().all_input_nodes[:1]
    }


def test_inputs_are_passed_on_and_not_saved():
    joint = captured_decoder()
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always"))
    halves = cut(joint)
    given = [s.kind for s in halves.backward.signature.inputs[: len(halves.inputs_read)]]
    assert InputKind.PARAMETER in given and InputKind.SAVED not in given
    assert not {n.op for n in halves.saved()} - {"call_function"}


def test_no_copy_of_a_gathered_parameter_is_saved():
    """Tags on the whole chain free the views and copies below the all-gather with it."""

    def saved_of_unshards(halves):
        roots = storage_roots(halves.forward.graph)
        roles = [(role_of(n), role_of(roots[n][0])) for n in halves.saved()]
        return sum(Role.UNSHARD in pair for pair in roles)

    joint = captured_decoder()
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always"))
    assert len(unshards(joint, BACKWARD)) > 0
    halves = cut(joint)
    assert saved_of_unshards(halves) == 0

    @gt.graph_pass(stage=gt.Stage.TAG, summary="Tag gathers without what is below them")
    def tag_gathers_alone(joint, options, context):
        for chain in unshard_chains(joint):
            for node in filter(is_collective, chain.nodes):
                set_recompute_policy(node, CheckpointPolicy.MUST_RECOMPUTE)

    gather_alone = captured_decoder()
    passes = ["default", tag_gathers_alone]
    gt.run_passes(gather_alone, gt.PassConfig(passes=passes, disable_passes=["tag_fsdp_unshards"]))
    kept = cut(gather_alone)
    assert saved_of_unshards(kept) > 0
    assert kept.saved_bytes() > halves.saved_bytes()


def test_no_tag_is_left_for_another_partition_once_rematerialize_has_acted():
    """It leaves what runs once, a registered effect for one, and its tag says nothing more."""
    b = Builder()
    x, _ = b.input("x", 4), b.parameter("w", 4)
    once = b.call(torch.ops.test_effects.note.default, x, "once")
    again = b.call(aten.sin.default, once)
    for node in (once, again):
        set_recompute_policy(node, CheckpointPolicy.MUST_RECOMPUTE)
    loss = b.total(again)
    both = b.call(aten.mul.Tensor, once, again, phase=BACKWARD)
    joint = b.joint(loss, w=b.call(aten.mul.Tensor, both, seed(b, loss), phase=BACKWARD))
    rematerialize(joint)
    forward = cut(joint).forward
    for node in forward.graph.nodes:
        restore_recompute_policy(node)
    assert not any(map(recompute_policy, forward.graph.nodes))


def test_interleaved_nodes_go_to_their_side_in_their_order():
    """A gather of backward that was moved into forward is backward's, and the other way round."""
    b = Builder()
    x, weight = b.input("x", 4), b.parameter("w", 2)
    statistics = b.buffer("b", 4, mutated=True)
    hidden = b.call(aten.tanh.default, x)
    again = b.call(GATHER, weight, 2, "0", phase=BACKWARD)
    loss = b.total(b.call(aten.mul.Tensor, hidden, b.waited(GATHER, weight, 2, "0")))
    ones = seed(b, loss)
    waited = b.call(torch.ops._c10d_functional.wait_tensor.default, again, phase=BACKWARD)
    grad = b.call(aten.mul.Tensor, waited, hidden, phase=BACKWARD)
    late = b.call(aten.add_.Tensor, statistics, hidden)
    grad = b.call(aten.mul.Tensor, grad, ones, phase=BACKWARD)
    joint = b.joint(loss, w=b.call(aten.slice.Tensor, grad, 0, 0, 2, phase=BACKWARD))
    halves = check(joint)
    assert again.name in names(halves.backward.graph.nodes)
    assert late.name in names(halves.forward.graph.nodes)
    assert names(halves.saved()) == [hidden.name]
    order = {n.name: place for place, n in enumerate(joint.graph.nodes)}
    for half in (halves.forward, halves.backward):
        places = [order[n.name] for n in compute_nodes(half.graph)]
        assert places == sorted(places)


def test_a_collective_that_forward_starts_ends_in_forward():
    """Its wait, wherever it was, comes to the end of forward: what is saved is finished."""
    b = Builder()
    x, weight = b.input("x", 4), b.parameter("w", 4)
    started = b.call(ALL_REDUCE, b.call(aten.mul.Tensor, x, weight), "sum", "0")
    loss = b.total(x)
    ones = seed(b, loss)
    waited = b.call(torch.ops._c10d_functional.wait_tensor.default, started, phase=BACKWARD)
    joint = b.joint(loss, w=b.call(aten.mul.Tensor, waited, ones, phase=BACKWARD))
    halves = check(joint)
    assert names(halves.saved()) == [waited.name]
    assert phase_of(halves.saved()[0]) is Phase.LOSS
    assert list(compute_nodes(halves.forward.graph))[-1].name == waited.name


def test_a_result_of_several_is_saved_without_the_others():
    b = Builder()
    x, weight = b.input("x", 4, 4), b.parameter("w", 4, 4)
    both = b.call(aten.var_mean.correction, b.call(aten.mul.Tensor, x, weight), [1])
    variance = b.call(torch.ops.aten.mul.Tensor, x, x)
    take = [b.graph.call_function(__import__("operator").getitem, (both, i)) for i in (0, 1)]
    for place, node in enumerate(take):
        node.meta["val"] = both.meta["val"][place]
        annotate_node(node, annotation(phase=BACKWARD if place else Phase.FORWARD))
    loss = b.total(take[0], variance)
    ones = seed(b, loss)
    grad = b.call(aten.mul.Tensor, take[1], ones, phase=BACKWARD)
    joint = b.joint(loss, w=b.call(aten.mul.Tensor, x, grad, phase=BACKWARD))
    halves = check(joint)
    assert names(halves.saved()) == [take[1].name]


def overwritten(late):
    """Backward reads a buffer's value, and the product, from before forward's last write."""
    b = Builder()
    x, weight, buffer = b.input("x", 4), b.parameter("w", 4), b.buffer("b", 4, mutated=True)
    product = b.call(aten.mul.Tensor, x, buffer)
    b.call(aten.add_.Tensor, buffer, x)
    between = b.call(aten.mul.Tensor, buffer, product)
    loss = b.total(b.call(aten.mul.Tensor, between, weight))
    ones = seed(b, loss)
    if not late:
        b.call(aten.mul_.Tensor, buffer, x)
    grad = b.call(aten.mul.Tensor, buffer, ones, phase=BACKWARD)
    if late:
        b.call(aten.mul_.Tensor, buffer, x)
    return b.joint(loss, w=grad)


def test_what_forward_overwrites_after_its_backward_reader_is_cloned():
    halves = check(overwritten(late=True))
    assert [n.target for n in halves.saved()] == [aten.clone.default]
    assert halves.saved_bytes() == 16 and not halves.inputs_read
    halves = check(overwritten(late=False))
    assert not halves.saved() and len(halves.inputs_read) == 1


def test_bytes_of_one_storage_count_once():
    b = Builder()
    x, weight = b.input("x", 4), b.parameter("w", 4)
    hidden = b.call(aten.tanh.default, x)
    ends = [b.call(aten.slice.Tensor, hidden, 0, i, i + 2) for i in (0, 2)]
    loss = b.total(hidden)
    ones = seed(b, loss)
    parts = [b.call(aten.mul.Tensor, end, ones, phase=BACKWARD) for end in ends]
    joint = b.joint(loss, w=b.call(aten.cat.default, parts, phase=BACKWARD))
    halves = check(joint)
    assert names(halves.saved()) == names(ends)
    assert halves.saved_bytes() == 16
    assert weight.name not in names(halves.backward.graph.nodes)


# --- what cannot be cut ---------------------------------------------------------------------------


def test_a_tuple_cannot_be_saved():
    b = Builder()
    x, weight = b.input("x", 4), b.parameter("w", 4)
    both = b.call(aten.split.Tensor, b.call(aten.tanh.default, x), 2)
    loss = b.total(x)
    seed(b, loss)
    joint = b.joint(loss, w=b.call(aten.cat.default, both, phase=BACKWARD))
    assert weight.op == "placeholder"
    with pytest.raises(gt.PassError, match=f"reads '{both.name}'.*cannot be saved"):
        cut(joint)


def test_backward_without_its_beginning_is_refused():
    b = Builder()
    x, _ = b.input("x", 4), b.parameter("w", 4)
    joint = b.joint(b.total(x), w=b.call(aten.neg.default, x, phase=BACKWARD))
    with pytest.raises(gt.PassError, match="0 nodes are marked as the gradient of the loss"):
        cut(joint)


def test_forward_that_needs_backward_is_refused():
    b = Builder()
    x, _ = b.input("x", 4), b.parameter("w", 4)
    ones = seed(b, b.total(x))
    joint = b.joint(b.total(b.call(aten.mul.Tensor, x, ones)), w=x)
    with pytest.raises(gt.PassError, match=r"'mul_tensor' \(.*\) depends on"):
        cut(joint)


def test_writes_that_two_graphs_cannot_order_are_refused():
    b = Builder()
    x, buffer, _ = b.input("x", 4), b.buffer("b", 4, mutated=True), b.parameter("w", 4)
    ones = seed(b, b.total(x))
    b.call(aten.mul_.Tensor, buffer, ones, phase=BACKWARD)
    read = b.call(aten.neg.default, buffer)
    joint = b.joint(b.total(read), w=b.call(aten.mul.Tensor, x, ones, phase=BACKWARD))
    with pytest.raises(gt.PassError, match="has written in place before"):
        cut(joint)

    b = Builder()
    x, buffer, _ = b.input("x", 4), b.buffer("b", 4, mutated=True), b.parameter("w", 4)
    loss = b.total(x)
    ones = seed(b, loss)
    grad = b.call(aten.mul.Tensor, buffer, ones, phase=BACKWARD)
    b.call(aten.mul_.Tensor, buffer, x)
    b.call(aten.mul_.Tensor, buffer, ones, phase=BACKWARD)
    with pytest.raises(gt.PassError, match="write 'b' in place in turns"):
        cut(b.joint(loss, w=grad))
