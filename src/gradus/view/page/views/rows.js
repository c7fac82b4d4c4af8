// A table of any number of rows: those that can be seen are drawn, the next ones asked for ahead.

const WINDOW = 200;
const ROW = 30;
const BEYOND = 16;  // Rows drawn above and below what is seen.
const AHEAD = 5;  // Windows asked for in the direction of the reader, before they are looked at.
const WINDOWS_AT_ONCE = 4;
const KEPT = 20;  // Windows to each side of the reader.
const MAX_PIXELS = 8_000_000;  // A browser draws nothing below some height.

/** `ask` promises the rows of a window, `draw` makes a `tr` of one; `refused` hears what went wrong. */
function scrolled({ head, width, ask, draw, refused }) {
  const body = h("tbody", {}), pages = new Map(), drawn = new Map();
  const spacers = [0, 1].map(() => h("tr", { "aria-hidden": "true" }, h("td", { colspan: width })));
  const table = h("table", {}, h("thead", {}, head), body);
  const element = h("div", { class: "rows", tabindex: "-1", onscroll: () => paint() }, table);
  let total = 0, generation = 0, busy = 0, begin = 0, end = 0, wanted = [];
  body.append(...spacers);

  /** Some rows from the first on; those behind are asked for. What is drawn stays if it `stands`. */
  function give(rows, all = rows.length, stands = false) {
    if (!stands) { drawn.forEach((row) => row.remove()); drawn.clear(); generation += 1; }
    pages.clear();
    for (let first = 0; first < rows.length; first += WINDOW) pages.set(first / WINDOW, rows.slice(first, first + WINDOW));
    total = all;
    table.setAttribute("aria-rowcount", String(total));
    paint();
  }

  function paint() {
    const height = Math.min(total * ROW, MAX_PIXELS), tall = element.clientHeight, top = element.scrollTop;
    const isLong = total * ROW > MAX_PIXELS, room = Math.ceil(tall / ROW), before = begin;
    begin = isLong ? Math.round((top / Math.max(1, height - tall)) * Math.max(0, total - room)) : Math.max(0, Math.min(total - room, Math.floor(top / ROW)) - BEYOND);
    begin = Math.min(begin, Math.max(0, total - 1));
    const above = isLong ? top : begin * ROW;
    end = Math.min(total, begin + room + 2 * BEYOND, isLong ? begin + Math.max(room, Math.floor((height - above) / ROW)) : total);
    spacers[0].firstChild.style.height = `${above}px`;
    spacers[1].firstChild.style.height = `${Math.max(0, height - above - (end - begin) * ROW)}px`;
    for (const [place, row] of drawn) if (place < begin || place >= end) { row.remove(); drawn.delete(place); }
    let next = spacers[0].nextSibling;
    for (let place = begin; place < end; place += 1) {
      const known = pages.get(Math.floor(place / WINDOW))?.[place % WINDOW], old = drawn.get(place);
      if (old && (old.dataset.row || !known)) { next = old.nextSibling; continue; }
      const made = known ? draw(known, place) : h("tr", { class: "waits", "aria-busy": "true" }, h("td", { colspan: width }, "…"));
      if (old) { next = old.nextSibling; old.remove(); }
      body.insertBefore(made, next);
      drawn.set(place, made);
    }
    const [from, to] = [Math.floor(begin / WINDOW), Math.floor(Math.max(begin, end - 1) / WINDOW)];
    const ahead = Array.from({ length: AHEAD }, (_, n) => (begin < before ? from - 1 - n : to + 1 + n));
    wanted = [from, to, ...ahead, begin < before ? to + 1 : from - 1].filter((page) => page >= 0 && page * WINDOW < total);
    for (const page of pages.keys()) if (page < from - KEPT || page > to + KEPT) pages.delete(page);
    pump();
  }

  // What is looked at comes first, and what nobody will look at any more is not asked for.
  function pump() {
    for (const page of wanted) {
      if (busy >= WINDOWS_AT_ONCE) return;
      if (!pages.has(page)) load(page);
    }
  }

  async function load(page) {
    const mine = generation;
    busy += 1;
    pages.set(page, []);
    try {
      const rows = await ask(page * WINDOW);
      if (mine !== generation) return;
      pages.set(page, rows);
      if (page * WINDOW < end && (page + 1) * WINDOW > begin) paint();
    } catch (error) {
      if (mine === generation) { pages.delete(page); wanted = []; refused(error); }  // It is asked for again when it is looked at.
    } finally {
      busy -= 1;
      pump();
    }
  }

  return { element, give, isAtTop: () => element.scrollTop <= ROW, toTop: () => { element.scrollTop = 0; } };
}
