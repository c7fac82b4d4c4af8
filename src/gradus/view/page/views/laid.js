// Runs laid over each other: values between points, differences to the first, groups of runs.

/** The value of a curve at any place between its points; null outside of them. */
function valueAt(curve, x) {
  const xs = curve?.x ?? [];
  if (!xs.length || x < xs[0] || x > xs.at(-1)) return null;
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
  if (xs[high] === x || xs[high] === xs[low]) return curve.y[high];
  return curve.y[low] + ((curve.y[high] - curve.y[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}

/** Lines of each run but the first, minus the first. */
function differences(xs, curves, names) {
  const minus = (a, b) => (a === null || b === null ? null : a - b);
  return curves.slice(1).map((curve, place) => ({ label: `${names[place + 1]} - ${names[0]}`, place: place + 1, spans: true, values: xs.map((x) => minus(valueAt(curve, x), valueAt(curves[0], x))) }));
}

/** The mean of the runs of each group where all of them have a value, with the least and the most. */
function grouped(xs, curves, letters) {
  return [...new Set(letters)].sort().flatMap((letter, place) => {
    const own = curves.filter((curve, n) => letters[n] === letter && curve?.x.length);
    const at = xs.map((x) => own.map((curve) => valueAt(curve, x))).map((all) => (all.length && !all.includes(null) ? all : null));
    const line = (label, fold, more) => ({ label: `${letter} ${label}`, place, spans: true, values: at.map((all) => all && fold(all)), ...more });
    return [line(`mean of ${own.length}`, (all) => all.reduce((sum, it) => sum + it, 0) / all.length), line("least", (all) => Math.min(...all), { band: "low" }), line("most", (all) => Math.max(...all), { band: "high" })];
  });
}

/** In words, the values of several runs at the last place that all of them reached. */
function atTheSame(curves, names, axis) {
  const known = curves.map((curve, place) => [names[place], curve]).filter(([, curve]) => curve?.x.length);
  if (curves.length < 2 || known.length < 2) return "";
  const x = Math.min(...known.map(([, curve]) => curve.x.at(-1)));
  const values = known.map(([name, curve]) => [name, valueAt(curve, x)]), first = values[0][1];
  return `at ${axis} ${number(x)}: ${values.map(([name, value], place) => `${name} ${number(value)}${place && value !== null && first !== null ? ` (${signed(value - first)})` : ""}`).join(" · ")}`;
}
