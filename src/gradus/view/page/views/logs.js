// The newest lines of all processes in the order of their times; tracebacks folded.

const LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"];

async function logsView(main, at) {
  const state = Object.fromEntries(["process", "level", "step", "text"].map((name) => [name, at.query.get(name) ?? ""]));
  const words = () => Object.entries(state).filter(([, value]) => value !== "");
  const list = h("ol", { class: "log", tabindex: "-1" });
  const count = h("p", { class: "soft small", role: "status" });
  let shown = "", drawn = new Map();
  const set = (name, value) => { state[name] = value.trim(); history.replaceState(null, "", address(at.run, "logs", words())); load(true); };
  const processes = h("select", { "aria-label": "process", onchange: (e) => set("process", e.target.value) });
  const level = h("select", { "aria-label": "level", onchange: (e) => set("level", e.target.value) }, h("option", { value: "" }, "any level"), LEVELS.map((word) => h("option", { value: word, selected: word === state.level }, `${word} and worse`)));
  const box = (name, placeholder) => h("input", { type: "search", placeholder, "aria-label": placeholder, value: state[name], size: 14, "data-search": name === "text" ? "1" : null, onchange: (e) => set(name, e.target.value) });
  fill(main, h("h1", {}, "Logs"), h("div", { class: "tools" }, processes, level, box("step", "step as logged"), box("text", "text in a line")), count, list);

  async function load(isAll) {
    const it = await get(`${apiOf(at.run)}/logs`, words()).catch((error) => { fill(count, error.message); return null; });
    const now = JSON.stringify(it);
    if (!it || (!isAll && now === shown)) return;
    shown = now;
    const isAtEnd = isAll || list.scrollTop + list.clientHeight > list.scrollHeight - 40;
    fill(processes, h("option", { value: "" }, "all processes"), it.processes.map((name) => h("option", { value: name, selected: name === state.process }, name)));
    fill(count, it.count > it.lines.length ? `the newest ${number(it.lines.length)} of ${number(it.count)} lines` : it.processes.length ? `${number(it.count)} lines` : "The run left no logs.", it.cut.length ? `; older ones of ${it.cut.join(", ")} are not read` : "", it.lines.length ? "; times are UTC" : "");
    place(it.lines);
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  }

  // A line that stands there already stays, unfolded as it is and with the focus on it.
  function place(lines) {
    const next = new Map(), many = new Map();
    for (const one of lines) {
      const words = JSON.stringify(one), before = many.get(words) ?? 0, key = `${words} ${before}`;
      many.set(words, before + 1);
      next.set(key, drawn.get(key) ?? line(one));
    }
    for (const [key, element] of drawn) if (!next.has(key)) element.remove();
    drawn = next;
    let at = list.firstChild;
    for (const element of next.values()) if (element === at) at = at.nextSibling; else list.insertBefore(element, at);
  }

  function line(it) {
    const head = [h("span", { class: "soft" }, `${it.time.slice(11, 23)} `), h("b", { class: LEVELS.indexOf(it.level) > 1 ? "late" : "soft" }, it.level), ` ${it.process}`, it.step === null ? "" : ` step=${it.step}`, ` ${it.said}`];
    return h("li", { "data-row": "1", tabindex: "0", title: it.time }, it.more.length ? h("details", {}, h("summary", {}, head, h("span", { class: "soft" }, ` (${number(it.more.length)} more)`)), h("pre", {}, it.more.join("\n"))) : head);
  }

  await load(true);
  let timer = setInterval(() => { if (!document.hidden) load(false); }, 5000);
  return { follow(on) { if (on) list.scrollTop = list.scrollHeight; }, close: () => { clearInterval(timer); timer = 0; } };
}
