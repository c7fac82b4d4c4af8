// A conversation with the servers that gradus view was told of, side by side, tokens by logprob.

const SETTINGS = { temperature: ["1", 0, 0.1], top_p: ["", 0, 0.05], max_tokens: ["256", 1, 1], seed: ["", 0, 1] };

/** What the first agent of an episode that spoke was told before its first reply, as messages. */
async function beginning(run, key) {
  const { traces } = await get(`${apiOf(run)}/episodes/${key}`);
  const place = Math.max(0, traces.findIndex((trace) => trace.nodes.some((node) => node.sampled)));
  const nodes = traces[place]?.nodes ?? [], first = nodes.findIndex((node) => node.sampled);
  const whole = async (node) => (node.text.text.length < node.text.length ? (await get(`${apiOf(run)}/episodes/${key}/text`, [["trace", place], ["node", node.node]])).text : node.text.text);
  const messages = nodes.slice(0, first < 0 ? nodes.length : first).map(async (node) => ({ role: node.role, content: await whole(node) }));
  return { agent: traces.length > 1 ? traces[place].agent : "", messages: await Promise.all(messages), tools: traces[place]?.tools ?? [] };
}

async function say(place, asked) {
  const answer = await fetch(`api/talk/${place}`, { method: "POST", body: JSON.stringify(asked), headers: { "Content-Type": "application/json" } });
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error);
  return value;
}

async function talkView(main, at) {
  const { talks } = await get("api/runs");
  if (!talks?.length) throw new Error("Start gradus view with --talk URL, the address of a server such as that of gradus serve.");
  const key = at.query.get("episode");
  const { agent, messages: told, tools } = key ? await beginning(at.run, key) : { agent: "", messages: [], tools: [] };
  const offers = h("input", { type: "checkbox", checked: true });
  const text = h("textarea", { rows: 4, "data-search": "1", "aria-label": "Message", placeholder: "Message; Ctrl-Enter sends it" });
  text.value = told.at(-1)?.role === "user" ? told.pop().content : "";
  const inputs = Object.entries(SETTINGS).map(([name, [value, min, step]]) => [name, h("input", { type: "number", value, min, step, "aria-label": name })]);
  const columns = talks.map((url) => ({ url, messages: [...told], calls: [], shown: h("div", {}) }));
  const send = h("button", {}, "send");
  const bubble = (role, ...content) => h("article", { class: `turn ${role === "assistant" ? "own" : ""}`, "data-row": "1", tabindex: "0" }, h("header", {}, h("b", {}, role)), h("div", {}, content));
  const reply = (it) => {
    const node = { ids: it.tokens.map(() => ""), texts: it.tokens.map(([piece]) => piece), logprobs: it.tokens.map(([, logprob]) => logprob), sampled: it.tokens.map(() => true), alternatives: it.tokens.map(([, , others]) => others) };
    return bubble("assistant", it.reasoning ? h("details", {}, h("summary", {}, "reasoning"), h("pre", {}, it.reasoning)) : null,
      it.tokens.length ? h("div", { class: "tokens" }, tokenSpans(node)) : h("pre", {}, it.text || "(nothing)"), it.calls.map(({ function: call }) => h("div", { class: "call" }, h("b", {}, call.name), h("pre", {}, call.arguments))), it.calls.length ? h("p", { class: "soft small" }, "What you send next is what the tool answers.") : null, it.finish === "stop" ? null : h("p", { class: "soft small" }, `ended: ${it.finish}`));
  };

  async function ask(column, place, content, settings) {
    const call = column.calls.shift();
    const messages = [...column.messages, call ? { role: "tool", tool_call_id: call.id, content } : { role: "user", content }];
    const waits = bubble("assistant", h("span", { class: "soft" }, "…"));
    column.shown.append(bubble(call ? `tool ${call.function.name}` : "user", h("pre", {}, content)));
    column.messages = messages;
    if (column.calls.length) return;  // Each call has its answer before the model is asked.
    column.shown.append(waits);
    try {
      const it = await say(place, { messages, settings, ...(tools.length && offers.checked ? { tools } : {}) });
      column.messages = [...messages, { role: "assistant", content: it.text, ...(it.calls.length ? { tool_calls: it.calls } : {}) }];
      column.calls = [...it.calls];
      waits.replaceWith(reply(it));
    } catch (error) {
      column.messages = messages.slice(0, -1);  // It was not heard.
      if (call) column.calls.unshift(call);
      waits.replaceWith(h("p", { class: "problem" }, error.message));
    }
  }

  async function go() {
    const content = text.value;
    if (!content || send.disabled) return;
    const settings = Object.fromEntries(inputs.filter(([, input]) => input.value !== "").map(([name, input]) => [name, Number(input.value)]));
    send.disabled = true;
    text.value = "";
    await Promise.all(columns.map((column, place) => ask(column, place, content, settings)));
    send.disabled = false;
    text.focus();
  }
  send.addEventListener("click", go);
  text.addEventListener("keydown", (e) => { if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) go(); });
  fill(main, h("h1", {}, "Talk"), key ? h("p", { class: "small" }, "With the task of ", h("a", { href: address(at.run, `episode/${key}`) }, "an episode"), agent ? `, as ${agent} was told it.` : ".") : null,
    legend(scaleOf("engine", [])), h("div", { class: columns.length > 1 ? "two" : "" }, columns.map((column) => panel(column.url, told.map((it) => bubble(it.role, h("pre", {}, it.content))), column.shown))),
    h("div", { class: "tools" }, inputs.map(([name, input]) => h("label", {}, `${name} `, input)), tools.length ? h("label", {}, offers, ` tools: ${tools.map((it) => it.function.name).join(", ")}`) : null), h("div", { class: "talk" }, text, send), h("p", { class: "soft small" }, "The servers answer to your settings, one message at a time each; nothing is kept."));
  return {};
}
