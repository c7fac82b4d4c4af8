// A chart as a file of SVG, with the colours of the page, for documents.

const WIDE = 640, TALL = 320, LEFT = 64, BOTTOM = 44, TOP = 34, RIGHT = 14;
const text = (words) => visible(words).replace(/[&<>"]/g, (c) => `&#${c.codePointAt(0)};`);

/** About five round numbers from `low` to `high`. */
function ticks(low, high) {
  const rough = (high - low) / 5 || 1, power = 10 ** Math.floor(Math.log10(rough));
  const each = [1, 2, 5, 10].map((it) => it * power).find((it) => it >= rough);
  const first = Math.ceil(low / each), count = Math.floor(high / each) - first + 1;
  return Array.from({ length: Math.max(0, count) }, (_, place) => (first + place) * each);
}

/** Powers of ten as exponents; of less than two decades numbers that are evenly spread. */
const powers = (low, high) => (high - low < 2 ? ticks(10 ** low, 10 ** high).map(Math.log10) : ticks(low, high).filter(Number.isInteger));

/** The least and the most; of a single number a range around it. */
function ends(values) {
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return low === high ? around(low) : [low, high];
}

function drawing(title, axis, { xs, lines: plain }, isLog = false) {
  const lines = plain.map((line) => ({ ...line, values: line.values.map((it) => (it === null || !Number.isFinite(it) ? null : isLog ? Math.log10(it) : it)) }));
  const [left, right] = ends(xs), [low, high] = ends(lines.flatMap((line) => line.values).filter((it) => it !== null));
  const x = (value) => LEFT + ((value - left) / (right - left || 1)) * (WIDE - LEFT - RIGHT);
  const y = (value) => TALL - BOTTOM - ((value - low) / (high - low || 1)) * (TALL - BOTTOM - TOP);
  const point = (value, place) => `${x(xs[place]).toFixed(1)},${y(value).toFixed(1)}`;
  const points = (line) => line.values.map((value, place) => (value === null ? "" : point(value, place))).filter(Boolean);
  const bands = lines.map((line, place) => (line.band === "high" ? `<polygon points="${[...points(line), ...points(lines[place - 1]).reverse()].join(" ")}" fill="${line.colour}" fill-opacity="0.15"/>` : "")).join("");
  // A line ends at a gap, and goes on behind it; a point alone is a dot.
  const pieces = (line) => line.values.reduce((all, value, place) => {
    if (value !== null) all.at(-1).push(point(value, place)); else if (!line.spans) all.push([]);
    return all;
  }, [[]]).filter((it) => it.length);
  const curves = lines.filter((line) => !line.band).flatMap((line) => pieces(line).map((piece) => (piece.length === 1 ? `<circle cx="${piece[0].replace(",", '" cy="')}" r="2.5" fill="${line.colour}"/>`
    : `<polyline points="${piece.join(" ")}" fill="none" stroke="${line.colour}" stroke-width="${line.faint ? 0.7 : 1.8}"${line.faint ? ' stroke-opacity="0.4"' : ""}/>`))).join("");
  const across = (xs.length === 1 ? xs : ticks(left, right)).map((it) => `<text x="${x(it)}" y="${TALL - BOTTOM + 18}" text-anchor="middle">${number(it)}</text>`).join("");
  const up = (isLog ? powers : ticks)(low, high).map((it) => `<path d="M${LEFT} ${y(it)}H${WIDE - RIGHT}" stroke="#ddd"/><text x="${LEFT - 6}" y="${y(it) + 4}" text-anchor="end">${number(Number((isLog ? 10 ** it : it).toPrecision(4)))}</text>`).join("");
  const names = lines.filter((line) => !line.band && !line.faint);
  const legend = names.map((line, place) => `<text x="${WIDE - RIGHT}" y="${TOP + 14 + 15 * place}" text-anchor="end" fill="${line.colour}">${text(line.label)}</text>`).join("");
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDE} ${TALL}" font-family="sans-serif" font-size="12"><rect width="${WIDE}" height="${TALL}" fill="#fff"/><text x="${LEFT}" y="20" font-weight="bold">${text(title)}</text>${up}${across}<text x="${(WIDE + LEFT) / 2}" y="${TALL - 8}" text-anchor="middle">${text(axis)}</text>${bands}${curves}${names.length > 1 ? legend : ""}</svg>\n`;
}
