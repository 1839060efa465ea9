"""A plan under other spreads of tokens over experts: memory, time and what still fits."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from io import StringIO

import pytest

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.data_sizes import uneven_experts
from graph_trainer.core.passes.memory_limit import DeviceMemory
from graph_trainer.core.passes.pipeline import run_before
from graph_trainer.core.passes.plan_memory.items import blocks_of
from graph_trainer.core.passes.plan_memory.plan_memory import plan_memory
from graph_trainer.core.passes.plan_memory.solver import Op
from graph_trainer.core.simulation.collective_costs import collective_parts
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.core.units import GIB
from graph_trainer.planner.expert_loads import data_sizes, expert_loads, received_rows
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.html.page import write_page
from graph_trainer.planner.plan import Plan, make_plan
from graph_trainer.planner.plan_report import plan_report
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.routing import SCHEMA, Routing
from tests.layers import with_few_layers
from tests.unit.planner.conftest import shown

RANKS, DEGREE, EXPERTS = 4, 2, 8
ROWS = 2 * 64 * 3
"""What a rank sends in a layer: its tokens, times the experts of each."""


@cache
def planned(hardware: str = "h100-sxm") -> Plan:
    return make_plan(config_with(), RANKS, load_hardware(hardware), every_pass=False)


def config_with(*flags: str) -> GraphTrainerConfig:
    words = ["--module", "graph_trainer.deepseek_v3", "--config", "debugmodel"]
    words += ["--training.seq_len", "64", "--parallelism.expert_parallel_degree", str(DEGREE)]
    config = load_config([*words, *flags], world_size=RANKS)
    with_few_layers(config)
    return config


def routing(*microbatches, world_size=RANKS, degree=DEGREE):
    """Of two layers: for each microbatch, tokens and what was received."""
    return Routing.model_validate_json(
        json.dumps(
            {
                "schema": SCHEMA,
                "world_size": world_size,
                "expert_parallel_degree": degree,
                "layers": ["layers.1", "layers.2"],
                "microbatches": [
                    {"step": step, "microbatch": 0, "tokens": tokens, "received": received}
                    for step, (tokens, received) in enumerate(microbatches, 1)
                ],
            }
        )
    )


EVEN = [[RANKS * ROWS // EXPERTS] * EXPERTS] * 2
BALANCED = [[ROWS] * RANKS] * 2


def test_more_tokens_need_more_memory_and_time():
    plan = planned()
    loads = expert_loads(plan, (1.0, 1.5), None)
    even, more, most = loads.rows
    assert (even.peak_bytes, even.needed_bytes) == (plan.peak_bytes, plan.need.total)
    assert even.step_seconds == plan.step_seconds and even.fits
    assert even.peak_bytes < more.peak_bytes < most.peak_bytes
    assert even.step_seconds <= more.step_seconds <= most.step_seconds
    assert (most.what, most.imbalance) == ("all tokens to one rank", DEGREE)
    assert loads.greatest_that_fits == DEGREE and loads.layers == {}
    assert plan.simulation.again().memory.peak_bytes == plan.peak_bytes


def test_exchanges_end_with_the_rank_that_receives_most():
    """Tokens to experts and back: as long as if all pairs exchanged what the fullest rank has."""
    plan = planned()
    hardware, joint = plan.hardware, plan.simulation.joint

    def transfers():
        exchanges = [c for c in collectives(joint) if c.reduction and c.largest_split_bytes]
        return [collective_parts(c, hardware).transfer_seconds for c in exchanges]

    even = transfers()
    with data_sizes(plan).assuming(1.5):
        uneven = transfers()
    assert len(even) == 8 == len(uneven)
    assert uneven == pytest.approx([1.5 * seconds for seconds in even])


def test_time_is_that_of_the_slowest_rank():
    plan = planned("cpu")  # slow enough that few tokens take time
    even, most = expert_loads(plan, (1.0,), None).rows
    assert most.step_seconds > 1.05 * even.step_seconds


@pytest.mark.parametrize("hardware", ["cpu", pytest.param("h100-sxm", marks=pytest.mark.full)])
def test_the_greatest_imbalance_that_fits_is_found_in_one_graph(hardware, monkeypatch):
    def fits(imbalance, limit):
        (row, _) = expert_loads(replace(plan, limit_bytes=limit), (imbalance,), None).rows
        return row.fits

    plan = planned(hardware)
    monkeypatch.setattr("graph_trainer.planner.fake_rank.FakeRank.capture", None)
    even, most = expert_loads(plan, (1.0,), None).rows
    # what an allocator takes grows in steps of pages: on a CPU memory is taken byte by byte
    limits = [even.needed_bytes, (even.needed_bytes + most.needed_bytes) // 2]
    for limit in limits if hardware == "cpu" else limits[:1]:
        found = expert_loads(replace(plan, limit_bytes=limit), (), None).greatest_that_fits
        assert fits(found, limit)
        assert found == DEGREE or not fits(found + 0.01, limit)
    too_little = replace(plan, limit_bytes=even.needed_bytes - 1)
    assert expert_loads(too_little, (), None).greatest_that_fits is None


@pytest.mark.parametrize("hardware", ["cpu", pytest.param("h100-sxm", marks=pytest.mark.full)])
def test_memory_counts_an_imbalance_and_time_even_shares(hardware):
    plan = planned(hardware)
    other = plan.simulation.other._replace(fused=True)
    simulation = replace(plan.simulation, other=other).again()
    joint = simulation.joint
    uneven = simulate(joint, simulation.hardware, other._replace(expert_imbalance=1.5))
    # what is known of the graph by then is of even shares
    assert simulate(joint, simulation.hardware, other).memory == simulation.memory
    with uneven_experts(joint.graph, 1.5):
        assumed = simulation.again()
        assert uneven.again().memory == assumed.memory  # not 1.5 times 1.5
    assert uneven.memory == assumed.memory != simulation.memory
    assert uneven.need() == assumed.need()
    assert uneven.timeline.step_seconds == simulation.timeline.step_seconds
    limited = replace(plan, simulation=simulation, limit_bytes=uneven.need().total - 1)
    loads = expert_loads(limited, (), None)
    assert expert_loads(replace(limited, simulation=uneven), (), None) == loads


BUDGET = ("--activation_checkpoint.type", "budget")
AUTO = ("--activation_checkpoint.type", "none", "--parallelism.fsdp_reshard_after_forward", "auto")


def test_what_is_kept_takes_the_bytes_of_an_imbalance_and_the_time_of_even_shares():
    def ops_of_blocks(imbalance: str) -> list[Op]:
        flags = ("--compile.memory_limit_gib", "1", "--compile.expert_imbalance", imbalance)
        run = FakeRank(config_with(*BUDGET, *flags), RANKS, device="cpu")
        joint = planned("cpu").captures.of(run)
        passes = run.pass_config(hardware=load_hardware("cpu"))
        blocks = blocks_of(joint, run_before(joint, passes, plan_memory))
        return [op for block in blocks for op in block.ops]

    factors = set()
    for even, uneven in zip(ops_of_blocks("1"), ops_of_blocks("1.5"), strict=True):
        assert uneven == replace(even, bytes=uneven.bytes)
        if even.bytes:
            factors.add(uneven.bytes / even.bytes)
    assert factors == {1.0, 1.5}


@pytest.mark.parametrize("flags", [AUTO, pytest.param(BUDGET, marks=pytest.mark.full)])
def test_a_limit_is_filled_for_the_imbalance_of_the_config(flags):
    def plan_within(limit: int, *more: str) -> Plan:
        config = config_with(*flags, "--compile.memory_limit_gib", str(limit / GIB), *more)
        captures = planned("cpu").captures
        hardware = load_hardware("cpu")
        return make_plan(config, RANKS, hardware, every_pass=False, captures=captures)

    key, limit = "--compile.expert_imbalance", 100 * GIB
    unset = plan_within(limit)
    while unset.need.total < limit:  # until the limit is filled to the byte
        limit = unset.need.total
        unset = plan_within(limit)
    even = plan_within(limit, key, "1")
    assert str(even.simulation.joint.graph) == str(unset.simulation.joint.graph)
    assert even.need == unset.need and even.memory_table == unset.memory_table
    loads = expert_loads(unset, (1.5,), None)
    assert loads.rows[0].needed_bytes > limit and loads.greatest_that_fits < 1.5
    assert not loads.rows[0].fits and loads.rows[0].fits_device
    assert loads.greatest_on_device == DEGREE

    uneven = plan_within(limit, key, "1.5")
    loads = expert_loads(uneven, (1.5,), None)
    assert loads.rows[0].needed_bytes == uneven.need.total <= limit
    assert loads.rows[0].fits and loads.greatest_that_fits >= 1.5
    assert uneven.step_seconds >= unset.step_seconds
    text = shown(replace(uneven, expert_loads=loads))
    assert " with an imbalance of 1.5 " in text and "compile.expert_imbalance = 1.5, in" in text


def test_a_step_that_does_not_fit_with_an_imbalance_is_refused_with_its_key():
    even = planned("cpu")
    room = DeviceMemory(even.need.total, "what even shares need")
    config = config_with("--compile.expert_imbalance", "1.5")
    with pytest.raises(gt.MemoryLimitError) as refused:
        make_plan(
            *(config, RANKS, even.hardware),
            every_pass=False,
            captures=even.captures,
            device_memory=lambda joint: room,
        )
    message = str(refused.value)
    assert "with compile.expert_imbalance = 1.5. " in message
    assert "  compile.expert_imbalance = 1: memory for even shares" in message


def test_a_routing_of_the_same_run_is_replayed_to_the_token():
    plan = planned("cpu")
    half = ROWS // 2
    received = [[ROWS, half, 3 * half, ROWS], [1, 2 * ROWS - 1, 10, 2 * ROWS - 10]]
    happened = routing((EVEN, BALANCED), (EVEN, received))
    assert received_rows(plan, happened, happened.microbatches[0]) == [[ROWS] * 2] * RANKS
    by_rank = [list(rank) for rank in zip(*received, strict=True)]
    assert received_rows(plan, happened, happened.microbatches[1]) == by_rank
    even, row, most = expert_loads(plan, (1.0,), happened).rows
    assert row.what == "as routed: memory of step 2, time of step 2"
    peaks = []
    for rows in by_rank:
        with data_sizes(plan).assuming(rows):
            peaks.append(plan.simulation.again().memory.peak_bytes)
    assert len(set(peaks)) > 2
    assert even.peak_bytes < row.peak_bytes == max(peaks) < most.peak_bytes
    assert even.step_seconds < row.step_seconds < most.step_seconds
    loads = expert_loads(plan, (), happened)
    assert loads.layers == {"layers.1": 1.5, "layers.2": (2 * ROWS - 1) / ROWS}
    balanced, _ = expert_loads(plan, (), routing((EVEN, BALANCED))).rows
    assert (balanced.peak_bytes, balanced.step_seconds) == (even.peak_bytes, even.step_seconds)


@pytest.mark.parametrize(
    ("world_size", "degree", "received"),
    [
        (8, 2, [[5] * 8, [1, 1, 1, 1, 1, 1, 2, 2]]),
        (4, 4, [[10] * 4, [1, 2, 3, 4]]),
        (4, 2, None),
    ],
    ids=["other ranks", "other degree", "unknown ranks"],
)
def test_experts_of_another_run_are_divided_anew_and_scaled(world_size, degree, received):
    plan = planned("cpu")
    tokens = [[10, 10, 10, 0, 10, 0, 0, 0], [0, 0, 0, 0, 1, 2, 3, 4]]
    happened = routing((tokens, received), world_size=world_size, degree=degree)
    found = received_rows(plan, happened, happened.microbatches[0])
    assert found == [[2 * ROWS * 3 // 4, 0], [2 * ROWS // 4, 2 * ROWS]]


def test_other_batches_are_scaled_rank_by_rank():
    happened = routing(([[1] * EXPERTS] * 2, [[4, 0, 2, 2], [1, 3, 3, 1]]))
    found = received_rows(planned("cpu"), happened, happened.microbatches[0])
    half = ROWS // 2
    assert found == [[4 * half, half], [0, 3 * half], [2 * half, 3 * half], [2 * half, half]]


def test_the_loads_are_shown():
    plan = planned()
    received = [[2 * ROWS, 0, ROWS, ROWS]] * 2
    loads = expert_loads(plan, (1.25,), routing((EVEN, received)))
    text = shown(replace(plan, expert_loads=loads))
    assert max(map(len, text.splitlines())) <= 100
    assert "Any routing fits h100-sxm, all tokens to one rank too." in text
    assert "most uneven: layers.1 2.00, layers.2 2.00." in " ".join(text.split())
    assert "all tokens to one rank" in text and "1.25" in text
    loads = replace(loads, greatest_that_fits=1.5)
    text = shown(replace(plan, expert_loads=loads))
    assert "Fits h100-sxm up to an imbalance of 1.50 in every layer." in text
    text = shown(replace(plan, expert_loads=replace(loads, greatest_that_fits=None)))
    assert "Even shares of the tokens do not fit h100-sxm." in text
    beyond_limit = replace(loads.rows[-1], fits=False)
    both = replace(loads, greatest_on_device=1.75, rows=(*loads.rows[:-1], beyond_limit))
    text = " ".join(shown(replace(plan, expert_loads=both, limit_bytes=3 * GIB)).split())
    assert "Fits compile.memory_limit_gib up to an imbalance of 1.50 in every layer. " in text
    assert "Fits h100-sxm up to an imbalance of 1.75 in every layer. " in text
    assert "device only" in text
    said = plan_report(replace(plan, expert_loads=loads))["expert_loads"]
    assert [row["what"] for row in said["rows"]][0] == "1.25"
    assert said["greatest_that_fits"] == 1.5 and plan_report(plan)["expert_loads"] is None
    page = StringIO()
    write_page(replace(plan, expert_loads=loads), page)
    assert "Fits h100-sxm up to an imbalance of 1.50" in page.getvalue()
