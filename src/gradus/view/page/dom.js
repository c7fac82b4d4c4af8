// Elements, texts and numbers. Every text of a run becomes a text node, never HTML.

const HIDDEN = new RegExp(
  "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u00ad\\u061c\\u115f\\u180e\\u200b-\\u200f\\u2028-\\u202e" +
  "\\u2060-\\u206f\\ud800-\\udfff\\ufe00-\\ufe0f\\ufeff\\ufff0-\\uffff\\u{e0000}-\\u{e0fff}]", "gu");

/** Controls, and what hides or reorders text, as something to see. */
function visible(text) {
  return String(text).replace(HIDDEN, (c) => {
    const code = c.codePointAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "␡" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** An element; a child that is no element becomes a text node. */
function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value") made.value = value;
    else made.setAttribute(name, value === true ? "" : visible(value));
  }
  put(made, ...children);
  return made;
}

function put(parent, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : visible(child));
  }
  return parent;
}

const fill = (parent, ...children) => { parent.replaceChildren(); return put(parent, ...children); };

const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return put(made, ...children);
}

/** A number with about four digits that count. */
function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en-US");
  if (size >= 1e9 || size < 1e-4) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

function signed(value) {
  return Number.isFinite(value) ? (value > 0 ? "+" : "") + number(value) : "–";
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds > 0 && seconds < 0.001) return "< 1 ms";
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  const minutes = Math.round(seconds / 60), hours = Math.round(seconds / 3600);
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  const place = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(1, value)) / 10)));
  return `${number(Number((value / 1024 ** place).toPrecision(3)))} ${["B", "KiB", "MiB", "GiB", "TiB"][place]}`;
}

/** What the server answers; an Error with its sentence when it refuses. */
async function get(path, query = []) {
  if (globalThis.gradusAnswer) return globalThis.gradusAnswer(path, query);
  const words = new URLSearchParams(query).toString();
  let answer;
  try {
    answer = await fetch(path + (words ? `?${words}` : ""));
  } catch {
    throw new Error("gradus view does not answer. It may have ended: start it again.");
  }
  const value = await answer.json().catch(() => ({ error: null }));
  if (!answer.ok) throw new Error(value.error ?? `gradus view could not answer this (${answer.status}); its terminal says why.`);
  return value;
}

const apiOf = (run) => `api/runs/${encodeURIComponent(run)}`;

/** An image that an episode showed, by the name that the run keeps it under; or why there is none. */
function picture(run, name) {
  const without = (why) => h("p", { class: "soft small" }, name ? `image ${name.slice(0, 12)} ${why}` : "an image that the run did not keep");
  const place = globalThis.gradusImage ? globalThis.gradusImage(name) : `${apiOf(run)}/images/${name}`;
  if (!name || !place) return without("is not in this export");
  return h("img", { class: "shown", src: place, alt: `image ${name.slice(0, 12)}`, title: name, loading: "lazy", onerror: (e) => e.target.replaceWith(without("cannot be read: its file went away, or holds something else")) });
}

/** An address on the page: `#/run/view?name=value`. */
function address(run, view = "run", query = []) {
  const words = new URLSearchParams(query).toString();
  return `#/${encodeURIComponent(run)}/${view}${words ? `?${words}` : ""}`;
}

/** Let the browser keep a file. */
function save(content, name) {
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type: "text/plain" }));
  h("a", { href: address, download: name.replace(/[^\w.-]+/g, "_") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Keep what the server makes a file of; the button says why there is none. */
async function saveFrom(path, query, name, button) {
  const answer = await fetch(`${path}?${new URLSearchParams(query)}`).catch(() => null);
  if (answer?.ok) save(await answer.blob(), name);
  else fill(button, answer ? (await answer.json()).error : "gradus view does not answer");
}

/** A bar from zero, which stands where the numbers around it leave it. */
function bar(value, least, most) {
  const low = Math.min(0, least ?? 0), high = Math.max(0, most ?? 0), whole = high - low || 1;
  const made = h("span", { class: `bar ${value < 0 ? "minus" : ""}` });
  made.style.setProperty("--from", `${(100 * (Math.min(0, value ?? 0) - low)) / whole}%`);
  made.style.setProperty("--wide", `${(100 * Math.abs(value ?? 0)) / whole}%`);
  return made;
}

/** What a click on a row does: nothing where it was for a link in it, or marked some of its text. */
const opens = (go) => (e) => { if (!e.target.closest("a") && !(e.detail && String(getSelection()))) go(); };

const panel = (title, ...children) => h("section", { class: "panel" }, h("h2", {}, title), ...children);
