// Tokens coloured by the engine's logprob: six steps of colour and underline, numbers on demand.

import { h, number, visible } from "./dom.js";

const LIMITS = [-0.1, -0.5, -1, -2, -4];
/** 0 for a token that was nearly certain, 5 for a very unlikely one. */
export const shade = (logprob) => LIMITS.filter((limit) => logprob < limit).length;

export function tokenSpans(node, { sampledOnly = false, onpoint = null, from = 0 } = {}) {
  return node.ids.map((id, place) => {
    const isSampled = node.sampled[place];
    if (sampledOnly && !isSampled) return null;
    const logprob = node.logprobs[place];
    const text = node.texts ? node.texts[place] : `<${id}>`;
    const about = [`token ${id} ${JSON.stringify(text)}`, isSampled ? `engine logprob ${number(logprob)} (p = ${number(logprob === null ? null : Math.exp(logprob))})` : "given, not sampled"];
    const span = h("span", { class: isSampled ? (logprob === null ? "token" : `token lp${shade(logprob)}`) : "token given", title: about.join("\n") }, shownText(text));
    if (onpoint) for (const kind of ["mouseenter", "click"]) span.addEventListener(kind, () => onpoint([...about, `place ${from + place}`].join(" · ")));
    return span;
  });
}

// A line feed is drawn and then breaks the line; an edge of blanks can be seen.
function shownText(text) {
  return visible(text).replace(/\n/g, "↵\n").replace(/\t/g, "⇥");
}

export function scale() {
  const words = ["> −0.1", "−0.5", "−1", "−2", "−4", "below"];
  return h("p", { class: "scale small" }, "engine logprob: ", words.map((word, place) => [h("span", { class: `token lp${place}` }, word), " "]), h("span", { class: "token given" }, "given"));
}
