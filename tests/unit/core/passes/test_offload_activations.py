"""Tagged activations are in host memory between forward and backward, and come back bit by bit."""

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import CheckpointPolicy

import graph_trainer as gt
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.annotations import (
    is_backward,
    module_of,
    phase_of,
    set_offload,
    set_recompute_policy,
)
from graph_trainer.core.graph.host_copies import OFFLOAD, RELOAD, WAIT_COPY, is_host_copy
from graph_trainer.core.passes.offload_activations import (
    OffloadActivationsOptions,
    offload_activations,
)
from graph_trainer.core.passes.rematerialize import rematerialize
from graph_trainer.testing import Builder, check_pass, targets
from tests.examples import examples
from tests.unit.graphs import ALL_REDUCE, BACKWARD, FORWARD, LOSS, aten, c10d, captured_decoder


def offload(joint, *, min_bytes=0, **options):
    return check_pass(
        offload_activations, joint, OffloadActivationsOptions(min_bytes=min_bytes, **options)
    )


def remarks(joint, **options):
    """What the pass says of the values that it leaves, when it first runs."""
    joint.remarks.clear()
    offload_activations(joint, OffloadActivationsOptions(min_bytes=0, **options))
    return joint.remarks


class Blocks(Builder):
    """x -> a product and an exponential a block -> loss; backward reads both, the last block
    first. Of a block, `backward` may replace what backward reads."""

    def __init__(self, blocks=4):
        super().__init__()
        self.x, self.w = self.input("x", 4, 4), self.parameter("w", 4, 4)
        self.blocks = blocks

    def built(self, make=None, backward=None):
        value, made = self.x, []
        for i in range(self.blocks):
            module = f"layers.{i}"
            value = self.call(aten.mm.default, value, self.w, module=module)
            read = self.call(aten.tanh.default, value, module=module)
            if make is not None:
                read = make(self, read, module)
            made.append(read)
            value = self.call(aten.add.Tensor, value, value, module=module)
        loss = self.total(value, phase=LOSS, module="loss")
        grad = self.call(aten.neg.default, value, phase=BACKWARD, module="loss")
        for i in reversed(range(self.blocks)):
            how = {"phase": BACKWARD, "module": f"layers.{i}"}
            grad = self.call(aten.neg.default, grad, **how)
            for read in (backward or (lambda b, node, **how: [node]))(self, made[i], **how):
                grad = self.call(aten.mul.Tensor, grad, read, **how)
        return self.joint(loss, w=grad), made


def order(joint, base):
    """By name, the place of each node of a value's copies, and of those that read it."""
    nodes = list(joint.graph.nodes)
    (out,) = (n for n in base.users if n.target is OFFLOAD)
    (stored,) = out.users
    (again,) = (n for n in stored.users if n.target is RELOAD)
    (read,) = again.users
    assert [out.target, stored.target, again.target, read.target] == [
        OFFLOAD, WAIT_COPY, RELOAD, WAIT_COPY
    ]  # fmt: skip
    assert stored.args == (out, base) and read.args == (again, stored)
    return [nodes.index(n) for n in (out, stored, again, read)]


def block_at(joint, place):
    return module_of(list(joint.graph.nodes)[place])


@pytest.mark.parametrize(
    ("options", "left", "right", "back"),
    [
        # next to the wait: the block before it, and after it; behind the start of the copy back
        ({}, "layers.1", "layers.2", "layers.1"),
        ({"finish_blocks": 0}, "layers.0", "layers.1", "layers.1"),
        ({"finish_blocks": 2}, "layers.2", "layers.3", "layers.1"),
        ({"prefetch_blocks": 2}, "layers.1", "layers.2", "layers.2"),
        ({"prefetch_blocks": 0}, "layers.1", "layers.2", "layers.0"),
    ],
)
def test_copies_run_where_the_options_say(options, left, right, back):
    joint, made = Blocks().built()
    set_offload(made[0])
    readers = [n for n in made[0].users if is_backward(n)]
    assert offload(joint, **options)
    start, end, again, read = order(joint, made[0])
    nodes = list(joint.graph.nodes)
    assert nodes[start - 1] is made[0], "nothing else of forward reads it"
    assert (block_at(joint, end - 1), block_at(joint, end + 1)) == (left, right)
    assert block_at(joint, again + 1) == (back if options.get("prefetch_blocks", 1) else "layers.0")
    assert nodes[read + 1] in readers
    assert [phase_of(nodes[i]) for i in (start, end, again, read)] == [FORWARD] * 2 + [BACKWARD] * 2
    assert not any(is_backward(n) for n in made[0].users)
    assert all(module_of(n) == "layers.0" for n in joint.graph.nodes if is_host_copy(n))


def test_without_a_tag_nothing_happens():
    joint, _ = Blocks().built()
    assert not offload(joint)
    assert not remarks(joint)


def test_a_value_that_several_nodes_read_is_copied_once():
    joint, made = Blocks().built(
        backward=lambda b, read, **how: [read, b.call(aten.exp.default, read, **how)]
    )
    set_offload(made[1])
    assert offload(joint)
    assert targets(joint).count(OFFLOAD) == targets(joint).count(RELOAD) == 1


def test_a_view_is_made_again_of_the_whole_storage():
    """Tagged are a view and its view, and backward reads three more; forward needs one of them."""

    def make(b, read, module):
        view = b.call(aten.t.default, read, module=module)
        return [read, view, b.call(aten.view.default, read, [2, 8], module=module),
                b.call(aten.relu.default, view, module=module)]  # fmt: skip

    def backward(b, made, **how):
        base, view, other, _ = made
        again = b.call(aten.view.default, other, [4, 4], **how)
        return [view, again, b.call(aten.t.default, b.call(aten.t.default, base, **how), **how)]

    joint, made = Blocks().built(make, backward)
    for node in made[0][1:3]:
        set_offload(node)
    assert offload(joint)
    assert targets(joint).count(OFFLOAD) == 1
    base, view, other, _ = made[0]
    order(joint, base)
    assert not any(is_backward(n) for node in (base, view) for n in node.users)
    assert other not in list(joint.graph.nodes), "only backward read it"


def test_the_parts_of_a_split_are_taken_again():
    def make(b, read, module):
        parts = b.call(aten.split.Tensor, read, 2, module=module)
        return [b.call(operator.getitem, parts, i, module=module) for i in (0, 1)]

    def backward(b, made, **how):
        return [b.call(aten.cat.default, [made[1], made[0]], **how)]

    joint, made = Blocks().built(make, backward)
    set_offload(made[0][1])
    assert offload(joint)
    assert targets(joint).count(OFFLOAD) == 1
    assert sum(is_backward(n) for n in joint.graph.nodes if n.target is aten.split.Tensor) == 1


def test_results_of_an_op_with_several_are_copied_one_by_one():
    def make(b, read, module):
        norm = b.call(aten.native_layer_norm.default, read, [4], None, None, 1e-5, module=module)
        return [b.call(operator.getitem, norm, i, module=module) for i in range(3)]

    joint, made = Blocks().built(make, lambda b, made, **how: made)
    (norm,) = {n.args[0] for n in made[0]}
    set_offload(norm)
    assert offload(joint)
    assert targets(joint).count(OFFLOAD) == 3
    joint, made = Blocks().built(make, lambda b, made, **how: made)
    set_offload(made[0][1])
    assert offload(joint)
    (copy,) = (n for n in joint.graph.nodes if n.target is OFFLOAD)
    assert copy.args == (made[0][1],)


def test_the_result_of_a_collective_is_copied_when_it_is_complete():
    def make(b, read, module):
        started = b.call(ALL_REDUCE, read, "sum", "group", module=module)
        return [started, b.call(c10d.wait_tensor.default, started, module=module)]

    for tagged in (0, 1):
        joint, made = Blocks().built(make, lambda b, made, **how: made[1:])
        set_offload(made[0][tagged])
        assert offload(joint)
        (copy,) = (n for n in joint.graph.nodes if n.target is OFFLOAD)
        assert copy.args == (made[0][1],)


STAYS = {
    "smaller than OffloadActivationsOptions.min": lambda b, made: (made[0], {"min_bytes": 65}),
    "backward needs them before a copy would be complete": lambda b, made: (made[-1], {}),
    "memory of an input": lambda b, made: (made[0].args[0].args[1], {}),
    "backward does not read them": lambda b, made: (made[0].args[0], {}),
}  # fmt: skip


@pytest.mark.parametrize("why", STAYS)
def test_what_stays_and_why(why):
    b = Blocks()
    joint, made = b.built()
    node, options = STAYS[why](b, made)
    set_offload(node)
    assert not offload(joint, **options)
    joint.remarks.clear()
    offload_activations(joint, OffloadActivationsOptions(**({"min_bytes": 0} | options)))
    assert joint.remarks[0].startswith("0 values") and why in joint.remarks[1]


def test_a_value_of_exactly_the_smallest_size_is_copied():
    joint, made = Blocks().built()
    set_offload(made[0])
    assert offload(joint, min_bytes=64)


def test_what_is_written_in_place_stays():
    def make(b, read, module):
        b.call(aten.add_.Tensor, b.call(aten.t.default, read, module=module), 1, module=module)
        return read

    joint, made = Blocks().built(make)
    set_offload(made[0])
    assert not offload(joint)
    assert "written in place" in remarks(joint)[1]


def test_an_output_stays():
    b = Builder()
    w = b.parameter("w", 4)
    made = b.call(aten.exp.default, w)
    total = b.total(made, phase=LOSS)
    read = b.call(aten.sum.default, made, phase=BACKWARD)
    loss = b.call(aten.add.Tensor, total, read, phase=BACKWARD)
    joint = b.joint(loss, w=b.call(aten.view.default, made, [4]))
    set_offload(made)
    assert "memory of an output" in remarks(joint)[1]


def test_a_value_with_gaps_stays():
    def make(b, read, module):
        return b.call(aten.new_empty_strided.default, read, [4, 4], [8, 1], module=module)

    joint, made = Blocks().built(make)
    set_offload(made[0])
    assert "with gaps in memory" in remarks(joint)[1]


def test_a_gathered_parameter_stays():
    joint = captured_decoder(layers=3)
    for node in joint.graph.nodes:
        if node.op == "call_function" and not is_backward(node):
            set_offload(node)
    assert offload(joint)
    assert any("parameters, which are gathered again" in r for r in remarks(joint))
    # all blocks but the last two: of the last, backward needs everything at once
    copied = {module_of(n) for n in joint.graph.nodes if n.target is OFFLOAD}
    assert any(m.startswith("layers.0") for m in copied)
    assert not any(m.startswith("layers.2") for m in copied)


def test_what_is_recomputed_is_not_copied_and_what_it_reads_is():
    joint, made = Blocks().built()
    set_offload(made[0])
    set_recompute_policy(made[0], CheckpointPolicy.MUST_RECOMPUTE)
    set_offload(made[0].args[0])
    check_pass(rematerialize, joint)
    assert offload(joint)
    (copy,) = (n for n in joint.graph.nodes if n.target is OFFLOAD)
    assert copy.args[0].target is aten.mm.default


def test_random_numbers_are_copied_and_not_drawn_again():
    def make(b, read, module):
        return b.call(aten.rand_like.default, read, module=module)

    joint, made = Blocks().built(make)
    set_offload(made[0])
    assert offload(joint)
    assert targets(joint).count(aten.rand_like.default) == 4


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["tanh", "mul", "t", "split", "norm", "add_", "rand"]),
        *(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.booleans()),
    ),
    min_size=2,
    max_size=16,
)


@given(STEPS, st.integers(0, 2), st.integers(0, 2), st.integers(1, 4))
@examples(100)
def test_numbers_are_the_same_whatever_is_tagged(steps, prefetch, finish, blocks):
    b = Builder()
    values, read, tagged = [b.input("x", 4, 4)], [], []
    for place, (op, one, two, tag, again) in enumerate(steps):
        how = {"module": f"layers.{place * blocks // len(steps)}"}
        x, y = values[one % len(values)], values[two % len(values)]
        if op == "split":
            parts = b.call(aten.split.Tensor, x, 2, **how)
            both = [b.call(operator.getitem, parts, i, **how) for i in (0, 1)]
            made = b.call(aten.cat.default, both, **how)
            read += [(both[0], place)] if again else []
        elif op == "norm":
            made = b.call(aten.native_layer_norm.default, x, [4], None, None, 1e-5, **how)
            made = b.call(operator.getitem, made, 0, **how)
        elif op == "mul":
            made = b.call(aten.mul.Tensor, x, y, **how)
        elif op == "add_":
            copy = b.call(aten.clone.default, x, **how)
            made = b.call(aten.add_.Tensor, copy if tag else x, 1, **how) if place else copy
        else:
            called = {"tanh": aten.tanh, "t": aten.t, "rand": aten.rand_like}[op]
            made = b.call(called.default, x, **how)
        values.append(made)
        tagged += [made] if tag else []
        read += [(made, place)] if again else []
    total = b.total(values[-1], phase=LOSS, module="loss")
    for node, place in reversed(read):
        how = {"phase": BACKWARD, "module": f"layers.{place * blocks // len(steps)}"}
        total = b.call(aten.add.Tensor, total, b.call(aten.sum.default, node, **how), **how)
    joint = b.joint(total)
    for node in tagged:
        set_offload(node)
    offload(joint, prefetch_blocks=prefetch, finish_blocks=finish)
    peak = lifetimes(joint)
    assert peak.host_bytes >= 0
    assert (OFFLOAD in targets(joint)) is (peak.host_bytes > 0)


@pytest.mark.parametrize("name", ["prefetch_blocks", "finish_blocks", "min_bytes"])
def test_bad_options_are_named(name):
    with pytest.raises(
        gt.PassError, match=f"OffloadActivationsOptions.{name} is -1; it must be 0 or more"
    ):
        OffloadActivationsOptions(**{name: -1})
