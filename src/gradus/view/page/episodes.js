// The table of episodes: windows of rows, filters that stand in the address, histograms that filter.

const SHOWN = ["step", "reward", "advantage", "tokens", "turns", "staleness", "source", "agent", "outcome", "dropped", "error", "task", "group"];
const SUMMED = ["episodes", "reward", "least", "most", "advantage", "tokens", "first step", "last step"];
const OF_TASK = ["purpose", "source", "task"];
const WORDS = new Set(["source", "agent", "outcome", "dropped", "error", "task", "group", "purpose"]);

async function episodesView(main, at) {
  const where = [...at.query].filter(([name]) => !["sort", "text", "by"].includes(name));
  const text = at.query.get("text") ?? "";
  const sort = at.query.get("sort") ?? "";
  const by = text ? "" : at.query.get("by") ?? "";
  const base = `${apiOf(at.run)}`;
  const go = (filters, order = sort, words = text, rows = by) => { location.hash = address(at.run, "episodes", [...filters, ...Object.entries({ text: words, by: rows, sort: order }).filter(([, value]) => value)]); };
  const set = (name, value) => go([...where.filter(([it]) => it !== name), ...(value === "" ? [] : [[name, value]])]);
  const asked = (from, more = []) => get(`${base}/episodes`, [...where, ["sort", sort], ...(by ? [["by", by]] : []), ["from", from], ["rows", WINDOW], ...more]);
  let table = await asked(0);
  const whole = table;
  let searched = 0, isOver = false;
  let now = null, told = null, refreshing = null, isFollowing = false;
  const isEvaluation = () => where.some(([name, value]) => name === "purpose" && value === "eval") || table.words.purpose.join() === "eval";
  const shownSteps = (range) => range.split("..").map((end) => (/^\d+$/.test(end) ? Number(end) + (isEvaluation() ? 0 : 1) : end)).join("..");
  remembered = { run: at.run, query: [...where, ...Object.entries({ text, by, sort }).filter(([, value]) => value)] };
  // Those that tell something anywhere in the run.
  const columnsOf = ({ columns: all, words }) => (by ? [by, by === "group" ? "task" : "source", ...SUMMED]
    : [...SHOWN.filter((name) => !WORDS.has(name) || name === "outcome" || (name === "agent" ? words.agent.length > 1 : words[name].some(Boolean))), ...all.filter((it) => it.startsWith("part:") && it !== "part:reward")]);
  const form = (it) => String([columnsOf(it), it.words.purpose]);
  const hidden = new Set(by ? [] : keptColumns());
  let columns = [], shown = columns, arranged = "", rows = null;

  const count = h("p", { class: "soft", role: "status" });
  const holder = h("div", {});
  const bins = h("div", { class: "histograms" });
  const chips = h("div", { class: "chips" }), choices = h("span", { class: "choices" }), tools = h("div", { class: "tools" });
  const note = h("button", { class: "new", hidden: true, onclick: () => { rows.toTop(); refresh().catch(refused); } });
  const refused = (error) => fill(count, error.message);
  fill(main, h("h1", {}, "Episodes"), filterBar(), chips, bins, tools, note, holder);

  // All that follows from what the run tells by now.
  function arrange() {
    columns = columnsOf(table);
    arranged = form(table);
    fill(chips, where.map(([name, value]) => h("button", { title: "take this filter away", onclick: () => go(where.filter(([n, v]) => n !== name || v !== value)) }, `${name === "where" ? "" : name} ${name === "step" ? `= ${shownSteps(value)}` : value || "(none)"} ✕`)), text ? h("button", { title: "search no more", onclick: () => go(where, sort, "") }, `“${text}” in prompts and replies ✕`) : null);
    fill(tools, count, grouping(), by ? null : chooser());
    measure();
    build();
  }

  // The table anew, with the columns that are chosen now.
  function build() {
    shown = columns.filter((name) => !hidden.has(name));
    const head = h("tr", {}, shown.map((name) => {
      const is = sort.replace(/^-/, "") === name;
      return h("th", { class: isWord(name) ? "" : "n", "aria-sort": is ? (sort.startsWith("-") ? "descending" : "ascending") : null },
        h("button", { class: "quiet", onclick: () => go(where, sort === `-${name}` ? name : `-${name}`) }, name.replace("part:", ""), is ? (sort.startsWith("-") ? " ↓" : " ↑") : ""));
    }));
    rows = scrolled({ head, width: shown.length, ask, draw: by ? drawSum : drawRow, refused });
    fill(holder, rows.element);
  }

  // Rows of the table as it was when its first ones came: a run that plays on would move them.
  async function ask(from) {
    if (text) return table.rows.slice(from, from + WINDOW);
    const more = await asked(from, [["all", table.all]]);
    if (more.generation !== table.generation) await refresh();
    return more.rows;
  }

  function grouping() {
    return h("label", {}, "rows ", h("select", { onchange: (e) => go(where, "", text, e.target.value) }, [["", "each episode"], ["group", "by group"], ["task", "by task"]].map(([name, words]) => h("option", { value: name, selected: name === by, disabled: Boolean(text && name) }, words))));
  }

  // Columns that are not shown, kept by the browser for all runs.
  function chooser() {
    const boxes = columns.map((name) => h("label", {}, h("input", { type: "checkbox", checked: !hidden.has(name), disabled: name === "step", onchange: (e) => {
      if (!hidden.delete(e.target.value)) hidden.add(e.target.value);
      try { localStorage.hiddenColumns = JSON.stringify([...hidden]); } catch { /* A private window keeps nothing. */ }
      build();
      draw();
    }, value: name }), ` ${name.replace("part:", "")}`));
    const parquet = h("button", { class: "quiet small", onclick: () => saveFrom(`${base}/episodes.parquet`, [...where, ["sort", sort]], `${at.run}.parquet`, parquet) }, "as Parquet");
    return [h("details", { class: "columns" }, h("summary", {}, "columns"), h("div", { class: "choices" }, boxes)), by || text || globalThis.gradusAnswer ? null : parquet];
  }

  function measure() {
    get(`${base}/histograms`, where).then((found) => { drawBins(found.histograms); fill(choices, Object.entries(found.words).filter(([, words]) => words.length > 1).map(([name, words]) =>
      h("select", { "aria-label": name, onchange: (e) => set(name, e.target.value === "\u0000" ? "" : e.target.value) }, h("option", { value: "\u0000" }, `any ${name}`), words.filter((word) => word !== "").map((word) => h("option", { value: word, selected: where.some(([n, v]) => n === name && v === word) }, word))))); }).catch((error) => fill(bins, h("p", { class: "problem" }, error.message)));
  }

  function filterBar() {
    const wrong = h("p", { class: "late small", role: "status" });
    const value = h("input", { "aria-label": "Filter", placeholder: "reward < 0.2 and staleness > 2", title: `An expression of SQL with ${table.columns.join(", ")}; words stand in single quotes, names with a colon in double ones.`, "data-search": "1", class: "filter", value: where.find(([name]) => name === "where")?.[1] ?? "" });
    const words = h("input", { type: "search", "aria-label": "Text in a prompt or a reply", placeholder: "text in prompts and replies", value: text });
    const submit = async (e) => {
      e.preventDefault();
      const written = value.value.trim() ? [["where", value.value.trim()]] : [];
      try { if (written.length) await get(`${base}/episodes`, [...written, ["rows", 1]]); } catch (error) { fill(wrong, error.message); return; }
      go([...where.filter(([name]) => name !== "where"), ...written], sort, words.value.trim());
    };
    return h("div", {}, h("form", { class: "tools", onsubmit: submit }, value, h("button", {}, "filter"), words, choices, savedFilters()), wrong);
  }

  // Filters by name, kept by the browser for all runs that it shows from this port or file.
  function savedFilters() {
    const kept = () => { try { return JSON.parse(localStorage.filters ?? "{}"); } catch { return {}; } };
    const keep = (all) => { try { localStorage.filters = JSON.stringify(all); } catch { /* A private window keeps nothing. */ } };
    const own = new URLSearchParams([...where, ...Object.entries({ by, sort }).filter(([, value]) => value)]).toString();
    const name = h("input", { "aria-label": "Name of the filter", placeholder: "name", size: 10, hidden: true });
    const button = h("button", { type: "button", onclick: () => {
      if (name.hidden) { name.hidden = false; name.focus(); return; }
      if (name.value.trim()) { keep({ ...kept(), [name.value.trim()]: own }); draw(); name.hidden = true; }
    } }, "keep");
    name.addEventListener("keydown", (e) => { if (e.key === "Enter") { e.preventDefault(); button.click(); } });
    const list = h("select", { "aria-label": "Kept filters", onchange: (e) => {
      const [what, chosen] = [e.target.value[0], e.target.value.slice(1)], all = kept();
      if (!what) return;
      if (what === "-") { delete all[chosen]; keep(all); draw(); return; }
      const query = new URLSearchParams(all[chosen]);
      go([...query].filter(([it]) => it !== "sort" && it !== "by"), query.get("sort") ?? "", text, query.get("by") ?? "");
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
    const short = (value) => number(Number(value.toPrecision(3)));
    fill(bins, Object.entries(histograms).filter(([, it]) => it.counts.length).map(([name, it]) => {
      const most = Math.max(...it.counts, 1);
      return h("div", { class: "histogram", role: "group", "aria-label": `histogram of ${name}` }, h("b", {}, name), it.missing ? h("span", { class: "soft small" }, ` ${number(it.missing)} without`) : null,
        h("div", { class: "bins" }, it.counts.map((many, place) => {
          const [low, high] = [it.edges[place], it.edges[place + 1]];
          const range = it.whole ? `${low}` : `${low}..${place < it.counts.length - 1 ? "<" : ""}${high}`;
          const bar = h("button", { title: `${it.whole ? low : `${number(low)} to ${number(high)}`}: ${number(many)} episodes`, "aria-label": `${name} ${range}: ${many}`, onclick: () => set(name, range) });
          bar.style.setProperty("--share", many ? Math.max(0.03, many / most) : 0);
          return bar;
        })), h("div", { class: "ends small soft" }, h("span", {}, short(it.edges[0])), h("span", {}, short(it.whole ? it.edges.at(-2) : it.edges.at(-1)))));
    }));
  }

  function isWord(name) { return WORDS.has(name); }

  function drawSum(row, place) {
    const open = opens(() => { if (by === "group") location.hash = address(at.run, `group/${row.key}`); else go([...where.filter(([name]) => !OF_TASK.includes(name)), ...OF_TASK.map((name) => [name, row[name]])], "", "", ""); });
    const word = (name) => (name === "source" && row.purpose === "eval" ? [row.source, "evaluation"].filter(Boolean).join(", ") : row[name]);
    return h("tr", { "data-row": place + 1, "aria-rowindex": place + 1, tabindex: "0", class: "opens", onclick: open }, shown.map((name) => h("td", isWord(name) ? { title: word(name) } : { class: "n" }, name === "advantage" ? signed(row[name]) : isWord(name) ? word(name) : number(row[name]))));
  }

  function cell(row, name) {
    const value = row[name];
    if (name === "step") return number(row.purpose === "eval" ? value : value + 1) + (row.purpose === "eval" ? " eval" : "");
    if (name === "advantage") return value === null ? "–" : signed(value);
    if (name === "task") return value.length > 14 ? `${value.slice(0, 12)}…` : value;
    return WORDS.has(name) ? value : number(value);
  }

  function drawRow(row, place) {
    const open = opens(() => { location.hash = address(at.run, `episode/${row.key}`); });
    return h("tr", { "data-row": place + 1, "aria-rowindex": place + 1, tabindex: "0", class: "opens", onclick: open }, shown.map((name) => h("td", { class: WORDS.has(name) ? "" : "n" }, name === "group" && row.group ? h("a", { href: address(at.run, `group/${row.key}`) }, row.group) : cell(row, name))));
  }

  const draw = () => rows.give(table.rows, table.passing);

  // Records are read a share of a second at a time, as long as somebody looks at what was found.
  async function search() {
    const found = [];
    table = { ...whole, rows: found, passing: 0 };
    while (!isOver) {
      const part = await get(`${base}/search`, [...where, ["sort", sort], ["text", text], ["from", searched]]);
      if (part.generation !== whole.generation) { searched = 0; found.length = 0; whole.generation = part.generation; continue; }
      const known = new Set(found.map((row) => row.key));  // Rows move down while a run plays on.
      found.push(...part.rows.filter((row) => !known.has(row.key)));
      searched = part.next;
      table.passing = found.length;
      rows.give(found, found.length, known.size > 0);
      fill(count, `${number(found.length)} found in ${number(searched)} of ${number(part.of)} episodes${searched < part.of ? " …" : ""}`);
      if (searched >= part.of) return;
    }
  }

  // What is shown stays until the newer rows are there.
  function refresh() {
    note.hidden = true;
    return refreshing ??= asked(0).then((newer) => {
      table = newer;
      if (form(table) !== arranged) arrange();
      draw();
      drawCount();
    }).finally(() => { refreshing = null; });
  }

  function drawCount() {
    if (by) { fill(count, `${number(table.passing)} ${by}s of ${number(table.of)} episodes`, table.of < table.passes ? `; ${number(table.passes - table.of)} have none` : "", table.kept ?? ""); return; }
    fill(count, table.passing === table.all ? `${number(table.all)} episodes` : `${number(table.passing)} of ${number(table.all)} episodes`, table.all ? "" : ": none is recorded, or episodes/ was deleted",
      table.parts_left_out ? "; more parts of the reward than columns: open an episode for all" : "", table.kept ?? "");
  }
  arrange();
  if (text) search().catch(refused);
  else { draw(); drawCount(); }
  return {
    close: () => { isOver = true; },
    async follow(on) { isFollowing = on && !text; if (isFollowing) { rows.toTop(); await refresh(); } },
    async news(news) {
      told = news;
      await refreshing?.catch(() => { /* Whoever asked says it. */ });
      if (told !== news) return;  // Later ones waited too.
      const mark = `${news.episodes} ${news.generation}`;
      if (text || mark === now || (now === null && news.episodes === table.all)) { now = now ?? mark; return; }
      now = mark;
      // What the reader looks at stays where it is: at the top of the newest rows they are shown at once.
      if (isFollowing || (rows.isAtTop() && !holder.contains(document.activeElement))) { await refresh(); return; }
      note.hidden = false;
      fill(note, `${number(news.episodes)} episodes now: show`);
    },
  };
}

function keptColumns() {
  try { return JSON.parse(localStorage.hiddenColumns ?? "[]").filter((name) => name !== "step"); } catch { return []; }
}

// The table that was looked at last.
/** @type {{run: string, query: [string, string][]}} */
let remembered = { run: "", query: [] };
const lastTable = (run) => (remembered.run === run ? remembered.query : []);
