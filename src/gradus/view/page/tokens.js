// Tokens by colour: one of the numbers that are known of each, in steps of colour and underline.

const known = (value) => value !== null && value !== undefined;
const low = (value) => [-0.1, -0.5, -1, -2, -4].filter((limit) => value < limit).length;
const high = (value) => [0.1, 0.5, 1, 2, 3].filter((limit) => value > limit).length;
const both = (value, limits) => { const steps = limits.filter((limit) => Math.abs(value) > limit).length; return steps ? `${value < 0 ? "dn" : "up"}${steps}` : "lp0"; };
const LOW = ["> −0.1", "−0.5", "−1", "−2", "−4", "below"];
const HIGH = ["< 0.1", "0.5", "1", "2", "3", "above"];
const at = (node, name, place) => node[name]?.[place];
const times = (node, place) => (known(at(node, "advantage", place)) ? node.advantage[place] * (node.weight[place] ?? 0) : null);

/** What tokens can be coloured by: title, number of a token, class of a number, and what it needs. */
const COLOURS = {
  engine: { title: "engine logprob", of: (node, place) => node.logprobs[place], shade: (value) => `lp${low(value)}`, words: LOW },
  trainer: { title: "trainer logprob", needs: "trainer", of: (node, place) => at(node, "policy", place), shade: (value) => `lp${low(value)}`, words: LOW },
  difference: { title: "trainer − engine", needs: "trainer", limits: [0.02, 0.1, 0.5], of: (node, place) => (known(at(node, "policy", place)) && known(node.logprobs[place]) ? node.policy[place] - node.logprobs[place] : null) },
  entropy: { title: "entropy", needs: "trainer", of: (node, place) => at(node, "entropy", place), shade: (value) => `lp${high(value)}`, words: HIGH },
  advantage: { title: "advantage × weight", needs: "trainer", relative: true, of: times },
  push: { title: "push of the step", needs: "trainer", relative: true, of: (node, place) => at(node, "push", place) },
  version: { title: "policy version", needs: "versions", of: (node, place) => at(node, "versions", place), shade: (value) => `ver${value % 8}` },
  trained: { title: "trained or masked", needs: "trainer", of: (node, place) => (node.sampled[place] ? Number(known(at(node, "policy", place))) : null), shade: (value) => (value ? "ver2" : "ver7") },
  ratio: { title: "ratio − 1", needs: "trainer", limits: [0.02, 0.1, 0.5], of: (node, place) => { const apart = COLOURS.difference.of(node, place); return apart === null ? null : Math.expm1(apart); } },
  drift: { title: "trainer − reference", needs: "reference", limits: [0.1, 0.5, 2], of: (node, place) => (known(at(node, "policy", place)) && known(at(node, "reference", place)) ? node.policy[place] - node.reference[place] : null) },
};

/** The scale of one colour over all tokens of an episode. */
function scaleOf(name, traces) {
  const colour = COLOURS[name];
  const values = traces.flat().flatMap((node) => node.ids.map((_, place) => colour.of(node, place))).filter(known);
  const most = values.reduce((largest, value) => Math.max(largest, Math.abs(value)), 0);
  const limits = colour.relative ? most === 0 ? [] : [0.02, 0.3, 0.7].map((share) => Number((share * most).toPrecision(2))) : colour.limits;
  const shade = colour.shade ?? ((value) => both(value, limits));
  const steps = limits ? [...limits.map((limit) => -limit).reverse(), 0, ...limits].map((value) => [value === 0 ? (limits.length ? `±${number(limits[0])}` : "0") : `${value < 0 ? "< −" : "> "}${number(Math.abs(value))}`, shade(value * 1.001)])
    : name === "version" ? [...new Set(values)].sort((a, b) => a - b).map((value) => [`v${value}`, shade(value)])
      : name === "trained" ? [["trained", "ver2"], ["masked", "ver7"]] : colour.words.map((word, place) => [word, `lp${place}`]);
  return { colour, shade: (node, place) => { const value = colour.of(node, place); return known(value) ? shade(value) : ""; }, steps };
}

const ENGINE = scaleOf("engine", []);

function tokenSpans(node, { sampledOnly = false, onpoint = null, from = 0, scale = ENGINE } = {}) {
  const otherwise = new Set(node.read_otherwise ?? []);
  let own = -1;
  return node.ids.map((id, place) => {
    const isSampled = node.sampled[place];
    if (isSampled) own += 1;
    const isOdd = isSampled && otherwise.has(own);
    if (sampledOnly && !isSampled) return null;
    const text = node.texts ? node.texts[place] : `<${id}>`;
    const about = [`token ${id} ${JSON.stringify(text)}`, ...numbers(node, place), ...(isOdd ? ["its text, read again, gives other tokens"] : []), ...(node.alternatives?.[place] ?? []).map(([piece, logprob]) => `or ${JSON.stringify(piece)} ${number(logprob)}`)];
    const span = h("span", { class: isSampled ? `token ${scale.shade(node, place)}${isOdd ? " odd" : ""}` : "token given", title: about.join("\n") }, shownText(text));
    if (onpoint) for (const kind of ["mouseenter", "click"]) span.addEventListener(kind, () => onpoint([...about, `place ${from + place}`].join(" · ")));
    return span;
  });
}

/** All that is known of a token, in words. */
function numbers(node, place) {
  if (!node.sampled[place] && !known(at(node, "policy", place))) return ["given, not sampled"];
  const engine = node.logprobs[place];
  const said = [node.sampled[place] ? `engine logprob ${number(engine)} (p = ${number(known(engine) ? Math.exp(engine) : null)})` : "given, not sampled"];
  if (known(at(node, "versions", place))) said.push(`version ${node.versions[place]}`);
  if (!known(at(node, "policy", place))) return said;
  const difference = COLOURS.difference.of(node, place);
  return [...said, `trainer logprob ${number(node.policy[place])}`, known(difference) ? `trainer − engine ${signed(difference)}, ratio ${number(Math.exp(difference))}` : "", known(at(node, "reference", place)) ? `reference logprob ${number(node.reference[place])}, trainer − reference ${signed(COLOURS.drift.of(node, place))}` : "", `entropy ${number(at(node, "entropy", place))}`,
    `advantage ${signed(node.advantage[place])} × weight ${number(node.weight[place])}`, node.push[place] === 0 && times(node, place) !== 0 ? "push 0: dropped by the loss" : `push ${signed(node.push[place])}`].filter(Boolean);
}

// A line feed is drawn and then breaks the line; an edge of blanks can be seen.
function shownText(text) {
  return visible(text).replace(/\n/g, "↵\n").replace(/\t/g, "⇥");
}

/** The steps of a scale with their numbers, to stand beside the tokens. */
function legend({ colour, steps }) {
  return h("p", { class: "scale small" }, `${colour.title}: `, steps.map(([word, shade]) => [h("span", { class: `token ${shade}` }, word), " "]), h("span", { class: "token given" }, "given"));
}
