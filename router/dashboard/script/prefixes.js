// The hottest prefixes as an icicle: boxes below each other, one of them in the tab order, arrows between them.

const runs = new Map(); // name -> its button
let picked = null; // name of the run told about
let zoomed = null; // name of the run that fills the width

function showChains(view) {
  const box = $("icicle");
  if (!view.chains.length) {
    runs.clear();
    mark(box, "class", "icicle is-empty");
    box.style.height = "";
    box.replaceChildren(make("div", { class: "empty" }, "No prompt of a full block has been routed yet."));
    $("crumbs").hidden = true;
    $("chain-table-box").hidden = true;
    say($("chain-read"), "");
    return;
  }
  mark(box, "class", "icicle");
  box.querySelector(".empty")?.remove();
  $("chain-table-box").hidden = false;
  const nodes = place(view.chains);
  const byName = new Map(nodes.map((node) => [node.run.name, node]));
  if (zoomed !== null && !byName.has(zoomed)) zoomed = null;
  const focus = zoomed !== null ? byName.get(zoomed) : { left: 0, width: 1 };
  const wide = box.clientWidth || 1;
  let bottom = 0;
  const live = new Set();
  for (const node of nodes) {
    const left = Math.max(0, (node.left - focus.left) / focus.width);
    const right = Math.min(1, (node.left + node.width - focus.left) / focus.width);
    if (right - left < 1.5 / wide) continue;
    live.add(node.run.name);
    bottom = Math.max(bottom, node.top + node.height);
    showRun(box, node, left, right - left, wide);
  }
  for (const [name, button] of runs) {
    if (live.has(name)) continue;
    const hadFocus = button.contains(document.activeElement);
    button.remove();
    runs.delete(name);
    if (hadFocus) runs.get([...live][0])?.focus();
  }
  box.style.height = `${bottom + 2}px`;
  order(box, nodes, live);
  showCrumbs(byName);
  tell(picked, byName, view);
  if ($("chain-table-box").open) showChainTable(view);
}

function place(chains) { // each run below its parent, siblings side by side, the widest first
  const nodes = chains.map((run) => ({ run, top: 0, left: 0, width: run.share, height: tall(run), next: 0 }));
  let next = 0;
  nodes.forEach((node) => { // parents come before their children
    const parent = node.run.parent !== null ? nodes[node.run.parent] : null;
    node.parent = parent;
    node.left = parent ? parent.left + parent.next : next;
    node.top = parent ? parent.top + parent.height : 0;
    if (parent) parent.next += node.width;
    else next += node.width;
  });
  return nodes;
}

function tall(run) { return Math.round(28 + 6 * Math.log2(1 + (run.end - run.start) / 16)); }

function showRun(box, { run, top, height }, left, width, wide) {
  let button = runs.get(run.name);
  if (!button) {
    button = make("button", {
      type: "button", class: "run", tabindex: "-1",
      onclick: () => { zoomed = zoomed === run.name ? null : run.name; pick(run.name); },
      onfocus: () => pick(run.name), onmouseenter: () => pick(run.name),
    }, make("span", { class: "size" }), make("span", { class: "shares" }), make("span", { class: "mono" }, run.name));
    runs.set(run.name, button);
    box.append(button);
  }
  const style = button.style;
  style.left = `${100 * left}%`;
  style.width = `${100 * width}%`;
  style.top = `${top}px`;
  style.height = `${height}px`;
  style.setProperty("--hit", `${100 * (run.hit ?? 0)}%`);
  mark(button, "data-unknown", run.hit === null);
  mark(button, "data-lines", width * wide < 46 ? 0 : height < 42 ? 1 : height < 58 ? 2 : 3);
  say(button.children[0], `${count(run.end - run.start)} tokens`);
  say(button.children[1], `${percent(run.share)} of prompts, ${percent(run.hit)} cached`);
  mark(button, "aria-label", describe(run));
}

function describe(run) {
  return `Tokens ${count(run.start)} to ${count(run.end)}: ${percent(run.share)} of prompts, about ${count(run.per_minute)} a minute, `
    + `${run.hit === null ? "not answered yet" : `${percent(run.hit)} from cache`}, held by ${plural(run.holders, "replica")} when last asked for. ${run.name}`;
}

function order(box, nodes, live) { // one of them is in the tab order; arrows go on from there
  const names = nodes.filter((node) => live.has(node.run.name)).map((node) => node.run.name);
  const active = names.includes(picked) ? picked : names[0];
  for (const name of names) mark(runs.get(name), "tabindex", name === active ? "0" : "-1");
  box.walk = { nodes: new Map(nodes.map((node) => [node.run.name, node])), live };
}

function step(event) {
  const walk = $("icicle").walk;
  const node = walk?.nodes.get(picked);
  if (!node) return;
  const family = (parent) => [...walk.nodes.values()].filter((other) => other.parent === parent && walk.live.has(other.run.name));
  const siblings = family(node.parent);
  const at = siblings.indexOf(node);
  const target = {
    ArrowUp: node.parent, ArrowDown: family(node)[0], ArrowLeft: siblings[at - 1], ArrowRight: siblings[at + 1],
    Home: siblings[0], End: siblings[siblings.length - 1],
  }[event.key];
  if (event.key === "Escape" && zoomed !== null) zoomed = null;
  else if (!target) return;
  event.preventDefault();
  if (target && target !== node) runs.get(target.run.name)?.focus();
  else refresh();
}

function pick(name) {
  picked = name;
  refresh();
}

function refresh() {
  const known = shown !== null ? heard.get(shown) : null;
  if (known) showChains(known.view);
}

function tell(name, byName, view) {
  const node = byName.get(name);
  for (const [other, button] of runs) mark(button, "data-picked", other === name && "true");
  const covered = sum(view.chains.filter((run) => run.parent === null), (run) => run.share);
  say($("chain-read"), node ? describe(node.run)
    : `${plural(view.chains.length, "stretch").replace("stretchs", "stretches")} shown. `
      + (covered < 0.995 ? `${percent(1 - covered)} of prompts begin with something rarer.` : "Point at one, or use the arrow keys."));
}

function showCrumbs(byName) {
  const bar = $("crumbs");
  bar.hidden = zoomed === null;
  if (zoomed === null) { bar.replaceChildren(); return; }
  const path = [];
  for (let node = byName.get(zoomed); node; node = node.parent) path.unshift(node.run);
  const signature = path.map((run) => run.name).join();
  if (bar.dataset.path === signature && bar.children.length) return;
  bar.dataset.path = signature;
  bar.replaceChildren(make("button", { type: "button", onclick: () => { zoomed = null; refresh(); } }, "All prompts"),
    ...path.map((run) => make("button", { type: "button", "aria-current": run.name === zoomed ? "location" : null,
      onclick: () => { zoomed = run.name; pick(run.name); } }, `${count(run.end - run.start)} tokens`)));
}

function showChainTable(view) {
  const rows = view.chains.map((run) => make("tr", {},
    make("td", { class: "mono" }, run.name),
    make("td", { class: "mono" }, run.parent === null ? "–" : view.chains[run.parent].name),
    ...[`${count(run.start)}–${count(run.end)}`, percent(run.share, 1), count(run.per_minute), percent(run.hit), count(run.holders)]
      .map((text) => make("td", { class: "num" }, text))));
  $("chain-table").replaceChildren(table(["name", "goes on from", "tokens#", "of prompts#", "a minute#", "from cache#", "held by#"], rows));
}

function table(names, rows, kind = null) { // names ending in # are of columns of numbers
  return make("table", { class: kind }, make("thead", {}, make("tr", {},
    ...names.map((name) => make("th", { scope: "col", class: name.endsWith("#") ? "num" : null }, name.replace("#", ""))))),
  make("tbody", {}, ...rows));
}
