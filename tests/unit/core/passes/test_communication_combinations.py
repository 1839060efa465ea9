"""Communication passes in every combination: equal numbers on every rank, an order that cannot
hang, and a peak within what the schedule is allowed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import graph_trainer as gt
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.ordering.proof import prove_order
from graph_trainer.core.ordering.sequences import issued_by
from graph_trainer.core.passes.bucketing.bucket_collectives import BucketCollectivesOptions
from graph_trainer.core.passes.overlap.scheduler import ScheduleOverlapOptions
from tests.examples import examples
from tests.unit.core.passes.rank_order import OuterFirst, run_world, worlds_of
from tests.unit.core.simulation.machines import machine

ALWAYS_ON = ("normalize_views", "functionalize_writes", "eliminate_dead_code")
CLEANS = ("deduplicate_unshards", "eliminate_round_trips")
FUSES = ("fuse_chained_all_gathers", "fuse_chained_reduce_scatters")
KEEPS = ("tag_fsdp_unshards", "rematerialize")
MERGES = ("tag_buckets", "bucket_collectives")
SCHEDULES = ("overlap_fsdp", "schedule_overlap")
KIB = 1 / 1024


class Model(nn.Module):
    """Layers of odd sizes, one read twice, a weight gathered over two axes, and activations that
    tensor parallelism lays out to and fro."""

    def __init__(self, mesh: DeviceMesh, rows: int, layers: int) -> None:
        super().__init__()
        self.tp = mesh["tp"]
        self.entry = OuterFirst(mesh, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=i % 2 == 0) for i in range(layers))
        self.head = nn.Linear(8, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for layer in self.layers:
            x = layer(layer(x))
            whole = DTensor.from_local(x, self.tp, [Shard(0)]).redistribute(self.tp, [Replicate()])
            there = whole.redistribute(self.tp, [Shard(0)])
            x = there.to_local() + whole.to_local().sum(0)
        return self.head(x)


def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients are whole numbers for whole numbers, and not too large ones."""
    return model(x).sum()


def capture(rows: int, layers: int) -> JointGraph:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = Model(mesh, rows, layers).double()
    gt.simple_fsdp(model, mesh["fsdp"], gradient_divide_factor=1.0)
    return gt.capture(model, total, (torch.randn(2, 4, dtype=torch.float64),))


chosen = st.fixed_dictionaries(
    {
        "clean": st.sets(st.sampled_from(CLEANS)),
        "fuse": st.sets(st.sampled_from(FUSES)),
        "policy": st.sampled_from(["always", "never", "default", None]),
        "strategy": st.sampled_from(["none", "size", "transformer_block", "auto"]),
        "cap_kib": st.sampled_from([0.3, 1.0, 100.0]),
        "schedule": st.sets(st.sampled_from(SCHEDULES)),
        "depth": st.integers(0, 2),
    }
)


@examples(8)
@given(rows=st.integers(1, 4), layers=st.integers(1, 3), chosen=chosen)
def test_any_combination(rows, layers, chosen):
    sequences = {}

    def change(joint: JointGraph) -> None:
        run(joint, chosen)
        sequences[len(sequences)] = issued_by(joint, 4)

    before, after = worlds_of((2, 2), lambda: capture(rows, layers), change)
    prove_order(sequences, None)
    expected = run_world(before, integers=True)
    assert all(t.abs().max() < 2**50 for returned in expected for t in returned if t.numel())
    for wanted, found in zip(expected, run_world(after, integers=True), strict=True):
        assert all(map(torch.equal, wanted, found))


def run(joint: JointGraph, chosen: dict) -> None:
    names = [
        *ALWAYS_ON,
        *(n for n in CLEANS if n in chosen["clean"]),
        *(n for n in FUSES if n in chosen["fuse"]),
        *(KEEPS if chosen["policy"] else ()),
        *MERGES,
        *(n for n in SCHEDULES if n in chosen["schedule"]),
    ]
    caps = {"cap_mib": chosen["cap_kib"] * KIB} if chosen["strategy"] == "size" else {}
    bucketing = BucketCollectivesOptions(strategy=chosen["strategy"], **caps)
    options = {"bucket_collectives": bucketing}
    if "schedule_overlap" in names:
        options["schedule_overlap"] = ScheduleOverlapOptions(prefetch_depth=chosen["depth"])
    gt.run_passes(
        joint,
        gt.PassConfig(
            passes=names,
            reshard_after_forward=chosen["policy"],
            options=options,
            hardware=machine(base_seconds=1e-6),
            verify_passes=True,
        ),
    )
