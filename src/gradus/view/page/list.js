// The runs of a folder.

async function listView(main) {
  const { runs, left_out: leftOut } = await get("api/runs");
  const head = ["run", "kind", "status", "steps", "last reward", "alarms", "last record"];
  const rows = runs.map((it) => {
    const open = opens(() => { location.hash = address(it.id); });
    return h("tr", { "data-row": "1", tabindex: "0", onclick: open, class: "opens" },
      h("td", {}, h("a", { href: address(it.id) }, it.name)), h("td", {}, it.kind ?? ""),
      h("td", {}, h("span", { class: `badge ${it.outcome}` }, it.outcome), it.problem ? h("div", { class: "soft small" }, it.problem) : null),
      h("td", { class: "n" }, it.problem ? "" : number(it.steps) + (it.planned ? ` of ${number(it.planned)}` : "")),
      h("td", { class: "n" }, it.problem ? "" : number(it.reward)),
      h("td", {}, (it.alarms ?? []).join(", ")),
      h("td", { class: "n" }, it.problem || it.age === null ? "" : `${duration(it.age)} ago`));
  });
  fill(main, h("h1", {}, "Runs"), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((it, n) => h("th", { class: n > 2 && n !== 5 ? "n" : "" }, it)))), h("tbody", {}, rows))),
    leftOut ? h("p", { class: "soft" }, `${number(leftOut)} older runs are left out.`) : null);
  return {};
}
