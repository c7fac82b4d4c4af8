// The answers of an export, which has no server: from its data files, filtered and sorted here.

const store = globalThis.gradusExport;
const loading = new Map();
const RANGES = ["reward", "tokens", "staleness"];
const BINS = 24;

function load(key) {
  if (!loading.has(key)) loading.set(key, new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = `data/${key}.js`;
    script.onload = done;
    script.onerror = () => failed(new Error(`data/${key}.js cannot be read.`));
    document.head.append(script);
  }));
  return loading.get(key);
}

const isNumber = (value) => typeof value === "number";

function passes(row, name, wanted) {
  const value = row[name] ?? null;
  return wanted.some((text) => {
    if (!isNumber(value) && value !== null) return String(value) === text;
    if (text === "..") return value === null;
    const [low, high] = text.includes("..") ? text.split("..") : [text, text];
    return value !== null && (low === "" || value >= Number(low)) && (high === "" || (high[0] === "<" ? value < Number(high.slice(1)) : value <= Number(high)));
  });
}

function chosen(query, but = "") {
  if (query.has("where")) throw new Error("An export filters by the bars and the lists; gradus view reads filters that are written out.");
  const names = [...new Set(query.keys())].filter((name) => !["sort", "from", "rows", "by", "all", but].includes(name));
  return store.rows.filter((row) => names.every((name) => passes(row, name, query.getAll(name))));
}

function sorted(rows, sort) {
  const name = sort.replace(/^-/, ""), way = sort.startsWith("-") ? -1 : 1;
  if (!name) return rows;
  const order = (a, b) => (isNumber(a) ? a - b : String(a).localeCompare(String(b)));
  return [...rows].sort((a, b) => Number(a[name] === null) - Number(b[name] === null) || way * order(a[name], b[name]));
}

/** What of the run the export has. */
function kept() {
  const all = store.rows.length < store.passing ? `the newest ${number(store.rows.length)} of ${number(store.passing)}` : "all";
  return store.where || all !== "all" ? `; the export has ${all}${store.where ? ` with ${store.where}` : ""}` : "";
}

/** A row for each group, or each task of a source in training or evaluation, as gradus view sums them. */
function summed(query) {
  const by = query.get("by"), passing = chosen(query), rows = passing.filter((row) => row[by]), together = new Map();
  const names = by === "task" ? ["purpose", "source", "task"] : [by], kind = (row) => JSON.stringify([by === "group" && row.purpose === "eval" ? row.step : null, ...names.map((name) => row[name])]);
  for (const row of rows) together.set(kind(row), [...(together.get(kind(row)) ?? []), row]);
  const fold = (own, name, how) => { const values = own.map((row) => row[name]).filter(isNumber); return values.length ? how(values) : null; };
  const mean = (values) => values.reduce((sum, it) => sum + it, 0) / values.length;
  const step = (row) => row.step + (row.purpose === "train" ? 1 : 0);
  const sums = [...together.values()].map((own) => ({ task: own[0].task, ...Object.fromEntries(names.map((name) => [name, own[0][name]])), key: own[0].key, episodes: own.length, reward: fold(own, "reward", mean), advantage: fold(own, "advantage", mean), tokens: fold(own, "tokens", mean),
    least: fold(own, "reward", (all) => Math.min(...all)), most: fold(own, "reward", (all) => Math.max(...all)), "first step": Math.min(...own.map(step)), "last step": Math.max(...own.map(step)) }));
  const first = Number(query.get("from") ?? 0), all = sorted(sums, query.get("sort") || "-last step");
  return { rows: all.slice(first, first + Number(query.get("rows") ?? 100)), from: first, passing: all.length, of: rows.length, passes: passing.length, ...about() };
}

function table(query) {
  if (query.get("by")) return summed(query);
  const rows = sorted(chosen(query), query.get("sort") ?? ""), first = Number(query.get("from") ?? 0);
  return { rows: rows.slice(first, first + Number(query.get("rows") ?? 100)), from: first, passing: rows.length, ...about(), parts_left_out: 0 };
}

const words = (names) => Object.fromEntries(names.map((name) => [name, [...new Set(store.rows.map((row) => row[name]))]]));
const about = () => ({ all: store.rows.length, columns: store.columns, kept: kept(), generation: 0, words: words(["purpose", "source", "agent", "dropped", "error", "task", "group"]) });

function histogram(name, query) {
  const rows = chosen(query, name), values = rows.map((row) => row[name]).filter(isNumber);
  if (!values.length) return { edges: [], counts: [], missing: rows.length };
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  const whole = values.every(Number.isInteger) && high - low < BINS, count = whole ? high - low + 1 : BINS;
  const edges = Array.from({ length: count }, (_, place) => low + (whole ? place : (place * (high - low)) / BINS)).concat(whole ? high + 1 : high);
  const counts = edges.slice(0, -1).map((edge, place) => values.filter((value) => value >= edge && (place === count - 1 || value < edges[place + 1])).length);
  return { edges, counts, missing: rows.length - values.length, whole };
}

function histograms(query) {
  return { histograms: Object.fromEntries(RANGES.map((name) => [name, histogram(name, query)])), words: words(["source", "agent", "outcome", "dropped", "error", "purpose"]) };
}

function logs(query) {
  const levels = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], text = (query.get("text") ?? "").toLowerCase();
  const lines = store.logs.lines.filter((it) => (!query.get("process") || it.process === query.get("process")) && (!query.get("step") || String(it.step) === query.get("step"))
    && levels.indexOf(it.level) >= levels.indexOf(query.get("level") ?? "") && [it.said, ...it.more].join("\n").toLowerCase().includes(text));
  return { ...store.logs, lines, count: query.toString() ? lines.length : store.logs.count };
}

function keptGroup(group, query) {
  const first = Number(query.get("from") ?? 0);
  const note = group.count > group.replies.length ? `The ${group.replies.length} best; gradus view shows all.` : "";
  return { ...group, note, from: first, replies: sorted(group.replies, query.get("sort") ?? "").slice(first) };
}

if (store) {
  globalThis.gradusImage = (name) => store.images[name];
  globalThis.gradusTake = (answers) => Object.assign(store.answers, answers);
  globalThis.gradusAnswer = async (path, asked) => {
    const query = new URLSearchParams(asked), [, , , view, key, part] = path.split("/");
    if (view === "curves") return Object.fromEntries(query.getAll("name").map((name) => [name, store.curves[query.get("over") ?? "steps"][name]]));
    if (view === "histograms") return histograms(query);
    if (view === "logs") return logs(query);
    if (view === "episodes" && !key) return table(query);
    if (key && !store.keys.includes(key)) throw new Error("This episode is not in the export.");
    if (key && !store.isWhole) await load(key);
    const words = view === "groups" ? "" : query.toString();
    const answer = part === "text" ? null : store.answers[path + (words ? `?${words}` : "")];
    if (!answer) throw new Error("This is not in the export; gradus view shows it.");
    if (answer.error && Object.keys(answer).length === 1) throw new Error(answer.error);
    return view === "groups" ? keptGroup(answer, query) : answer;
  };
}
