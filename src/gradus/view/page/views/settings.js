// Settings, chosen or by default, beside other runs; what ran; who started it with what.

async function settingsView(main, at, runs) {
  const others = at.query.getAll("with").filter((id) => runs.some((it) => it.id === id));
  const it = await get(`${apiOf(at.run)}/settings`, others.map((id) => ["with", id]));
  const table = (head, rows) => h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((word) => h("th", {}, word)))), h("tbody", {}, rows.map((cells) => h("tr", { "data-row": "1", tabindex: "0" }, cells.map((cell) => h("td", { class: "value" }, cell)))))));
  const body = h("div", {});
  const search = h("input", { type: "search", class: "filter", placeholder: "name or value", "aria-label": "Search settings", "data-search": "1", oninput: () => draw() });
  const all = h("input", { type: "checkbox", onchange: () => draw() });
  const beside = runs.length > 1 ? h("label", {}, "beside ", h("select", { onchange: (e) => { if (e.target.value) location.hash = address(at.run, "settings", [...others, e.target.value].map((id) => ["with", id])); } }, h("option", { value: "" }, "…"), runs.filter((run) => run.id !== at.run && !others.includes(run.id)).map((run) => h("option", { value: run.id }, run.name)))) : null;
  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = it.keys.filter((key) => (all.checked || key.chosen || words.length) && words.every((word) => `${key.key} ${key.value}`.toLowerCase().includes(word)));
    fill(body, found.length ? table(["setting", "value", ""], found.map((key) => [key.key, key.value, h("span", { class: key.chosen ? "n" : "n soft" }, key.chosen ? "chosen" : "default")])) : h("p", { class: "soft" }, it.keys.length ? "None." : it.note));
  }
  // What a version was trained on: the episodes in the table, and each sample by its name as a file.
  function behind(version) {
    const told = h("span", { class: "soft", role: "status" });
    const take = () => get(`${apiOf(at.run)}/samples`, [["version", version]]).then(({ batches }) => {
      save(batches.map(([step, samples]) => `${JSON.stringify({ step: step + 1, samples })}\n`).join(""), `samples-of-version-${version}.jsonl`);
      fill(told, ` ${number(batches.reduce((sum, [, samples]) => sum + samples.length, 0))} samples of ${number(batches.length)} batches${batches.length < version ? `; the journal has not all of ${number(version)}` : ""}`);
    }, (error) => fill(told, ` ${error.message}`));
    return h("li", {}, `version ${version}: `, h("a", { href: address(at.run, "episodes", [["purpose", "train"], ["step", `..${version - 1}`], ["where", "dropped = none and outcome = finished"]]) }, "its episodes"), " · ", h("button", { class: "quiet small", onclick: take }, "its samples"), told);
  }

  draw();
  const chosen = it.keys.filter((key) => key.chosen).length;
  fill(main, h("h1", {}, "Settings"),
    others.length ? panel("Settings that differ", it.differing.length ? table(["setting", ...it.runs], it.differing.map((row) => [row.key, ...row.values])) : h("p", { class: "soft" }, "None."), h("p", { class: "small" }, others.map((id) => [h("a", { href: address(at.run, "settings", others.filter((other) => other !== id).map((other) => ["with", other])) }, `without ${id}`), " "]))) : null,
    panel(`Settings: ${chosen} chosen, ${it.keys.length - chosen} by default`, it.note && it.keys.length ? h("p", { class: "late" }, it.note) : null, h("div", { class: "tools" }, search, h("label", {}, all, " with defaults"), beside), body),
    h("div", { class: "two" }, panel("What ran", it.versions.length ? table(["", ...it.runs], it.versions.map((row) => [row.name, ...row.values])) : h("p", { class: "soft" }, "The folder does not say.")),
      it.checkpoints.length ? panel("What checkpoints were trained on", h("ul", { class: "behind" }, it.checkpoints.map(behind))) : null,
      panel("History", it.cuts.length ? h("p", {}, `Resumed ${it.cuts.length} times; steps were done again from ${it.cuts.map((step) => step + 1).join(", ")}.`) : null, it.history.length ? h("ol", { class: "notices", reversed: true }, [...it.history].reverse().map((line) => h("li", {}, line.time === null || !(Math.abs(line.time) < 8e9) ? "" : `${new Date(1000 * line.time).toISOString().replace("T", " ").slice(0, 19)} UTC `, h("b", {}, line.event), ` ${line.said}`))) : h("p", { class: "soft" }, "None was kept."))));
  return {};
}
