"""`graph-trainer plan --trace`: what the Trace Event Format asks for, and the simulation's numbers.

Perfetto's own reader, trace_processor, is not on the package index: it is not asked here.
"""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graph_trainer as gt
from graph_trainer.core.passes.offload_activations import OffloadActivationsOptions
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.simulate import OtherMemory, Simulation, simulate
from graph_trainer.core.simulation.timeline import COMPUTE, FROM_HOST, HOST, TO_HOST
from graph_trainer.planner import perfetto_trace as trace
from graph_trainer.planner.html.drawn import drawn
from graph_trainer.planner.perfetto_trace import WAITS, nanoseconds
from graph_trainer.testing import mean_square
from graph_trainer.titan.files import check_outputs, published
from tests.unit.graphs import Decoder, fake_world

HOSTILE = '</script><img src=x onerror="document.title=1">\\ "quoted"\n'


class Hostile(nn.Module):
    """A decoder under a name that is hard to write."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE.replace(".", "_"), Decoder(layers=3, dim=64, hidden=256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return next(self.children())(tokens)


def simulated(
    *passes: str, model: Callable[[], nn.Module] = Hostile, **options: object
) -> Simulation:
    """On two groups: parameters are sharded over four ranks and replicated over two."""
    fake_world(8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    sharded = gt.simple_fsdp(model(), mesh, mode="hybrid_shard")
    joint = gt.capture(sharded, mean_square, (torch.zeros(2, 300, dtype=torch.int64),))
    config = gt.PassConfig(
        passes=("default", *passes),
        disable_passes=["bucket_collectives", "schedule_overlap"],
        reshard_after_forward="always",
        options=options,
    )
    gt.run_passes(joint, config)
    return simulate(joint, load_hardware("h100-sxm"), OtherMemory(optimizer_bytes=1000))


@pytest.fixture(scope="module", params=[(), ("overlap_fsdp",)], ids=["in place", "overlapped"])
def simulation(request: pytest.FixtureRequest) -> Simulation:
    return simulated(*request.param)


def written(simulation: Simulation) -> dict:
    file = io.StringIO()
    trace.write_trace(SimpleNamespace(simulation=simulation, rank=3, headline=HOSTILE), file)
    return json.loads(file.getvalue())


def on_thread(events: list[dict], name: str) -> list[dict]:
    (tid,) = [e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == name]
    return [e for e in events if e["ph"] == "X" and e["tid"] == tid]


def test_every_event_is_of_the_format(simulation):
    document = written(simulation)
    assert document["otherData"]["plan"] == HOSTILE
    events = document["traceEvents"]
    asked = {"M": {"args"}, "X": {"dur", "args", "cat"}, "C": {"args"}, "s": {"id", "cat"}}
    asked["f"] = asked["s"] | {"bp"}
    assert {e["ph"] for e in events} == set(asked)
    for event in events:
        assert event.keys() >= {"ph", "pid", "tid", "ts", "name"} | asked[event["ph"]]
        assert event["pid"] == 3 and event["ts"] >= 0
    named = [e for e in events if e["name"] == "thread_name"]
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    names = [e["args"]["name"] for e in sorted(named, key=lambda e: order[e["tid"]])]
    assert names == [COMPUTE, HOST, "ranks 0, 1, 2, 3", "ranks 0, 4", WAITS]


def test_slices_follow_each_other_and_are_as_long_as_the_streams_are_busy(simulation):
    events = written(simulation)["traceEvents"]
    timeline = simulation.timeline
    for stream, busy in timeline.busy.items():
        slices = on_thread(events, stream)
        assert len(slices) == sum(e.stream == stream for e in timeline.events) > 5
        assert sum(e["dur"] for e in slices) * 1e-6 == pytest.approx(busy, rel=1e-3)
        assert all(end_of(e) <= begin_of(following) for e, following in pairwise(slices))
    compute = on_thread(events, COMPUTE)
    for wait in on_thread(events, WAITS):
        assert not any(begin_of(e) < end_of(wait) and end_of(e) > begin_of(wait) for e in compute)


def test_waits_are_the_simulations_and_an_arrow_leads_to_each(simulation):
    events = written(simulation)["traceEvents"]
    waits = on_thread(events, WAITS)
    assert len(waits) == len(simulation.timeline.exposed) > 0
    for slice_, wait in zip(waits, simulation.timeline.exposed, strict=True):
        assert slice_["dur"] * 1e-6 == pytest.approx(wait.seconds, abs=2e-9)
        assert slice_["args"]["role"] == wait.traffic.value
        assert slice_["args"]["parameter"] == wait.collective.parameter
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == len(waits)
    for number, begin in starts.items():
        # Each end lies within a slice of its thread, and they name the same collective.
        by, to = (
            {e["args"]["collective"] for e in around(events, p)} for p in (begin, ends[number])
        )
        assert len(by) == 1 and by == to


def around(events: list[dict], point: dict) -> list[dict]:
    """The slices of a point's thread within which it lies."""
    thread = [e for e in events if e["ph"] == "X" and e["tid"] == point["tid"]]
    return [e for e in thread if begin_of(e) <= begin_of(point) < end_of(e)]


def begin_of(event: dict) -> int:
    """Nanoseconds: sums of the file's microseconds are not exact."""
    return round(event["ts"] * 1000)


def end_of(event: dict) -> int:
    return round((event["ts"] + event["dur"]) * 1000)


def test_slices_say_what_they_are(simulation):
    events = written(simulation)["traceEvents"]
    by_name = {e["args"]["node"]: e["args"] for e in events if e["ph"] == "X"}
    for node, cost in simulation.costs.items():
        if cost.seconds:
            said = by_name[node.name]
            assert (said["bytes"], said["flops"]) == (cost.bytes, cost.flops)
    assert sum(said.get("flops", 0) for said in by_name.values()) > 0
    for each in simulation.collectives:
        said = by_name[each.node.name]
        assert said["parameter"] == each.parameter and said["module"] == each.module
        assert said["bytes"] == max(each.input_bytes, each.output_bytes)
        assert said["phase"] == each.phase.value
    assert any(HOSTILE.replace(".", "_") in (said["module"] or "") for said in by_name.values())


def test_copies_to_host_memory_and_back_have_a_thread_each():
    options = OffloadActivationsOptions(block_inputs=True, min_bytes=0)
    simulation = simulated(model=partial(Decoder, layers=4), offload_activations=options)
    events = written(simulation)["traceEvents"]
    for stream in (TO_HOST, FROM_HOST):
        slices = on_thread(events, stream)
        assert slices and {e["cat"] for e in slices} == {"host_copy"}
        for each in slices:
            seconds = simulation.hardware.host_copy_seconds(each["args"]["bytes"])
            assert each["dur"] * 1e-6 == pytest.approx(seconds, abs=2e-9)
    plan = SimpleNamespace(
        simulation=simulation,
        hardware=simulation.hardware,
        need=simulation.need(),
        headroom_bytes=0,
        config=SimpleNamespace(parallelism=SimpleNamespace(tensor_parallel_degree=1)),
        world_size=2,
    )
    lanes = {lane["title"]: lane for lane in drawn(plan)["lanes"]}
    assert [name for name, lane in lanes.items() if not lane["group"]] == [
        COMPUTE, HOST, TO_HOST, FROM_HOST, WAITS
    ]  # fmt: skip
    assert len(lanes[TO_HOST]["node"]) == len(on_thread(events, TO_HOST))


def test_the_counter_is_the_memory_at_its_time(simulation):
    events = written(simulation)["traceEvents"]
    memory = simulation.memory
    at = defaultdict(list)
    for place, start in enumerate(simulation.timeline.starts):
        at[nanoseconds(start)].append(place)
    counters = [e for e in events if e["ph"] == "C"]
    for event in counters:
        places = at[round(event["ts"] * 1000)]
        most = max(memory.total[place] for place in places)
        assert sum(event["args"].values()) == most
        assert event["args"] in [
            {c.value: live[place] for c, live in memory.by_category.items()} for place in places
        ]
    assert max(sum(e["args"].values()) for e in counters) == memory.peak_bytes
    times = [e["ts"] for e in counters]
    assert times == sorted(set(times)) and len(times) > 20
    # What stands between two counters is what the first of them said.
    said = {round(e["ts"] * 1000): e["args"] for e in counters}
    now = None
    for time, places in at.items():
        now = said.get(time, now)
        assert sum(now.values()) == max(memory.total[place] for place in places)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(RuntimeError), published(path) as file:
        file.write("half")
        raise RuntimeError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]
    with published(path) as file:
        file.write("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["plan.json"]


def test_a_link_and_a_device_stay_what_they_are(tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    with published(link) as file:
        file.write("x")
    assert link.is_symlink() and (tmp_path / "target").read_text() == "x"
    check_outputs({"--json": Path(os.devnull)})
    with published(Path(os.devnull)) as file:
        file.write("x")
    assert Path(os.devnull).is_char_device()
