// One episode: what was said, what it earned, and the tokens as the engine sampled them.

async function episodeView(main, at, _runs, talks = []) {
  const base = `${apiOf(at.run)}/episodes/${at.key}`;
  const it = await get(base);
  const back = lastTable(at.run);
  let tokens = null;
  let showsTokens = true;
  let colour = "engine";
  let scale = scaleOf(colour, []);
  const scaleLine = h("div", {}, legend(scale));
  const buttons = h("div", { class: "chips", role: "group", "aria-label": "Colour tokens by" });
  const switches = h("label", {}, h("input", { type: "checkbox", checked: true, "data-tokens": "1", onchange: (e) => { showsTokens = e.target.checked; draw(); } }), " tokens (t)");
  const point = h("p", { class: "point small", role: "status" }, "Point at a token for its numbers.");
  const traces = h("div", {});
  const why = h("p", { class: "soft small" });
  const row = it.row;
  const inGroup = h("span", {}, h("a", { href: address(at.run, `group/${at.key}`) }, "its group"));
  const found = get(`${apiOf(at.run)}/groups/${at.key}`, [["keys", "1"]]).then((group) => group.keys, () => []);
  found.then((all) => { if (all.length > 1 && all.includes(at.key)) inGroup.append(`, ${number(all.indexOf(at.key) + 1)} of ${number(all.length)} by reward (h / l)`); });
  async function move(by) {
    const all = await found, next = all[all.indexOf(at.key) + by];  // Of a large group the first ones are known.
    if (next && all.includes(at.key)) location.replace(address(at.run, `episode/${next}`));
  }
  const when = row.purpose === "eval" ? `evaluation of version ${row.step}` : `step ${row.step + 1}`;
  fill(main,
    h("p", { class: "small" }, h("a", { href: address(at.run, "episodes", back) }, "← episodes"), " · ", inGroup, " · ", h("a", { href: address(at.run, "episodes", [["task", row.task], ["sort", "step"]]) }, "its task over the run"), talks.length ? [" · ", h("a", { href: address(at.run, "talk", [["episode", at.key]]) }, "talk with its task")] : null),
    h("h1", {}, `Episode ${it.id ?? at.key}`),
    h("dl", { class: "facts" }, facts(it, when).map(([value, name]) => h("div", {}, h("dd", {}, value), h("dt", {}, name)))),
    it.error ? h("p", { class: "problem" }, `${it.error.type ?? "error"}: ${it.error.message ?? ""}`) : null,
    ...Object.entries(it.dropped).map(([sample, reason]) => h("p", { class: "late" }, `${sample} trained nothing: ${reason}`)),
    it.cut ? h("p", { class: "soft small" }, `The record was too large; it was cut: ${JSON.stringify(it.cut)}`) : null,
    h("div", { class: "tools sticky" }, switches, h("button", { class: "quiet small", onclick: keep }, "as Markdown (e)"), scaleLine, buttons, point), why, traces,
    it.answer ? panel("The right answer", h("pre", {}, it.answer.text)) : null, filters(it));

  function keep() { save(markdown(it, when), `${it.id ?? at.key}.md`); }

  // The tokens with the strongest colour, one after the other.
  let worst = -1;
  function next(by) {
    const rank = (span) => Number((/(?:lp|up|dn)(\d)/.exec(span.className) ?? [0, 0])[1]);
    const found = [...traces.querySelectorAll(".token")].map((span, place) => [rank(span), place, span]).filter(([strength]) => strength > 0).sort((a, b) => b[0] - a[0] || a[1] - b[1]);
    if (!found.length) return;
    worst = worst < 0 && by < 0 ? found.length - 1 : (worst + by + found.length) % found.length;
    const span = found[worst][2];
    span.tabIndex = -1;
    span.focus();
    span.scrollIntoView({ block: "center" });
    fill(point, span.title.replace(/\n/g, " · "));
  }

  function draw() {
    worst = -1;
    const order = transcript(it);
    fill(traces, order, it.traces.map((trace, place) => drawTrace(trace, place)), it.num_traces > it.traces.length ? h("p", { class: "soft" }, `${number(it.num_traces - it.traces.length)} more traces are left out.`) : null);
  }

  function drawTrace(trace, place) {
    const turns = h("div", {}, trace.nodes.map((node) => drawNode(node, place)));
    const left = () => trace.num_nodes - trace.nodes.length;
    const more = left() > 0 ? asking(`${number(left())} more messages`, async () => {
      const next = await get(base, [["from", trace.nodes.length]]);
      trace.nodes.push(...next.traces[place].nodes);
      draw();
    }) : null;
    const title = it.traces.length > 1 ? `${trace.agent || "agent"}${trace.trainable ? "" : " (does not train)"}` : "Conversation";
    return panel(title, traceFacts(trace), turns, more,
      trace.info !== "{}" ? h("details", {}, h("summary", {}, "what the environment noted"), h("pre", {}, trace.info)) : null, timeline(trace));
  }

  function traceFacts(trace) {
    const rewards = trace.rewards.map((part) => `${part.name} ${number(part.score)}${part.weight === 1 || part.weight === null ? "" : ` × ${number(part.weight)}`}`);
    const metrics = Object.entries(trace.metrics).map(([name, value]) => `${name} ${number(value)}`);
    return h("div", { class: "small" }, rewards.length ? h("div", {}, h("b", {}, "reward "), rewards.join(" + ")) : null,
      trace.advantage !== null ? h("div", {}, h("b", {}, "advantage "), signed(trace.advantage), h("span", { class: "soft" }, " mean over its sampled tokens")) : null,
      metrics.length ? h("div", { class: "soft" }, metrics.join(" · ")) : null,
      h("div", { class: "soft" }, [trace.stop ? `ended: ${trace.stop}` : "", trace.tokens !== null && trace.tokens !== undefined ? `${number(trace.tokens)} tokens sampled, ${number(trace.prompt_tokens)} given` : ""].filter(Boolean).join(" · ")),
      trace.errors.map((error) => h("p", { class: "problem" }, error.text)));
  }

  function drawNode(node, place) {
    const known = tokens?.traces?.[place]?.[node.node];
    const asTokens = showsTokens && known && known.ids.length && (known.texts || node.sampled);
    const notes = [node.tokens ? `${number(node.tokens)} tokens` : "", node.finish && node.finish !== "stop" ? `ended: ${node.finish}` : "", node.seconds !== null ? duration(node.seconds) : ""].filter(Boolean).join(" · ");
    const spans = asTokens ? tokenSpans(known, { scale, onpoint: (about) => fill(point, about) }) : [];
    const before = asTokens && !node.sampled ? systemTokens(known.texts, node.role) : 0;
    const said = asTokens ? h("div", { class: "tokens" }, spans.slice(before)) : [
      node.reasoning ? h("details", {}, h("summary", {}, `reasoning, ${number(node.reasoning.length)} characters`), long(node.reasoning, null)) : null,
      node.text.length || !(node.reasoning || node.calls.length) ? long(node.text, [place, node.node]) : null];
    const shown = (node.images ?? []).map((name) => picture(at.run, name));
    const system = before ? h("article", { class: "turn" }, h("header", {}, h("b", {}, "system"), h("span", { class: "soft small" }, "of the chat template")), h("div", { class: "tokens" }, spans.slice(0, before))) : null;
    return [system, h("article", { class: `turn ${node.sampled ? "own" : ""}`, "data-row": "1", tabindex: "0" }, h("header", {}, h("b", {}, node.role + (node.tool ? ` ${node.tool}` : "")), h("span", { class: "soft small" }, notes)),
      h("div", {}, shown, said, node.calls.map((call) => h("div", { class: "call" }, h("b", {}, call.name), long(call.arguments, null)))))];
  }

  /** A button that asks for more, and says why none came. */
  function asking(words, act) {
    const button = h("button", { onclick: () => act().catch((error) => fill(button, `${words}: ${error.message}`)) }, words);
    return button;
  }

  function long(text, where) {
    const shown = h("pre", {}, text.length ? text.text : "(nothing)");
    if (text.text.length >= text.length || !where) return text.text.length < text.length ? [shown, h("p", { class: "soft small" }, `${number(text.length)} characters; the beginning is shown.`)] : shown;
    const more = asking(`all ${number(text.length)} characters`, async () => { const whole = await get(`${base}/text`, [["trace", where[0]], ["node", where[1]]]); fill(shown, whole.text); more.remove(); });
    return [shown, more];
  }

  // Colours that the episode has no numbers for are named with their reason, and not offered.
  function choose(name) {
    if (tokens?.why || tokens?.missing?.[COLOURS[name]?.needs] || !COLOURS[name]) return;
    colour = name;
    scale = scaleOf(name, tokens?.traces ?? []);
    fill(scaleLine, legend(scale));
    fill(buttons, tokens ? Object.entries(COLOURS).map(([key, it], place) => h("button", { "data-colour": key, "aria-pressed": String(key === colour), disabled: Boolean(tokens.missing?.[it.needs]), onclick: () => choose(key) }, `${(place + 1) % 10} ${it.title}`)) : null);
    draw();
  }

  draw();
  get(`${base}/tokens`).then((found) => {
    tokens = found;
    for (const part of [switches, scaleLine, buttons, point]) part.hidden = Boolean(found.why);
    fill(why, found.why ? `No tokens: ${found.why}.` : [found.has_texts ? "" : "No tokenizer was found, so tokens are numbers. ", found.left_out ? `${number(found.left_out)} tokens are left out. ` : "", readOtherwise(found),
      [...new Set(Object.values(found.missing ?? {}))].map((reason) => h("div", {}, `No ${Object.values(COLOURS).filter((it) => found.missing[it.needs] === reason).map((it) => it.title).join(", ")}: ${reason}.`))]);
    choose(found.missing?.[COLOURS[colour].needs] ? "engine" : colour);  // A key may have chosen one before.
  }).catch((error) => fill(why, error.message));
  return { back, move, keep, worst: next, toggle: () => main.querySelector("[data-tokens]")?.click(), colour: (place) => choose(Object.keys(COLOURS)[place - 1]) };
}

/** How many of a message's first tokens are a system prompt that the chat template put before it. */
function systemTokens(texts, role) {
  const header = (word, from) => texts.findIndex((text, place) => place > from && text.trim() === word && texts[place - 1].startsWith("<"));
  const system = header("system", 0), own = system < 0 ? -1 : header(role, system);
  return own > 0 && texts[own - 1] === texts[system - 1] ? own - 1 : 0;
}

function readOtherwise(found) {
  const count = (found.traces ?? []).flat().reduce((sum, node) => sum + (node.read_otherwise?.length ?? 0), 0);
  return count ? `${number(count)} tokens have a wavy line: their text, read again, gives other tokens. ` : "";
}

function facts(it, when) {
  const row = it.row;
  return [[number(row.reward), "reward"], [signed(row.advantage ?? NaN), "advantage"], [when, row.source], [number(row.tokens), "tokens sampled"], [number(row.turns), "replies"],
    row.staleness === null ? null : [number(row.staleness), "staleness"], it.versions ? [it.versions.oldest === it.versions.newest ? `v${it.versions.oldest}` : `v${it.versions.oldest} to v${it.versions.newest}`, "sampled by"] : null, [row.outcome, "outcome"]].filter(Boolean);
}

function timeline(trace) {
  const parts = Object.entries(trace.seconds).filter(([, seconds]) => seconds !== null);
  const longest = Math.max(...parts.map(([, seconds]) => seconds), 1e-9);
  return parts.length ? h("details", {}, h("summary", {}, `time: ${duration(parts.reduce((sum, [, it]) => sum + it, 0))}`), h("div", { class: "bars" }, parts.map(([name, seconds]) => [h("span", {}, name), h("meter", { min: 0, max: longest, value: seconds, "aria-label": name }), h("span", { class: "n" }, duration(seconds))]))) : null;
}

function filters(it) {
  const lines = Object.entries(it.filters).map(([sample, verdicts]) => `${sample}: ${Object.entries(verdicts ?? {}).map(([name, verdict]) => `${name} ${verdict}`).join(", ")}`);
  return lines.length ? panel("Filters", h("ul", { class: "small" }, lines.map((line) => h("li", {}, line)))) : null;
}
