// The frame of the page: which view an address asks for, what is new, and the keys.

const VIEWS = { run: runView, curves: curvesView, episodes: episodesView, episode: episodeView, group: groupView, evaluations: evaluationsView, time: timeView, settings: settingsView, logs: logsView, talk: talkView };
const TITLES = { run: "Run", curves: "Curves", episodes: "Episodes", evaluations: "Evaluations", time: "Time", settings: "Settings", logs: "Logs" };
let talks = [];
const BELOW_THE_TABLE = new Set(["episode", "group"]);
const KEYS = [
  ["j / k", "next and previous row or message"], ["Enter", "open"], ["Esc", "back"],
  ["/", "to the filters or the search"], ["g r, g c, g e", "run, curves, episodes"], ["g v, g t, g s, g o", "evaluations, time, settings, logs"], ["g k", "talk, with --talk"], ["g l", "list of runs"], ["[ / ]", "previous and next step, in time"],
  ["t", "tokens on and off in an episode; what differs from the best reply in a group"], ["h / l", "previous and next episode of its group"], ["1 … 9, 0", "colours of its tokens"], ["n / N", "next and previous token that stands out"], ["e", "keep the episode as Markdown"], [".", "follow the run: what is new is shown at once, wherever you look"], ["y", "copy the address"], ["d", "light or dark"], ["?", "these keys"],
];
const main = document.getElementById("main");
const head = document.getElementById("head");
const said = document.getElementById("said");
const keys = /** @type {HTMLDialogElement} */ (document.getElementById("keys"));
let shown = null;
let events = null, lastNews = null;
let runs = [];
let waitsForLetter = false;
let triedAgain = null;
let isFollowing = false;

function decoded(word) {
  try { return decodeURIComponent(word); } catch { return word; }
}

function place() {
  const [path, words = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [run = "", view = "run", key = ""] = path.split("/").map(decoded);
  return { run, view, key, query: new URLSearchParams(words) };
}

function drawHead(at) {
  const links = at.run ? Object.entries(TITLES).map(([view, title]) =>
    h("a", { href: address(at.run, view), "aria-current": view === at.view || (view === "episodes" && BELOW_THE_TABLE.has(at.view)) ? "page" : null }, title)) : [];
  const chosen = h("select", { "aria-label": "Run", onchange: (e) => { location.hash = address(e.target.value, TITLES[at.view] ? at.view : "run"); } },
    runs.map((it) => h("option", { value: it.id, selected: it.id === at.run }, it.name)));
  fill(head, h("a", { class: "brand", href: "#/" }, "gradus"), at.run && runs.length > 1 ? chosen : h("b", { class: "name" }, at.run),
    h("nav", { "aria-label": "Views" }, links), h("span", { id: "state", class: "soft" }),
    h("button", { class: "quiet", onclick: dark, "aria-label": "Light or dark" }, "◐"),
    h("button", { class: "quiet", onclick: showKeys, "aria-label": "Keys" }, "?"));
}

async function draw() {
  const at = place();
  shown?.close?.();
  shown = null;
  const mine = {};
  shown = mine;
  const holder = h("div", {});  // What a slow view writes after another was asked for is not seen.
  try {
    if (!runs.length) {
      ({ runs, talks = [] } = await get("api/runs"));
      if (talks.length) TITLES.talk = "Talk";
      if (runs.length === 1 && !at.run) { location.replace(address(runs[0].id)); return; }
    }
    drawHead(at);
    document.title = at.run ? `${at.run} · gradus` : "gradus view";
    const view = at.run ? VIEWS[at.view] : listView;
    if (!view) throw new Error(`The page has no view "${at.view}".`);
    follow(at.run);
    fill(main, put(holder, h("p", { class: "soft" }, "Reading …")));
    const before = lastNews;
    const made = await view(holder, at, runs, talks);
    if (shown !== mine) { made?.close?.(); return; }
    shown = made;
    // What was known when the view was asked for is drawn; what came since is new to it.
    if (before) await shown?.news?.(before)?.catch(() => { /* As below. */ });
    if (isFollowing) shown?.follow?.(true);
    if (lastNews && lastNews !== before) tell(lastNews);
  } catch (error) {
    if (shown !== mine) return;
    fill(main, h("p", { class: "problem" }, error.message));
    // What is not there yet may be once all episodes are read.
    if (triedAgain !== location.hash) shown = { async news(news) { if (!news.has_more) { triedAgain = location.hash; await draw(); } } };
  }
}

// One connection for what is new; none for the list, and none while nobody looks.
function follow(run) {
  if (events?.run === run && !document.hidden) return;
  events?.source.close();
  events = lastNews = null;
  said.textContent = "";
  if (!run || document.hidden || globalThis.gradusAnswer) return;
  const source = new EventSource(`${apiOf(run)}/events`);
  events = { run, source };
  source.onmessage = (event) => {
    const news = lastNews = JSON.parse(event.data);
    const state = document.getElementById("state");
    const left = news.all_bytes - news.read_bytes;
    if (state) fill(state, left > 0 ? `reading episodes, ${Math.round((100 * news.read_bytes) / news.all_bytes)} %` : "");
    said.textContent = "";
    tell(news);
  };
  source.onerror = () => {
    said.textContent = source.readyState === EventSource.CLOSED ? "What is new is not shown any more. Open the address that gradus view printed last." : "The connection is lost; trying again …";
  };
}

// While the index grows there is news many times a second: a view hears the last of each half.
let latest = null;
function tell(news) {
  if (!latest) setTimeout(() => { const last = latest; latest = null; shown?.news?.(last)?.catch(() => { /* The line about the connection says it. */ }); }, 500);
  latest = news;
}

document.addEventListener("visibilitychange", () => follow(place().run));

function dark() {
  const root = document.documentElement;
  const is = root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = is === "dark" ? "light" : "dark";
  try { localStorage.theme = root.dataset.theme; } catch { /* A private window keeps nothing. */ }
  shown?.recolour?.();
}

// Without the token, which is in the first address alone.
function copyLink() {
  navigator.clipboard?.writeText(location.href).then(() => { said.textContent = "The address is copied."; setTimeout(() => { said.textContent = ""; }, 2000); }, () => { said.textContent = "The browser does not let this page copy."; });
}

function showKeys() {
  fill(keys, h("h2", {}, "Keys"), h("dl", {}, KEYS.map(([key, meaning]) => [h("dt", {}, key), h("dd", {}, meaning)])),
    h("button", { onclick: () => keys.close() }, "Close"));
  keys.showModal();
}

function followTheRun() {
  isFollowing = !isFollowing;
  said.textContent = isFollowing ? "Following the run: the newest is shown as it comes. Press . to stop." : "Not following any more.";
  setTimeout(() => { said.textContent = ""; }, 4000);
  shown?.follow?.(isFollowing);
}

/** Move the focus among what is marked as a row. */
function step(by) {
  const rows = /** @type {HTMLElement[]} */ ([...main.querySelectorAll("[data-row]")]);
  if (!rows.length) return;
  const now = rows.indexOf(document.activeElement?.closest("[data-row]"));
  const next = rows[Math.max(0, Math.min(rows.length - 1, now < 0 ? 0 : now + by))];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  const target = /** @type {HTMLElement} */ (event.target);
  const writes = /** @type {HTMLElement | null} */ (target.closest?.("input, select, textarea"));
  if (event.key === "Escape" && writes) { writes.blur(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || writes || keys.open) return;
  const at = place();
  const go = { r: "run", c: "curves", e: "episodes", v: "evaluations", t: "time", s: "settings", o: "logs", ...(talks.length ? { k: "talk" } : {}) };
  if (waitsForLetter) {
    waitsForLetter = false;
    if (event.key === "l") location.hash = "#/";
    else if (go[event.key] && at.run) location.hash = address(at.run, go[event.key]);
    return;
  }
  const actions = {
    j: () => step(1), k: () => step(-1), g: () => { waitsForLetter = true; }, d: dark, "?": showKeys,
    Enter: () => (target.dataset.row ? target.click() : null),
    Escape: () => { location.hash = BELOW_THE_TABLE.has(at.view) ? address(at.run, "episodes", [...(shown?.back ?? [])]) : at.view === "run" ? "#/" : address(at.run); },
    "/": () => /** @type {HTMLElement | null} */ (main.querySelector("[data-search]"))?.focus(), t: () => shown?.toggle?.(), h: () => shown?.move?.(-1), l: () => shown?.move?.(1), e: () => shown?.keep?.(), n: () => shown?.worst?.(1), N: () => shown?.worst?.(-1), y: copyLink, ".": followTheRun, "[": () => shown?.step?.(-1), "]": () => shown?.step?.(1),
  };
  const action = actions[event.key] ?? (/^\d$/.test(event.key) && shown?.colour ? () => shown.colour(Number(event.key) || 10) : null);
  if (!action || (event.key === "Enter" && target.closest("a, button, summary") && !target.dataset.row)) return;
  event.preventDefault();
  action();
});

try { if (localStorage.theme) document.documentElement.dataset.theme = localStorage.theme; } catch { /* As above. */ }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown?.recolour?.());
addEventListener("hashchange", draw);
draw();
