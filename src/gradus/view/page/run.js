// The first screen of a run: is it learning, who waits for whom, what does it say now.

async function runView(main, at) {
  let overview = await get(apiOf(at.run));
  let drawn = null, newest = null, isBusy = false, changed = null, changedAt = null, measured = null;
  const charts = [];
  // Each part of the screen: what draws it, and what of the overview it depends on.
  const parts = [
    [(it) => tops(it, measured), (it) => [it, measured]],
    [problems, (it) => it.problems],
    [alarms, (it) => it.alarms],
    [(it) => (it.kind === "eval" ? results(at.run, measured) : rewards(it)), (it) => [it.rewards, it.losses, it.evaluations, measured]],
    [(it) => (it.kind === "eval" ? null : waits(it)), (it) => it.waits],
    // Their tokens are there once the index has come to them.
    [(it) => newestReplies(at.run, it.newest_replies), (it) => [it.newest_replies, changed?.is_reading]],
    [(it) => changed && changes(at.run, it.kind, changed), () => changed],
    [now, (it) => it.live && [it.live, it.now, it.outcome]],
    [slots, (it) => [it.slots, it.slots_held, it.live?.numbers["live/slots/free"]]],
    [processes, (it) => [it.processes, it.outcome, it.machine]],
    [notices, (it) => it.notices],
  ].map(([build, depends]) => ({ build, depends, holder: h("div", {}), shown: null }));
  const two = (...holders) => h("div", { class: "two" }, holders);
  const [head, trouble, bells, earned, waited, said, then, live, held, signs, told] = parts.map((it) => it.holder);
  fill(main, head, trouble, bells, two(earned, waited), said, then, live, held, two(signs, told));

  // What did not change stays as it is, and so does what the reader is in.
  function draw(isAll = true) {
    for (const part of parts) {
      const depends = JSON.stringify(part.depends(overview));
      if (!isAll && (depends === part.shown || part.holder.contains(document.activeElement))) continue;
      part.shown = depends;
      if (part.holder === earned) charts.splice(0).forEach((it) => it.destroy());
      fill(part.holder, part.build(overview));
      if (part.holder === earned) for (const [holder, data, options] of rewardCharts(main, overview)) charts.push(chart(holder, data, options));
    }
  }
  draw();
  // What is found in all episodes comes once they are read, and again after each step.
  async function renew(mark) {
    if (changedAt === mark) return;
    changedAt = mark;
    changed = await get(`${apiOf(at.run)}/changes`);
    if (overview.kind === "eval") measured = await get(`${apiOf(at.run)}/evaluations`);
    if (head.isConnected) draw(false);
  }
  renew("").catch(() => { /* The page stands without it. */ });
  async function look() {
    overview = await get(apiOf(at.run));
    if (head.isConnected) draw(false);
  }
  // A run that hangs tells nothing, and its signs of life grow old.
  const ticking = setInterval(() => { if (overview.outcome === "running" && !document.hidden && !isBusy) look().catch(() => { /* The line about the connection says it. */ }); }, 10_000);
  const markOf = (news) => `${news.records} ${news.newest} ${news.live} ${news.outcome}`;
  return {
    recolour: () => draw(),
    close: () => { clearInterval(ticking); charts.forEach((it) => it.destroy()); },
    async news(news) {
      newest = news;
      drawn ??= markOf(news);
      if (isBusy) return;
      isBusy = true;
      try {
        for (let told = null; told !== newest;) {
          told = newest;
          if (drawn !== markOf(told)) { drawn = markOf(told); await look(); }
          // An evaluation has its record at its end, and its episodes before.
          if (!told.has_more) await renew(`${told.records} ${told.generation} ${overview.kind === "eval" ? told.episodes : ""}`);
        }
      } finally { isBusy = false; }
    },
  };
}

const problems = (it) => (it.problems.length ? h("ul", { class: "problems" }, it.problems.map((line) => h("li", {}, line))) : null);

/** Of an evaluation, what it found so far, in the place where a run has the curve of its reward. */
function results(run, measured) {
  if (!measured?.sources.length) return panel("Reward", h("p", { class: "soft" }, measured ? "No episode has ended yet." : "Reading …"));
  return measured.sources.map((source) => panel(source, versionsTable(run, measured, source)));
}

function tops(it, measured) {
  const sum = (name) => number(measured.cells.reduce((total, cell) => total + cell[name], 0));
  const facts = [
    it.kind !== "eval" ? [it.planned ? `${number(it.steps)} of ${number(it.planned)}` : number(it.steps), "steps"] : measured && [sum("episodes"), "episodes"],
    it.kind === "eval" && measured ? [sum("tasks"), "tasks"] : null,
    it.began && it.newest > it.began ? [duration(it.newest - it.began), "first to last record"] : null,
    it.newest ? [`${duration(Math.max(0, it.now - it.newest))} ago`, "last record"] : null,
    it.launches > 1 ? [number(it.launches), "launches (resumed)"] : null,
    timeLeft(it),
  ].filter(Boolean);
  return h("div", {}, h("h1", {}, it.name, " ", h("span", { class: `badge ${it.outcome}` }, it.outcome === "killed" ? "ended without a word" : it.outcome)),
    h("p", { class: "soft" }, [it.kind, it.model, ...Object.entries(it.versions).map(([name, version]) => `${name} ${version}`)].filter(Boolean).join(" · ")),
    it.cause ? h("p", { class: "problem" }, it.cause) : null,
    it.verdict ? h("div", { class: "verdict" }, h("b", {}, it.verdict.word), it.verdict.text === it.verdict.word ? null : h("p", {}, it.verdict.text.replace(`${it.verdict.word}: `, "")), it.verdict.advice ? h("p", {}, `Next: ${it.verdict.advice}.`) : null) : null,
    h("dl", { class: "facts" }, facts.map(([value, name]) => h("div", {}, h("dd", {}, value), h("dt", {}, name)))));
}

function timeLeft(it) {
  if (it.outcome !== "running" || !it.planned || it.steps < 2 || !it.began) return null;
  const each = it.waits[0]?.seconds ?? (it.newest - it.began) / (it.steps - 1);
  return [duration(each * (it.planned - it.steps)), "left at this rate"];
}

function alarms(it) {
  if (!it.alarms.length) return null;
  return panel("Alarms that are on", h("ul", { class: "alarms" }, it.alarms.map((alarm) =>
    h("li", {}, h("b", {}, alarm.name), ` in step ${number(alarm.step)}, at ${number(alarm.value)}. `, h("span", { class: "soft" }, alarm.told)))));
}

function rewards(it) {
  const parts = Object.keys(it.rewards.parts);
  const hasMean = it.rewards.mean.some((value) => value !== null);
  const isEmpty = !hasMean && !parts.length && !it.evaluations.length;
  const losses = Object.values(it.losses).some((curve) => curve.y.length);
  return [losses ? panel("Loss", h("div", { class: "plot", "data-plot": "losses" })) : null, isEmpty && losses ? null : panel("Reward", isEmpty ? h("p", { class: "soft" }, "No record has a reward yet.") : [
    hasMean || it.evaluations.length ? h("div", { class: "plot", "data-plot": "mean" }) : null,
    parts.length > 1 || (parts.length && !hasMean) ? [h("h3", {}, hasMean ? "By part" : "By agent"), h("div", { class: "plot", "data-plot": "parts" })] : null])];
}

function rewardCharts(main, it) {
  const found = [];
  const { steps, mean, p5, p95, parts } = it.rewards;
  const holder = main.querySelector('[data-plot="mean"]');
  if (holder) {
    const evaluations = new Map(it.evaluations);
    const xs = [...new Set([...steps, ...evaluations.keys()])].sort((a, b) => a - b);
    const at = new Map(steps.map((step, place) => [step, place]));
    const over = (values) => xs.map((x) => (at.has(x) ? values[at.get(x)] : null));
    const lines = [{ label: "mean", values: over(mean) }];
    if (p5.some((value) => value !== null)) lines.push({ label: "5 %", values: over(p5), band: "low" }, { label: "95 %", values: over(p95), band: "high" });
    if (it.evaluations.length) lines.push({ label: "evaluation", values: xs.map((x) => evaluations.get(x) ?? null), dots: true });
    found.push([holder, { xs, lines }, { height: 210, x: "step" }]);
  }
  const loss = main.querySelector('[data-plot="losses"]');
  if (loss) {
    const curves = Object.entries(it.losses).filter(([, curve]) => curve.y.length);
    const xs = [...new Set(curves.flatMap(([, curve]) => curve.x))].sort((a, b) => a - b);
    const lines = curves.map(([name, curve]) => {
      const of = new Map(curve.x.map((x, place) => [x, curve.y[place]]));
      return { label: name.replace(/\/mean$/, ""), values: xs.map((x) => of.get(x) ?? null), spans: true };
    });
    found.push([loss, { xs, lines }, { height: 210, x: "step" }]);
  }
  const below = main.querySelector('[data-plot="parts"]');
  if (below) found.push([below, { xs: steps, lines: Object.entries(parts).map(([name, values]) => ({ label: partName(name), values })) }, { height: 170, x: "step" }]);
  return found;
}

const partName = (name) => name.replace(/^episode\//, "").replace(/\/mean$/, "").replace(/\/reward$/, "").replace("/agent/", ": ").replace("/reward/", ": ");

function waits(it) {
  if (!it.waits.length) return panel("Who waits for whom", h("p", { class: "soft" }, "No step has ended yet."));
  const longest = Math.max(...it.waits.map((wait) => wait.seconds), 1e-9);
  return panel("Who waits for whom", h("p", { class: "soft small" }, "Seconds of a step, means of the last ten. Roles work at once, so these overlap."),
    h("div", { class: "bars" }, it.waits.map((wait) => [h("span", { title: wait.name }, wait.meaning),
      h("meter", { min: 0, max: longest, value: wait.seconds, "aria-label": wait.meaning }), h("span", { class: "n" }, duration(wait.seconds))])));
}

const CHAIN = [
  ["environments", ["in_flight/now", "playing"], ["in_flight/limit", "at most"]],
  ["groups", ["groups/open", "open"], ["groups/scoring", "scoring"], ["groups/complete", "complete"]],
  ["batches", ["groups/shipped", "groups shipped"], ["slots/free", "slots free"]],
  ["trainer", ["batches/untrained", "batches wait"], ["batches/trained", "trained"]],
  ["version", ["version", "newest"], ["batches/unserved", "not served"]],
  ["engine", ["engine/running", "running"], ["engine/waiting", "waiting"], ["engine/kv_usage", "of its memory", "share"]],
];

function now(it) {
  if (!it.live) return null;
  const { numbers, time } = it.live;
  const age = Math.max(0, it.now - time);
  const isNow = it.outcome === "running" && age < 30;
  return panel(isNow ? "Now" : `When it last looked, ${duration(age)} ago`, h("ol", { class: "chain" }, CHAIN.map(([name, ...entries]) =>
    h("li", {}, h("b", {}, name), entries.filter(([key]) => `live/${key}` in numbers).map(([key, word, kind]) => {
      const value = numbers[`live/${key}`];
      return h("div", {}, h("span", { class: "n" }, kind === "share" ? `${number(100 * value)} %` : number(value)), ` ${word}`);
    })))), numbers["live/engine/answers"] === 0 ? h("p", { class: "problem" }, "The engine does not answer.") : null,
  isNow && numbers["live/quiet_seconds"] > 20 ? h("p", { class: "problem" }, `Nothing has happened for ${duration(numbers["live/quiet_seconds"])}.`) : null);
}

const STATES = { playing: "its episodes play", scoring: "waits for its credit", complete: "waits for its batch", shipped: "trains, or waits for the trainer", "not served": "trained; waits for the engine" };

function slots(it) {
  if (!it.live) return null;
  const free = it.live.numbers["live/slots/free"] ?? 0;
  const cell = ({ group, ended, size, state, staleness }) => h("span", { class: `cell ${staleness === null ? "" : `old${Math.min(staleness, 4)}`}`, role: "img", "aria-label": `${group}: ${state}, staleness ${staleness ?? "unknown"}`, title: `${group}: ${state}, ${ended} of ${size} episodes ended, staleness ${staleness ?? "not known: nothing began"}` }, staleness === null ? "·" : String(staleness));
  const row = (name, meaning, cells, count) => [h("dt", {}, h("b", {}, `${number(count)} ${name}`), h("span", { class: "soft" }, ` ${meaning}`)), h("dd", {}, cells)];
  return panel("Slots of the buffer", h("p", { class: "soft small" }, "One cell for each group; the number and the colour are the staleness that it has in its batch, or would have in the one that fills now."),
    h("dl", { class: "slots" }, Object.entries(STATES).map(([state, meaning]) => { const own = it.slots.filter((held) => held.state === state), all = it.slots_held[state] ?? 0; return all ? row(state, meaning, [own.map(cell), own.length < all ? `and ${number(all - own.length)} more` : ""], all) : null; }),
      free ? row("free", "", Array.from({ length: Math.min(free, 256) }, () => h("span", { class: "cell free" })), free) : null), !free && !it.slots.length ? h("p", { class: "soft" }, "None is held.") : null);
}

function processes(it) {
  const isOver = it.outcome !== "running";
  const taken = it.machine?.of ?? {};
  const signs = new Map(it.processes.map((entry) => [entry.name, entry]));
  const names = [...new Set([...signs.keys(), ...Object.keys(taken).filter((name) => name && !name.startsWith("gpu_"))])];
  const row = (name) => {
    const entry = signs.get(name), held = taken[name];
    return h("tr", {}, h("td", {}, name), h("td", { class: !isOver && entry?.age > 30 ? "late" : "" }, entry ? `${duration(entry.age)} ago` : ""),
      h("td", {}, entry ? entry.last + (entry.step === null ? "" : ` (step ${entry.step + 1})`) : ""), h("td", { class: "n" }, held ? bytes(held.memory_bytes) : ""), h("td", { class: "n" }, held?.cpu === undefined ? "" : number(held.cpu)), h("td", { class: "n" }, entry?.pid === null || !entry ? "" : String(entry.pid)));
  };
  return panel("Processes", names.length ? h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["process", "last sign", "what it did", "memory", "cores", "pid"].map((word, place) => h("th", { class: place > 2 ? "n" : "" }, word)))), h("tbody", {}, names.map(row)))) :
    h("p", { class: "soft" }, "The run left no signs of life."), machineLine(it));
}

function machineLine(it) {
  if (!it.machine) return null;
  if (it.machine.problem) return h("p", { class: "problem" }, it.machine.problem);
  const whole = it.machine.of[""] ?? {}, full = it.machine.full_seconds;
  const gpus = Object.entries(it.machine.of).filter(([name]) => name.startsWith("gpu_"));
  return h("p", { class: "soft small" }, it.outcome === "running" ? "" : `When it was last looked at, ${duration(Math.max(0, it.now - it.machine.time))} ago: `, `disk ${bytes(whole.disk_free_bytes)} free`, full === null ? "" : h("span", { class: full < 86400 ? "late" : "" }, `, full in ${duration(full)} at this rate`),
    `; memory ${bytes(whole.memory_available_bytes)} available`, gpus.map(([name, gpu]) => `; ${name.replace("_", " ")} ${number(100 * gpu.use)} % busy, ${bytes(gpu.memory_bytes)}${gpu.power_watts === undefined ? "" : `, ${number(gpu.power_watts)} W`}`));
}

function notices(it) {
  return panel("Notices", it.notices.length ? h("ol", { class: "notices", reversed: true }, [...it.notices].reverse().map((line) => h("li", {}, line))) : h("p", { class: "soft" }, "None."));
}
