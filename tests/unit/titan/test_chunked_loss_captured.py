"""A captured step with the chunked cross-entropy: its numbers, collectives and labels."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import (
    Phase,
    Role,
    module_of,
    phase_of,
    tensors_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.testing import fake_mesh
from graph_trainer.titan.chunked_loss import ChunkedCrossEntropyLoss
from tests.unit.graphs import fake_world
from tests.unit.titan.tiny_decoder import DIM, UNIT, TinyDecoder, attached, inputs

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

POLICIES = ("always", "never", "default")


def step_of(loss: ChunkedCrossEntropyLoss) -> Callable[..., torch.Tensor]:
    def step(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, n: torch.Tensor) -> Any:
        return loss(model(tokens), labels, n)[0]

    return step


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, _, labels = inputs()
    return labels.clamp(min=0), labels, torch.tensor(20)


@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_captured_is_eager_bit_by_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = TinyDecoder().to(dtype)
    loss = attached(model, num_chunks=4)
    joint = gt.capture(model, step_of(loss), batch())
    gt.run_passes(joint, gt.PassConfig(verify_passes=True))
    value, gradients = gt.compile(joint)(model, *batch())
    expected = step_of(loss)(model, *batch())
    expected.backward()
    assert torch.equal(value, expected)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


def head_collectives(joint: JointGraph) -> Counter[tuple[str, str]]:
    return Counter(
        (c.kind, str(c.phase)) for c in collectives(joint) if c.parameter == "lm_head.weight"
    )


@functools.cache
def _captured_llama() -> JointGraph:
    from graph_trainer.llama3.config_registry import llama3_debugmodel

    spec = llama3_debugmodel().model_spec
    assert spec is not None
    del spec.model.layers[1:]
    with torch.device("meta"):
        model = spec.model.build()
    loss = attached(model, num_chunks=4, global_vocab_size=2048)
    gt.simple_fsdp(
        model, fake_mesh(), mp_policy=gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    tokens = torch.zeros(2, 32, dtype=torch.int64, device="meta")
    return gt.capture(model, step_of(loss), (tokens, tokens, torch.tensor(20)))


def captured_llama() -> JointGraph:
    """torchtitan's Llama 3 debug model on a rank of four, captured on meta: a copy for a test."""
    joint = copy_graph(_captured_llama())
    fake_mesh()
    return joint


@pytest.mark.parametrize("policy", POLICIES)
def test_the_head_is_gathered_once_and_reduced_once(policy: Any) -> None:
    joint = captured_llama()
    off = ["bucket_collectives", "schedule_overlap"]
    gt.run_passes(
        joint,
        gt.PassConfig(reshard_after_forward=policy, verify_passes=True, disable_passes=off),
    )
    # backward does not read the weight: no policy gathers it again
    assert head_collectives(joint) == {
        ("all_gather_into_tensor", Phase.LOSS): 1,
        ("reduce_scatter_tensor", Phase.BACKWARD): 1,
    }
    # of what has the vocabulary as a dimension there are the weight, [2048, 256], and the logits
    # of a chunk, [2 * 32 / 4, 2048]
    shapes = {tuple(t.shape) for n in compute_nodes(joint.graph) for t in tensors_of(n)}
    found = {tuple(sorted(shape)) for shape in shapes if 2048 in shape}
    assert found == {(256, 2048), (16, 2048)}


def test_what_the_head_computes_is_labelled_as_its_own() -> None:
    joint = captured_llama()
    nodes = list(compute_nodes(joint.graph))
    matmuls = [n for n in nodes if any(2048 in t.shape for t in _operands(n))]
    assert Counter(n.target for n in matmuls) == {aten.mm.default: 4 * 3}
    assert {(module_of(n), phase_of(n)) for n in matmuls} == {("lm_head", Phase.LOSS)}
    exponentials = [n for n in nodes if n.target in (aten.exp_.default, aten.exp.default)]
    assert exponentials
    assert {module_of(n) for n in exponentials if phase_of(n) is Phase.LOSS} == {"loss"}
    gathers = [n for n in nodes if n.target is c10d.all_gather_into_tensor.default]
    assert [module_of(n) for n in gathers][-1] == "lm_head"


def _operands(node: Any) -> list[torch.Tensor]:
    if node.target is not aten.mm.default:
        return []
    return [t for n in (node, *node.all_input_nodes) for t in tensors_of(n)]


def test_every_rank_of_tensor_parallelism_captures_the_same_collectives() -> None:
    """Seven rows over three ranks: three, three and one."""
    found = []
    for rank, rows in ((0, 3), (2, 1)):
        fake_world(3, rank)
        mesh = torch.distributed.init_device_mesh("cpu", (3,))
        model = TinyDecoder(vocabulary=7)
        weight = DTensor.from_local(
            torch.zeros(rows, DIM),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=(7, DIM),
            stride=(DIM, 1),
        )
        model.lm_head.weight = nn.Parameter(weight)
        loss = attached(model, num_chunks=2)
        tokens = torch.zeros(2, 6, dtype=torch.int64)
        joint = gt.capture(model, step_of(loss), (tokens, tokens, torch.tensor(20)))
        entries = [(c.kind, c.dtype, c.role, c.input_bytes) for c in collectives(joint)]
        # three numbers for each of six tokens a chunk, and the hidden states' gradient
        assert [e[0] for e in entries] == ["all_gather_into_tensor"] * 2 + ["all_reduce"]
        assert [e[3] for e in entries[:2]] == [2 * 3 * 3 * 4] * 2
        assert all(role is not Role.UNSHARD for *_, role, _ in entries)
        found.append(entries)
        torch.distributed.destroy_process_group()
    assert found[0] == found[1]
