"""The table of collective kinds: complete, and the only place where a kind is named."""

import dataclasses

import pytest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.capture.tracing.fsdp_roles import find_fsdp_roles
from graph_trainer.core.graph.collective_kinds import (
    FUNCTIONAL_NAMESPACES,
    KINDS,
    UNKNOWN,
    kind_of_op,
    mergeable_kinds,
    shown_name,
)
from graph_trainer.core.ordering.sequences import issued_by
from graph_trainer.core.passes.catalogue import registered_passes
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.planner.planned_run import IssuedCollectives
from graph_trainer.testing import become, mean_square
from tests.unit.core.passes.rank_order import inner_first
from tests.unit.core.simulation.machines import machine
from tests.unit.graphs import c10d, captured_decoder

OPS = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
MADE_UP = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


def test_every_functional_collective_of_torch_has_a_row_and_every_row_an_op():
    known = {op.split("::")[1] for op in OPS if op.split("::")[0] in FUNCTIONAL_NAMESPACES}
    assert known <= KINDS.keys() and KINDS.keys() <= known | {"check_for_nan"}


def test_an_op_without_a_row_is_a_collective_of_which_nothing_is_assumed():
    assert kind_of_op("_c10d_functional::sum_by_tree") is UNKNOWN is kind_of_op("c10d::allreduce_")
    assert kind_of_op("aten::all_reduce") is None
    assert shown_name("sum_by_tree") == "sum_by_tree" and not UNKNOWN.mergeable


@pytest.fixture
def made_up(monkeypatch):
    """Ops that do what torch's do, each by another name: rows of the table and nothing else."""
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    renamed = {}
    for number, name in enumerate(MADE_UP):
        op, new = getattr(c10d, name).default, f"made_up_{number}"
        library.define(str(op._schema).split("::")[1].replace(name, new, 1))
        library.impl(new, op, "CompositeExplicitAutograd")
        monkeypatch.setitem(KINDS, new, dataclasses.replace(KINDS[name], ops=(new,)))
        renamed[op] = getattr(c10d, new).default
    yield renamed
    library._destroy()


def hybrid():
    return captured_decoder(tied=True, world=(2, 4), fsdp={"mode": "hybrid_shard"})


def chained():
    become(0, 4)
    return inner_first(2, 2)


class RoundTrip(nn.Linear):
    def forward(self, x):
        whole = DTensor.from_local(x, self.mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        part = whole.redistribute(placements=[Shard(0)])
        return super().forward(whole.to_local()).sum() + part.to_local()


def round_trip():
    become(1, 2)
    model = RoundTrip(4, 4)
    model.mesh = init_device_mesh("cpu", (2,))
    return gt.capture(model, mean_square, (torch.ones(2, 4),))


PASSES = ["default", "fuse_chained_reduce_scatters"]


def outline(joint, renamed):
    """The graph without names: every op, its arguments by position, and its annotations."""
    place = {node: index for index, node in enumerate(joint.graph.nodes)}
    return [
        (
            renamed.get(node.target, node.target if node.op == "call_function" else node.op),
            fx.map_arg(node.args, lambda n: place[n]),
            node.meta.get("custom"),
        )
        for node in joint.graph.nodes
    ]


def observed(capture, device, renamed, without_roles):
    """What the passes, the simulation and the order check make of a captured step whose
    collectives have other names; names apart, it must not depend on them."""
    joint = capture()
    for node in joint.graph.nodes:
        node.target = renamed.get(node.target, node.target)
        if without_roles:
            node.meta.get("custom", {}).pop("fsdp_role", None)
    find_fsdp_roles(joint)
    options = registered_passes()["bucket_collectives"].options_type(strategy="size")
    hardware = machine(device=device)
    config = gt.PassConfig(
        passes=PASSES, options={"bucket_collectives": options}, hardware=hardware
    )
    report = gt.run_passes(joint, config)
    simulation = simulate(joint, hardware)
    text = repr([cells[:-1] for cells in report.cells()])
    text += repr([(c.inputs, c.reduction, c.input_bytes) for c in collectives(joint)])
    text += repr([(e.entry[1:], e.waited_after) for e in issued_by(joint, 8)])
    seconds = [(e.start, e.seconds) for e in simulation.timeline.events]
    back = {new: op for op, new in renamed.items()}
    return outline(joint, back), text, seconds, simulation.memory.total


@pytest.mark.parametrize("without_roles", [False, True], ids=["roles", "structure"])
@pytest.mark.parametrize("capture", [hybrid, chained, round_trip])
def test_a_row_is_all_that_a_collective_needs(capture, without_roles, made_up, monkeypatch):
    device = "cuda" if without_roles else "cpu"
    expected = observed(capture, device, {}, without_roles)
    assert observed(capture, device, made_up, without_roles) == expected
    for new in made_up.values():
        monkeypatch.delitem(KINDS, new._schema.name.split("::")[1])
    assert observed(capture, device, made_up, without_roles) != expected


def test_tables_and_counts_know_a_row(made_up):
    become(0, 2)
    group = torch.distributed.group.WORLD.group_name
    with IssuedCollectives() as issued:
        c10d.wait_tensor(c10d.made_up_2(torch.ones(2), "sum", group))
    assert issued.count == {"made_up_2": 1}
    shown = dict.fromkeys(mergeable_kinds().values())
    assert [*shown] == ["all-gather", "reduce-scatter", "all-reduce"]
    assert shown_name("made_up_1") == mergeable_kinds()["made_up_1"] == "reduce-scatter"
