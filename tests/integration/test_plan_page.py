"""The page of a plan in a real browser: what it shows is the simulation, and it asks for nothing.

One page of the debug model on 8 fake ranks, and one with names that would do harm as HTML.
"""

from __future__ import annotations

import copy
import io
import re
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, replace
from html import unescape
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from graph_trainer.core.analysis.collective_purpose import Traffic
from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.graph.annotations import annotate_node, annotation, parameter_of
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.units import MIB
from graph_trainer.planner.html.drawn import KINDS
from graph_trainer.planner.html.page import write_comparison, write_page
from graph_trainer.planner.plan import Outcome, Plan, make_plan
from graph_trainer.planner.plan_report import PURPOSES, plan_report
from graph_trainer.planner.trace import WAIT, WAITS, Slice, slices, tracks
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


def shown(browser: Browser, plot: str) -> tuple[float, float]:
    """The span that a plot shows, nanoseconds."""
    script = "return document.getElementById(arguments[0])._fullLayout.xaxis.range"
    start, end = browser.js(script, plot)
    return start * 1e6, end * 1e6


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


def test_headings_state_the_result(browser, plan):
    (title,) = browser.texts("h1")
    assert title.startswith("Fits: ") and title.endswith(" GiB")
    text = browser.js("return document.body.innerText")
    assert f"{plan.mfu:.1%}" in text and f"{plan.tokens_per_second_per_gpu:,.0f}" in text
    exposed = sum(plan.simulation.timeline.exposed_seconds().values())
    assert f"{exposed / plan.simulation.timeline.step_seconds:.1%} of forward" in text
    names = browser.js(
        "return [...document.querySelectorAll('.ledger tbody tr')].map("
        "e => e.firstElementChild.firstChild.textContent)"
    )
    rows = [row for row in plan.rows if row.name in names]
    assert names == [row.name for row in rows] and names[0] == "capture"
    (folded,) = browser.texts(".ledger details p")
    folded = folded.removesuffix(".").rpartition(": ")[2].split(", ")
    assert folded == [row.name for row in plan.rows if row.name not in names] and len(folded) > 4
    nodes = browser.js(
        "return [...document.querySelectorAll('.ledger tbody tr')].map("
        "e => e.children[1].firstChild.textContent)"
    )
    assert nodes == [f"{row.nodes:,}" for row in rows]
    largest = plan.simulation.memory.live_at(plan.simulation.memory.peak_position)[0]
    assert largest.owner in text and largest.node.name in text


def test_what_does_not_fit_says_by_how_much(opened, plan, tmp_path):
    usable = plan.hardware.memory_bytes
    opened.window(1280, 900)
    opened.open(
        written(replace(plan, need=plan.need._replace(total=2 * usable)), tmp_path / "large.html")
    )
    heading = "return [document.querySelector('h1').className, document.title]"
    kind, title = opened.js(heading)
    gib = usable / 2**30
    assert kind == "bad" and title.startswith(f"Does not fit: needs {2 * gib:.2f} of {gib:.2f} GiB")
    assert "too much" in opened.js("return document.querySelector('.figures').innerText")


def test_long_steps_are_in_seconds(opened, plan, tmp_path):
    done = plan.simulation
    slow = replace(done, timeline=replace(done.timeline, step_seconds=9.0))
    curve = tuple(replace(each, step_seconds=9 + each.step_seconds) for each in CURVE)
    opened.window(1280, 900)
    opened.open(written(replace(plan, simulation=slow, memory_curve=curve), tmp_path / "slow.html"))
    for plot, axis in (("memory", "x"), ("streams", "x"), ("curve", "y")):
        ticks = [text for text in opened.texts(f"#{plot} .{axis}tick text") if " " in text]
        assert ticks and {text.split()[-1] for text in ticks} == {"s"}, plot
    assert "9 s" in opened.texts("#memory .xtick text")


def test_the_memory_curve_is_drawn_over_what_a_device_must_have(browser):
    line, points = drawn(browser, "curve")
    assert line["x"] == [28, 52] and line["y"] == pytest.approx([4, 3.1])
    assert points["x"] == [64]
    assert list(filter(None, browser.texts("#curve .textpoint"))) == ["none"]
    assert {text.split()[-1] for text in browser.texts("#curve .xtick text")} == {"MiB"}
    assert browser.texts("#curve .ytick text")[-1].endswith(" ms")


def test_a_comparison_has_the_front(opened, plan, tmp_path):
    """Of three that fit one is slower and larger than another."""
    speeds = {"4": (50, 4000.0), "2": (40, 3000.0), "3": (60, 2000.0), "1": (20, 1000.0)}
    rows = [
        Outcome(
            config={"training.local_batch_size": batch, "dump_folder": HOSTILE},
            fits=needed < 55,
            needed_bytes=needed * MIB,
            step_seconds=9.0,
            tokens_per_second_per_gpu=speed,
        )
        for batch, (needed, speed) in speeds.items()
    ]
    rows.append(Outcome(config=rows[0].config, error="too large"))
    document = plan_report(plan) | {"rows": [asdict(row) for row in rows]}
    path = tmp_path / "front.html"
    with path.open("w", encoding="utf-8") as file:
        write_comparison(document, "a model", 55 * MIB, file)
    opened.window(1280, 900)
    opened.open(path)
    line, others = drawn(opened, "curve")
    assert (line["x"], line["y"]) == ([20, 40, 50], [1000, 3000, 4000])
    assert (others["x"], others["y"]) == ([60], [2000])
    assert sorted(opened.texts("#curve .textpoint")) == ["1", "2", "3", "4"]
    assert "3 of 5 combinations fit" in opened.texts("h1")[0]
    assert opened.texts("#curve .annotation-text") == ["55.00 MiB of h100-sxm"]
    assert opened.texts("tbody tr td:nth-child(3)")[0] == HOSTILE and opened.texts("main b") == []
    assert opened.log() == [] and "harmed" not in opened.driver.title


@pytest.mark.parametrize("width", [1280, 500])
def test_labels_of_near_points_cover_no_other(opened, plan, tmp_path, width):
    """Pairs at both ends of the front, and three points beside it."""
    sizes = {30.4: 19673, 28.8: 19626, 11.0: 18450, 370.8: 20027, 369.3: 20024, 30.0: 19500}
    rows = []
    for needed, speed in (sizes | {31.0: 19510, 31.5: 19505}).items():
        row = Outcome(config={}, fits=needed < 55, needed_bytes=int(needed * 1024 * MIB))
        rows.append(asdict(replace(row, tokens_per_second_per_gpu=float(speed))))
    path = tmp_path / "near.html"
    with path.open("w", encoding="utf-8") as file:
        document = plan_report(plan) | {"rows": rows}
        write_comparison(document, "a model", 80 * 1024 * MIB, file)
    opened.window(width, 900)
    opened.open(path)
    script = """
        const shown = [...document.querySelectorAll("#curve .textpoint, #curve .annotation-text")];
        return shown.filter((each) => each.textContent).map((each) => {
            const {left, right, top, bottom} = each.getBoundingClientRect();
            return [each.textContent, left, right, top, bottom];
        })
    """
    labels = opened.js(script)
    assert {"4", "5"} <= {name for name, *_ in labels} and len(labels) > 5
    for one, two in combinations(labels, 2):
        beside = one[2] <= two[1] or two[2] <= one[1]
        assert beside or one[4] <= two[3] or two[4] <= one[3], (one, two)


def test_memory_is_drawn_as_it_was_simulated(browser, plan):
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


def test_every_slice_is_in_one_bar(browser, plan):
    lanes = by_lane(plan)
    drawn_bars = bars(browser)
    assert len(drawn_bars) == len(lanes) == 4
    # Only neighbours that are hardly to be seen are merged, and not into wide blocks.
    width = browser.js("return document.getElementById('streams').clientWidth")
    pixel = plan.simulation.timeline.step_seconds * 1e9 / width
    for found, lane in zip((drawn_bars[i] for i in range(4)), lanes.values(), strict=True):
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
    assert names == [name if name in ("compute", WAITS) else f"group of {name}" for name in lanes]


def test_zoomed_in_every_slice_has_a_bar_of_its_own(browser, plan):
    press(browser, "peak")
    press(browser, "in")
    browser.until("return document.getElementById('merged').textContent.startsWith('Every')")
    start, end = shown(browser, "streams")
    assert shown(browser, "memory") == (start, end)
    within = {
        lane: [(i, i) for i, each in enumerate(found) if each.end > start and each.start < end]
        for lane, found in enumerate(by_lane(plan).values())
    }
    assert bars(browser) == {lane: found for lane, found in within.items() if found}
    assert sum(map(len, within.values())) > 5
    # Each is as long as it takes and stands where it begins.
    lanes = list(by_lane(plan).values())
    for trace in drawn(browser, "streams"):
        for length, base, (lane, i, _) in zip(
            trace["x"], trace["base"], trace["customdata"], strict=True
        ):
            each = lanes[lane][i]
            assert base == pytest.approx(each.start / 1e6, abs=1e-6)
            assert length == pytest.approx((each.end - each.start) / 1e6, abs=1e-6)
    press(browser, "all")
    assert shown(browser, "memory") == shown(browser, "streams")
    assert shown(browser, "memory")[1] == pytest.approx(
        plan.simulation.timeline.step_seconds * 1e9, abs=1
    )


def test_dragging_zooms_both_plots_and_a_double_click_shows_the_whole_step(browser):
    whole = shown(browser, "memory")
    browser.point_at("#streams", right=-200)
    browser.actions().click_and_hold().move_by_offset(250, 0).release().perform()
    browser.until("return document.getElementById('memory')._fullLayout.xaxis.range[0] > 0")
    start, end = shown(browser, "memory")
    assert whole[0] < start < end < whole[1]
    assert shown(browser, "streams") == pytest.approx((start, end))
    browser.point_at("#memory")
    browser.actions().double_click().perform()
    browser.until("return document.getElementById('streams')._fullLayout.xaxis.range[0] === 0")
    assert shown(browser, "memory") == shown(browser, "streams") == whole
    assert browser.log() == []


def shortened(name: str, letters: int) -> str:
    """A long name as the labels show it: its two ends."""
    return name if len(name) <= letters else name[: letters // 2] + "…" + name[1 - letters // 2 :]


@pytest.mark.parametrize(("zoom", "right"), [("all", -300), ("all", 300), ("peak", 10)])
def test_pointing_at_memory_names_the_largest_tensors_alive(browser, plan, zoom, right):
    press(browser, zoom)
    position, label = hover(browser, "memory", "#memory", right)
    live = plan.simulation.memory.live_at(position)
    for storage in live[:5]:
        assert storage.owner in label and shortened(storage.node.name, 30) in label
    assert f"{live[0].bytes / 1024:,.0f} KiB" in label or f"{live[0].bytes / MIB:g} MiB" in label
    assert list(plan.simulation.joint.graph.nodes)[position].name in label


def test_pointing_at_a_slice_says_what_it_is(browser, plan):
    press(browser, "peak")
    press(browser, "out")
    lanes = list(by_lane(plan).values())
    seen = set()
    for trace in drawn(browser, "streams"):
        if not trace["customdata"] or trace["meta"] in seen:
            continue
        seen.add(trace["meta"])
        count = len(seen)
        browser.js(
            """
            const [meta, name] = arguments;
            const plot = document.getElementById("streams");
            const group = [...plot.querySelectorAll(".bars")]
                .find((bars) => bars.__data__[0].trace.meta === meta);
            const widest = [...group.querySelectorAll(".point path")].filter((path) => {
                const {left, right} = path.getBoundingClientRect();
                return left > plot.getBoundingClientRect().left + 70
                    && right < plot.getBoundingClientRect().right - 10;
            }).sort((a, b) => b.getBoundingClientRect().width - a.getBoundingClientRect().width)[0];
            widest.id = name;
            """,
            trace["meta"],
            f"bar{count}",
        )
        (lane, first, last), label = hover(browser, "streams", f"#bar{count}")
        each = lanes[lane][first]
        assert first == last
        if each.track == WAITS:
            assert f"waits for {each.collective.node.name}" in label
            delayed = each.delayed.name if each.delayed else "the end of the step"
            assert f"holds up {delayed}" in label
        else:
            assert shortened(each.node.name, 60) in label
        if each.collective is not None and each.collective.parameter:
            assert shortened(each.collective.parameter, 60) in label
        assert f"{round((each.end - each.start) / 1e3, 3):g} µs" in label
    assert seen >= {"wait", "memory", "matmul"} and seen & {"unshard", "reduce_grad"}


def test_nothing_is_wider_than_a_phone_but_tables_in_their_own_frame(browser):
    browser.window(375, 812)
    browser.driver.refresh()
    browser.until("return document.documentElement.dataset.drawn === 'yes'")
    assert browser.js("return document.documentElement.scrollWidth") == 375
    assert browser.js("return document.body.scrollWidth") <= 375
    frames = browser.js(
        "return [...document.querySelectorAll('.wide')].map(e => [e.clientWidth, e.scrollWidth])"
    )
    assert any(inner > outer for outer, inner in frames)
    for plot in ("memory", "streams"):
        box = browser.js(
            f"const b = document.querySelector('#{plot} .main-svg').getBoundingClientRect();"
            "return [b.left, b.right, b.height]"
        )
        assert box[0] >= 0 and box[1] <= 375 and box[2] > 200
    smallest = browser.js(
        "return Math.min(...[...document.querySelectorAll('button')]"
        ".map(e => Math.min(e.offsetWidth, e.offsetHeight)))"
    )
    assert smallest >= 44, "too small for a finger"
    assert browser.log() == []


def test_a_flag_in_a_note_is_in_one_line(opened, plan, tmp_path, monkeypatch):
    """A browser breaks lines after hyphens, as the flag's in the middle of this one."""
    flag = "--activation_checkpoint-per-op"
    notes = [" ".join(["word"] * n + [flag]) for n in range(12)]
    monkeypatch.setattr("graph_trainer.planner.plan_report._notes", lambda plan: notes)
    opened.window(375, 812)
    opened.open(written(plan, tmp_path / "notes.html"))
    script = """
        return [...document.querySelectorAll('.note span')].map(e => {
            const range = document.createRange();
            range.selectNodeContents(e);
            return [e.textContent, new Set([...range.getClientRects()].map(r => r.top)).size];
        }).filter(([text, lines]) => text === arguments[0]);
    """
    assert opened.js(script, flag) == [[flag, 1]] * 12


@pytest.mark.parametrize("width", [700, 800, 1024, 1080, 1280])
def test_tables_beside_each_other_are_whole(browser, width):
    browser.window(width, 900)
    frames = (
        "return [...document.querySelectorAll('.pair .wide')].map("
        "e => [e.clientWidth, e.scrollWidth])"
    )
    shown = browser.js(frames)
    assert len(shown) == 2 and all(inner <= outer for outer, inner in shown)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_is_filled_and_its_blues_differ(browser, dark):
    browser.window(1280, 900, dark=dark)
    gaps = browser.js(
        "return [...document.querySelectorAll('.plot')].map("
        "e => e.clientHeight - e.querySelector('.main-svg').getBoundingClientRect().height)"
    )
    assert len(gaps) == 3 and max(gaps) < 10
    widths = "return [...document.querySelectorAll('main > section table')].map(e => e.clientWidth)"
    assert min(width for width in browser.js(widths) if width) > 400
    legend = browser.texts("#memory-legend li")
    listed = [text for text in browser.texts(".pair > :first-child th") if text in legend]
    assert len(listed) > 4 and listed == [text for text in legend if text in listed]
    headings, figures = (
        browser.js(
            "return [...document.querySelectorAll(arguments[0])].map("
            "e => e.getBoundingClientRect().right)",
            f".ledger {part} tr:first-child > .n",
        )
        for part in ("thead", "tbody")
    )
    assert headings == figures
    kinds = [each.value for each in (*Category, *Traffic)] + list(KINDS)
    colours = browser.js(
        "const style = getComputedStyle(document.documentElement);"
        "return arguments[0].map(kind => style.getPropertyValue(`--${kind}`).trim())",
        kinds,
    )
    of_kind = dict(zip(kinds, colours, strict=True))
    assert all(colours) and len({of_kind[kind] for kind in (*PURPOSES, WAIT)}) == len(PURPOSES) + 1
    assert browser.contrast_of("--parameters", "--optimizer_state") > (2.4 if dark else 2.1)
    assert browser.contrast_of("--matmul", "--tensor_parallel") > (2.4 if dark else 2.1)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_in_either_scheme(browser, dark):
    browser.window(1280, 900, dark=dark)
    light = "return getComputedStyle(document.body).backgroundColor"
    assert browser.js(light) == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
    for selector in ("h2", ".note", "h1", ".figures dt", "td"):
        assert browser.contrast(selector) >= 4.5, selector
    # The plots follow without a reload.
    ink = browser.js("return getComputedStyle(document.body).color")
    browser.until(
        "const plot = document.getElementById('memory');"
        "const probe = document.createElement('i'); document.body.append(probe);"
        "probe.style.color = plot._fullLayout.font.color;"
        f"const same = getComputedStyle(probe).color === '{ink}'; probe.remove(); return same"
    )


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


def test_a_script_in_the_page_that_is_not_its_own_does_not_run(browser, page, tmp_path):
    """The second lock: were a name ever written as it stands, the policy would stop it."""
    html = page.read_text(encoding="utf-8")
    path = tmp_path / "broken.html"
    path.write_text(
        html.replace("</main>", f"<script>document.title='harmed'</script>{HOSTILE}</main>"),
        encoding="utf-8",
    )
    browser.open(path)
    assert browser.driver.title != "harmed"
    assert any("Content Security Policy" in line for line in browser.log())


def test_the_page_is_written_a_part_at_a_time(plan):
    class Counted(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            return super().write(text)

    file = Counted()
    write_page(plan, file)
    assert file.writes > 100
