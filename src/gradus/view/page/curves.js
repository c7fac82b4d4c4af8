// All metrics by the groups of the catalogue, several runs over each other, one crosshair.

import { address, apiOf, fill, get, h, number } from "./dom.js";
import { chart, colour, smoothed } from "./chart.js";

const AT_ONCE = 24;
const AXES = { steps: "step", tokens: "tokens trained", minutes: "minutes" };

export async function curvesView(main, at, runs) {
  const query = at.query;
  const others = query.getAll("with").filter((id) => runs.some((it) => it.id === id));
  const chosen = [at.run, ...others];
  const catalogues = await Promise.all(chosen.map((id) => get(`${apiOf(id)}/metrics`)));
  const known = new Map();
  catalogues.flat().forEach((it) => { if (!known.has(it.name)) known.set(it.name, { ...it }); });
  catalogues.slice(1).flat().forEach((it) => { if (it.lost.length) known.get(it.name).lostElsewhere = true; });
  const state = { over: query.get("over") ?? "steps", search: query.get("search") ?? "", smooth: Number(query.get("smooth") ?? 0), log: query.has("log"), section: query.get("section") };
  const open = new Set(state.section ? [state.section] : []);
  let charts = [];
  const holder = h("div", {});

  function go(changes) {
    Object.assign(state, changes);
    const words = [...others.map((id) => ["with", id]), ["over", state.over], ["search", state.search], ["smooth", state.smooth || ""], ["log", state.log ? "1" : ""]].filter(([, value]) => value && value !== "steps");
    history.replaceState(null, "", address(at.run, "curves", words));
    draw();
  }

  const search = h("input", { type: "search", value: state.search, placeholder: "name or meaning", "aria-label": "Search metrics", "data-search": "1" });
  let timer = 0;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => go({ search: search.value }), 150); });
  const tools = h("div", { class: "tools" }, search,
    h("label", {}, "over ", h("select", { onchange: (e) => go({ over: e.target.value }) }, Object.keys(AXES).map((it) => h("option", { selected: it === state.over }, it)))),
    h("label", {}, "smooth ", h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, onchange: (e) => go({ smooth: Number(e.target.value) }) })),
    h("label", {}, h("input", { type: "checkbox", checked: state.log, onchange: (e) => go({ log: e.target.checked }) }), " log"),
    runs.length > 1 ? h("label", {}, "lay over ", h("select", { onchange: (e) => { if (e.target.value) location.hash = address(at.run, "curves", [...others, e.target.value].map((id) => ["with", id])); } },
      h("option", { value: "" }, "…"), runs.filter((it) => !chosen.includes(it.id)).map((it) => h("option", { value: it.id }, it.name)))) : null);
  const legend = chosen.length > 1 ? h("p", { class: "legend" }, chosen.map((id, place) => h("span", { class: `k${place % 8}` }, id, " ",
    place ? h("a", { href: address(at.run, "curves", others.filter((it) => it !== id).map((it) => ["with", it])), "aria-label": `take ${id} away` }, "✕") : null))) : null;
  fill(main, h("h1", {}, "Curves"), tools, legend, holder);

  function matching() {
    const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    return [...known.values()].filter((it) => words.every((word) => `${it.name} ${it.meaning} ${it.section}`.toLowerCase().includes(word)));
  }

  function draw() {
    charts.forEach((it) => it.destroy());
    charts = [];
    const found = matching();
    const sections = new Map();
    found.forEach((it) => sections.set(it.section, [...(sections.get(it.section) ?? []), it]));
    if (!open.size && !state.search) [...sections.keys()].filter((it) => /Episodes|Loss/.test(it)).slice(0, 1).forEach((it) => open.add(it));
    fill(holder, found.length ? null : h("p", { class: "soft" }, known.size ? "No metric has these words." : "The run has no records: no step and no evaluation came to its end."),
      [...sections].map(([title, metrics]) => section(title, metrics, Boolean(state.search) ? sections.size <= 3 || found.length <= AT_ONCE : open.has(title))));
  }

  function section(title, metrics, isOpen) {
    const grid = h("div", { class: "plots" });
    const details = h("details", { open: isOpen }, h("summary", {}, h("b", {}, title), ` ${metrics.length}`), grid);
    let isDrawn = false;
    const drawNow = () => { if (details.open && !isDrawn) { isDrawn = true; more(grid, metrics, 0); } };
    details.addEventListener("toggle", () => { if (details.open) open.add(title); else open.delete(title); drawNow(); });
    if (isOpen) queueMicrotask(drawNow);
    return details;
  }

  async function more(grid, metrics, first) {
    const some = metrics.slice(first, first + AT_ONCE);
    const query = [["over", state.over], ...some.map((it) => ["name", it.name])];
    const values = await Promise.all(chosen.map((id) => get(`${apiOf(id)}/curves`, query)));
    if (!grid.isConnected) return;
    for (const metric of some) grid.append(one(metric, values.map((it) => it[metric.name])));
    if (first + AT_ONCE < metrics.length) {
      const next = h("button", { onclick: () => { next.remove(); more(grid, metrics, first + AT_ONCE); } }, `${metrics.length - first - AT_ONCE} more`);
      grid.append(next);
    }
  }

  function one(metric, values) {
    const plot = h("div", { class: "plot" });
    const last = values[0]?.y.at(-1);
    const card = h("figure", { class: "chart" }, h("figcaption", {}, h("b", {}, metric.name), metric.unit ? h("span", { class: "soft" }, ` in ${metric.unit}`) : null, h("span", { class: "last" }, number(last)),
      h("div", { class: "soft small" }, metric.meaning || "No entry of the catalogue describes it."),
      metric.lost.length ? h("div", { class: "late small" }, `not finite in step ${metric.lost.slice(0, 5).join(", ")}${metric.lost.length > 5 ? " …" : ""}`) : null), plot);
    const isEmpty = values.every((it) => !it || !it.y.length);
    if (isEmpty) { plot.append(h("p", { class: "soft small" }, "Never a finite number.")); return card; }
    requestAnimationFrame(() => { if (plot.isConnected) charts.push(chart(plot, joined(values, state), { height: 170, x: AXES[state.over], log: state.log && values.every((it) => it.y.every((y) => y > 0)), sync: `curves-${state.over}`, marks: state.over === "steps" ? metric.lost : [], onpick: state.over === "steps" && !metric.name.startsWith("eval/") ? (step) => { location.hash = address(at.run, "episodes", [["step", step - 1], ["purpose", "train"]]); } : null })); });
    return card;
  }

  function joined(values, { smooth }) {
    const xs = [...new Set(values.flatMap((it) => it?.x ?? []))].sort((a, b) => a - b);
    const lines = values.flatMap((it, place) => {
      const at = new Map(it.x.map((x, n) => [x, it.y[n]]));
      const raw = xs.map((x) => at.get(x) ?? null);
      const line = { label: chosen[place], colour: colour(place), spans: chosen.length > 1, values: raw };
      return smooth ? [{ ...line, faint: true, label: `${chosen[place]}, raw` }, { ...line, values: smoothed(raw, smooth) }] : [line];
    });
    return { xs, lines };
  }

  draw();
  let records = null;
  return {
    recolour: draw, close: () => charts.forEach((it) => it.destroy()),
    news(news) {
      if (records !== null && news.records !== records && !document.activeElement?.closest?.(".tools")) draw();
      records = news.records;
    },
  };
}
