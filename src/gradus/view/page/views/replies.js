// Replies on the first screen: of the newest step, of one task over the steps; tokens that grew.

let replyColour = "engine";

function card(run, reply, word) {
  const said = h("div", { class: "said" }, reply.said || "(nothing)");
  get(`${apiOf(run)}/episodes/${reply.key}/tokens`).then((tokens) => {
    const nodes = (tokens.traces?.[reply.trace] ?? []).filter((node) => node.sampled.includes(true));
    const paint = () => fill(said, tokenSpans(nodes.at(-1), { sampledOnly: true, scale: scaleOf(replyColour, tokens.traces) }));
    if (!nodes.length || !tokens.has_texts || reply.is_cut) return;
    paint();
    made.addEventListener("colour", paint);
  }).catch(() => { /* The text stands there already. */ });
  const made = h("article", { class: "reply", "data-row": "1", tabindex: "0", onclick: opens(() => { location.hash = address(run, `episode/${reply.key}`); }) },
    h("div", { class: "facts-line" }, h("b", {}, word), h("span", {}, `reward ${number(reply.reward)}`), reply.advantage !== null ? h("span", {}, `advantage ${signed(reply.advantage)}`) : null,
      reply.count > 1 ? h("span", { class: "soft" }, `median of ${number(reply.count)}, mean ${number(reply.mean)}`) : null),
    h("div", { class: "asked" }, reply.asked || "(no prompt)"), said,
    reply.answer ? h("div", { class: "soft small" }, `right: ${reply.answer}`) : null,
    Object.keys(reply.parts).length > 1 ? h("div", { class: "soft small" }, Object.entries(reply.parts).map(([name, value]) => `${name} ${number(value)}`).join(" · ")) : null);
  return made;
}

function newestReplies(run, found) {
  if (!found.replies.length) return null;
  const when = found.purpose === "eval" ? `evaluation of version ${found.step}` : `step ${found.step + 1}`;
  return panel(`Newest replies: ${when}, ${number(found.count)} episodes`, h("div", { class: "three" }, found.replies.map((reply) => card(run, reply, reply.word))),
    found.purpose === "train" ? h("p", { class: "soft small" }, "Tokens by ", h("select", { "aria-label": "Colour tokens by", onchange: (e) => { replyColour = e.target.value; document.querySelectorAll(".reply").forEach((it) => it.dispatchEvent(new Event("colour"))); } }, Object.entries(COLOURS).map(([name, it]) => h("option", { value: name, selected: name === replyColour }, it.title))), " (of a share of the groups the trainer's numbers are kept); an underline marks strong colours too.") : null);
}

function changes(run, kind, { is_reading: isReading, followed, grown }) {
  if (isReading) return panel("Then and now", h("p", { class: "soft" }, "The episodes are still being read."));
  const { task, replies } = followed;
  const title = task ? `One task over ${number(followed.num_steps)} ${followed.purpose === "train" ? "steps" : "evaluations"}` : "Then and now";
  const about = task ? h("p", { class: "soft small" }, "The task that was played most often. ", h("a", { href: address(run, "episodes", [["task", task], ["purpose", followed.purpose], ["sort", "step"]]) }, "all its episodes")) : h("p", { class: "soft small" }, "No task was played in two steps: the median reply of each step, to different tasks.");
  return [replies.length > 1 ? panel(title, about, h("div", { class: "three" }, replies.map((reply) => card(run, reply, reply.word)))) : null, kind === "rl" ? grownTokens(grown) : null];
}

const percent = (share) => `${number(Number((100 * share).toPrecision(2)))} %`;

function grownTokens({ why, grown, first, last, groups, tokens }) {
  const title = "Tokens whose share grew most";
  if (why) return panel(title, h("p", { class: "soft" }, `Not known: ${why}.`));
  const most = Math.max(...grown.map((it) => it.shares[1]), 1e-9);
  return panel(title, h("p", { class: "soft small" }, `Of the tokens that trained in step ${number(last)} (${number(tokens[1])} in ${number(groups[1])} groups) against step ${number(first)} (${number(tokens[0])} in ${number(groups[0])}). By more than groups differ among themselves${grown.some((it) => !it.is_sure) ? ", which a single group does not tell: ?" : ""}.`),
    grown.length ? h("div", { class: "bars grown" }, grown.map((it) => [h("code", {}, it.text === null ? `<${it.token}>` : JSON.stringify(it.text), it.is_sure ? "" : " ?"), bar(it.shares[1], 0, most), h("span", { class: "n" }, `${percent(it.shares[0])} → ${percent(it.shares[1])}`)])) : h("p", {}, "None grew by more than groups differ among themselves."));
}
