"""All readings of a parameter share one gather, and nothing else is merged."""

import pytest
import torch
from torch import nn

from graph_trainer.core.graph.annotations import Role
from graph_trainer.core.passes.deduplicate_unshards import deduplicate_unshards
from graph_trainer.testing import Builder, captured, check_pass, targets
from tests.unit.graphs import BACKWARD, FORWARD, GATHER, SCATTER, aten, captured_decoder, unshards

UNSHARD = {"role": Role.UNSHARD, "parameter": "w"}


class Twice(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size, bias=False)

    def forward(self, x):
        return self.linear(torch.relu(self.linear(x)))


@pytest.mark.parametrize(("size", "rank"), [(4, 0), (5, 2)], ids=["even", "padded"])
def test_two_readings_share_one_gather_padding_and_all(size, rank):
    joint = captured(Twice(size), torch.randn(2, size), rank=rank)
    assert unshards(joint) == ["linear.weight"] * 2
    assert check_pass(deduplicate_unshards, joint)
    assert unshards(joint) == ["linear.weight"]
    assert targets(joint).count(SCATTER) == 2, "gradients are reduced as often as before"
    # one gather's padding, and that of two reductions
    assert targets(joint).count(aten.cat.default) == (3 if size == 5 else 0)


def test_a_tied_parameter_is_gathered_once():
    joint = captured_decoder(tied=True)
    before = unshards(joint)
    assert before.count("embedding.weight") == 2
    assert check_pass(deduplicate_unshards, joint)
    assert unshards(joint).count("embedding.weight") == 1


def test_what_checkpointing_runs_again_reads_the_gathers_of_forward():
    joint = captured_decoder(checkpointed=True)
    assert unshards(joint, BACKWARD)
    forward = unshards(joint, FORWARD)
    assert check_pass(deduplicate_unshards, joint)
    assert unshards(joint, FORWARD) == unshards(joint) == forward


def unshard(b, shard, group="0"):
    return b.waited(GATHER, shard, 2, group, **UNSHARD)


def cast(b, node, dtype):
    return b.call(aten._to_copy.default, node, dtype=dtype, **UNSHARD)


def filled(b, node, value):
    return b.call(aten.full_like.default, node, value, dtype=None, **UNSHARD)


def padded_to_another_shape(b, w):
    padded = b.call(aten.constant_pad_nd.default, w, [0, 2], **UNSHARD)
    return unshard(b, w), b.call(aten.slice.Tensor, unshard(b, padded), 0, 0, 4)


def a_gathered_tensor_is_written(b, w):
    gathered = unshard(b, w)
    b.call(aten.mul_.Tensor, gathered, 2)
    return gathered, unshard(b, w)


def the_shard_is_written(b, w):
    gathered = unshard(b, w)
    b.call(aten.mul_.Tensor, w, 2)
    return gathered, unshard(b, w)


NEAR_MISSES = {
    "activations": lambda b, w: [b.waited(GATHER, w, 2, "0") for _ in range(2)],
    "another dtype": lambda b, w: [
        unshard(b, cast(b, w, dtype)) for dtype in (torch.bfloat16, torch.float16)
    ],
    "another group": lambda b, w: (unshard(b, w, "0"), unshard(b, w, "1")),
    "another parameter": lambda b, w: (unshard(b, w), unshard(b, b.other)),
    "equal numbers of another type": lambda b, w: (filled(b, w, 1), filled(b, w, True)),
    "padded to another shape": padded_to_another_shape,
    "a gathered tensor that the model writes": a_gathered_tensor_is_written,
    "a shard that the step writes": the_shard_is_written,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_not_one_gather_twice_stays(name):
    b = Builder()
    b.other = b.parameter("v", 2)
    one, two = NEAR_MISSES[name](b, b.parameter("w", 2))
    joint = b.joint(b.call(aten.sum.default, b.call(aten.mul.Tensor, one, two)))
    assert not check_pass(deduplicate_unshards, joint)
