// Environments by versions with intervals over tasks, and two versions task by task.

const interval = (it) => (it.low === null ? "" : `${number(it.low)} to ${number(it.high)}`);

/** A row for each version of an environment, which opens its episodes. */
function versionsTable(run, it, source) {
  const own = it.cells.filter((cell) => cell.source === source);
  const told = [...new Set(own.flatMap((cell) => Object.keys(cell.told)))];
  const head = ["version", "mean reward", "95 % interval", "tasks", "episodes", "failed", ...told];
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((word) => h("th", { class: "n" }, word)))), h("tbody", {}, own.map((cell) => {
    const open = opens(() => { location.hash = address(run, "episodes", [["purpose", "eval"], ["source", source], ["step", cell.version]]); });
    return h("tr", { class: "opens", "data-row": "1", tabindex: "0", onclick: open }, [String(cell.version), number(cell.mean), interval(cell), number(cell.tasks), number(cell.episodes), cell.failed ? number(cell.failed) : "", ...told.map((name) => { const [value, low, high] = cell.told[name] ?? []; return number(value) + (low === null || low === undefined ? "" : ` (${interval({ low, high })})`); })].map((word) => h("td", { class: "n" }, word)));
  }))));
}

async function evaluationsView(main, at) {
  const base = `${apiOf(at.run)}/evaluations`;
  const charts = [];
  const compared = h("div", {});
  const table = h("div", {});
  let it = null, drawn = null;

  function draw() {
    charts.splice(0).forEach((one) => one.destroy());
    if (!it.versions.length) {
      fill(table, h("p", { class: "soft" }, "No version was evaluated yet, or the episodes of evaluations were deleted."));
      return;
    }
    fill(table, it.left_out ? h("p", { class: "soft" }, `${number(it.left_out)} older versions are left out.`) : null,
      it.sources.map((source) => panel(source, it.versions.length > 1 ? h("div", { class: "plot", "data-source": source }) : null, versionsTable(at.run, it, source), choice(source))));
    for (const holder of table.querySelectorAll("[data-source]")) {
      const own = it.cells.filter((cell) => cell.source === holder.dataset.source);
      const of = (name) => own.map((cell) => cell[name]);
      const lines = [{ label: "mean", values: of("mean"), dots: false }, { label: "low", values: of("low"), band: "low" }, { label: "high", values: of("high"), band: "high" }];
      charts.push(chart(holder, { xs: of("version"), lines }, { height: 180, x: "version", onpick: (version) => { location.hash = address(at.run, "episodes", [["purpose", "eval"], ["source", holder.dataset.source], ["step", version]]); } }));
    }
  }

  function choice(source) {
    const versions = it.cells.filter((cell) => cell.source === source && cell.mean !== null).map((cell) => cell.version);
    if (versions.length < 2) return null;
    const pick = (label, chosen) => h("select", { "aria-label": label }, versions.map((version) => h("option", { value: version, selected: version === chosen }, `version ${version}`)));
    const first = pick("first version", versions[0]), second = pick("second version", versions.at(-1));
    const show = () => get(base, [["source", source], ["first", first.value], ["second", second.value]]).then((found) => { fill(compared, tasks(source, first.value, second.value, found)); compared.scrollIntoView({ block: "start" }); }, (error) => fill(compared, h("p", { class: "problem" }, error.message)));
    return h("form", { class: "tools", onsubmit: (e) => { e.preventDefault(); show(); } }, "task by task: ", first, " and ", second, h("button", {}, "compare"));
  }

  function tasks(source, first, second, found) {
    const same = found.count - found.better - found.worse;
    const verdict = found.low === null ? `${found.count > 1 ? "a few tasks that changed alike say" : "one task says"} nothing about others` : found.low * found.high > 0 ? `${found.change > 0 ? "better" : "worse"}, more than noise` : "noise: the interval holds 0";
    const open = (key) => h("a", { href: address(at.run, `group/${key}`) }, "replies");
    return panel(`${source}: version ${second} against ${first}`, h("p", {}, h("b", {}, signed(found.change)), ` mean over ${number(found.count)} tasks, 95 % interval ${interval(found) || "unknown"}: ${verdict}. `,
      `Better on ${number(found.better)}, the same on ${number(same)}, worse on ${number(found.worse)}; so uneven a split is by chance in ${number(100 * found.chance)} % of cases.`),
    found.only.some(Boolean) ? h("p", { class: "soft" }, `Left out: tasks that only one of them played (${found.only.join(" and ")}).`) : null,
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["task", `version ${first}`, `version ${second}`, "change", "", ""].map((word, place) => h("th", { class: place ? "n" : "" }, word)))),
      h("tbody", {}, found.tasks.map((task) => h("tr", { "data-row": "1", tabindex: "0" }, h("td", {}, task.task.length > 40 ? `${task.task.slice(0, 40)}…` : task.task), [number(task.first), number(task.second), signed(task.change), open(task.keys[0]), open(task.keys[1])].map((word) => h("td", { class: "n" }, word))))))),
    found.count > found.tasks.length ? h("p", { class: "soft" }, `${number(found.count - found.tasks.length)} tasks that changed less are left out.`) : null);
  }

  it = await get(base);
  fill(main, h("h1", {}, "Evaluations"), h("p", { class: "soft small" }, "Mean over tasks of a task's mean reward, with its interval over tasks. Episodes that failed have no reward."), table, compared);
  draw();
  return {
    recolour: draw, close: () => charts.forEach((one) => one.destroy()),
    async news(news) {
      const mark = `${news.episodes} ${news.generation}`;
      const isNew = drawn !== null && mark !== drawn;
      drawn = mark;
      if (!isNew || table.contains(document.activeElement)) return;
      const newer = await get(base);
      if (JSON.stringify(newer) !== JSON.stringify(it) && table.isConnected) { it = newer; draw(); }
    },
  };
}
