// The table of episodes: windows of rows, filters that stand in the address, histograms that filter.

import { address, apiOf, fill, get, h, number, signed } from "./dom.js";

const WINDOW = 100;
const ROW = 30;
const BEYOND = 32;  // Rows drawn beyond what is seen.
const MAX_PIXELS = 8_000_000;
const SHOWN = ["step", "reward", "advantage", "tokens", "turns", "staleness", "source", "agent", "outcome", "dropped", "error", "task", "group"];
const WORDS = new Set(["source", "agent", "outcome", "dropped", "error", "task", "group", "purpose"]);

export async function episodesView(main, at) {
  const where = [...at.query].filter(([name]) => name !== "sort" && name !== "text");
  const text = at.query.get("text") ?? "";
  const sort = at.query.get("sort") ?? "";
  const base = `${apiOf(at.run)}`;
  const go = (filters, order = sort, words = text) => { location.hash = address(at.run, "episodes", [...filters.filter(([, value]) => value !== ""), ...(words ? [["text", words]] : []), ...(order ? [["sort", order]] : [])]); };
  const set = (name, value) => go([...where.filter(([it]) => it !== name), ...(value === "" ? [] : [[name, value]])]);
  let pages = new Map();
  let table = await get(`${base}/episodes`, [...where, ["sort", sort], ["rows", WINDOW]]);
  pages.set(0, table.rows);
  const whole = table;
  let searched = 0, isOver = false;
  let now = null;
  const firstStep = table.rows.length && table.rows.every((row) => row.purpose === "eval") ? 0 : 1;
  const columns = [...SHOWN.filter((name) => !WORDS.has(name) || name === "outcome" || table.rows.some((row) => row[name])), ...table.columns.filter((it) => it.startsWith("part:"))].filter((name) => name !== "part:reward");
  const shown = columns.filter((name) => !(name === "agent" && table.rows.every((row) => row.agent === table.rows[0].agent)));

  const count = h("p", { class: "soft", role: "status" });
  const body = h("tbody", {});
  const spacers = [h("tr", { "aria-hidden": "true" }, h("td", { colspan: shown.length })), h("tr", { "aria-hidden": "true" }, h("td", { colspan: shown.length }))];
  const scroller = h("div", { class: "rows", tabindex: "-1", onscroll: () => paint() }, h("table", { "aria-rowcount": table.passing },
    h("thead", {}, h("tr", {}, shown.map((name) => {
      const is = sort.replace("-", "") === name;
      return h("th", { class: WORDS.has(name) ? "" : "n", "aria-sort": is ? (sort.startsWith("-") ? "descending" : "ascending") : null },
        h("button", { class: "quiet", onclick: () => go(where, sort === `-${name}` ? name : `-${name}`) }, name.replace("part:", ""), is ? (sort.startsWith("-") ? " ↓" : " ↑") : ""));
    }))), body));
  const bins = h("div", { class: "histograms" });
  const chips = h("div", { class: "chips" }, where.map(([name, value]) => h("button", { title: "take this filter away", onclick: () => go(where.filter(([n, v]) => n !== name || v !== value)) }, `${name === "where" ? "" : name} ${name === "step" && /^\d+$/.test(value) ? `= ${Number(value) + firstStep}` : value || "(none)"} ✕`)), text ? h("button", { title: "search no more", onclick: () => go(where, sort, "") }, `“${text}” in prompts and replies ✕`) : null);
  const note = h("button", { class: "new", hidden: true, onclick: () => refresh() });
  fill(main, h("h1", {}, "Episodes"), filterBar(), chips, bins, count, note, scroller);

  function filterBar() {
    const wrong = h("p", { class: "late small", role: "status" });
    const value = h("input", { "aria-label": "Filter", placeholder: "reward < 0.2 and staleness > 2", title: `Compare ${table.columns.join(", ")} with < <= > >= = != ~ and a number, a word or none; join with and, or, not and parentheses.`, "data-search": "1", class: "filter", value: where.find(([name]) => name === "where")?.[1] ?? "" });
    const choices = h("span", { class: "choices" });
    get(`${base}/histograms`, where).then((found) => { drawBins(found.histograms); fill(choices, Object.entries(found.words).filter(([, words]) => words.length > 1).map(([name, words]) =>
      h("select", { "aria-label": name, onchange: (e) => set(name, e.target.value === "\u0000" ? "" : e.target.value) }, h("option", { value: "\u0000" }, `any ${name}`), words.filter((word) => word !== "").map((word) => h("option", { value: word, selected: where.some(([n, v]) => n === name && v === word) }, word))))); }).catch((error) => fill(bins, h("p", { class: "problem" }, error.message)));
    const submit = (e) => { e.preventDefault(); const text = value.value.trim(); get(`${base}/episodes`, [["where", text], ["rows", 1]]).then(() => set("where", text), (error) => fill(wrong, error.message)); };
    const words = h("input", { type: "search", "aria-label": "Text in a prompt or a reply", placeholder: "text in prompts and replies", value: text, onchange: (e) => { if (e.target.value.trim().length !== 1) go(where, sort, e.target.value.trim()); } });
    return h("div", {}, h("form", { class: "tools", onsubmit: submit }, value, h("button", {}, "filter"), words, choices, savedFilters()), wrong);
  }

  // Filters by name, kept by the browser for all runs that it shows from this port or file.
  function savedFilters() {
    const kept = () => { try { return JSON.parse(localStorage.filters ?? "{}"); } catch { return {}; } };
    const keep = (all) => { try { localStorage.filters = JSON.stringify(all); } catch { /* A private window keeps nothing. */ } };
    const own = new URLSearchParams([...where, ...(sort ? [["sort", sort]] : [])]).toString();
    const name = h("input", { "aria-label": "Name of the filter", placeholder: "name", size: 10, hidden: true });
    const button = h("button", { type: "button", onclick: () => {
      if (name.hidden) { name.hidden = false; name.focus(); return; }
      if (name.value.trim()) { keep({ ...kept(), [name.value.trim()]: own }); draw(); name.hidden = true; }
    } }, "keep");
    name.addEventListener("keydown", (e) => { if (e.key === "Enter") { e.preventDefault(); button.click(); } });
    const list = h("select", { "aria-label": "Kept filters", onchange: (e) => {
      const [what, chosen] = [e.target.value[0], e.target.value.slice(1)], all = kept();
      if (what === "-") { delete all[chosen]; keep(all); draw(); return; }
      const query = [...new URLSearchParams(all[chosen])];
      go(query.filter(([it]) => it !== "sort"), query.find(([it]) => it === "sort")?.[1] ?? "");
    } });
    function draw() {
      const names = Object.keys(kept());
      list.hidden = !names.length;
      fill(list, h("option", { value: "" }, "kept filters"), names.map((it) => h("option", { value: `=${it}` }, it)), names.map((it) => h("option", { value: `-${it}` }, `forget ${it}`)));
    }
    draw();
    return [list, name, own ? button : null];
  }

  function drawBins(histograms) {
    fill(bins, Object.entries(histograms).filter(([, it]) => it.counts.length).map(([name, it]) => {
      const most = Math.max(...it.counts, 1);
      return h("div", { class: "histogram", role: "group", "aria-label": `histogram of ${name}` }, h("b", {}, name), it.missing ? h("span", { class: "soft small" }, ` ${number(it.missing)} without`) : null,
        h("div", { class: "bins" }, it.counts.map((many, place) => {
          const [low, high] = [it.edges[place], it.edges[place + 1]];
          const range = it.whole ? `${low}` : `${low}..${high}`;
          const bar = h("button", { title: `${it.whole ? low : `${number(low)} to ${number(high)}`}: ${number(many)} episodes`, "aria-label": `${name} ${range}: ${many}`, onclick: () => set(name, range) });
          bar.style.setProperty("--share", many ? Math.max(0.03, many / most) : 0);
          return bar;
        })), h("div", { class: "ends small soft" }, h("span", {}, number(it.edges[0])), h("span", {}, number(it.whole ? it.edges.at(-2) : it.edges.at(-1)))));
    }));
  }

  function cell(row, name) {
    const value = row[name];
    if (name === "step") return number(row.purpose === "eval" ? value : value + 1) + (row.purpose === "eval" ? " eval" : "");
    if (name === "advantage") return value === null ? "–" : signed(value);
    if (name === "task") return value.length > 14 ? `${value.slice(0, 12)}…` : value;
    return WORDS.has(name) ? value : number(value);
  }

  function drawRow(row, place) {
    const open = () => { remember(at.run, where, sort); location.hash = address(at.run, `episode/${row.key}`); };
    return h("tr", { "data-row": place + 1, "aria-rowindex": place + 1, tabindex: "0", class: "opens", onclick: open }, shown.map((name) => h("td", { class: WORDS.has(name) ? "" : "n" }, name === "group" && row.group ? h("a", { href: address(at.run, `group/${row.key}`), onclick: (e) => { e.stopPropagation(); remember(at.run, where, sort); } }, row.group) : cell(row, name))));
  }

  let lastFirst = -1, painting = 0;
  async function paint() {
    const height = Math.min(table.passing * ROW, MAX_PIXELS), seen = Math.ceil(scroller.clientHeight / ROW) + BEYOND;
    const share = height > scroller.clientHeight ? scroller.scrollTop / (height - scroller.clientHeight) : 0;
    const first = table.passing * ROW > MAX_PIXELS ? Math.round(share * Math.max(0, table.passing - seen + BEYOND)) : Math.max(0, Math.floor(scroller.scrollTop / ROW) - BEYOND / 2);
    const last = Math.min(table.passing, first + seen);
    const mine = painting += 1, own = [...new Set([Math.floor(first / WINDOW), Math.floor(Math.max(first, last - 1) / WINDOW)])];
    await Promise.all(own.map(load));
    if (mine !== painting) return;  // A later one shows where the reader is now.
    if (lastFirst === first && body.children.length > 2) return;
    lastFirst = first;
    const focused = document.activeElement?.dataset?.row;
    const above = table.passing * ROW > MAX_PIXELS ? Math.max(0, scroller.scrollTop) : first * ROW;
    spacers[0].firstChild.style.height = `${above}px`;
    spacers[1].firstChild.style.height = `${Math.max(0, height - above - (last - first) * ROW)}px`;
    const rows = [];
    for (let place = first; place < last; place += 1) { const row = pages.get(Math.floor(place / WINDOW))?.[place % WINDOW]; if (row) rows.push(drawRow(row, place)); }
    body.replaceChildren(spacers[0], ...rows, spacers[1]);
    if (focused) body.querySelector(`[data-row="${focused}"]`)?.focus({ preventScroll: true });
    for (const near of [own[0] - 1, own.at(-1) + 1]) load(near).catch(() => { /* It is asked for again when it is looked at. */ });
  }

  // Records are read a share of a second at a time, as long as somebody looks at what was found.
  async function search() {
    table = { ...whole, rows: [], passing: 0 };
    const found = [];
    lastFirst = -1;
    while (!isOver) {
      const part = await get(`${base}/search`, [...where, ["sort", sort], ["text", text], ["from", searched]]);
      if (part.generation !== whole.generation) { searched = 0; found.length = 0; whole.generation = part.generation; continue; }
      const known = new Set(found.map((row) => row.key));  // Rows move down while a run plays on.
      found.push(...part.rows.filter((row) => !known.has(row.key)));
      pages = new Map(Array.from({ length: Math.ceil(found.length / WINDOW) }, (_, page) => [page, found.slice(page * WINDOW, (page + 1) * WINDOW)]));
      searched = part.next;
      table = { ...table, passing: found.length };
      lastFirst = -1;
      fill(count, `${number(found.length)} found in ${number(searched)} of ${number(part.of)} episodes${searched < part.of ? " …" : ""}`);
      await paint();
      if (searched >= part.of) return;
    }
  }

  // A window of rows that is on its way is not asked for again.
  async function load(page) {
    const into = pages;
    if (text || page < 0 || page * WINDOW >= table.passing) return;
    if (!into.has(page)) {
      if (into.size > 40) into.delete(into.keys().next().value);
      into.set(page, get(`${base}/episodes`, [...where, ["sort", sort], ["from", page * WINDOW], ["rows", WINDOW]]).then((more) => more.rows));
    }
    try { into.set(page, await into.get(page)); } catch (error) { into.delete(page); throw error; }
  }

  async function refresh() {
    note.hidden = true;
    pages = new Map();
    table = await get(`${base}/episodes`, [...where, ["sort", sort], ["rows", WINDOW]]);
    pages.set(0, table.rows);
    lastFirst = -1;
    drawCount();
    await paint();
  }

  function drawCount() {
    fill(count, table.passing === table.all ? `${number(table.all)} episodes` : `${number(table.passing)} of ${number(table.all)} episodes`, table.all ? "" : ": none is recorded, or episodes/ was deleted",
      table.parts_left_out ? "; more parts of the reward than columns: open an episode for all" : "");
  }
  drawCount();
  await paint();
  if (text) search().catch((error) => fill(count, error.message));
  let waiting = false;
  return {
    close: () => { isOver = true; },
    async news(news) {
      const mark = `${news.episodes} ${news.generation}`;
      if (text || mark === now || waiting || (now === null && news.episodes === table.all)) { now = now ?? mark; return; }
      now = mark;
      // What the reader looks at stays where it is: at the top of the newest rows they are shown at once.
      if (scroller.scrollTop > ROW || body.contains(document.activeElement)) { note.hidden = false; fill(note, `${number(news.episodes)} episodes now: show`); return; }
      waiting = true;
      try { await refresh(); } finally { waiting = false; }
    },
  };
}

let remembered = { run: "", query: [] };
function remember(run, where, sort) { remembered = { run, query: [...where, ...(sort ? [["sort", sort]] : [])] }; }
export const lastTable = (run) => (remembered.run === run ? remembered.query : []);
