"""Ranks that hold unlike sizes: whatever sizes or simulation decide, all decide alike."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import graph_trainer as gt
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.ordering.proof import prove_order
from graph_trainer.core.ordering.sequences import issued_by
from graph_trainer.core.passes.bucketing.bucket_collectives import BucketCollectivesOptions
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.planner.simulated_agreement import as_agreed, decided_by
from graph_trainer.testing import become
from tests.examples import examples
from tests.unit.core.simulation.machines import machine

KIB = 1 / 1024


class Pairs(nn.Module):
    """Products split by rows and by columns in turn, summed over the ranks of an axis."""

    def __init__(self, tp, dim, rows):
        super().__init__()

        def split(placement, *shape):
            whole = torch.randn(*shape)
            return nn.Parameter(distribute_tensor(whole, tp, [placement], src_data_rank=None))

        self.tp = tp
        self.up = nn.ParameterList(split(Shard(0), rows, dim) for _ in range(4))
        self.down = nn.ParameterList(split(Shard(1), dim, rows) for _ in range(4))

    def forward(self, x):
        x = DTensor.from_local(x, self.tp, [Replicate()])
        for up, down in zip(self.up, self.down, strict=True):
            y = nn.functional.linear(nn.functional.linear(x, up).relu(), down)
            x = x + y.redistribute(self.tp, [Replicate()])
        return x.to_local()


CAPTURED = {}


def captured_once(key, mesh, capture):
    """A copy of what a rank captures on a mesh, which has the groups of the first such mesh."""
    key = (key, dist.get_world_size(), dist.get_rank())
    if key not in CAPTURED:
        CAPTURED[key] = capture(mesh)
    return copy_graph(CAPTURED[key])


def pairs(rows):
    """Such a model under FSDP over the other axis."""

    def capture(mesh):
        model = gt.simple_fsdp(Pairs(mesh["tp"], 64, rows), mesh["fsdp"])
        return gt.capture(model, lambda m, x: m(x).square().mean(), (torch.randn(64, 64),))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    return captured_once(("pairs", rows), mesh, capture)


def padded():
    """Seven rows over three ranks: the last has fewer, and other nodes."""

    def capture(mesh):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 7))
        gt.simple_fsdp(model, mesh)
        return gt.capture(model, lambda m, x: m(x).square().sum(), (torch.randn(4, 8),))

    return captured_once("padded", init_device_mesh("cpu", (3,)), capture)


def hybrid():
    """Groups of three along one axis, of which one is within a machine of eight and one is not."""

    def capture(mesh):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
        gt.simple_fsdp(model, mesh, "hybrid_shard")
        return gt.capture(model, lambda m, x: m(x).square().sum(), (torch.randn(4, 256),))

    mesh = init_device_mesh("cpu", (4, 3), mesh_dim_names=("replicate", "shard"))
    return captured_once("hybrid", mesh, capture)


def decided(ranks, world, make, **config):
    """The graphs of some ranks of a world once all of them have agreed."""
    seen = {}

    def run(rank, agree):
        become(rank, world)
        torch.manual_seed(0)
        seen[rank] = make()
        gt.run_passes(seen[rank], gt.PassConfig(**config), agreement=agree)
        return issued_by(seen[rank], world), decided_by(seen[rank])

    found = as_agreed(ranks, run, lambda line: None)
    return [found[rank] for rank in ranks], list(seen.values())


def sequences(ranks, make, **config):
    """What every rank issues then, and their graphs."""
    return decided(range(ranks), ranks, make, **config)


UNSCHEDULED = {"disable_passes": ["schedule_overlap"]}
"""For the remarks of the pass before, which the next one clears."""


def buckets(strategy="size", **options):
    return {"bucket_collectives": BucketCollectivesOptions(strategy=strategy, **options)}


@pytest.mark.parametrize("cap_kib", [2.2, 4.5, 100.0])
def test_unlike_parts_of_tensor_parallelism_are_merged_alike_or_not_at_all(cap_kib):
    for rows in (9, 8):
        make = functools.partial(pairs, rows)
        found, graphs = sequences(4, make, options=buckets(cap_mib=cap_kib * KIB), **UNSCHEDULED)
        prove_order(dict(enumerate(found)))
        told = [line for joint in graphs for line in joint.remarks if "none merged" in line]
        assert bool(told) is (rows == 9 and cap_kib < 100)


def test_unlike_parts_of_tensor_parallelism_are_scheduled_alike_or_not_at_all():
    """Nine rows over two ranks: costs differ, and with them what overlaps with what."""
    hardware = machine(
        collective_seconds=1e-6,
        peak_flops={"float32": 1e12, "bfloat16": 4e12},
        memory_bytes_per_second=1e12,
    )
    config = {"hardware": hardware}
    for rows, unlike in ((9, True), (8, False)):
        found, graphs = sequences(4, functools.partial(pairs, rows), **config)
        prove_order(dict(enumerate(found)))
        told = [line for joint in graphs for line in joint.remarks if "nothing moved" in line]
        assert bool(told) is unlike


@pytest.mark.parametrize("max_span", [1, 5, 21])
def test_padding_does_not_move_the_borders_of_buckets(max_span):
    found, graphs = sequences(3, padded, options=buckets(max_span=max_span), **UNSCHEDULED)
    prove_order(dict(enumerate(found)))
    told = [line for joint in graphs for line in joint.remarks if "none merged" in line]
    assert not told, "they need not even ask"


@pytest.mark.full
def test_auto_asks_the_slowest_links_of_an_axis():
    # without tiles, these small products take a launch, less than a collective between machines
    hardware = replace(load_hardware("h100-sxm"), compute_units=1)
    config = {"options": buckets("auto"), "hardware": hardware}

    def caps(graphs):
        return [tuple(j.decisions["bucket_collectives"].values()) for j in graphs]

    kinds = (0, 2, 6, 8)
    alone = [caps(decided([rank], 12, hybrid, **config)[1])[0] for rank in kinds]
    assert len(set(alone)) > 1, "alone they would not agree"
    assert len(set(caps(decided(kinds, 12, hybrid, **config)[1]))) == 1


def read_whole(rows, ranks):
    """A step that reads its uneven shards by full_tensor(), twice, beside the module itself."""

    def loss(model, x):
        whole = sum(p.full_tensor().square().sum() for _ in range(2) for p in model.parameters())
        return model(x).square().sum() + whole

    def capture(mesh):
        model = nn.Sequential(nn.Linear(4, rows), nn.Linear(rows, 3, bias=False))
        gt.simple_fsdp(model, mesh)
        return gt.capture(model, loss, (torch.randn(2, 4),))

    return captured_once(("read whole", rows), init_device_mesh("cpu", (ranks,)), capture)


LISTS = [
    *([name] for name in ("deduplicate_unshards", "eliminate_round_trips", "normalize_views")),
    ["normalize_views", "deduplicate_unshards"],
    ["default"],
    ["default", "overlap_fsdp"],
]


@examples(6)
@given(st.integers(2, 5), st.integers(1, 9), st.sampled_from(LISTS), st.booleans())
@example(3, 7, ["deduplicate_unshards"], True)
@example(3, 7, ["normalize_views", "deduplicate_unshards"], True)
def test_uneven_shards_read_by_hand_keep_one_order_after_each_list(ranks, rows, names, kept):
    policy = "never" if kept else "always"
    config = {"reshard_after_forward": policy} if names[0] == "default" else {}
    found, _ = sequences(ranks, lambda: read_whole(rows, ranks), passes=names, **config)
    prove_order(dict(enumerate(found)))
