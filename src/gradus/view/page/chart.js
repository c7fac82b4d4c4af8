// One drawing of curves, by uPlot, in the colours of the page.

/* global uPlot */

const LINES = 8;
const WHOLE = [1, 2, 5].flatMap((it) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((scale) => it * scale)).sort((a, b) => a - b);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (place) => style(`--c${place % LINES}`);

/** In a legend: nothing where the pointer is on nothing. */
const told = (value) => (value === null || value === undefined ? "" : number(value));

/** An axis for a single number; of none, any. */
const around = (value) => [(value ?? 0) - (Math.abs(value ?? 0) * 0.1 || 0.5), (value ?? 0) + (Math.abs(value ?? 0) * 0.1 || 0.5)];

/** Lines over one x; `band` draws two of them as the edges of an area, `dots` as points alone. */
function chart(holder, { xs, lines }, { height = 200, x = "", log = false, sync = null, onpick = null, marks = [], events = [], limit = null } = {}) {
  const ink = style("--soft"), rule = style("--rule");
  const bands = [];
  const series = lines.map((line, place) => {
    const shade = line.colour ?? colour(line.band ? 0 : place);
    if (line.band === "high") bands.push({ series: [place + 1, place], fill: `${shade}22` });
    return {
      label: line.label, stroke: line.faint ? `${shade}66` : shade, width: line.band ? 0 : line.faint ? 1 : 2, spanGaps: Boolean(line.dots || line.spans || line.band),
      paths: line.dots ? () => null : undefined, dash: line.dash, points: { show: Boolean(line.dots) || xs.length < 40 && !line.band && !line.faint, size: line.dots ? 8 : 5 },
      value: (_, value) => told(value),
    };
  });
  const made = new uPlot({
    width: Math.max(200, holder.clientWidth), height,
    cursor: { sync: sync ? { key: sync } : undefined, focus: { prox: 24 }, drag: { x: true, y: false } },
    legend: { live: true }, bands,
    scales: { x: { time: false, range: (_, low, high) => (low === high ? around(low) : [low, high]) }, y: log ? { distr: 3 } : { range: (_, low, high) => (low === high ? around(low) : uPlot.rangeNum(low, high, 0.1, true)) } },
    axes: [
      { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule }, incrs: x === "step" || x === "version" ? WHOLE : undefined, values: (_, all) => all.map(number) },
      { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule }, size: 58, values: (_, all) => all.map((it) => (it === null ? "" : number(it))) },
    ],
    series: [{ label: x, value: (_, value) => told(value) }, ...series],
    hooks: { draw: [(plot) => { drawMarks(plot, marks); drawEvents(plot, events, limit); }] },
  }, [xs, ...lines.map((line) => line.values)], holder);
  const watch = new ResizeObserver(() => { if (Math.abs(made.width - holder.clientWidth) > 1 && holder.clientWidth > 100) made.setSize({ width: holder.clientWidth, height }); });
  watch.observe(holder);
  let picking = 0;
  if (onpick) made.over.addEventListener("click", (event) => {
    clearTimeout(picking);
    const x = made.data[0][made.cursor.idx];
    if (event.detail === 1 && x !== undefined) picking = setTimeout(() => onpick(x), 300);  // Unless it is a double click, which goes back to the whole.
  });
  /** More points of the same lines; what was zoomed into stays. */
  function update({ xs: newer, lines: newLines }, newMarks, newEvents) {
    const { min, max } = made.scales.x, old = made.data[0];
    const isZoomed = old.length > 1 && (min > old[0] || max < old.at(-1));
    [marks, events] = [newMarks, newEvents];
    made.batch(() => {
      made.setData([newer, ...newLines.map((line) => line.values)], !isZoomed);
      if (isZoomed) made.setScale("x", { min, max });
    });
  }
  return { update, destroy: () => { clearTimeout(picking); watch.disconnect(); made.destroy(); } };
}

/** A small triangle on the axis for each place where a number was not finite. */
function drawMarks(plot, marks) {
  if (!marks.length) return;
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.fillStyle = style("--bad");
  for (const mark of marks) {
    const x = plot.valToPos(mark, "x", true), y = bbox.top + bbox.height, size = 5 * devicePixelRatio;
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath(); ctx.moveTo(x, y - 2 * size); ctx.lineTo(x - size, y); ctx.lineTo(x + size, y); ctx.fill();
  }
  ctx.restore();
}

/** Lines up from the axis where something happened, and one across at the limit of an alarm. */
function drawEvents(plot, events, limit) {
  const { ctx, bbox } = plot, right = bbox.left + bbox.width, bottom = bbox.top + bbox.height;
  ctx.save();
  for (const { x, dash, shade, share } of events) {
    const at = plot.valToPos(x, "x", true);
    if (at < bbox.left || at > right) continue;
    ctx.strokeStyle = style(shade);
    ctx.lineWidth = (share < 1 ? 2.5 : 1.5) * devicePixelRatio;
    ctx.setLineDash(dash.map((it) => it * devicePixelRatio));
    ctx.beginPath(); ctx.moveTo(at, bottom); ctx.lineTo(at, bottom - share * bbox.height); ctx.stroke();
  }
  const at = limit === null ? NaN : plot.valToPos(limit, "y", true);
  if (at >= bbox.top && at <= bottom) {
    ctx.strokeStyle = style("--bad");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath(); ctx.moveTo(bbox.left, at); ctx.lineTo(right, at); ctx.stroke();
  }
  ctx.restore();
}

/** The picture of a drawn chart on the colour of its card. */
function pictureOf(holder, name) {
  const drawn = holder.querySelector("canvas"), whole = document.createElement("canvas");
  if (!drawn) return;
  Object.assign(whole, { width: drawn.width, height: drawn.height });
  const ctx = whole.getContext("2d");
  ctx.fillStyle = style("--card");
  ctx.fillRect(0, 0, whole.width, whole.height);
  ctx.drawImage(drawn, 0, 0);
  whole.toBlob((blob) => save(blob, `${name}.png`));
}

/** An exponential mean of what came before: the last smooth point never sees the future. */
function smoothed(values, strength) {
  if (!strength) return values;
  let total = 0, weight = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    total = strength * total + value;
    weight = strength * weight + 1;
    return total / weight;
  });
}
