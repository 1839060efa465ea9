"use strict";
// What all plots share: the data, the look, and the plot of plans over memory.

const plotting = (() => {
  const narrow = () => document.documentElement.clientWidth < 600;
  const CONFIG = { displayModeBar: false, doubleClick: false, responsive: true, scrollZoom: false };

  /** The data: JSON, compressed. */
  async function read() {
    const packed = Uint8Array.from(atob(document.getElementById("plan").textContent), (each) => each.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  function layout(more) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const [ink, soft, line, paper] = ["ink", "soft", "line", "paper"].map(colour);
    const axis = { gridcolor: line, zeroline: false, linecolor: line, tickcolor: line, tickfont: { color: soft } };
    return {
      colour,
      layout: {
        autosize: true,
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: ink },
        // The same for both plots: a moment stands at the same place in each.
        margin: { l: narrow() ? 58 : 72, r: 24, t: 8, b: 36 },
        showlegend: false,
        dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
        hoverlabel: { bgcolor: paper, bordercolor: soft, font: { color: ink, size: narrow() ? 11 : 13 }, align: "left" },
        ...more(axis, { ink, soft, line, paper }),
      },
    };
  }

  /** Names are data: plotly reads some HTML in its texts. */
  const text = (name) => String(name).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  /**
   * The side of its point on which a label stands, by point: none covers a label or a point, and one
   * without a free side is left out. Pixels are a guess from below, as no axis is drawn yet.
   */
  function sidesOf(points, across, down) {
    const spread = (values) => Math.max(...values) - Math.min(...values) || 1;
    const dx = across / spread(points.map(({ x }) => x)), dy = down / spread(points.map(({ y }) => y));
    const box = (point, left, above, wide, high) => ({ x: point.x * dx + left, y: point.y * dy + above, wide, high });
    const apart = (one, other) =>
      one.x + one.wide <= other.x || other.x + other.wide <= one.x || one.y + one.high <= other.y || other.y + other.high <= one.y;
    const taken = points.map((point) => box(point, -3, -3, 6, 6));
    const chosen = new Map();
    for (const point of points.filter(({ label }) => label)) {
      const wide = 8 * point.label.length + 4, high = 16;
      const places = [
        ["top left", -wide, 3], // of the line alone: a front rises to the right
        ["top center", -wide / 2, 3], ["bottom right", 0, -19], ["top right", 0, 3], ["bottom left", -wide, -19],
      ];
      for (const [side, left, above] of point.line ? places : places.slice(1)) {
        const label = box(point, left, above, wide, high);
        if (!taken.every((each) => apart(label, each))) continue;
        taken.push(label);
        chosen.set(point, side);
        break;
      }
    }
    return chosen;
  }

  /** Plans over memory: the best as a line, others as points; where memory ends, if that is near. */
  function drawCurve(curve) {
    const div = document.getElementById("curve");
    if (!div) return Promise.resolve();
    const { points, limit } = curve;
    const near = Math.max(...points.map(({ x }) => x)) > 0.7 * limit.x;
    const { colour, layout: drawn } = layout((axis, colours) => ({
      height: narrow() ? 300 : 360,
      hovermode: "closest",
      xaxis: { ...axis, fixedrange: true, ticksuffix: ` ${curve.x_unit}`, nticks: narrow() ? 4 : 10 },
      yaxis: { ...axis, fixedrange: true, ticksuffix: ` ${curve.y_unit}`, showticksuffix: "last", nticks: 8, exponentformat: "none", automargin: true },
      shapes: near ? [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: limit.x, x1: limit.x, line: { color: colours.ink, width: 1, dash: "dash" } }] : [],
      annotations: near ? [{ yref: "paper", y: 1, yanchor: "bottom", x: limit.x, xanchor: "right", xshift: 4, showarrow: false, text: text(limit.text) }] : [],
    }));
    if (near) drawn.margin.t = 28; // where the limit is named, above all labels
    const sides = sidesOf(points, div.clientWidth - 200, narrow() ? 200 : 260);
    const trace = (name, chosen, look) => ({
      type: "scatter", name, x: chosen.map(({ x }) => x), y: chosen.map(({ y }) => y),
      text: chosen.map((point) => (sides.has(point) ? text(point.label) : "")),
      textposition: chosen.map((point) => sides.get(point) || "top center"), hovertext: chosen.map((point) => text(point.text)), hoverinfo: "text", cliponaxis: false, ...look,
    });
    const ink = colour("ink");
    return Plotly.react(div, [
      trace("best", points.filter(({ line }) => line), { mode: "lines+markers+text", line: { color: ink, width: 1.5 }, marker: { size: 6, color: ink } }),
      trace("others", points.filter(({ line }) => !line), { mode: "markers+text", marker: { size: 10, symbol: "diamond", color: colour("activations") } }),
    ], drawn, CONFIG);
  }

  return { narrow, CONFIG, read, layout, text, drawCurve };
})();
