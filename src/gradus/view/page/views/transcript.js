// What several agents said, in the order in which they said it; and an episode as Markdown.

/** Replies of all agents by the time when they were asked; null for an episode of one agent. */
function transcript(it) {
  const said = it.traces.flatMap((trace, place) => trace.nodes.filter((node) => node.sampled).map((node) => ({ trace, place, node })));
  const seats = new Set(said.map((one) => one.place));
  if (seats.size < 2 || said.some(({ node }) => node.began === null)) return null;
  said.sort((a, b) => a.node.began - b.node.began || a.place - b.place);
  // Who was asked while another was still speaking speaks beside, not after.
  const rounds = [];
  for (const one of said) {
    const last = rounds.at(-1), ends = last && Math.min(...last.map(({ node }) => node.began + (node.seconds ?? 0)));
    if (last && one.node.began < ends && !last.some((other) => other.place === one.place)) last.push(one); else rounds.push([one]);
  }
  return panel("In the order of speaking", h("div", { class: "chips" }, it.traces.map((trace, place) => (seats.has(place) ? h("span", { class: `seat k${place % 8}` }, `${trace.agent || `agent ${place + 1}`}: ${rewardOf(trace)}${trace.advantage === null ? "" : `, advantage ${signed(trace.advantage)}`}${trace.trainable ? "" : ", does not train"}`) : null))),
    rounds.map((round) => h("div", { class: "round" }, round.map(({ trace, place, node }) => h("article", { class: `reply seat k${place % 8}`, "data-row": "1", tabindex: "0" },
      h("div", { class: "facts-line" }, h("b", {}, trace.agent || `agent ${place + 1}`), h("span", { class: "soft" }, [node.tokens ? `${number(node.tokens)} tokens` : "", node.seconds === null ? "" : duration(node.seconds)].filter(Boolean).join(" · "))),
      h("div", { class: "said" }, node.text.text || "(nothing)"))))),
    it.traces.filter((trace) => trace.verdict).map((trace) => verdict(trace.verdict)));
}

// What was decided, and whether the order of the sides decided it.
function verdict({ winner, answers, flipped, failure }) {
  const again = flipped === true ? "Asked again with the sides in the other order, the verdict flips: it went by the order." : flipped === false ? "Asked again with the sides in the other order, the verdict stays." : failure.length ? `Asked again in the other order, no verdict came: ${failure.text}` : "";
  return h("div", { class: "verdict" }, h("b", {}, winner.text === "tie" ? "A tie" : winner.length ? `${winner.text} wins` : "No verdict"),
    Object.entries(answers).map(([side, answer]) => h("p", {}, h("span", { class: "soft" }, `${side}: `), answer.text)), again ? h("p", { class: flipped ? "late" : "" }, again) : null);
}

// A judge, or an agent whose task failed, has none, which is not 0.
function rewardOf(trace) {
  const scored = trace.rewards.filter((part) => part.score !== null);
  return scored.length ? `reward ${number(scored.reduce((sum, part) => sum + part.score * (part.weight ?? 1), 0))}` : "no reward";
}

/** A text between fences that it cannot end. */
function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((it) => it[0].length));
  const fence = "`".repeat(longest + 1);
  return `${fence}text\n${text}\n${fence}`;
}

function markdown(it, when) {
  const cut = (text) => (text.text.length < text.length ? `${text.text}\n(${text.length} characters; the beginning)` : text.text);
  const lines = [`# Episode ${it.id}`, "", [it.source, when, it.outcome, `reward ${number(it.row.reward)}`, `advantage ${signed(it.row.advantage ?? NaN)}`, it.group ? `group ${it.group}` : "", it.task.key ? `task ${it.task.key}` : ""].filter(Boolean).join(" · "), ""];
  if (it.error) lines.push(`**${it.error.type ?? "error"}**`, "", fenced(String(it.error.message ?? "")), "");
  for (const trace of it.traces) {
    lines.push(`## ${trace.agent || "Conversation"}`, "", ...trace.rewards.map((part) => `- reward \`${part.name}\` ${number(part.score)} × ${number(part.weight)}`), "");
    for (const node of trace.nodes) {
      lines.push(`### ${node.role}${node.sampled ? ", sampled" : ""}${node.tokens ? `, ${node.tokens} tokens` : ""}`, "");
      if (node.reasoning) lines.push("reasoning:", "", fenced(cut(node.reasoning)), "");
      lines.push(fenced(cut(node.text)), "", ...node.calls.flatMap((call) => [`calls \`${call.name}\``, "", fenced(cut(call.arguments)), ""]));
    }
    if (trace.num_nodes > trace.nodes.length) lines.push(`(${trace.num_nodes - trace.nodes.length} more messages)`, "");
  }
  if (it.answer) lines.push("## The right answer", "", fenced(cut(it.answer)), "");
  return lines.join("\n");
}
