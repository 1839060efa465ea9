"""Memory by category: on graphs by hand, and properties of all graphs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given

import graph_trainer as gt
from graph_trainer.core.analysis.lifetimes import bytes_kept, lifetimes
from graph_trainer.core.analysis.memory import Category, given_bytes, memory_of
from graph_trainer.core.graph.annotations import Role
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.partition.cut import cut
from graph_trainer.core.pipeline.stage_graphs import stage_graphs
from graph_trainer.testing import Builder
from tests.examples import examples
from tests.unit.core.simulation.machines import random_graph, steps
from tests.unit.graphs import BACKWARD, aten, c10d, captured_decoder

GIVEN = (Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.BUFFERS)
ROW = 4 * 8
"""Bytes of eight float32."""


def fsdp_step():
    """One sharded weight: gathered, used, read again by backward, its gradient reduced."""
    b = Builder()
    shard, x = b.parameter("w", 8), b.input("x", 16)
    running = b.buffer("running", 8)
    gathers = {"role": Role.UNSHARD, "parameter": "w", "module": "layers.0"}
    reduces = gathers | {"role": Role.REDUCE_GRAD, "phase": BACKWARD}
    cast = b.call(aten._to_copy.default, shard, dtype=torch.bfloat16, **gathers)
    gathered = b.call(c10d.all_gather_into_tensor.default, cast, 2, "0", **gathers)
    weight = b.call(c10d.wait_tensor.default, gathered, **gathers)
    kept = b.call(aten.mul.Tensor, x, weight, module="layers.0")
    passing = b.call(aten.exp.default, kept)
    loss = b.call(aten.sum.default, passing)
    back = b.call(aten.mul.Tensor, kept, weight, phase=BACKWARD)
    sent = b.call(aten.neg.default, back, phase=BACKWARD)
    reduced = b.call(c10d.reduce_scatter_tensor.default, sent, "sum", 2, "0", **reduces)
    waited = b.call(c10d.wait_tensor.default, reduced, **reduces)
    gradient = b.call(aten.div.Tensor, waited, 2, phase=BACKWARD)
    nodes = {
        "running": running,
        "cast": cast,
        "gathered": gathered,
        "kept": kept,
        "passing": passing,
        "back": back,
        "sent": sent,
        "reduced": reduced,
        "gradient": gradient,
    }
    return b.joint(loss, w=gradient), nodes


def test_every_category_on_a_step_made_by_hand():
    joint, nodes = fsdp_step()
    found = memory_of(joint, optimizer_bytes=100, accumulated_bytes=7)
    categories = {s.node: s.category for s in found.storages}
    assert {name: categories[n] for name, n in nodes.items() if n in categories} == {
        "cast": Category.COMMUNICATION,  # sent, and read by no other op
        "gathered": Category.UNSHARDED,
        "kept": Category.ACTIVATIONS,
        "passing": Category.TEMPORARIES,
        "back": Category.TEMPORARIES,
        "sent": Category.COMMUNICATION,
        "reduced": Category.COMMUNICATION,
        "gradient": Category.GRADIENTS,
    }
    owner = {s.node: s.owner for s in found.storages}
    assert [owner[nodes[n]] for n in ("gathered", "kept", "passing")] == ["w", "layers.0", ""]
    size = {s.node: s.bytes for s in found.storages}
    assert size[nodes["gathered"]] == 2 * size[nodes["cast"]] == 16 * 2
    assert size[nodes["kept"]] == 2 * ROW and size[nodes["gradient"]] == ROW
    for category, num in zip(GIVEN, (ROW, 100, 2 * ROW + ROW), strict=True):
        assert set(found.by_category[category]) == {num}  # all the time
    assert min(found.by_category[Category.GRADIENTS]) == 7
    assert found.by_category[Category.GRADIENTS][-1] == 7 + ROW


def test_storages_inside_a_kernel_are_not_counted():
    joint, nodes = fsdp_step()
    full = memory_of(joint)
    less = memory_of(joint, not_allocated={(nodes["passing"], 0)})
    assert {s.node for s in full.storages} - {s.node for s in less.storages} == {nodes["passing"]}
    drop = [a - b for a, b in zip(full.total, less.total, strict=True)]
    assert set(drop) == {0, 2 * ROW}


def test_a_storage_kept_longer_is_alive_longer():
    joint, nodes = fsdp_step()
    last = len(joint.graph.nodes) - 1
    found = memory_of(joint, kept_until={(nodes["passing"], 0): last})
    assert next(s.last for s in found.storages if s.node is nodes["passing"]) == last
    assert found.total[last] == memory_of(joint).total[last] + 2 * ROW


def test_scratch_is_communication_until_the_wait():
    joint, nodes = fsdp_step()
    plain = memory_of(joint)
    found = memory_of(joint, scratch={nodes["gathered"]: 1000})
    buffers = (m.by_category[Category.COMMUNICATION] for m in (found, plain))
    rise = [a - b for a, b in zip(*buffers, strict=True)]
    place = list(joint.graph.nodes).index(nodes["gathered"])
    assert [i for i, more in enumerate(rise) if more == 1000] == [place, place + 1]
    assert set(rise) == {0, 1000}


def check(joint, **how):
    found = memory_of(joint, **how)
    assert len(found.total) == len(joint.graph.nodes)
    for place, total in enumerate(found.total):
        parts = {c: found.by_category[c][place] for c in Category}
        assert sum(parts.values()) == total and min(parts.values()) >= 0
    assert found.peak_bytes == max(found.total)
    assert found.total[found.peak_position] == found.peak_bytes
    assert all(live < found.peak_bytes for live in found.total[: found.peak_position])
    assert sum(found.peak_by_category().values()) == found.peak_bytes
    for category in GIVEN:
        assert len(set(found.by_category[category])) == 1
    made = lifetimes(joint).live_bytes
    for place, live in enumerate(made):
        sizes = [s.bytes for s in found.live_at(place)]
        assert sum(sizes) == live and sizes == sorted(sizes, reverse=True)
    caller = how.get("accumulated_bytes", 0) + sum(found.by_category[c][0] for c in GIVEN)
    assert found.total == [caller + live for live in made]
    return found


@examples(25, suppress_health_check=list(HealthCheck))
@given(program=steps)
def test_categories_sum_to_the_total_and_the_peak_is_above_every_node(program):
    check(random_graph(program), optimizer_bytes=11, accumulated_bytes=13)


@pytest.mark.parametrize("policy", ["always", "never"])
def test_of_a_captured_step(policy):
    joint = captured_decoder(layers=2)
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward=policy))
    found = check(joint, optimizer_bytes=10)
    assert found.peak_by_category()[Category.PARAMETERS] == given_bytes(joint, InputKind.PARAMETER)
    for category in (Category.UNSHARDED, Category.ACTIVATIONS, Category.GRADIENTS):
        assert max(found.by_category[category]) > 0


@pytest.mark.parametrize("policy", ["always", "never"])
def test_each_earlier_microbatch_keeps_what_forward_saves(policy):
    joint = captured_decoder(layers=2)
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward=policy))
    one, four = memory_of(joint), memory_of(joint, earlier_microbatches=3)
    more = {b - a for a, b in zip(one.total, four.total, strict=True)}
    graphs = stage_graphs(joint)
    saved = graphs.forward.output_values()[-graphs.saved_by.count(None) :]
    kept = bytes_kept(graphs.forward.graph, saved)
    assert more == {3 * (kept + given_bytes(joint, InputKind.BATCH))}
    assert (kept < cut(joint).saved_bytes()) is (policy == "never")
