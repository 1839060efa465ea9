"""Plans of memory: within the limit, faster with more of it, the same on all ranks, and repeatable.

What they do to numbers on real ranks is tested in tests/integration/test_matrix.py.
"""

import re
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import graph_trainer as gt
from benchmarks.llama_stack import LlamaStack, Size
from graph_trainer.core.analysis.unshard_chains import unshard_chains
from graph_trainer.core.graph.annotations import is_backward, recompute_policy, set_recompute_policy
from graph_trainer.core.graph.host_copies import is_copy_to_host
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.ordering.agreement import OneRank
from graph_trainer.core.passes.context import PassContext, SlowestStep
from graph_trainer.core.passes.memory_table import MemoryTable
from graph_trainer.core.passes.offload_activations import OffloadActivationsOptions
from graph_trainer.core.passes.pipeline import run_passes
from graph_trainer.core.passes.plan_memory.items import agreed_on, blocks_of, items_of_parameters
from graph_trainer.core.passes.plan_memory.plan_memory import _Planner
from graph_trainer.core.passes.plan_memory.solver import frontier
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.core.units import GIB
from graph_trainer.planner.simulated_agreement import as_agreed
from graph_trainer.testing import targets
from graph_trainer.titan.memory_table_file import memory_table_of, memory_table_to_toml
from tests.unit.core.simulation.machines import changed
from tests.unit.fake_ranks import Agreed
from tests.unit.graphs import BACKWARD, aten, captured_decoder, captured_stack, unshards

# launches, tiles and links cost nothing, so that small ops cost what their bytes and FLOPs do, and
# no communication hides recomputation
MACHINE = changed(
    load_hardware("h100-sxm"),
    launch_seconds=0.0,
    compute_units=1,
    memory_latency_seconds=0.0,
    base_seconds=0.0,
    node_latency_seconds=0.0,
    node_bytes_per_second=1e18,
    memory_reserved_gib=0.25,
)
# where memory is taken byte by byte, and not in pages
ON_CPU = replace(MACHINE, device="cpu", memory_reserved_gib=0.0)
SIZE = Size(layers=4, dim=128, heads=4, hidden=344, vocabulary=64)


@pytest.fixture
def stack():
    return captured_stack(SIZE, 16, 2048)


def planned(joint, limit, policy="budget", hardware=MACHINE, first=None, **more):
    """A copy after all passes, the bytes that a device must have for it, and its seconds."""
    found = copy_graph(joint)
    limited = {} if limit is None else {"memory_limit_gib": limit / GIB}
    config = gt.PassConfig(activation_policy=policy, hardware=hardware, **limited, **more)
    report = run_passes(found, config, first=first, agreement=OneRank())
    simulated = simulate(found, hardware)
    return found, simulated.need().total, simulated.timeline.step_seconds, report


def peaks(joint, **more):
    """The least that a step needs and what it needs with nothing recomputed."""
    return planned(joint, None, "full", **more)[1], planned(joint, None, "none", **more)[1]


@pytest.fixture(scope="module")
def extremes():
    """The least that the stack needs and what it needs with nothing recomputed."""
    return peaks(captured_stack(SIZE, 16, 2048))


@pytest.fixture(scope="module")
def roomy(extremes):
    """The table of the stack with memory for everything."""
    joint, *_ = planned(captured_stack(SIZE, 16, 2048), extremes[1])
    return joint.decisions["plan_memory"], joint


def test_more_memory_is_never_slower_and_less_never_needs_more(monkeypatch):
    """On a GPU with the allocator's gaps and what is reserved, both inside the limit."""
    made = []

    def one_planner(joint, *others):
        """What it tries is the same for every limit: it is simulated once."""
        made[:] = made or [_Planner(copy_graph(joint), *others)]
        return made[0]

    monkeypatch.setattr(f"{_Planner.__module__}._Planner", one_planner)
    alone = {"disable_passes": ("bucket_collectives", "schedule_overlap"), "hardware": MACHINE}
    stack = captured_stack(replace(SIZE, layers=3), 16, 2048)
    least, most = peaks(stack, **alone)
    limits = [least + (most - least) * part // 8 for part in range(1, 11)]
    found = [planned(stack, limit, **alone)[1:3] for limit in limits]
    for limit, (needed, _) in zip(limits, found, strict=True):
        assert needed <= limit
        # binding limits are used
        assert needed == found[-1][0] or needed >= 0.95 * limit
    for (less, slow), (more, fast) in zip(found, found[1:], strict=False):
        assert less <= more and fast <= slow
    assert found[-1][0] == most and len(set(found)) > 5


@pytest.mark.full
def test_a_plan_leaves_room_for_collectives_that_are_merged(extremes, stack):
    """Here a bucket of parameters takes as much as a block's activations."""
    least, most = extremes
    for part in (1, 3):
        limit = least + (most - least) * part // 4
        _, peak, _, report = planned(stack, limit)
        assert not any(row.rolled_back for row in report.rows)
        assert 0.9 * limit <= peak <= limit


@pytest.mark.full
def test_a_plan_is_no_slower_than_a_fixed_policy_that_fits(stack):
    for policy in ("full", "layers", "selective"):
        _, peak, seconds, _ = planned(stack, None, policy)
        assert planned(stack, int(peak * 1.03))[2] <= seconds


def test_least_is_kept_where_that_is_faster_as_compute_waits_for_communication(
    extremes, stack, monkeypatch
):
    """Memory that is left lets gathers run ahead."""
    least, most = extremes

    def kept(limit):
        rows = planned(stack, limit)[0].decisions["plan_memory"].rows
        return sum(row.mib * len(row.keep_in) for row in rows)

    of_least = kept(least)
    assert of_least < kept(most)

    def simulate_waiting(planner, number):
        return SlowestStep(needed=least, nanoseconds=1000 + number, waits=100)

    monkeypatch.setattr(_Planner, "_simulate", simulate_waiting)
    assert kept(most) <= of_least


def test_equal_blocks_are_solved_once_and_the_last_keep_most(extremes, stack, monkeypatch):
    solved = []

    def counted(ops):
        solved.append(ops)
        return frontier(ops)

    monkeypatch.setattr(f"{_Planner.__module__}.frontier", counted)
    least, most = extremes
    joint, *_ = planned(stack, least + (most - least) * 3 // 8)
    assert len(solved) == len(set(solved)) < SIZE.layers
    table = joint.decisions["plan_memory"]
    kept = [
        sum(row.mib for row in table.rows if f"layers.{number}" in row.keep_in)
        for number in range(1, SIZE.layers - 1)
    ]
    assert kept == sorted(kept) and kept[0] < kept[-1]  # the last block is the first to be freed


def test_a_limit_that_nothing_fits_is_refused_with_the_least_that_does(extremes, stack):
    least, _ = extremes
    with pytest.raises(gt.PassError) as caught:
        planned(stack, least // 2)
    said = str(caught.value)
    assert "the least, with everything recomputed" in said and "activations" in said
    assert "a smaller batch" in said
    assert "compute activations again" not in said  # all are
    needed = float(said.split("Raise PassConfig.memory_limit_gib to ")[1].split(",")[0])
    assert planned(stack, needed * GIB)[1] <= needed * GIB


def test_the_table_repeats_the_plan_and_can_be_edited(extremes, stack):
    least, most = extremes
    limit = (least + most) // 2  # which overlap is held to as well
    joint, peak, seconds, _ = planned(stack, limit)
    table = joint.decisions["plan_memory"]
    written = memory_table_to_toml(table)
    read = memory_table_of(tomllib.loads(written), "a file")
    assert memory_table_to_toml(read) == written and '"layers.' in written
    again, *same, _ = planned(stack, limit, "file", memory_table=read)
    assert same == [peak, seconds] and targets(again) == targets(joint)
    nothing = replace(read, rows=tuple(replace(row, keep_in=()) for row in read.rows))
    assert planned(stack, least, "file", memory_table=nothing)[1] == least


def test_the_table_of_a_model_without_blocks_is_read_back():
    def without_blocks():
        model = torch.nn.Sequential()
        model.add_module("a", torch.nn.Linear(4, 4))
        return gt.capture(model, lambda model, x: model(x).square().mean(), (torch.ones(2, 4),))

    planned_one, followed = without_blocks(), without_blocks()
    gt.run_passes(planned_one, gt.PassConfig(activation_policy="budget", memory_limit_gib=1.0))
    table = planned_one.decisions["plan_memory"]
    assert table.rows == ()
    read = memory_table_of(tomllib.loads(memory_table_to_toml(table)), "a file")
    gt.run_passes(followed, gt.PassConfig(activation_policy="file", memory_table=read))
    assert followed.decisions["plan_memory"] == table and targets(followed) == targets(planned_one)


def test_a_later_graph_follows_the_first(extremes, stack):
    least, most = extremes
    joint, *_ = planned(stack, (least + most) // 2)
    other = captured_stack(SIZE, 1, 32)
    followed, *_ = planned(other, most, first=joint)
    assert followed.decisions["plan_memory"] == joint.decisions["plan_memory"]


def test_a_larger_batch_than_the_one_planned_for_is_told_to_come_first(extremes, stack):
    least, most = extremes
    limit = (least + most) // 2
    joint, *_ = planned(captured_stack(SIZE, 1, 32), limit)
    with pytest.raises(gt.MemoryLimitError) as refused:
        planned(stack, limit, first=joint)
    said = " ".join(str(refused.value).split())
    assert "planned for the first batch" in said and "let the largest come first" in said
    planned(stack, limit)  # where it comes first there is room


def test_a_table_of_another_model_is_refused_by_name(roomy, stack):
    table, _ = roomy
    first = table.rows[0]
    for rows, name in (
        ([replace(first, module="attention.wz")], "'attention.wz'"),
        ([replace(first, keep_in=("layers.17",))], "layers.17"),
    ):
        other = MemoryTable(tuple(rows))
        with pytest.raises(gt.PassError, match=f"of another model.*{name}"):
            planned(stack, None, "file", memory_table=other)


def test_the_users_tags_win(stack):
    joint = copy_graph(stack)
    silu = next(n for n in joint.graph.nodes if n.target is aten.silu.default)
    set_recompute_policy(silu, CheckpointPolicy.MUST_SAVE, ac_graph_id=1)
    found, *_ = planned(joint, peaks(joint)[0] * 1.2)
    kept = next(n for n in found.graph.nodes if n.name == silu.name)
    assert recompute_policy(kept) is CheckpointPolicy.MUST_SAVE
    assert any(is_backward(reader) for reader in kept.users)


def test_parameters_stay_unsharded_where_memory_allows():
    joint = captured_decoder(layers=4, dim=64, hidden=256)
    auto = {"reshard_after_forward": "auto", "disable_passes": ("bucket_collectives",)}
    auto["hardware"] = ON_CPU
    never = {**auto, "reshard_after_forward": "never"}
    always = {**auto, "reshard_after_forward": "always"}
    most = planned(joint, None, "none", **never)
    fewest = planned(joint, None, "none", **always)
    assert unshards(planned(joint, 2 * most[1], "none", **auto)[0], BACKWARD) == []
    found = planned(joint, (most[1] + fewest[1]) // 2, "none", **auto)
    some = set(unshards(found[0], BACKWARD))
    assert set() < some < set(unshards(fewest[0], BACKWARD))
    kept = found[0].decisions["plan_memory"].parameters
    assert kept and not some & set(kept)


def test_ranks_with_other_costs_get_one_plan(stack):
    """The costs of the rank that they cost most hold for all; unlike blocks are refused."""
    joint = captured_decoder(layers=4, dim=64, hidden=256)
    alone = PassContext(hardware=load_hardware("h100-sxm"))
    blocks = blocks_of(joint, alone)
    dear = [replace(b, ops=tuple(replace(op, bytes=op.bytes + 1) for op in b.ops)) for b in blocks]
    parameters = items_of_parameters(joint, unshard_chains(joint), alone)
    dearer = [
        item._replace(choices=[c._replace(nanoseconds=3 * c.nanoseconds) for c in item.choices])
        for item in parameters
    ]
    assert dearer != parameters
    ours, theirs = on_ranks(
        lambda context: agreed_on(blocks, parameters, context),
        lambda context: agreed_on(dear, dearer, context),
    )
    assert ours == theirs == (dear, dearer)
    of_ranks = [(blocks, parameters), (dear, dearer)]

    def planned_alone(rank, agreement):  # as --save and --verify-order plan rank after rank
        context = PassContext(hardware=MACHINE, agreement=agreement)
        found = agreed_on(*of_ranks[rank], context)
        return found, (repr(found),)

    assert as_agreed([0, 1], planned_alone, print) == {0: ours, 1: ours}
    assert agreed_on(blocks, parameters, alone) == (blocks, parameters)
    with pytest.raises(gt.PassError, match="different ops"):
        on_ranks(
            lambda context: agreed_on(blocks, parameters, context),
            lambda context: agreed_on(blocks_of(stack, alone), parameters, context),
        )


def on_ranks(*runs):
    """Run a function of a context on each rank, a thread; all_reduce_max is over the ranks.

    One thread works at a time: copies of a graph share a mode of fake tensors.
    """
    meet, numbers = threading.Barrier(len(runs), timeout=60), [0] * len(runs)
    turn = threading.Lock()

    def wait():
        turn.release()
        meet.wait()
        turn.acquire()

    def one(place):
        def all_reduce_max(number):
            numbers[place] = number
            wait()
            largest = max(numbers)
            wait()
            return largest

        with turn:
            return runs[place](PassContext(hardware=MACHINE, agreement=Agreed(all_reduce_max)))

    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(one, range(len(runs))))


def test_ranks_of_unlike_machines_leave_one_table():
    """Gathers cost one rank more than another, which ranks see as unlike costs of parameters."""
    other = changed(ON_CPU, base_seconds=1e-4, collective_compute_share=1.0)
    joint = captured_decoder(layers=4, dim=64, hidden=256)
    auto = {"reshard_after_forward": "auto", "disable_passes": ("bucket_collectives",)}
    least, most = (planned(joint, None, p, ON_CPU, **auto | {"reshard_after_forward": r})[1]
                   for p, r in (("full", "always"), ("none", "never")))  # fmt: skip
    copies = [copy_graph(joint), copy_graph(joint)]

    def run(place, machine):
        def on_rank(context):
            config = gt.PassConfig(
                activation_policy="budget",
                memory_limit_gib=(0.6 * least + 0.4 * most) / GIB,
                hardware=machine,
                **auto,
            )
            run_passes(copies[place], config, agreement=context.agreement)
            return copies[place].decisions["plan_memory"]

        return on_rank

    ours, theirs = on_ranks(run(0, ON_CPU), run(1, other))
    assert ours == theirs and ours.parameters


@pytest.mark.parametrize("policy", ["none", "selective"])
def test_a_later_graph_under_auto_follows_the_parameters_alone(policy):
    joint = captured_decoder(layers=4, dim=64, hidden=256)
    auto = {"reshard_after_forward": "auto", "policy": policy}
    first, *peak, _ = planned(joint, GIB, **auto)
    assert not first.decisions["plan_memory"].rows
    later, *same, _ = planned(joint, GIB, **auto, first=first)
    assert same == peak and targets(later) == targets(first)


@pytest.mark.parametrize("policy", ["budget", "file"])
def test_a_graph_without_backward_is_left_alone(roomy, stack, policy):
    table, joint = roomy
    model, tokens = LlamaStack(SIZE), torch.zeros(2, 96, dtype=torch.int64)
    forward = gt.capture(model, lambda m, x: m(x).mean(), (tokens,), backward=False)
    given = {"memory_table": table} if policy == "file" else {}
    found, *_ = planned(forward, GIB, policy, first=joint, **given)
    assert "plan_memory" not in found.decisions
    assert targets(found) == targets(planned(forward, None, "none")[0])


def test_what_a_file_cannot_decide_is_refused(stack):
    decided = MemoryTable((), ("layers.0.wq",))
    for table, reshard, said in (
        (None, "default", "memory_table is None, .* give it a MemoryTable"),
        ("table.toml", "default", "memory_table is 'table.toml', "),
        (decided, "never", 'reshard_after_forward = "never" decides that too'),
        (decided, "always", 'reshard_after_forward = "always" decides that too'),
        (replace(decided, parameters=None), "auto", "has no keep_unsharded"),
    ):
        with pytest.raises(gt.PassError, match=said):
            gt.PassConfig(
                activation_policy="file", memory_table=table, reshard_after_forward=reshard
            )


@pytest.mark.full
def test_inputs_of_blocks_wait_in_host_memory_where_that_makes_room(extremes):
    """Of more blocks where memory is short, and of none where nothing is recomputed."""
    # with as many tokens inputs of blocks take more than gradients
    stack = captured_stack(SIZE, 16, 2048)
    plain = {
        "options": {"offload_activations": OffloadActivationsOptions(min_bytes=0)},
        "disable_passes": ("bucket_collectives", "schedule_overlap"),
    }
    offload = {"allow_offload": True, **plain}

    def least(**more):
        with pytest.raises(gt.MemoryLimitError) as refused:
            planned(stack, 1, **more)
        return float(re.search(r"needs ([\d.]+) GiB", str(refused.value))[1]) * GIB

    low, most = (least(**offload) + least(**plain)) / 2, 2 * extremes[1]
    assert low < 0.99 * least(**plain)
    found, peak, _, report = planned(stack, low, **offload)
    table = found.decisions["plan_memory"]
    assert peak <= low and table.offloaded and any(map(is_copy_to_host, found.graph.nodes))
    assert "blocks in host memory" in str(report)
    read = memory_table_of(tomllib.loads(memory_table_to_toml(table)), "a file")
    again, *_ = planned(stack, None, "file", memory_table=read, **plain)
    assert targets(again) == targets(found)
    plans = [planned(stack, limit, **offload) for limit in (low, 2 * low, most)]
    away = [len(plan[0].decisions["plan_memory"].offloaded) for plan in plans]
    seconds = [plan[2] for plan in plans]
    assert away == sorted(away, reverse=True) and away[-1] == 0
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[1] <= planned(stack, 2 * low, **plain)[2]


def test_a_table_that_offloads_inputs_of_no_block_is_refused(roomy, stack):
    table, _ = roomy
    with pytest.raises(gt.PassError, match="of another model.*layers.17"):
        planned(stack, None, "file", memory_table=replace(table, offloaded=("layers.17",)))
