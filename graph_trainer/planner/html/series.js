"use strict";
// What of the simulation is drawn for a span of time and a number of pixels. Times are
// nanoseconds, sizes bytes; a node is its position in the graph. Nothing here touches the page.

const series = (() => {
  /** The data as plots need them: running totals, and the lanes by time. */
  function prepare(plan) {
    const count = plan.nodes.start.length;
    const live = plan.categories.map(({ key }) => {
      const values = new Float64Array(count);
      let now = 0;
      plan.memory[key].forEach((change, at) => { values[at] = now += change; });
      return values;
    });
    const total = new Float64Array(count);
    for (const values of live) values.forEach((bytes, at) => { total[at] += bytes; });
    return { ...plan, live, total };
  }

  /** First place of a sorted column whose value is not below `wanted`. */
  function firstFrom(column, wanted) {
    let low = 0, high = column.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (column[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low;
  }

  /**
   * Positions at which to read memory between two times, at most one a pixel: that of the most
   * bytes alive, so that no peak is lost. The last one before the span comes first.
   */
  function memoryPositions(plan, from, to, pixels) {
    const start = plan.nodes.start;
    const first = Math.max(0, firstFrom(start, from) - 1);
    const end = Math.min(start.length, firstFrom(start, to) + 1);
    const width = (to - from) / pixels;
    const found = [];
    let bin = -Infinity;
    for (let at = first; at < end; at++) {
      // Nodes that take no time share a moment: one bin, however far one zooms in.
      const own = start[at] < from ? -1 : width > 1 ? Math.floor((start[at] - from) / width) : start[at];
      if (own !== bin) { found.push(at); bin = own; }
      else if (plan.total[at] > plan.total[found[found.length - 1]]) found[found.length - 1] = at;
    }
    return found;
  }

  /** The largest storages alive at a node. They are sorted by size. */
  function largestAt(plan, position, wanted) {
    const { born, last } = plan.storages;
    const found = [];
    for (let i = 0; i < born.length && found.length < wanted; i++)
      if (born[i] <= position && position <= last[i]) found.push(i);
    return found;
  }

  /**
   * A lane's slices between two times as bars. Neighbours narrower than a pixel and a half with
   * less than a pixel between them become one bar of up to four pixels, of the kind that takes
   * most of it; a bar knows the slices that it stands for.
   */
  function bars(lane, from, to, pixels) {
    const pixel = (to - from) / pixels;
    const found = [];
    let open = null;
    let first = firstFrom(lane.start, from);
    while (first > 0 && lane.start[first - 1] + lane.ns[first - 1] > from) first--;
    for (let i = first; i < lane.start.length && lane.start[i] < to; i++) {
      const start = lane.start[i], ns = lane.ns[i], end = start + ns;
      const narrow = ns < 1.5 * pixel;
      if (narrow && open && start - open.end < pixel && end - open.start <= 4 * pixel) {
        open.end = end;
      } else {
        open = { start, end, first: i, last: i, busy: 0, longest: i, byKind: new Map() };
        found.push(open);
      }
      open.last = i;
      open.busy += ns;
      if (ns > lane.ns[open.longest]) open.longest = i;
      open.byKind.set(lane.kind[i], (open.byKind.get(lane.kind[i]) || 0) + ns);
      if (!narrow) open = null;
    }
    for (const bar of found)
      bar.kind = [...bar.byKind].reduce((most, each) => (each[1] > most[1] ? each : most))[0];
    return found;
  }

  return { prepare, memoryPositions, largestAt, bars };
})();
