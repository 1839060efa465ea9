"""PassConfig.memory_limit_gib: what is rolled back, kept and refused, the same on every rank."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import graph_trainer as gt
from graph_trainer.core.analysis.memory import memory_of
from graph_trainer.core.graph.snapshot import copy_graph, restore_graph
from graph_trainer.core.ordering.agreement import OneRank
from graph_trainer.core.passes.base import Pass, Stage
from graph_trainer.core.passes.memory_limit import (
    MORE_SHARDS,
    SMALLER_BATCH,
    DeviceMemory,
    host_memory_of,
    unknown,
)
from graph_trainer.core.passes.offload_activations import OffloadActivationsOptions
from graph_trainer.core.passes.pipeline import pass_by_pass
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.simulate import OtherMemory, need_of, predicted_memory
from graph_trainer.core.text import error_text
from graph_trainer.core.training.step_cache import TrainStep
from graph_trainer.core.units import GIB, gib
from graph_trainer.testing import assert_same, code, mean_square, run
from tests.unit.core.simulation.machines import machine
from tests.unit.fake_ranks import Agreed
from tests.unit.graphs import aten, captured_decoder, hungry

OVERLAP = ["default", "overlap_fsdp"]


# Of the default list, what is optional too.
OFF = ["bucket_collectives", "schedule_overlap"]
NOTHING = OtherMemory()


def after(limit=None, passes=OVERLAP, other=NOTHING, agreement=None, has=unknown, **decoder):
    """The graph after the passes and the report; the limit in bytes; `has` as `device_memory`."""
    joint = captured_decoder(**decoder)
    config = gt.PassConfig(
        reshard_after_forward="always",
        passes=passes,
        disable_passes=OFF,
        memory_limit_gib=limit and limit / GIB,
        other_memory=lambda joint: other,
        device_memory=has,
    )
    return joint, gt.run_passes(joint, config, agreement=agreement or OneRank())


def peak(joint):
    return predicted_memory(joint, load_hardware("cpu")).peak_bytes


def prose(error):
    """The message in one line; what is printed of it fits 100 columns."""
    lines = error_text(error).splitlines()
    assert len(lines[0]) > 60 and len(lines) < 16
    assert all(len(line) <= 100 for line in lines)
    return " ".join(str(error).split())


def described(joint):
    """Everything of a graph that passes read."""
    return [
        (n.format_node(), dict(n.meta.get("custom") or {}), n.meta.get("recompute"))
        for n in joint.graph.nodes
    ]


@pytest.fixture
def plain():
    return after(passes=["default"])[0]


@pytest.fixture
def overlapped():
    return after()[0]


@pytest.fixture
def low(plain):
    return peak(plain)


@pytest.fixture
def high(overlapped, plain):
    assert peak(plain) < peak(overlapped) and code(plain) != code(overlapped)
    return peak(overlapped)


def test_an_optional_pass_beyond_the_limit_is_rolled_back(plain, high):
    joint, report = after(high - 1)
    assert described(joint) == described(plain) and str(joint) == str(plain)
    assert joint.history == plain.history
    joint.validate()
    assert_same(run(plain), run(joint))
    row = report.last
    assert row.name == "overlap_fsdp" and row.peak_bytes == report.rows[-2].peak_bytes
    for text in (row.rolled_back, str(report)):
        assert "rolled back" in text and "PassConfig.memory_limit_gib" in text
    assert [line.split()[0] for line in report.notes()] == ["overlap_fsdp"]


def test_at_the_limit_it_is_kept_and_the_memory_beside_the_graph_counts(plain, overlapped, high):
    other = OtherMemory(optimizer_bytes=1000, accumulated_bytes=500)
    for joint, report in (after(high), after(high + 1500, other=other)):
        assert described(joint) == described(overlapped)
        assert report.notes() == [] and "rolled back" not in str(report)
        assert joint.history[-1] == "overlap_fsdp"
    assert described(after(high + 1499, other=other)[0]) == described(plain)


def test_a_graph_beyond_the_limit_without_them_is_refused(plain, low):
    assert described(after(low)[0]) == described(plain)
    with pytest.raises(gt.PassError) as caught:
        after(low - 1, other=OtherMemory(optimizer_bytes=0))
    message = str(caught.value)
    for words in (
        f"PassConfig.memory_limit_gib = {(low - 1) / GIB:g}",
        "activations",
        "PassConfig.activation_policy",
        SMALLER_BATCH,
        MORE_SHARDS,
    ):
        assert words in message
    # it gathers every parameter twice already
    assert "PassConfig.reshard_after_forward" not in message
    config = gt.PassConfig(
        reshard_after_forward="never", memory_limit_gib=(low - 1) / GIB, disable_passes=OFF
    )
    with pytest.raises(gt.PassError, match="PassConfig.reshard_after_forward"):
        gt.run_passes(captured_decoder(), config)
    with pytest.raises(gt.PassError, match="PassConfig.reshard_after_forward"):
        list(pass_by_pass(captured_decoder(), config))
    assert list(pass_by_pass(captured_decoder(), config, refuses=False))


def diet(joint, options, context):
    """Undo what `hungry` did."""
    for node in reversed(joint.graph.nodes):
        if node.target in (aten.neg.default, aten.ones.default) and not node.users:
            joint.graph.erase_node(node)


def test_an_optional_pass_that_needs_no_more_is_not_to_blame(plain, low):
    """Over the limit before and after it, or within the limit afterwards: kept."""

    last = Pass("diet", Stage.SCHEDULE, "for a test", diet, optional=True)
    passes = ["default", hungry(50_000, optional=False), last]
    joint, report = after(low, passes=passes)
    assert described(joint) == described(plain) and report.notes() == []
    idle = Pass("idle", Stage.SCHEDULE, "for a test", lambda *_: None, optional=True)
    last = dataclasses.replace(last, optional=False)
    joint, report = after(low, passes=[*passes[:2], idle, last])
    assert joint.history[-2:] == ["idle", "diet"] and report.notes() == []


def test_an_optional_pass_is_kept_where_a_later_one_brings_the_step_back_within(plain, low):
    """As prefetching does to merged gathers, which alone would be too much at once."""
    greedy = hungry(1_000_000)
    last = Pass("diet", Stage.SCHEDULE, "for a test", diet, optional=True)
    joint, report = after(low, passes=["default", greedy, last])
    assert joint.history[-2:] == [greedy.name, "diet"] and report.notes() == []
    assert described(joint) == described(plain)
    # it is the later ones that are tried, on a copy: a pass that does less is no help
    idle = Pass("idle", Stage.SCHEDULE, "for a test", lambda *_: None, optional=True)
    joint, report = after(low, passes=["default", greedy, idle])
    assert [note.split()[0] for note in report.notes()] == [greedy.name]
    assert joint.history[-1] == "idle" and described(joint) == described(plain)


def test_an_optional_pass_with_which_nothing_can_be_planned_is_rolled_back():
    early = dataclasses.replace(hungry(100_000), stage=Stage.CLEANUP)
    config = gt.PassConfig(
        passes=["default", early],
        disable_passes=OFF,
        activation_policy="budget",
        memory_limit_gib=1.0,
        hardware=load_hardware("cpu"),
        other_memory=lambda joint: NOTHING,
    )
    alone = dataclasses.replace(config, passes=["default"])
    joint = captured_decoder()
    gt.run_passes(joint, dataclasses.replace(alone, activation_policy="full"))
    limit = (peak(joint) + 100_000) / GIB
    report = gt.run_passes(captured_decoder(), dataclasses.replace(config, memory_limit_gib=limit))
    assert [row.name for row in report.rows if row.rolled_back] == ["hungry"]


def test_a_pass_that_breaks_the_limit_after_an_optional_one_is_refused_with_the_remedy(high):
    """Each of the two is within the limit alone; the optional one was kept before the other ran."""
    passes = ["default", "overlap_fsdp", hungry(500, optional=False)]
    alone, _ = after(passes=["default", passes[-1]])
    limit = max(high, peak(alone))
    with pytest.raises(gt.PassError, match=r'PassConfig.disable_passes = \["overlap_fsdp"\]'):
        after(limit, passes=passes)
    assert after(limit, passes=["default", passes[-1]])[0].history == alone.history


def test_what_was_rolled_back_leaves_no_remark():
    def talk(joint, options, context):
        hungry(1_000_000)(joint)
        joint.remarks.append("it talks")

    talking = Pass("talking", Stage.SCHEDULE, "for a test", talk, optional=True)
    joint, report = after(passes=["default", talking])
    assert report.notes() == ["talking: it talks"]
    joint, report = after(peak(joint) - 1, passes=["default", talking])
    (note,) = report.notes()
    assert note.startswith("talking was rolled back") and not joint.remarks


# --- ranks ---------------------------------------------------------------------------------

RANKS = 5


def uneven(rank):
    return {"world": RANKS, "rank": rank, "dim": 6, "hidden": 7}


def test_ranks_with_uneven_shards_decide_the_same():
    peaks = [peak(after(**uneven(rank))[0]) for rank in range(RANKS)]
    without = [peak(after(**uneven(rank), passes=["default"])[0]) for rank in range(RANKS)]
    assert min(peaks) < max(peaks)
    limit = max(peaks) - 1
    assert min(peaks) <= limit, "some ranks are within the limit"
    assert max(without) <= limit

    def names(rank, agree):
        return after(limit, **uneven(rank), agreement=Agreed(agree))[0].history

    alone = [names(rank, lambda mine: mine)[-1] for rank in range(RANKS)]
    assert len(set(alone)) == 2, "alone they would not agree"

    def largest(rank):
        """What the ranks would say to each other, one answer a call."""
        answers = iter([max(without), max(peaks), max(without)])
        return lambda mine: next(answers)

    together = [names(rank, largest(rank)) for rank in range(RANKS)]
    assert all("overlap_fsdp" not in history for history in together)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def test_a_step_captured_again_keeps_to_what_the_first_graph_did():
    """A rank that meets another shape is alone: it cannot ask whether others roll back."""

    def need(rows, *passes):
        joint = gt.capture(net(), mean_square, (torch.ones(rows, 4),))
        gt.run_passes(joint, gt.PassConfig(passes=["default", *passes]))
        return peak(joint)

    extra, model = hungry(100), net()
    small, large = need(2, extra), need(40, extra)
    assert need(40) < large

    step = TrainStep(mean_square, passes=config(extra, small))
    step(model, torch.ones(2, 4))
    (joint,) = step.joint_graphs()
    assert joint.history[-1] == "hungry"
    with pytest.raises(gt.PassError, match="memory_limit_gib"):
        step(model, torch.ones(40, 4))  # with `hungry`, as on the other ranks

    step = TrainStep(mean_square, passes=config(extra, max(need(40), small - 1, large - 1)))
    step(model, torch.ones(40, 4))
    step(model, torch.ones(2, 4))  # would fit with `hungry`, which other ranks go without
    assert ["hungry" in joint.history for joint in step.joint_graphs()] == [False, False]


def config(extra, limit):
    return gt.PassConfig(passes=["default", extra], memory_limit_gib=limit / GIB)


# --- what the device has -------------------------------------------------------------------


def having(num):
    """A device with so many bytes."""
    return lambda joint: DeviceMemory(num, "all there is")


def test_a_device_refuses_a_step_and_rolls_nothing_back(overlapped, high, low):
    joint, report = after(has=having(high))
    assert described(joint) == described(overlapped) and report.notes() == []
    with pytest.raises(gt.PassError) as caught:
        after(has=having(high - 1))  # which would do without overlap_fsdp
    message = prose(caught.value)
    for words in (
        "PassConfig.memory_limit_gib is unset, and the step needs",
        f"This rank has {gib(high - 1)} GiB: all there is; it needs {gib(high)} GiB",
        "activations",
        "Take the risk with PassConfig.memory_limit_gib = 0",
        SMALLER_BATCH,
        'PassConfig.disable_passes = ["overlap_fsdp"]',
    ):
        assert words in message
    assert "rolled back" not in message


def test_a_limit_of_ones_own_and_none_at_all_ask_no_device(plain, overlapped, high):
    def has(joint):
        pytest.fail("asked")

    assert described(after(high, has=has)[0]) == described(overlapped)
    assert described(after(high - 1, has=has)[0]) == described(plain)
    silent = lambda mine: pytest.fail("asked")  # noqa: E731
    joint, report = after(0, has=has, agreement=Agreed(silent))
    assert described(joint) == described(overlapped) and report.notes() == []


@pytest.mark.parametrize("limit", [-1.0, math.nan, math.inf])
def test_what_is_no_limit(limit):
    with pytest.raises(gt.PassError, match=f"PassConfig.memory_limit_gib = {limit}: not a limit"):
        gt.run_passes(captured_decoder(), gt.PassConfig(memory_limit_gib=limit))


def test_ranks_with_unlike_memory_decide_the_same(high):
    """One has enough, one too little, one does not know; each asks the others once."""
    ranks = [having(high + 10 * GIB), having(high - 1000), lambda joint: None]
    said = []
    for has in ranks:
        after(has=has, agreement=Agreed(lambda mine: said.append(mine) or -1))
    assert len(said) == len(ranks) and max(said) == 1000
    for has in ranks:
        with pytest.raises(gt.PassError, match="needs 9.31e-07 GiB more than there is"):
            after(has=has, agreement=Agreed(lambda mine: max(said)))


def test_a_batch_of_another_shape_has_to_fit_too():
    model = net()
    joint = gt.capture(model, mean_square, (torch.ones(2, 4),))
    gt.run_passes(joint)
    step = TrainStep(mean_square, passes=gt.PassConfig(device_memory=having(peak(joint))))
    step(model, torch.ones(2, 4))
    with pytest.raises(gt.PassError, match="memory_limit_gib is unset, and the step needs"):
        step(model, torch.ones(40, 4))


# --- copies --------------------------------------------------------------------------------


def test_a_copy_does_not_change_with_its_original(plain):
    joint = after(passes=["default"])[0]
    copy, before = copy_graph(joint), described(joint)
    assert described(copy) == before and str(copy) == str(joint)
    assert any(node.kwargs for node in copy.graph.nodes)
    assert [str(n.kwargs) for n in copy.graph.nodes] == [str(n.kwargs) for n in joint.graph.nodes]
    assert [n.name for n in copy.graph.nodes] == [n.name for n in joint.graph.nodes]
    copy.validate()
    gt.run_passes(joint, gt.PassConfig(passes=["overlap_fsdp", hungry(10)]))
    for node in joint.graph.nodes:
        if node.op == "call_function":
            node.meta["custom"]["module"] = "elsewhere"
    assert described(joint) != before and described(copy) == before
    assert copy.history != joint.history
    restore_graph(joint, copy)
    assert described(joint) == before and joint.history[-1] == "tag_buckets"
    joint.validate()
    assert_same(run(joint), run(plain))


def test_on_a_gpu_the_limit_has_the_gaps_and_the_reserve_inside(plain, overlapped):
    """What is alive may be far below a limit that the device would need more than."""
    gpu = load_hardware("h100-sxm")
    need = need_of(predicted_memory(plain, gpu), gpu)
    assert need.alive < need.allocated < need.total == need.allocated + 2 * GIB

    def run(limit):
        joint = captured_decoder()
        config = gt.PassConfig(
            reshard_after_forward="always",
            disable_passes=OFF,
            hardware=gpu,
            memory_limit_gib=limit / GIB,
        )
        return gt.run_passes(joint, config, agreement=OneRank())

    run(need.total)
    with pytest.raises(gt.MemoryLimitError) as caught:
        run(need.total - 1)
    message = prose(caught.value)
    for words in (
        f"the step needs {gib(need.total)} GiB on the rank that needs most",
        f"gaps of the allocator {gib(need.allocated - need.alive)}",
        "reserved for driver and communication 2.00",
    ):
        assert words in message


def test_what_a_device_has_is_compared_with_what_it_would_need_itself(low):
    """A run on CPU, whose passes decide for a GPU: no reserve and no gaps of a GPU."""
    joint = captured_decoder()
    config = gt.PassConfig(
        reshard_after_forward="always",
        disable_passes=OFF,
        hardware=load_hardware("h100-sxm"),
        device_memory=having(low),
    )
    gt.run_passes(joint, config, agreement=OneRank())


def test_no_limit_costs_no_exchange():
    after(agreement=Agreed(lambda mine: pytest.fail("asked")))


# --- host memory ---------------------------------------------------------------------------


def offloaded(host, limit=None, agreement=None, block_inputs=True):
    """A graph whose blocks' inputs are in host memory, of which there are `host` bytes."""
    joint = captured_decoder(layers=4)
    options = OffloadActivationsOptions(block_inputs=block_inputs, min_bytes=0)
    config = gt.PassConfig(
        passes=["default"],
        disable_passes=OFF,
        options={"offload_activations": options},
        hardware=load_hardware("h100-sxm"),
        memory_limit_gib=limit,
        host_memory=host if callable(host) else lambda joint: DeviceMemory(host, "a test's"),
    )
    gt.run_passes(joint, config, agreement=agreement or OneRank())
    return memory_of(joint).host_bytes


def test_copies_that_the_host_has_no_memory_for_are_refused():
    need = offloaded(unknown)
    assert need > 0 and offloaded(need) == need
    with pytest.raises(gt.PassError) as caught:
        offloaded(need - 1)
    message = str(caught.value)
    assert f"keeps {gib(need)} GiB of activations there" in message
    assert "a test's" in message and "block_inputs = False" in message
    assert "PassConfig.memory_limit_gib = 0 takes the risk" in message
    assert offloaded(need - 1, limit=0) == need
    assert offloaded(lambda joint: None) == need, "it is not known what there is"
    assert offloaded(0, block_inputs=False) == 0


def test_what_one_rank_lacks_on_its_host_is_refused_on_all():
    asked = []

    def another_lacks(number):
        asked.append(number)
        return max(number, 100)

    with pytest.raises(gt.PassError, match="needs .* GiB more of host memory than there is"):
        offloaded(1 << 30, agreement=Agreed(another_lacks))
    calls = len(asked)
    asked.clear()
    with pytest.raises(gt.PassError, match="more of host memory"):
        offloaded(1 << 30, agreement=Agreed(another_lacks), block_inputs=False)
    assert len(asked) == calls, "a rank without copies takes part"


def test_the_devices_of_a_machine_share_its_memory():
    found = host_memory_of(machine(host_memory_gib=64, devices_per_node=8))(None)
    assert found.bytes == 8 * GIB and found.source == "64 GiB of a machine of 'round' / 8 devices"
