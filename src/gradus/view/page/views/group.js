// All replies to one task side by side, and what the same task earned over the whole run.

const SORTS = { "-reward": "best first", reward: "worst first", "-advantage": "largest advantage first", advantage: "smallest advantage first", "-tokens": "longest first", tokens: "shortest first", "-turns": "most replies first" };

const MARKS = { tokens: "tokens by the engine's logprob", words: "words that differ from the best reply", none: "nothing" };

async function groupView(main, at) {
  const base = `${apiOf(at.run)}/groups/${at.key}`;
  let sort = at.query.get("sort") ?? "-reward";
  let plot = null, shown = "", isClosed = false;
  const holder = fill(main, h("div", {})).firstChild;
  let best = null, marks = null, plain = "none";  // The best reply; what is marked, and what `t` takes in place of its differences.
  const known = new Map();  // Tokens that were asked for already.
  const watch = new IntersectionObserver((seen) => seen.filter((it) => it.isIntersecting).forEach((it) => { watch.unobserve(it.target); it.target.dispatchEvent(new Event("colour")); }), { rootMargin: "400px" });

  async function load(first = 0) { return get(base, [["sort", sort], ["from", first]]); }

  async function draw(isAll = true) {
    const it = await load();
    const now = JSON.stringify(it);
    if (isClosed || (!isAll && now === shown)) return;
    shown = now;
    plot?.destroy();
    best = sort === "-reward" ? it.replies[0] : (await get(base, [["sort", "-reward"]])).replies[0];
    const isEvaluation = it.purpose === "eval";
    plain = isEvaluation ? "none" : "tokens";
    marks ??= isEvaluation ? "words" : "tokens";
    const when = isEvaluation ? `evaluation of version ${it.step}` : `step ${it.step + 1}`;
    const grid = h("div", { class: "three group" }, it.replies.map((reply) => card(it, reply)));
    fill(holder,
      h("p", { class: "small" }, h("a", { href: address(at.run, "episodes", lastTable(at.run)) }, "← episodes"), " · ",
        h("a", { href: address(at.run, "episodes", [...(it.group ? [["group", it.group]] : [["source", it.source], ["task", it.task]]), ...(isEvaluation || !it.group ? [["purpose", it.purpose], ["step", it.step]] : [])]) }, "as a table")),
      h("h1", {}, it.group ? `Group ${it.group}` : `One task in ${when}`),
      h("p", { class: "soft" }, [it.source, when, it.title || (it.task ? `task ${it.task.length > 24 ? `${it.task.slice(0, 24)}…` : it.task}` : ""), `${number(it.count)} ${it.count === 1 ? "reply" : "replies"}`, it.mean === null ? "no reward" : `reward ${number(it.mean)} ± ${number(it.spread)}`].filter(Boolean).join(" · ")),
      it.spread === 0 && it.count > 1 ? h("p", { class: "soft" }, "All earned the same, so no reply is told apart by its reward.") : null,
      it.asked || it.answer ? panel("The task", h("pre", { class: "asked" }, it.asked || "(no prompt)"), it.answer ? h("p", { class: "small" }, h("b", {}, "right: "), it.answer) : null) : null,
      h("div", { class: "tools" }, h("label", {}, "order ", h("select", { "data-search": "1", onchange: (e) => { sort = e.target.value; history.replaceState(null, "", address(at.run, `group/${at.key}`, [["sort", sort]])); draw().catch(refused); } },
        Object.entries(SORTS).map(([name, words]) => h("option", { value: name, selected: name === sort }, words)))), h("label", {}, "mark (t) ", h("select", { onchange: (e) => { marks = e.target.value; draw().catch(refused); } }, Object.entries(isEvaluation ? { words: MARKS.words, none: MARKS.none } : MARKS).map(([name, words]) => h("option", { value: name, selected: name === marks }, words))))),
      grid, more(it, grid), overRun(it));
    const where = holder.querySelector("[data-plot]");
    if (where) plot = chart(where, runCurve(it), { height: 190, x: isEvaluation ? "version" : "step", onpick: (x) => { const found = it.over_run.find((step) => step.step + (isEvaluation ? 0 : 1) === x); if (found) location.hash = address(at.run, `group/${found.key}`); } });
  }

  const refused = (error) => { plot?.destroy(); plot = null; fill(holder, h("p", { class: "problem" }, error.message)); };

  function more(it, grid) {
    let next = it.replies.length;
    if (next >= it.count) return null;
    if (it.note) return h("p", { class: "soft" }, it.note);
    const button = h("button", { onclick: async () => {
      const found = await load(next);
      next += found.replies.length;
      grid.append(...found.replies.map((reply) => card(it, reply)));
      if (next >= it.count || !found.replies.length) button.remove(); else fill(button, `${number(it.count - next)} more`);
    } }, `${number(it.count - next)} more`);
    return button;
  }

  function card(it, reply) {
    const isBest = reply.key === best?.key, isCompared = marks === "words" && best?.said && !isBest;
    const texts = reply.said?.map((text, place) => (text ? (isCompared ? withMarks(text, best.said[place] ?? "") : text) : "(nothing)"));
    const said = h("div", { class: "said" }, !texts ? "(too much to read here: open the episode)" : texts.length ? separated(texts) : "(no reply)");
    if (marks === "tokens" && reply.said?.length && !reply.is_cut) {
      said.addEventListener("colour", () => colour(said, reply).catch(() => { /* The text stands there already. */ }));
      watch.observe(said);
    }
    const open = opens(() => { location.hash = address(at.run, `episode/${reply.key}`); });
    const line = (name, value, text) => [h("span", { class: "soft" }, name), bar(value, ...it.ranges[name]), h("span", { class: "n" }, text)];
    return h("article", { class: "reply", "data-row": "1", tabindex: "0", onclick: open },
      h("div", { class: "bars" }, line("reward", reply.reward, number(reply.reward)), it.ranges.advantage[0] === null ? null : line("advantage", reply.advantage, signed(reply.advantage ?? NaN)), line("tokens", reply.tokens, number(reply.tokens))),
      reply.outcome === "finished" ? null : h("div", { class: "late small" }, reply.why || reply.outcome), reply.dropped ? h("div", { class: "late small" }, `trained nothing: ${reply.dropped}`) : null,
      said, h("div", { class: "soft small" }, [reply.turns > 1 ? `${number(reply.turns)} replies` : "", reply.is_cut ? "the beginning" : "", reply.agent].filter(Boolean).join(" · "), isBest && it.count > 1 ? h("b", {}, " the best") : null));
  }

  async function colour(said, reply) {
    if (!known.has(reply.key)) known.set(reply.key, await get(`${apiOf(at.run)}/episodes/${reply.key}/tokens`));
    const tokens = known.get(reply.key);
    const nodes = (tokens.traces?.[reply.trace] ?? []).filter((node) => node.sampled.includes(true));
    if (tokens.has_texts && nodes.length === reply.said.length) fill(said, separated(nodes.map((node) => tokenSpans(node, { sampledOnly: true }))));
  }

  await draw();
  let marked = null;
  return {
    back: lastTable(at.run), toggle: () => { marks = marks === "words" ? plain : "words"; draw().catch(refused); }, recolour: () => { draw().catch(refused); },
    close: () => { isClosed = true; watch.disconnect(); plot?.destroy(); },
    async news(news) {
      const mark = `${news.episodes} ${news.generation}`;
      const isNew = marked !== null && mark !== marked;
      marked = mark;
      if (isNew && !holder.contains(document.activeElement)) await draw(false).catch(refused);
    },
  };
}

const MOST_COMPARED = 4e6;

/** A text as pieces in which the words that a longest common part with another leaves out are marked. */
function withMarks(text, other) {
  const words = text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [], others = other.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
  if (words.length * others.length > MOST_COMPARED) return text;
  const wide = others.length + 1, common = new Uint16Array((words.length + 1) * wide);
  for (let one = words.length - 1; one >= 0; one -= 1) for (let two = others.length - 1; two >= 0; two -= 1) common[one * wide + two] = words[one] === others[two] ? common[(one + 1) * wide + two + 1] + 1 : Math.max(common[(one + 1) * wide + two], common[one * wide + two + 1]);
  let two = 0;
  return words.map((word, one) => {
    while (two < others.length && words[one] !== others[two] && common[one * wide + two] === common[one * wide + two + 1]) two += 1;
    if (two < others.length && word === others[two]) { two += 1; return word; }
    return word.trim() ? h("mark", {}, word) : word;
  });
}

const separated = (parts) => parts.map((part, place) => [place ? h("hr", {}) : null, part]);

function overRun(it) {
  if (it.over_run.length < 2) return it.task ? h("p", { class: "soft" }, `The task was played in ${it.purpose === "eval" ? "one evaluation" : "this step"} alone.`) : null;
  return panel("The same task over the run", h("p", { class: "soft small" }, "Mean reward, and least to most. Click a point for its replies."), h("div", { class: "plot", "data-plot": "over" }));
}

function runCurve(it) {
  const first = it.purpose === "eval" ? 0 : 1;
  const of = (name) => it.over_run.map((step) => step[name]);
  return { xs: of("step").map((step) => step + first), lines: [{ label: "mean", values: of("mean") }, { label: "least", values: of("low"), band: "low" }, { label: "most", values: of("high"), band: "high" }] };
}
