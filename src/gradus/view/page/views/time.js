// Some steps as bars over time: trainer, batches, engine, evaluations, episodes; who stood still.

const SHADES = { "waits for a batch": 7, learns: 0, "updates weights": 3, "copies weights": 4, "waits for the trainer, and trains": 1, "stands still": 5, evaluates: 6 };
const EVENT_MARKS = { policy_applied: ["version", "new weights"], checkpoint_committed: ["checkpoint", "checkpoint"], run_resumed: ["resumed", "resumed"] };

async function timeView(main, at) {
  const base = `${apiOf(at.run)}/time`;
  let step = at.query.has("step") ? Number(at.query.get("step")) : null;
  let count = Number(at.query.get("count") ?? 3);
  const holder = h("div", {}), wrong = h("div", { role: "status" });
  let it = null, drawn = null, isFollowing = false;
  fill(main, h("h1", {}, "Time"), wrong, holder);

  const words = () => [...(step === null ? [] : [["step", step]]), ["count", count]];
  async function load() {
    it = await get(base, words());
    fill(wrong);
    draw();
  }
  const refused = (error) => fill(wrong, h("p", { class: "problem" }, error.message));
  function go(newStep, newCount = count) {
    const before = [step, count];
    step = newStep === null || newStep >= it.newest ? null : Math.max(it.oldest, newStep);
    count = newCount;
    // What is refused leaves the steps that are shown, and the choice of them.
    load().then(() => { if (holder.isConnected) history.replaceState(null, "", address(at.run, "time", words())); }, (error) => { [step, count] = before; draw(); refused(error); });
  }

  function draw() {
    const whole = it.end - it.begin || 1;
    const percent = (time) => `${Math.max(0, Math.min(100, (100 * (time - it.begin)) / whole))}%`;
    const span = ([start, end, said, number_]) => {
      const shade = SHADES[said] ?? 2;
      const about = `${said}${typeof number_ === "number" ? `, ${said === "evaluates" || said === "stands still" ? "version" : "step"} ${said === "evaluates" || said === "stands still" ? number_ : number_ + 1}` : ""}: ${duration(end - start)}`;
      const made = h("span", { class: `span s${shade}`, title: about, role: "img", "aria-label": about });
      made.style.setProperty("--at", percent(start));
      made.style.setProperty("--to", percent(end));
      return made;
    };
    const lane = (entry) => h("div", { class: "lane" }, h("span", { class: "soft small" }, entry.name), h("div", { class: "track" }, entry.spans.map(span)));
    const most = Math.max(...it.playing, 1);
    const playing = h("div", { class: "lane" }, h("span", { class: "soft small" }, `episodes, at most ${number(Math.round(most))} at once`), h("div", { class: "track tall", role: "img", "aria-label": `episodes that run, at most ${number(most)}` }, it.playing.map((value) => { const made = h("span", { class: "column" }); made.style.setProperty("--share", value / most); return made; })));
    const marks = h("div", { class: "lane" }, h("span", { class: "soft small" }, "marks"), h("div", { class: "track" }, it.marks.map((mark) => {
      const about = `${EVENT_MARKS[mark.what]?.[1] ?? mark.what}: ${EVENT_MARKS[mark.what]?.[0] ?? ""} ${mark.number ?? ""}`;
      const made = h("span", { class: "mark", title: about, role: "img", "aria-label": about }, mark.what === "policy_applied" ? `v${mark.number}` : "◆");
      made.style.setProperty("--at", percent(mark.time));
      return made;
    })));
    const named = it.lanes.filter((entry) => !/^(longest episodes|)$/.test(entry.name));
    const slow = it.lanes.filter((entry) => /^(longest episodes|)$/.test(entry.name));
    fill(holder,
      h("div", { class: "tools" }, h("button", { onclick: () => go(it.last - 1), disabled: it.last <= it.oldest }, "← earlier"), h("button", { onclick: () => go(it.last + 1), disabled: it.last >= it.newest }, "later →"),
        h("label", {}, "steps ", h("select", { "data-search": "1", onchange: (e) => go(step, Number(e.target.value)) }, [1, 3, 5, 10, 20].map((many) => h("option", { value: many, selected: many === count }, String(many))))), h("b", {}, it.first === it.last ? `step ${it.last + 1}` : `steps ${it.first + 1} to ${it.last + 1}`), h("span", { class: "soft" }, duration(whole))),
      panel("Who stood still", it.shares.length ? h("div", { class: "bars" }, it.shares.map((share) => [h("span", {}, share.said), h("meter", { min: 0, max: 1, value: Math.min(1, share.share), "aria-label": share.said }), h("span", { class: "n" }, `${number(Math.round(1000 * share.share) / 10)} %`)])) : h("p", { class: "soft" }, "Nobody, as far as was noted."), h("p", { class: "soft small" }, "Shares of the time of these steps. Roles work at once, so they overlap.")),
      panel("What ran when", it.is_whole ? null : h("p", { class: "late small" }, "The journal has too many lines here: choose fewer steps."),
        h("p", { class: "legend small" }, Object.entries(SHADES).map(([word, shade]) => h("span", { class: `k${shade}` }, word))),
        h("div", { class: "gantt" }, named.map(lane), playing, marks, h("div", { class: "lane small soft" }, h("span", {}), h("span", { class: "ends" }, h("span", {}, "0 s"), h("span", {}, duration(whole)))))),
      slow.length ? panel("Longest episodes", h("div", { class: "gantt" }, slow.map((entry) => lane({ ...entry, name: h("a", { href: address(at.run, "episodes", [["group", entry.spans[0][3].split(".")[0]]]) }, entry.spans[0][3]) })))) : null);
  }

  await load();
  return { step: (by) => go(it.last + by), follow(on) { isFollowing = on; if (on) go(null); }, async news(news) {
    const isNew = drawn !== null && news.records !== drawn;
    drawn = news.records;
    if (isNew && step === null && (isFollowing || !holder.contains(document.activeElement))) await load().catch(refused);
  } };
}
