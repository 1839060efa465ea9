"""Steps of models whose activations are in host memory: by an option, and by the model's mark."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import graph_trainer as gt
from benchmarks.llama_stack import SIZES
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.annotations import (
    is_backward,
    module_of,
    offload_tag,
    recompute_policy,
    tensor_of,
)
from graph_trainer.core.graph.host_copies import OFFLOAD, is_host_copy
from graph_trainer.core.ordering.sequences import may_communicate
from graph_trainer.core.passes.context import PassContext, RunSettings
from graph_trainer.core.passes.offload_activations import OffloadActivationsOptions
from graph_trainer.core.passes.overlap.schedule_graph import Kind, ScheduleGraph
from graph_trainer.core.passes.overlap.schedule_overlap import schedule_overlap
from graph_trainer.core.passes.overlap.scheduler import ScheduleOverlapOptions
from graph_trainer.core.passes.rematerialize import rematerialize
from graph_trainer.core.passes.tag_activations import tag_activations
from graph_trainer.testing import assert_same, captured, check_pass, run
from tests.unit.core.passes.test_offload_activations import offload
from tests.unit.core.simulation.machines import machine
from tests.unit.graphs import aten, captured_stack


def stack():
    return captured_stack(replace(SIZES["tiny"], layers=4), 2, 24)


@pytest.mark.parametrize(
    ("policy", "ahead", "away"),
    [("full", 1, 2), ("full", 0, 3), ("selective", 1, 3), ("none", 1, 3)],
)
def test_the_inputs_of_blocks_under_a_policy(policy, ahead, away):
    """The peak is in the loss; under "full" in the last block's backward, by when one is back."""
    joint = stack()
    check_pass(
        tag_activations, joint, None, PassContext(settings=RunSettings(activation_policy=policy))
    )
    check_pass(rematerialize, joint)
    before = lifetimes(joint)
    assert offload(joint, block_inputs=True, prefetch_blocks=ahead)
    after = lifetimes(joint)
    inputs = [n.args[0] for n in joint.graph.nodes if n.target is OFFLOAD]
    # the last block's input comes back at once, unless its first reader has to wait for it
    late = [] if ahead else ["layers.2"]
    assert [module_of(n) for n in inputs] == ["embedding", "layers.0", "layers.1", *late]
    size = tensor_of(inputs[0]).nbytes
    assert (size, after.host_bytes) == (12 * 1024, len(inputs) * 16 * 1024)
    assert before.peak_bytes - after.peak_bytes == away * size


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            with gt.offload():
                x = torch.tanh(layer(x))
            x = x * x
        return x


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_model_marks_what_it_wants_in_host_memory(policy):
    torch.manual_seed(0)
    joint = captured(Marked(), torch.randn(2, 4))
    before = run(joint)
    marked = [n for n in joint.graph.nodes if offload_tag(n)]
    assert marked and not any(is_backward(n) for n in marked)
    assert {n.target for n in marked} <= {aten.tanh.default, aten.addmm.default}
    options = {"offload_activations": OffloadActivationsOptions(min_bytes=0)}
    config = gt.PassConfig(
        passes=["default", "overlap_fsdp"],
        activation_policy=policy,
        options=options,
        verify_passes=True,
    )
    report = gt.run_passes(joint, config)
    assert_same(before, run(joint))
    copied = [n.args[0] for n in joint.graph.nodes if n.target is OFFLOAD]
    assert {n.target for n in copied} == {aten.tanh.default} and len(copied) >= 2
    assert all(recompute_policy(n) is CheckpointPolicy.MUST_SAVE for n in copied)
    assert re.search(r"offload_activations: \d values \(.* GiB\) are in host memory", str(report))
    # outside of a capture it is no more than a with statement
    assert torch.equal(Marked()(torch.zeros(1, 4)).isfinite(), torch.ones(1, 4, dtype=bool))


def test_schedules_leave_copies_where_they_are_and_they_communicate_nothing():
    joint = stack()
    offload(joint, block_inputs=True)
    copies = [n for n in joint.graph.nodes if is_host_copy(n)]
    assert len(copies) == 12 and not any(map(may_communicate, copies))
    graph = ScheduleGraph(joint, machine(), fused=False)
    kinds = {n: kind for n, kind in zip(graph.nodes, graph.kind, strict=True) if n in copies}
    assert set(kinds.values()) == {Kind.FIXED}
    before = compute_order(joint, copies)
    context = PassContext(hardware=machine())
    assert check_pass(schedule_overlap, joint, ScheduleOverlapOptions(), context)
    assert compute_order(joint, copies) == before


def compute_order(joint, copies):
    """The copies and the blocks' products, as they follow each other."""
    return [n for n in joint.graph.nodes if n in copies or n.target is aten.mm.default]
