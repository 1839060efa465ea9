"""graph_trainer.testing: what `check_pass` finds in a pass that is wrong, and accepts."""

import pytest
import torch
from torch import nn

import graph_trainer as gt
from graph_trainer.core.passes.base import Pass, Stage
from graph_trainer.core.passes.fuse_chained_collectives import fuse_chained_all_gathers
from graph_trainer.testing import Builder, become, captured, check_pass, targets
from tests.unit.core.passes.rank_order import inner_first
from tests.unit.core.passes.test_verify_numbers import insert, outputs, returned, scale, swap
from tests.unit.graphs import aten


def as_pass(change, **declared):
    return Pass("mine", Stage.CLEANUP, "", lambda joint, *_: change(joint), **declared)


def two_gradients():
    b = Builder()
    up, down, x = b.parameter("up.weight", 4), b.parameter("down.weight", 4), b.input("x", 4)
    count = b.buffer("count", 4, mutated=True)
    b.call(aten.add_.Tensor, count, x)
    loss = b.total(b.call(aten.mul.Tensor, up, down), count)
    return b.joint(
        loss,
        up__weight=b.call(aten.mul.Tensor, down, x),
        down__weight=b.call(aten.mul.Tensor, up, x),
    )


def zero(joint):
    gradient = returned(joint, "down.weight")
    insert(gradient, aten.zeros_like.default, reader=joint.output_node())


def drop_write(joint):
    (add,) = joint.graph.find_nodes(op="call_function", target=aten.add_.Tensor)
    joint.graph.erase_node(add)


def unmarked(joint):
    insert(outputs(joint)[0], aten.neg.default).meta.pop("custom")


def once_more(joint):
    insert(insert(outputs(joint)[0], aten.neg.default), aten.neg.default)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap, "gradient of up.weight is another than before the pass"),
        (zero, "gradient of down.weight is another than before the pass"),
        (drop_write, "the step writes buffer 'count', and the graph no longer has a node"),
        (unmarked, "has no phase"),
        (once_more, "changed the graph again when it ran a second time"),
    ],
)
def test_a_wrong_pass_is_named_with_what_is_wrong(change, message):
    with pytest.raises(gt.VerificationError, match=f"pass 'mine'.*{message}"):
        check_pass(as_pass(change), two_gradients())


def test_wrong_metadata_is_named():
    def wrong(joint):
        returned(joint, "up.weight").prev.prev.meta["val"] = torch.empty(4).half()

    with pytest.raises(gt.VerificationError, match="'mine'.*metadata says.*float16"):
        check_pass(as_pass(wrong), two_gradients())


def test_a_right_pass_says_whether_it_changed_anything():
    def without_copies(joint):
        for node in joint.graph.find_nodes(op="call_function", target=aten.clone.default):
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)

    class Copying(nn.Linear):
        def forward(self, x):
            return super().forward(x).clone()

    batch = torch.randn(3, 4)
    assert check_pass(as_pass(without_copies), Copying(4, 4), args=(batch,))
    joint = captured(Copying(4, 4), batch, world=8, rank=7)
    assert check_pass(as_pass(without_copies), joint)
    assert aten.clone.default not in targets(joint) and joint.history == ["mine"]
    assert not check_pass(as_pass(without_copies), joint)


def test_a_pass_that_may_round_may_round():
    shift = scale("up.weight", 1 + 2**-22)
    done = []

    def once(joint):
        if not done:
            done.append(shift(joint))

    assert check_pass(as_pass(once, changes_sums=True), two_gradients())


def test_what_cannot_be_compared_is_refused():
    b = Builder()
    joint = b.joint(b.total(b.call(aten._to_copy.default, b.input("x", 4), device="meta")))
    with pytest.raises(gt.VerificationError, match="cannot tell whether 'mine' is right: .*meta"):
        check_pass(as_pass(lambda joint: None), joint)
    become(1, 32)
    with pytest.raises(gt.VerificationError, match="cannot tell .* where all ranks hold the same"):
        check_pass(fuse_chained_all_gathers, inner_first(8, 4, rows=64))
    assert check_pass(fuse_chained_all_gathers, inner_first(8, 4, rows=64), ranks_alike=True)
