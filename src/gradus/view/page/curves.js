// All metrics by the groups of the catalogue, several runs over each other, one crosshair.

const CHARTS_AT_ONCE = 24;
const LETTERS = "ABCD";
const EVENTS = { run_resumed: ["resumed", "--c3", [2, 3], 1], checkpoint_committed: ["checkpoint", "--c2", [], 0.08], evaluation_ended: ["evaluation", "--c6", [1, 2], 0.16], on: ["alarm on", "--bad", [], 1], off: ["alarm off", "--c7", [4, 4], 1] };
const AXES = { steps: "step", tokens: "tokens trained", minutes: "minutes", episodes: "episodes" };
const DEFAULTS = { over: "steps", search: "", smooth: 0, log: false, show: "each", in: "" };
const PINNED = "pinned", FIRST = "First";
const pins = () => { try { return new Set(JSON.parse(localStorage.pins ?? "[]")); } catch { return new Set(); } };

async function curvesView(main, at, runs) {
  const query = at.query;
  const others = query.getAll("with").filter((id) => runs.some((it) => it.id === id));
  const chosen = [at.run, ...others];
  async function catalogue() {
    const found = new Map();
    for (const it of (await Promise.all(chosen.map((id) => get(`${apiOf(id)}/metrics`)))).flat()) {
      const lost = [...new Set([...(found.get(it.name)?.lost ?? []), ...it.lost])].sort((a, b) => a - b);
      found.set(it.name, { ...(found.get(it.name) ?? it), lost });
    }
    return found;
  }
  let known = await catalogue();
  const marksOf = (id) => get(`${apiOf(id)}/marks`).catch(() => ({ events: {}, alarms: [], limits: {} }));
  let marks = await Promise.all(chosen.map(marksOf));
  // Alarms stand in the reward and in the curve of the one that rang; of several runs each in its colour.
  function eventsOf(name) {
    if (state.over !== "steps") return [];
    const rang = (it) => it.alarms.filter(([, alarm]) => name === `alarm/${alarm}/value` || name === "episode/reward/mean");
    if (chosen.length > 1) return marks.flatMap((it, place) => rang(it).filter(([, , isOn]) => isOn).map(([x]) => ({ x, shade: `--c${place % 8}`, dash: [2, 2], share: 1 })));
    return [...Object.entries(marks[0].events).flatMap(([what, steps]) => steps.map((x) => [x, what])), ...rang(marks[0]).map(([x, , isOn]) => [x, isOn ? "on" : "off"])].map(([x, what]) => ({ x, shade: EVENTS[what][1], dash: EVENTS[what][2], share: EVENTS[what][3] }));
  }
  const state = { ...DEFAULTS, ...Object.fromEntries(Object.keys(DEFAULTS).filter((name) => query.has(name)).map((name) => [name, query.get(name)])), smooth: Number(query.get("smooth") ?? 0), log: query.has("log") };
  const open = new Set();
  let cards = [];
  const holder = h("div", {});

  /** The address of the same curves with these runs laid over, in groups by these letters. */
  function beside(ids, letters = state.in) {
    const chosenNow = Object.entries({ ...state, in: letters }).filter(([name, value]) => value !== DEFAULTS[name] && (ids.length || (name !== "show" && name !== "in")));
    return address(at.run, "curves", [...ids.map((id) => ["with", id]), ...chosenNow.map(([name, value]) => [name, value === true ? 1 : value])]);
  }
  function go(changes) {
    Object.assign(state, changes);
    history.replaceState(null, "", beside(others));
    draw();
  }

  const search = h("input", { type: "search", value: state.search, placeholder: "name or meaning", "aria-label": "Search metrics", "data-search": "1" });
  let timer = 0;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => go({ search: search.value }), 150); });
  const tools = h("div", { class: "tools" }, search,
    h("label", {}, "over ", h("select", { onchange: (e) => go({ over: e.target.value }) }, Object.keys(AXES).map((it) => h("option", { selected: it === state.over }, it)))),
    h("label", {}, "smooth ", h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, onchange: (e) => go({ smooth: Number(e.target.value) }) })),
    h("label", {}, h("input", { type: "checkbox", checked: state.log, onchange: (e) => go({ log: e.target.checked }) }), " log"),
    chosen.length > 1 ? h("label", {}, "show ", h("select", { onchange: (e) => go({ show: e.target.value }) }, Object.entries({ each: "each run", difference: "difference to the first", groups: "mean and range of groups" }).map(([name, words]) => h("option", { value: name, selected: name === state.show }, words)))) : null,
    runs.length > 1 ? h("label", {}, "lay over ", h("select", { onchange: (e) => { if (e.target.value) location.hash = beside([...others, e.target.value]); } },
      h("option", { value: "" }, "…"), runs.filter((it) => !chosen.includes(it.id)).map((it) => h("option", { value: it.id }, it.name)))) : null);
  const without = (place) => beside(chosen.filter((_, n) => n && n !== place), state.in.slice(0, place) + state.in.slice(place + 1));
  const legend = chosen.length > 1 ? h("p", { class: "legend" }, chosen.map((id, place) => h("span", { class: `k${place % 8}` }, id, " ",
    h("button", { class: "quiet small", title: "its group", "aria-label": `group of ${id}`, onclick: (e) => { const letters = chosen.map((_, n) => state.in[n] ?? "A"); letters[place] = LETTERS[(LETTERS.indexOf(letters[place]) + 1) % LETTERS.length]; fill(e.target, letters[place]); go({ in: letters.join(""), show: "groups" }); } }, state.in[place] ?? "A"),
    place ? h("a", { href: without(place), onclick: (e) => { e.currentTarget.href = without(place); }, "aria-label": `take ${id} away` }, "✕") : null)), " ", h("a", { href: address(at.run, "settings", others.map((id) => ["with", id])) }, "settings that differ")) : null;
  const meanings = chosen.length > 1 ? h("p", { class: "soft small" }, "Dotted lines over steps: an alarm began to ring, in the colour of its run.")
    : h("p", { class: "legend small" }, "marks over steps: ", Object.keys(EVENTS).map((what) => h("span", { class: `m${EVENTS[what][1].replace("--", "")}` }, EVENTS[what][0])));
  fill(main, h("h1", {}, "Curves"), tools, legend, meanings, holder);

  function matching() {
    const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    return [...known.values()].filter((it) => words.every((word) => `${it.name} ${it.meaning} ${it.section}`.toLowerCase().includes(word)));
  }

  /** Percentiles of a number stand in the chart of its mean, or of its median; of several runs each has its own. */
  function together(metrics) {
    const names = new Set(metrics.map((it) => it.name)), base = (it) => it.name.slice(0, it.name.lastIndexOf("/") + 1);
    const main = (it) => ["mean", "p50"].map((word) => base(it) + word).find((name) => names.has(name));
    return chosen.length > 1 ? metrics : metrics.flatMap((it) => {
      if (/\/p\d+$/.test(it.name) && main(it) && main(it) !== it.name) return [];
      const band = ["p5", "p95"].map((word) => base(it) + word);
      return [main(it) === it.name && band.every((name) => names.has(name)) ? { ...it, band } : it];
    });
  }

  /** What was read of a metric in each run, with its percentiles. */
  const own = (metric, read) => read.map((it) => it[metric.name] && { ...it[metric.name], band: metric.band?.map((name) => it[name]) });

  function draw() {
    cards.forEach((it) => it.destroy());
    cards = [];
    const found = together(matching());
    const pinned = pins(), kept = found.filter((it) => pinned.has(it.name)), first = state.search ? [] : found.filter((it) => it.first), sections = new Map();
    if (kept.length) { sections.set(PINNED, kept); open.add(PINNED); }
    if (first.length) { sections.set(FIRST, first); if (!open.size) open.add(FIRST); }
    found.forEach((it) => sections.set(it.section, [...(sections.get(it.section) ?? []), it]));
    if (!open.size && !state.search) [...sections.keys()].filter((it) => /Episodes|Loss/.test(it)).slice(0, 1).forEach((it) => open.add(it));
    fill(holder, found.length ? null : h("p", { class: "soft" }, known.size ? "No metric has these words." : "The run has no records: no step and no evaluation came to its end."),
      [...sections].map(([title, metrics]) => section(title, metrics, Boolean(state.search) ? sections.size <= 3 || found.length <= CHARTS_AT_ONCE : open.has(title))));
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
    const some = metrics.slice(first, first + CHARTS_AT_ONCE);
    const values = await valuesOf(some);
    if (!grid.isConnected) return;
    for (const metric of some) grid.append(one(metric, own(metric, values)));
    if (first + CHARTS_AT_ONCE < metrics.length) {
      const next = h("button", { onclick: () => { next.remove(); more(grid, metrics, first + CHARTS_AT_ONCE); } }, `${metrics.length - first - CHARTS_AT_ONCE} more`);
      grid.append(next);
    }
  }

  function valuesOf(metrics) {
    const words = [["over", state.over], ...metrics.flatMap((it) => [it.name, ...(it.band ?? [])].map((name) => ["name", name]))];
    return Promise.all(chosen.map((id) => get(`${apiOf(id)}/curves`, words)));
  }

  const isLog = (values) => state.log && state.show !== "difference" && values.every((it) => it.y.every((y) => y > 0));

  function one(metric, values) {
    const plot = h("div", { class: "plot" });
    const last = h("span", { class: "last" }, number(values[0]?.y.at(-1)));
    const same = h("div", { class: "small" }, atTheSame(values, chosen, AXES[state.over]));
    const thinned = values.find((it) => it && it.count > it.y.length);
    const card = h("figure", { class: "chart" }, h("figcaption", {}, h("b", {}, metric.name), metric.unit ? h("span", { class: "soft" }, ` in ${metric.unit}`) : null, last, same,
      h("div", { class: "soft small" }, metric.meaning || "No entry of the catalogue describes it."),
      metric.lost.length ? h("div", { class: "late small" }, `not finite in step ${metric.lost.slice(0, 5).join(", ")}${metric.lost.length > 5 ? " …" : ""}`) : null,
      thinned ? h("div", { class: "soft small" }, `${number(thinned.y.length)} of ${number(thinned.count)} points, evenly spread`) : null), plot, h("div", { class: "saves" }, h("button", { class: "quiet small", "aria-pressed": String(pins().has(metric.name)), onclick: (e) => pin(metric.name, e.target), "aria-label": `pin ${metric.name}` }, pins().has(metric.name) ? "pinned" : "pin"), h("button", { class: "quiet small", onclick: () => pictureOf(plot, metric.name), "aria-label": `${metric.name} as a picture` }, "png"), h("button", { class: "quiet small", onclick: () => save(drawing(metric.name, AXES[state.over], joined(mine.values, state), isLog(mine.values)), `${metric.name}.svg`), "aria-label": `${metric.name} as a drawing` }, "svg"), h("button", { class: "quiet small", onclick: () => table(metric.name, mine.values), "aria-label": `${metric.name} as a table` }, "csv"), globalThis.gradusAnswer ? null : h("button", { class: "quiet small", onclick: (e) => saveFrom(`${apiOf(at.run)}/curves.parquet`, [["name", metric.name], ["over", state.over]], `${metric.name}.parquet`, e.target), "aria-label": `${metric.name} as Parquet` }, "parquet")));
    const isEmpty = values.every((it) => !it || !it.y.length);
    const mine = { metric, values, drawn: null, destroy: () => mine.drawn?.destroy(), update(newer) {
      mine.values = newer;
      if (!mine.drawn || state.log) { mine.destroy(); cards = cards.filter((it) => it !== mine); card.replaceWith(one(metric, newer)); return; }
      fill(last, number(newer[0]?.y.at(-1)));
      fill(same, atTheSame(newer, chosen, AXES[state.over]));
      mine.drawn.update(joined(newer, state), state.over === "steps" ? metric.lost : [], eventsOf(metric.name));
    } };
    cards.push(mine);
    if (isEmpty) { plot.append(h("p", { class: "soft small" }, "Never a finite number.")); return card; }
    requestAnimationFrame(() => { if (plot.isConnected) mine.drawn = chart(plot, joined(values, state), { height: 170, x: AXES[state.over], log: isLog(values), sync: `curves-${state.over}`, marks: state.over === "steps" ? metric.lost : [], events: eventsOf(metric.name), limit: marks[0].limits[metric.name] ?? null, onpick: state.over === "steps" && !metric.name.startsWith("eval/") ? (step) => { location.hash = address(at.run, "episodes", [["step", step - 1], ["purpose", "train"]]); } : null }); });
    return card;
  }

  function table(name, values) {
    const { xs, lines } = joined(values, { ...state, smooth: 0 });
    const rows = xs.map((x, place) => [x, ...lines.map((line) => line.values[place] ?? "")].join(","));
    save(`${[state.over, ...lines.map((line) => `"${`${name} of ${line.label}`.replaceAll('"', '""')}"`)].join(",")}\n${rows.join("\n")}\n`, `${name}.csv`);
  }

  // What is pinned stands above all, in every run that this browser shows.
  function pin(name, button) {
    const now = pins();
    if (!now.delete(name)) now.add(name);
    try { localStorage.pins = JSON.stringify([...now]); } catch { /* A private window keeps nothing. */ }
    fill(button, now.has(name) ? "pinned" : "pin");
    button.setAttribute("aria-pressed", String(now.has(name)));
  }

  function joined(values, { smooth, show, in: letters }) {
    const xs = [...new Set(values.flatMap((it) => it?.x ?? []))].sort((a, b) => a - b);
    const shaded = (lines) => ({ xs, lines: lines.map((it) => ({ ...it, colour: colour(it.place), values: it.band ? it.values : smoothed(it.values, smooth) })) });
    if (show === "difference" && chosen.length > 1) return shaded(differences(xs, values, chosen));
    if (show === "groups" && chosen.length > 1) return shaded(grouped(xs, values, chosen.map((_, place) => letters[place] ?? "A")));
    const placed = (it) => { const at = new Map(it?.x.map((x, n) => [x, it.y[n]])); return xs.map((x) => at.get(x) ?? null); };
    const lines = values.flatMap((it, place) => {
      const raw = placed(it), [low, high] = it?.band ?? [];
      const band = low && high ? [{ label: "p5", colour: colour(place), band: "low", values: placed(low) }, { label: "p95", colour: colour(place), band: "high", values: placed(high) }] : [];
      const line = { label: chosen[place], colour: colour(place), spans: chosen.length > 1, values: raw };
      return [...band, ...(smooth ? [{ ...line, faint: true, label: `${chosen[place]}, raw` }, { ...line, values: smoothed(raw, smooth) }] : [line])];
    });
    return { xs, lines };
  }

  // What is new is added to what is drawn: the place on the page, the zoom and open groups stay.
  async function renew() {
    const newer = await catalogue();
    marks = await Promise.all(chosen.map(marksOf));
    const isSame = newer.size === known.size && [...known.keys()].every((name) => newer.has(name));
    known = newer;
    if (!isSame) { draw(); return; }
    const shown = [...cards];
    for (let first = 0; first < shown.length; first += CHARTS_AT_ONCE) {
      const some = shown.slice(first, first + CHARTS_AT_ONCE);
      const values = await valuesOf(some.map((it) => it.metric));
      if (!holder.isConnected) return;
      for (const it of some) if (cards.includes(it)) { it.metric.lost = known.get(it.metric.name).lost; it.update(own(it.metric, values)); }
    }
  }

  draw();
  let drawn = null, newest = null, isBusy = false;
  // News are of the first run alone.
  const isOtherRunning = others.some((id) => runs.find((it) => it.id === id).outcome === "running");
  const ticking = setInterval(() => {
    if (!isOtherRunning || document.hidden || isBusy) return;
    isBusy = true;
    renew().catch(() => { /* The line about the connection says it. */ }).finally(() => { isBusy = false; });
  }, 10_000);
  return {
    recolour: draw, close: () => { clearTimeout(timer); clearInterval(ticking); cards.forEach((it) => it.destroy()); },
    async news(news) {
      newest = news.records;
      drawn ??= newest;
      if (isBusy) return;
      isBusy = true;
      try { while (drawn !== newest) { drawn = newest; await renew(); } } finally { isBusy = false; }
    },
  };
}
