"""The host issues what the device runs, and the device waits where the host is late."""

import dataclasses

import pytest
import torch

from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import Phase, Role
from graph_trainer.core.simulation.fusion import NO_FUSION
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.host import Checkpoints, Dispatch, host_seconds, reads_on_host
from graph_trainer.core.simulation.op_costs import Cost, CostKind, costs
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER, TORCHTITAN
from graph_trainer.core.simulation.timeline import HOST, play
from graph_trainer.testing import Builder
from tests.unit.core.simulation.machines import GROUPS, INSTANT, machine, same_seconds
from tests.unit.graphs import aten, c10d

READ = aten._to_copy.default
HOST_COSTS = load_hardware("h100-sxm").host


def on_device(builder, node):
    """Let a tensor be on a device that is not the host, as a captured step for a GPU has it."""
    value = node.meta["val"]
    node.meta["val"] = builder.mode.from_tensor(torch.empty(value.shape, device="meta"))
    return node


def played(program, issue, *, hardware=None):
    """Play a program, in which "c" computes for a second, "r" computes and is read on the host,
    "a" starts a collective and "w" waits for it; each takes the host `issue` seconds."""
    b = Builder()
    x, nodes = on_device(b, b.input("x", 1)), []
    for step in program.split():
        if step == "a":
            started = b.call(c10d.all_reduce.default, x, "sum", "a")
            nodes.append(started)
        elif step == "w":
            b.call(c10d.wait_tensor.default, started)
        else:
            where = {"device": torch.device("cpu")} if step == "r" else {}
            nodes.append(b.call(READ if where else aten.relu.default, x, **where))
    joint = b.joint(b.call(aten.sum.default, x))
    joint.groups = GROUPS
    computing = (aten.relu.default, READ)
    cost = {
        n: Cost(CostKind.MEMORY, 1.0 if n.target in computing else 0.0, 0, 0)
        for n in joint.graph.nodes
    }
    hardware = hardware or same_seconds(3.0)
    return play(joint, collectives(joint), cost, hardware, host_seconds=dict.fromkeys(nodes, issue))


# Seconds of the host by node, of the step, and that compute waits for the host.
@pytest.mark.parametrize("program, issue, step, waits", [
    ("c c c", 0.0, 3.0, 0.0),
    ("c c c", 0.5, 3.5, 0.5),  # the first kernel starts when it is issued; the host stays ahead
    ("c c c", 2.0, 7.0, 4.0),  # the host is behind: a second of waiting after every kernel
    ("c r c c", 0.5, 5.0, 1.0),  # the read ends at 2.5; the queue is empty until 3.0
    ("c a c w c", 1.0, 6.0, 2.0),  # the collective starts at 2.0, when it is issued
    ("a w c", 2.0, 6.0, 2.0),  # compute waits for the host until 2.0, then for the collective
])  # fmt: skip
def test_a_schedule_by_hand(program, issue, step, waits):
    timeline = played(program, issue)
    assert timeline.step_seconds == pytest.approx(step)
    assert timeline.host_wait_seconds == pytest.approx(waits)
    if issue:
        assert timeline.busy[HOST] == pytest.approx(issue * len(program.replace("w", "").split()))


def test_a_read_takes_the_round_trip_too():
    hardware = same_seconds(3.0, host=dataclasses.replace(INSTANT, read_seconds=0.25))
    assert played("r c", 0.5, hardware=hardware).step_seconds == pytest.approx(1.5 + 0.75 + 1.0)


def test_the_thread_of_a_cpu_issues_nothing_while_it_computes():
    played_on_cpu = played("c a c w c", 0.5, hardware=same_seconds(3.0, device="cpu"))
    # 0.5 + 1, the start of the collective at 2.0, 0.5 + 1, its end at 5.0, 0.5 + 1
    assert played_on_cpu.step_seconds == pytest.approx(6.5)


def test_the_host_is_ahead_of_a_device_with_much_to_do():
    assert played("c c c c", 0.25).host_lead_seconds == pytest.approx(4.25 - 1.0)


def test_the_order_of_two_programs_differs_by_the_host_alone():
    """Many kernels that a compiler fuses: eager, the same device time, and a slower step."""
    b = Builder()
    x = b.input("x", 8)
    for _ in range(50):
        x = b.call(aten.relu.default, x)
    joint = b.joint(b.call(aten.sum.default, x))
    steps = {}
    for name, host in (("instant", INSTANT), ("real", HOST_COSTS)):
        hardware = machine(launch_seconds=1e-6, memory_bytes_per_second=1e15, host=host)
        cost = costs(joint, hardware)
        issue = host_seconds(joint, cost, NO_FUSION, hardware, GRAPH_TRAINER)
        steps[name] = play(joint, [], cost, hardware, host_seconds=issue).step_seconds
    assert steps["instant"] == pytest.approx(51e-6)
    assert steps["real"] == pytest.approx(51 * HOST_COSTS.op_seconds + 1e-6)


def issued(runtime, *, compiles=False, dispatch=None):
    """The seconds of the nodes of a small graph, by name."""
    b = Builder()
    w = b.parameter("layers.0.w", 8, 8)
    where = {"module": "layers.0"}
    unshard = {"role": Role.UNSHARD, "parameter": "layers.0.w", **where}
    x = b.input("x", 16, 8)
    gathered = b.call(c10d.all_gather_into_tensor.default, w, 2, "a", **unshard)
    again = b.call(c10d.all_gather_into_tensor.default, w, 2, "a", **unshard)
    cast = b.call(
        aten.clone.default, b.call(c10d.wait_tensor.default, gathered, **unshard), **unshard
    )
    b.call(c10d.wait_tensor.default, again, **unshard)
    op = b.call(aten.add.Tensor, x, cast, **where)
    fused = b.call(aten.relu.default, op, **where)
    view = b.call(aten.t.default, fused, **where)
    other = b.call(c10d.all_reduce.default, x, "sum", "a", **where)
    loss = b.call(aten.sum.default, view)
    back = b.call(aten.neg.default, fused, phase=Phase.BACKWARD, **where)
    b.call(c10d.wait_tensor.default, other, **where)
    joint = b.joint(loss)
    joint.groups = GROUPS
    names = {"gather": gathered, "second gather": again, "cast": cast, "op": op, "fused": fused,
             "view": view, "other": other, "back": back}  # fmt: skip
    hardware = load_hardware("h100-sxm")
    fusion = runtime.fusion(joint, compiles)
    cost = costs(joint, hardware, fusion)
    seconds = host_seconds(joint, cost, fusion, hardware, runtime, dispatch or Dispatch(), compiles)
    return {name: seconds.get(node, 0.0) for name, node in names.items()}


def test_a_captured_step_passes_neither_autograd_nor_hooks():
    h, found = HOST_COSTS, issued(GRAPH_TRAINER)
    assert found["gather"] == found["second gather"] == found["other"] == h.start_collective_seconds
    assert found["op"] == found["back"] == found["cast"] == h.op_seconds
    assert found["view"] == h.view_seconds


def test_torchtitans_program_is_recorded_and_its_parameters_are_gathered_by_hooks():
    h, found = HOST_COSTS, issued(TORCHTITAN)
    assert (found["gather"], found["second gather"], found["cast"]) == (h.fsdp_seconds, 0, 0)
    assert found["op"] == h.op_seconds + h.autograd_seconds
    assert found["view"] == h.view_seconds + h.autograd_seconds
    assert found["back"] == h.backward_seconds
    selective = issued(TORCHTITAN, dispatch=Dispatch(True, Checkpoints.SELECTIVE))
    added = h.dtensor_seconds + h.checkpoint_seconds + h.selective_seconds
    assert selective["op"] - found["op"] == pytest.approx(added)
    assert selective["back"] - found["back"] == pytest.approx(h.dtensor_seconds)


def test_a_compiled_program_launches_a_kernel_a_group():
    h, found = HOST_COSTS, issued(GRAPH_TRAINER, compiles=True)
    assert (found["fused"], found["view"]) == (0, 0)
    blocks = issued(TORCHTITAN, compiles=True)
    assert blocks["op"] == h.compiled_seconds + h.graph_seconds
    assert blocks["back"] == h.compiled_seconds + h.graph_seconds


def test_what_the_host_reads():
    b = Builder()
    x = on_device(b, b.input("x", 4))
    cpu = torch.device("cpu")
    copy = b.call(READ, x, device=cpu)
    assert reads_on_host(copy)
    assert not reads_on_host(b.call(READ, x, device=cpu, non_blocking=True))
    assert not reads_on_host(b.call(READ, copy, dtype=torch.float64))
    assert not reads_on_host(b.call(READ, x, dtype=torch.float64))


@pytest.mark.parametrize(("capability", "reads"), [(8.0, True), (9.0, False)])
def test_the_host_reads_offsets_of_groups_that_are_multiplied_one_by_one(capability, reads):
    """A100 and H100: PyTorch's kernel for groups is for the latter. The order of two products of
    groups behind a kernel of a second, which the host does not wait for unless it reads."""
    b = Builder()
    x = b.input("x", 1)
    left = b.input("left", 8, 16, dtype=torch.bfloat16)
    right = b.input("right", 2, 16, 16, dtype=torch.bfloat16)
    offsets = b.input("offsets", 2, dtype=torch.int32)
    busy = b.call(aten.relu.default, x)
    product = b.call(aten._grouped_mm.default, left, right, offsets)
    joint = b.joint(b.call(aten.sum.default, product))
    cost = {n: Cost(CostKind.MEMORY, 0.0, 0, 0) for n in joint.graph.nodes}
    cost[busy] = Cost(CostKind.MEMORY, 1.0, 0, 0)
    cost[product] = Cost(CostKind.MATMUL, 1.0, 0, 0)
    host = dataclasses.replace(INSTANT, read_seconds=0.25)
    hardware = machine(compute_units=100, compute_capability=capability, host=host)
    issue = dict.fromkeys((busy, product), 0.25)
    step = play(joint, [], cost, hardware, host_seconds=issue).step_seconds
    assert step == pytest.approx(1.25 + 0.5 * reads + 1.0)


@pytest.mark.parametrize("runtime", [GRAPH_TRAINER, TORCHTITAN], ids=lambda r: r.name)
def test_a_compiled_program_waits_for_what_it_reads_too(runtime):
    """A copy to the host is in no kernel of the op before it."""
    b = Builder()
    x = on_device(b, b.input("x", 64))
    total = on_device(b, b.call(aten.sum.default, x))
    read = b.call(READ, total, device=torch.device("cpu"))
    on_device(b, b.call(aten.relu.default, x))
    joint = b.joint(total)
    fusion = runtime.fusion(joint, compiles=True)
    hardware = load_hardware("h100-sxm")
    cost = costs(joint, hardware, fusion)
    issue = host_seconds(joint, cost, fusion, hardware, runtime, compiles=True)
    assert reads_on_host(read) and read in issue
    events = play(joint, [], cost, hardware, issue).events
    ends = {e.node: e.start + e.seconds for e in events if e.stream != HOST}
    later = [e.start for e in events if e.stream == HOST][-1]
    assert later >= ends[total] + hardware.host.read_seconds
