"use strict";
// Draws the two plots of a plan, again for every zoom: what is drawn is chosen by series.js.

(async () => {
  const { layout, narrow, CONFIG } = plotting;
  const data = await plotting.read();
  const drawCurve = () => plotting.drawCurve(data.curve);
  if (!data.nodes) { // a comparison
    await drawCurve();
    for (const query of ["(prefers-color-scheme: dark)", "(max-width: 600px)"])
      matchMedia(query).addEventListener("change", drawCurve);
    document.documentElement.dataset.drawn = "yes";
    return;
  }
  const plan = series.prepare(data);
  const memory = document.getElementById("memory");
  const streams = document.getElementById("streams");
  const merged = document.getElementById("merged");
  const whole = [0, Math.max(plan.step_ns, 1000)];
  const [UNIT, NS] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3]].find(([, ns]) => whole[1] >= ns);
  const LARGEST_NAMED = 5;
  let span = whole;

  // --- words -----------------------------------------------------------------------------

  const text = plotting.text;
  const short = (name, letters) =>
    text(name.length <= letters ? name : name.slice(0, letters / 2) + "…" + name.slice(1 - letters / 2));
  const peak = plan.total[plan.peak_position];
  const [unit, unitBytes] = peak >= 2 ** 30 ? ["GiB", 2 ** 30] : ["MiB", 2 ** 20];

  function scaled(value, units, digits) {
    const [name, each] = units.find(([, least]) => Math.abs(value) >= least) || units[units.length - 1];
    return (value / each).toLocaleString("en", { maximumFractionDigits: digits }) + " " + name;
  }
  const size = (bytes) => scaled(bytes, [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]], 2);
  const time = (ns) => scaled(ns, [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]], 3);
  const flops = (num) => scaled(num, [["TFLOP", 1e12], ["GFLOP", 1e9], ["MFLOP", 1e6], ["FLOP", 1]], 2);
  const letters = () => (narrow() ? 26 : 60);

  function whose(node) {
    const module = plan.texts[plan.nodes.module[node]], phase = plan.texts[plan.nodes.phase[node]];
    return [module && short(module, letters()), phase].filter(Boolean).join(", ");
  }

  function aliveText(at) {
    const lines = [
      `<b>${size(plan.total[at])}</b> at ${time(plan.nodes.start[at])}`,
      `${short(plan.nodes.name[at], letters())}${whose(at) && `, ${whose(at)}`}`,
      "",
    ];
    for (const i of series.largestAt(plan, at, narrow() ? 3 : LARGEST_NAMED)) {
      const owner = plan.texts[plan.storages.owner[i]] || "(the model itself)";
      const name = plan.nodes.name[plan.storages.born[i]];
      lines.push(
        `${size(plan.storages.bytes[i])}  <b>${short(owner, letters())}</b>` +
          (narrow() ? "" : `  ${short(name, 30)}, ${plan.categories[plan.storages.category[i]].title}`),
      );
    }
    return lines.join("<br>");
  }

  function sliceText(lane, i) {
    const node = lane.node[i], of = lane.of[i];
    const lines = [`<b>${lane.waits ? "waits for " : ""}${short(plan.nodes.name[lane.waits ? of : node], letters())}</b>`];
    const owner = plan.texts[lane.parameter[i]];
    if (owner) lines.push(short(owner, letters()));
    if (whose(node)) lines.push(whose(node));
    lines.push(`${time(lane.ns[i])} from ${time(lane.start[i])}`);
    lines.push(size(lane.bytes[i]) + (lane.flops[i] ? `, ${flops(lane.flops[i])}` : ""));
    if (lane.waits)
      lines.push("holds up " + (lane.holds[i] < 0 ? "the end of the step" : short(plan.nodes.name[lane.holds[i]], letters())));
    return lines.join("<br>");
  }

  function barText(lane, bar) {
    if (bar.first === bar.last) return sliceText(lane, bar.first);
    const count = bar.last - bar.first + 1;
    return (
      `<b>${count.toLocaleString("en")} slices</b>, ${time(bar.busy)} from ${time(bar.start)}<br>` +
      `the longest: ${sliceText(lane, bar.longest)}`
    );
  }

  // --- plots -----------------------------------------------------------------------------

  function timeAxis(axis) {
    return {
      ...axis,
      range: span.map((ns) => ns / NS),
      ticksuffix: ` ${UNIT}`,
      showgrid: true,
      nticks: narrow() ? 4 : 10,
      exponentformat: "none",
    };
  }

  /** Where backward begins, as a line with its name. */
  function backward(colours) {
    const at = plan.nodes.phase.findIndex((each) => plan.texts[each] === "backward");
    if (at < 0) return {};
    const x = plan.nodes.start[at] / NS;
    const [from, to] = span.map((ns) => ns / NS);
    const mark = { x, xref: "x", y: 1, yref: "paper", yanchor: "top", showarrow: false, font: { color: colours.soft } };
    return {
      shapes: [{ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: colours.soft, width: 1, dash: "dot" } }],
      annotations: from < x && x < to
        ? [{ ...mark, text: "forward", xanchor: "right", xshift: -3 }, { ...mark, text: "backward", xanchor: "left", xshift: 3 }]
        : [],
    };
  }

  function legend(plot, entries) {
    document.getElementById(`${plot.id}-legend`).replaceChildren(
      ...entries.map(({ key, title }) => {
        const entry = document.createElement("li"), swatch = document.createElement("i");
        swatch.className = "swatch";
        swatch.style.background = `var(--${key})`;
        entry.append(swatch, title);
        return entry;
      }),
    );
  }

  function drawMemory() {
    const at = series.memoryPositions(plan, ...span, Math.max(100, memory.clientWidth));
    const top = Math.max(peak, plan.usable_bytes < 1.5 * peak ? plan.usable_bytes : 0);
    const { colour, layout: drawn } = layout((axis, colours) => {
      const marks = backward(colours);
      if (plan.usable_bytes < 1.5 * peak) {
        const y = plan.usable_bytes / unitBytes;
        (marks.shapes ||= []).push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: colours.ink, width: 1, dash: "dash" } });
        (marks.annotations ||= []).push({ xref: "paper", x: 1, xanchor: "right", y, yanchor: "bottom", showarrow: false, text: `${size(plan.usable_bytes)} usable` });
      }
      return {
        ...marks,
        height: narrow() ? 320 : 420,
        hovermode: "x",
        hoverdistance: -1,
        xaxis: { ...timeAxis(axis), hoverformat: ".3f", showspikes: true, spikemode: "across", spikethickness: 1, spikecolor: colours.soft, spikedash: "solid" },
        yaxis: { ...axis, fixedrange: true, range: [0, (1.08 * top) / unitBytes], ticksuffix: ` ${unit}`, nticks: 8 },
      };
    });
    // A step lasts until the next node: the last one to the end of what is shown.
    const x = [...at.map((each) => plan.nodes.start[each] / NS), span[1] / NS];
    const column = (values) => { const y = at.map((each) => values[each] / unitBytes); return [...y, y[y.length - 1]]; };
    const areas = plan.categories
      .map(({ key, title }, i) => ({
        type: "scatter", mode: "lines", stackgroup: "alive", name: title, meta: key, x, y: column(plan.live[i]),
        line: { shape: "hv", width: 0.5, color: colour("paper") }, fillcolor: colour(key), hoverinfo: "skip",
      }))
      .filter((_, i) => plan.live[i].some((bytes) => bytes > 0));
    legend(memory, areas.map(({ meta, name }) => ({ key: meta, title: name })));
    const total = {
      type: "scatter", mode: "lines", name: "in all", meta: "total", x, y: column(plan.total),
      customdata: [...at, at[at.length - 1]], hovertext: [...at, at[at.length - 1]].map(aliveText), hoverinfo: "text",
      line: { shape: "hv", width: 1.25, color: colour("ink") },
    };
    return Plotly.react(memory, [...areas, total], drawn, CONFIG);
  }

  function drawStreams() {
    const pixels = Math.max(100, streams.clientWidth);
    const lanes = plan.lanes.filter((lane) => lane.start.length);
    const byKind = plan.kinds.map(() => ({ x: [], base: [], y: [], hovertext: [], customdata: [] }));
    const least = (span[1] - span[0]) / pixels;
    let slices = 0, drawnBars = 0;
    lanes.forEach((lane, row) => {
      for (const bar of series.bars(lane, ...span, pixels)) {
        const into = byKind[bar.kind];
        into.x.push(Math.max(bar.end - bar.start, least) / NS);
        into.base.push(bar.start / NS);
        into.y.push(-row);
        into.hovertext.push(barText(lane, bar));
        into.customdata.push([row, bar.first, bar.last]);
        slices += bar.last - bar.first + 1;
        drawnBars += 1;
      }
    });
    const { colour, layout: drawn } = layout((axis, colours) => {
      const marks = backward(colours);
      const names = lanes.map((lane, row) => ({
        xref: "paper", x: 0, xanchor: "left", yref: "y", y: 0.31 - row, yanchor: "bottom", showarrow: false,
        text: (lane.group ? "group of " : "") + text(lane.title), font: { color: colours.soft },
      }));
      return {
        shapes: marks.shapes,
        annotations: names,
        height: 50 + 62 * lanes.length,
        hovermode: "closest",
        barmode: "overlay",
        xaxis: timeAxis(axis),
        yaxis: { ...axis, fixedrange: true, range: [0.6 - lanes.length, 0.75], showgrid: false, showticklabels: false, ticks: "" },
      };
    });
    const traces = plan.kinds
      .map(({ key, title }, i) => ({
        type: "bar", orientation: "h", name: title, meta: key, width: 0.6, ...byKind[i],
        marker: { color: colour(key), line: { width: 0 } }, hoverinfo: "text", textposition: "none",
      }))
      .filter((_, i) => lanes.some((lane) => lane.kind.includes(i)));
    legend(streams, traces.map(({ meta, name }) => ({ key: meta, title: name })));
    merged.textContent = drawnBars < slices
      ? `${slices.toLocaleString("en")} slices are drawn as ${drawnBars.toLocaleString("en")} bars: neighbours that are narrower than a pixel are drawn together. Zoom in to see each.`
      : `Every slice is drawn: ${slices.toLocaleString("en")}.`;
    return Plotly.react(streams, traces, drawn, CONFIG);
  }

  // --- zoom ------------------------------------------------------------------------------

  const draw = () => Promise.all([drawMemory(), drawStreams(), drawCurve()]);

  function show(from, to) {
    const width = Math.min(Math.max(to - from, 1000), whole[1]);
    const start = Math.min(Math.max(from, 0), whole[1] - width);
    span = [start, start + width];
    return draw();
  }

  const zooms = {
    all: () => whole,
    peak: () => {
      const at = plan.nodes.start[plan.peak_position], width = whole[1] / 50;
      return [at - width / 2, at + width / 2];
    },
    in: (from, to) => [from + (to - from) / 4, to - (to - from) / 4],
    out: (from, to) => [from - (to - from) / 2, to + (to - from) / 2],
    left: (from, to) => [from - (to - from) / 2, to - (to - from) / 2],
    right: (from, to) => [from + (to - from) / 2, to + (to - from) / 2],
  };
  for (const button of document.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => show(...zooms[button.dataset.zoom](...span)));

  draw().then(() => {
    for (const plot of [memory, streams]) {
      plot.on("plotly_relayout", (change) => {
        if ("xaxis.range[0]" in change) show(change["xaxis.range[0]"] * NS, change["xaxis.range[1]"] * NS);
      });
      plot.on("plotly_doubleclick", () => show(...whole));
    }
    let waiting = 0;
    addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 150); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    document.documentElement.dataset.drawn = "yes";
  });
})();
