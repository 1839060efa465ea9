"""Annotations of nodes: written, read, copied."""

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.graph import annotations
from graph_trainer.core.graph.annotations import Role
from graph_trainer.testing import Builder
from tests.unit.graphs import BACKWARD, FORWARD


def node():
    return Builder().input("x", 1)


def test_annotations_are_read_as_they_were_written():
    def read(n):
        return (
            annotations.phase_of(n),
            annotations.module_of(n),
            annotations.role_of(n),
            annotations.parameter_of(n),
        )

    n = node()
    assert read(n) == (None,) * 4
    written = (BACKWARD, "layers.0", Role.UNSHARD, "layers.0.w")
    names = ("phase", "module", "role", "parameter")
    annotations.annotate_node(n, annotations.annotation(**dict(zip(names, written, strict=True))))
    assert read(n) == written and annotations.is_backward(n)
    annotations.annotate_node(n, annotations.annotation(phase=FORWARD))
    assert read(n) == (FORWARD, *written[1:]) and not annotations.is_backward(n)


def test_annotating_a_node_leaves_those_alone_that_share_its_meta():
    n = node()
    annotations.annotate_node(n, annotations.annotation(module="a"))
    copy = n.graph.node_copy(n)
    annotations.annotate_node(copy, annotations.annotation(module="b"))
    assert annotations.module_of(n) == "a"


def test_copied_annotations_carry_no_tag_and_may_change_phase():
    n, copy = node(), node()
    annotations.annotate_node(n, annotations.annotation(module="a", phase=FORWARD))
    annotations.set_recompute_policy(n, CheckpointPolicy.MUST_SAVE)
    copy.meta.update(n.meta)
    annotations.copy_annotations(n, copy, phase=BACKWARD)
    assert annotations.recompute_policy(copy) is None and "ac_graph_id" not in copy.meta
    assert annotations.recompute_policy(n) is CheckpointPolicy.MUST_SAVE
    assert (annotations.phase_of(n), annotations.phase_of(copy)) == (FORWARD, BACKWARD)
    annotations.clear_recompute_policy(n)
    assert annotations.recompute_policy(n) is None and "ac_graph_id" not in n.meta


@pytest.mark.parametrize(
    "fqn, block",
    [
        ("layers.3.attention.wo", "layers.3"),
        ("mtp_layers.3.attention.wo", "mtp_layers.3"),
        ("model.layers.12", "model.layers.12"),
        ("0.weight", "0"),
        ("layers.1.experts.7.w1", "layers.1"),
        ("encoder.layers.11.mlp.weight", "encoder.layers.11"),
        ("norm", None),
        ("layer3.weight", None),
        ("conv1d.weight", None),
        (None, None),
    ],
)
def test_block_of(fqn, block):
    assert annotations.block_of(fqn) == block


def test_tensors_of_takes_only_tensors():
    n = node()
    tensor = torch.empty(1)
    n.meta["val"] = (None, tensor, 3)
    assert annotations.tensors_of(n) == [tensor]
    n.meta["val"] = 3
    assert annotations.tensors_of(n) == []
