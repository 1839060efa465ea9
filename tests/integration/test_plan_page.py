"""The page of a plan in a real browser: what it shows is the simulation, and it asks for nothing.

One page of the debug model on 8 fake ranks, and one with names that would do harm as HTML.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from graph_trainer.core.graph.annotations import annotate_node, annotation, parameter_of
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.timeline import HOST
from graph_trainer.core.units import MIB
from graph_trainer.planner.html.page import write_page
from graph_trainer.planner.perfetto_trace import WAITS, Slice, slices, tracks
from graph_trainer.planner.plan import Outcome, Plan, make_plan
from graph_trainer.titan.config.load import load_config
from tests.integration.browser import Browser, hover

HOSTILE = "<b>&amp;</script><img src=x onerror=\"document.title='harmed'\">"
MOST_BYTES = 1.5e6


def on_the_curve(policy: str, limit: int | None, peak: int, needed: int, seconds: float) -> Outcome:
    """A policy, or a plan within a limit; sizes in MiB."""
    config = {"activation_checkpoint.type": policy}
    if limit is not None:
        config["compile.memory_limit_gib"] = str(limit / 1024)
    return Outcome(
        config=config, peak_bytes=peak * MIB, needed_bytes=needed * MIB, step_seconds=seconds
    )


CURVE = (
    on_the_curve("none", None, 60, 64, 0.003),
    on_the_curve("budget", 55, 49, 52, 0.0031),
    on_the_curve("budget", 30, 24, 28, 0.004),
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    words = ["--config", "debugmodel", "--parallelism.tensor_parallel_degree", "2"]
    # without these there is much to point at wherever the page is opened
    words += ["--compile.disable_passes", "bucket_collectives,schedule_overlap"]
    made = make_plan(load_config(words, world_size=8), 8, load_hardware("h100-sxm"))
    return replace(made, memory_curve=CURVE)


@pytest.fixture(scope="module")
def page(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(plan, tmp_path_factory.mktemp("page") / "plan.html")


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(opened: Browser, page: Path) -> Browser:
    """On a desk, by day, with the page new."""
    opened.window(1280, 900)
    opened.open(page)
    return opened


def written(plan: Plan, path: Path) -> Path:
    with path.open("w", encoding="utf-8") as file:
        write_page(plan, file)
    return path


def by_lane(plan: Plan) -> dict[str, list[Slice]]:
    """The page's lanes: streams, then the exposed waits."""
    lanes: dict[str, list[Slice]] = {name: [] for name in tracks(plan.simulation)}
    for each in slices(plan.simulation):
        lanes[each.track].append(each)
    return {name: found for name, found in lanes.items() if found}


def drawn(browser: Browser, plot: str) -> list[dict[str, Any]]:
    """What plotly holds: its own traces."""
    script = """
        return document.getElementById(arguments[0]).data.map(({meta, x, y, base, customdata}) =>
            ({meta, x: x && [...x], y: y && [...y], base, customdata}))
    """
    return browser.js(script, plot)


def bars(browser: Browser) -> dict[int, list[tuple[int, int]]]:
    """Lane -> first and last slice of each bar, in the order of time."""
    found: dict[int, list[tuple[int, int]]] = {}
    for trace in drawn(browser, "streams"):
        for lane, first, last in trace["customdata"]:
            found.setdefault(lane, []).append((first, last))
    return {lane: sorted(each) for lane, each in found.items()}


def press(browser: Browser, what: str) -> None:
    browser.js(f"document.querySelector('[data-zoom={what}]').click()")


def test_it_loads_offline_and_without_a_word_on_the_console(browser, page):
    assert browser.log() == []
    assert browser.js("return performance.getEntriesByType('resource').map(e => e.name)") == []
    html = page.read_text(encoding="utf-8")
    assert len(html) < MOST_BYTES
    tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", html.split("<script", 1)[0])
    assert tags == ['<link rel="icon" href="data:,">']
    assert "default-src 'none'" in unescape(html.split("<title>")[0])


def test_what_is_drawn_was_simulated(browser, plan):
    memory = plan.simulation.memory
    traces = {trace["meta"]: trace for trace in drawn(browser, "memory")}
    alive = {c.value: live for c, live in memory.by_category.items() if any(live)}
    assert traces.keys() == alive.keys() | {"total"}
    at = traces["total"]["customdata"]
    assert len(at) > 200 and memory.peak_position in at
    for name, live in [*alive.items(), ("total", memory.total)]:
        assert traces[name]["y"] == pytest.approx([live[p] / MIB for p in at], abs=1e-9)
    starts = plan.simulation.timeline.starts
    # The last point is the end of the step, where what the last node holds is still alive.
    assert traces["total"]["x"][:-1] == pytest.approx([starts[p] * 1e3 for p in at[:-1]], abs=1e-6)
    # A step is as high as the highest node that it stands for.
    for place, following in pairwise(at[:-1]):
        assert memory.total[place] == max(
            memory.total[p] for p in range(place, following) if starts[p] == starts[place]
        )
    assert len(browser.texts("#memory .scatterlayer .js-fill")) == len(alive)
    # Every slice is in one bar.
    lanes = by_lane(plan)
    drawn_bars = bars(browser)
    assert len(drawn_bars) == len(lanes) == 5
    # Only neighbours that are hardly to be seen are merged, and not into wide blocks.
    width = browser.js("return document.getElementById('streams').clientWidth")
    pixel = plan.simulation.timeline.step_seconds * 1e9 / width
    for found, lane in zip((drawn_bars[i] for i in range(5)), lanes.values(), strict=True):
        ends = [-1, *(last for _, last in found)]
        assert [first for first, _ in found] == [end + 1 for end in ends[:-1]]
        assert ends[-1] == len(lane) - 1
        for first, last in found:
            if first < last:
                assert lane[last].end - lane[first].start <= 4.01 * pixel
                assert max(s.end - s.start for s in lane[first : last + 1]) < 1.51 * pixel
    count = sum(map(len, drawn_bars.values()))
    total = sum(map(len, lanes.values()))
    assert count < total, "so few slices that none had to be merged"
    (note,) = browser.texts("#merged")
    assert note.startswith(f"{total:,} slices are drawn as {count:,} bars")
    assert len(browser.texts("#streams .bars .point")) == count
    names = browser.texts("#streams .annotation-text")
    plain = ("compute", HOST, WAITS)
    assert names == [name if name in plain else f"group of {name}" for name in lanes]


def test_names_are_text_and_never_code(opened, plan, tmp_path):
    simulation = plan.simulation
    # As a graph with such modules would have it.
    largest = simulation.memory.live_at(simulation.memory.peak_position)[0]
    kept = {node: dict(node.meta) for node in simulation.joint.graph.nodes}
    config = copy.copy(plan.config)
    config.dump_folder = HOSTILE
    hostile = replace(plan, config=config, rows=[replace(row, name=HOSTILE) for row in plan.rows])
    try:
        for node in simulation.joint.graph.nodes:
            if parameter_of(node) is None:
                annotate_node(node, annotation(module=f"layers.{HOSTILE}"))
        path = written(hostile, tmp_path / "hostile.html")
    finally:
        for node, meta in kept.items():
            node.meta.clear()
            node.meta.update(meta)
    opened.window(1280, 900)
    opened.open(path)
    assert opened.log() == []
    assert opened.texts("img, main b") == []
    assert HOSTILE in " ".join(opened.texts(".ledger tbody td"))
    names = opened.texts(".name")
    assert f"layers.{HOSTILE}" in names
    assert tomllib.loads(opened.texts("pre")[0])["dump_folder"] == HOSTILE
    press(opened, "peak")
    position, label = hover(opened, "memory", "#memory")
    assert "<b>&amp;</script>" in label
    assert largest.owner not in label
    assert opened.texts("img, main b") == []
    assert "harmed" not in opened.driver.title
    assert opened.log() == []
