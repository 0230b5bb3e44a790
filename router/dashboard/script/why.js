// Why tokens were not cached: one bar, and a line for each reason.

function showWhy(sums) {
  const box = $("why");
  if (!sums.prompt) {
    box.replaceChildren(make("div", { class: "empty" }, "Nothing has been computed yet."));
    say($("why-sum"), "");
    return;
  }
  const found = Object.entries(sums.uncached).filter(([, tokens]) => tokens).sort((a, b) => b[1] - a[1]);
  say($("why-sum"), `${count(sums.prompt - sums.delivered)} of ${count(sums.prompt)} tokens`);
  const parts = [["hit", sums.delivered], ...found];
  const stack = make("div", { class: "stack", role: "img", "aria-label": parts.map(([name, tokens]) =>
    `${name === "hit" ? "from cache" : REASONS[name]?.[0] ?? name} ${percent(tokens / sums.prompt)}`).join(", ") });
  for (const [name, tokens] of parts) {
    if (!tokens) continue;
    const part = make("span", { class: `r-${name}` });
    part.style.flex = `${tokens} 0 0`;
    stack.append(part);
  }
  const list = make("ul", { class: "reasons" }, line("hit", "From cache", "not computed at all", sums.delivered, sums.prompt));
  for (const [name, tokens] of found) {
    const [word, text] = REASONS[name] ?? [name, ""];
    list.append(line(name, word, text, tokens, sums.prompt));
  }
  box.replaceChildren(stack, list);
}

function line(name, word, text, tokens, all) {
  return make("li", {}, make("span", { class: `swatch r-${name}`, "aria-hidden": "true" }), make("span", { class: "what" }, word),
    make("span", { class: "count" }, count(tokens)), make("span", { class: "share" }, percent(tokens / all)),
    make("span", { class: "says" }, text));
}
