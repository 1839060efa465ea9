"""All readings of a parameter share one gather, and nothing else is merged."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graph_trainer.core.graph.annotations import Role
from graph_trainer.core.passes.deduplicate_unshards import deduplicate_unshards
from tests.unit.graphs import (
    BACKWARD,
    FORWARD,
    Builder,
    aten,
    c10d,
    captured,
    captured_decoder,
    check_pass,
    targets,
    unshards,
)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.linear(torch.relu(self.linear(x)))


def test_two_readings_share_one_gather():
    joint = captured(Twice(), torch.randn(2, 4))
    assert unshards(joint) == ["linear.weight"] * 2
    assert check_pass(deduplicate_unshards, joint)
    assert unshards(joint) == ["linear.weight"]


def test_two_readings_of_an_uneven_shard_share_one_gather_padding_and_all():
    torch.manual_seed(0)
    model = Twice()
    model.linear = nn.Linear(5, 5, bias=False)
    joint = captured(model, torch.randn(2, 5), rank=2)
    assert check_pass(deduplicate_unshards, joint)
    assert unshards(joint) == ["linear.weight"]
    assert targets(joint).count(aten.cat.default) == 1 + 2  # one gather's, two reductions'


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


def test_equal_gathers_of_activations_are_not_its_business():
    b = Builder()
    x = b.input("x", 2)
    gathers = [b.call(c10d.all_gather_into_tensor.default, x, 2, "0") for _ in range(2)]
    waited = [b.call(c10d.wait_tensor.default, g) for g in gathers]
    joint = b.joint(b.call(aten.sum.default, b.call(aten.mul.Tensor, *waited)))
    assert not check_pass(deduplicate_unshards, joint)


def unshard(b, shard, group="0", size=2):
    tag = {"role": Role.UNSHARD, "parameter": "w"}
    gathered = b.call(c10d.all_gather_into_tensor.default, shard, size, group, **tag)
    return b.call(c10d.wait_tensor.default, gathered, **tag)


def cast(b, node, dtype):
    return b.call(aten._to_copy.default, node, dtype=dtype, role=Role.UNSHARD, parameter="w")


def product(b, one, two):
    return b.joint(b.call(aten.sum.default, b.call(aten.mul.Tensor, one, two)))


def test_another_dtype_is_another_gather():
    b = Builder()
    w = b.parameter("w", 2)
    halves = [unshard(b, cast(b, w, dtype)) for dtype in (torch.bfloat16, torch.float16)]
    assert not check_pass(deduplicate_unshards, product(b, *halves))


def test_another_group_is_another_gather():
    b = Builder()
    w = b.parameter("w", 2)
    joint = product(b, unshard(b, w, "0"), unshard(b, w, "1"))
    assert not check_pass(deduplicate_unshards, joint)


def test_another_parameter_is_another_gather():
    b = Builder()
    w, v = b.parameter("w", 2), b.parameter("v", 2)
    joint = product(b, unshard(b, w), unshard(b, v))
    assert not check_pass(deduplicate_unshards, joint)


def test_equal_numbers_of_another_type_are_not_the_same():
    b = Builder()
    w = b.parameter("w", 2)
    tag = {"role": Role.UNSHARD, "parameter": "w"}
    whole = b.call(aten.full_like.default, w, 1, dtype=None, **tag)
    truth = b.call(aten.full_like.default, w, True, dtype=None, **tag)
    assert not check_pass(deduplicate_unshards, product(b, whole, truth))


def test_a_gathered_tensor_that_the_model_writes_is_its_own():
    b = Builder()
    w = b.parameter("w", 2)
    one = unshard(b, w)
    b.call(aten.mul_.Tensor, one, 2)
    joint = product(b, one, unshard(b, w))
    assert not check_pass(deduplicate_unshards, joint)


def test_a_shard_that_the_step_writes_is_gathered_again():
    b = Builder()
    w = b.parameter("w", 2)
    one = unshard(b, w)
    b.call(aten.mul_.Tensor, w, 2)
    joint = product(b, one, unshard(b, w))
    assert not check_pass(deduplicate_unshards, joint)


def test_gradients_are_reduced_as_often_as_before():
    class Checkpointed(Twice):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    joint = captured(Checkpointed(), torch.randn(2, 4))
    reductions = targets(joint).count(c10d.reduce_scatter_tensor.default)
    assert check_pass(deduplicate_unshards, joint)
    assert targets(joint).count(c10d.reduce_scatter_tensor.default) == reductions == 2
