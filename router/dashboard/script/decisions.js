// The last decisions, and on request what each candidate would have cost. An open one stays.

const FOLDED_DECISIONS = 12; // shown until more are asked for

let areAllDecisions = false;
const opened = new Set(); // "router/number" of rows whose costs are shown
const rowsShown = new Map(); // "router/number" -> { line, detail, told }

function showDecisions(router) {
  const box = $("decisions");
  const numbers = [...router.decisions.keys()].sort((a, b) => b - a);
  const most = areAllDecisions ? KEPT_DECISIONS : FOLDED_DECISIONS;
  const visible = numbers.filter((number, index) => index < most || opened.has(`${shown}/${number}`));
  say($("decisions-note"), visible.length ? `the latest ${visible.length}, newest first` : "");
  const more = $("decisions-more");
  more.hidden = numbers.length <= FOLDED_DECISIONS;
  say(more, areAllDecisions ? "Show fewer" : `Show up to ${KEPT_DECISIONS}`);
  if (!visible.length) {
    rowsShown.clear();
    box.replaceChildren(make("div", { class: "empty" }, "No decision yet. Try ",
      make("code", {}, `curl ${location.origin}${location.pathname.replace(/dashboard$/, "")}v1/chat/completions`), " or make demo."));
    return;
  }
  let body = box.querySelector("tbody");
  if (!body || box.dataset.router !== shown) {
    box.dataset.router = shown;
    rowsShown.clear();
    const made = table(["when", "because", "request", "went to", "prompt#", "expected there", "from cache#", "predicted#", "first token#", "costs"], [], "cards");
    box.replaceChildren(made);
    body = made.querySelector("tbody");
  }
  const wanted = new Set(visible.map((number) => `${shown}/${number}`));
  for (const [name, row] of rowsShown) {
    if (wanted.has(name)) continue;
    row.line.remove();
    row.detail?.remove();
    rowsShown.delete(name);
  }
  let before = body.firstChild;
  for (const number of visible) {
    const row = showDecision(router, number);
    for (const node of [row.line, row.detail]) {
      if (!node) continue;
      if (node !== before) body.insertBefore(node, before);
      else before = before.nextSibling;
    }
  }
}

function showDecision(router, number) {
  const name = `${shown}/${number}`;
  const told = router.decisions.get(number);
  let row = rowsShown.get(name);
  if (!row) {
    const cell = (label, kind) => make("td", { class: kind, "data-name": label });
    row = {
      when: cell("when", "quiet"), id: cell("request", "mono"), prompt: cell("prompt", "num"), replica: cell("went to", "mono"),
      matched: cell("expected there"), predicted: cell("predicted", "num"), first: cell("first token", "num"),
      cached: cell("from cache", "num"), reason: cell("because"), more: cell("costs"), detail: null, told: null,
    };
    row.button = make("button", { type: "button", class: "row-button", "aria-expanded": "false", onclick: () => toggle(name) }, "show");
    row.more.append(row.button);
    row.line = make("tr", { class: told.isNew ? "decision-new" : null }, row.when, row.reason, row.id, row.replica,
      row.prompt, row.matched, row.cached, row.predicted, row.first, row.more);
    rowsShown.set(name, row);
  }
  say(row.when, ago(router.view.uptime_s - told.asked_s));
  const isOpen = opened.has(name);
  mark(row.button, "aria-expanded", String(isOpen));
  if (row.told !== told) {
    row.told = told;
    tellDecision(row, told.request);
    row.detail?.remove();
    row.detail = null;
  }
  if (isOpen && !row.detail) row.detail = detail(told.request);
  if (!isOpen && row.detail) { row.detail.remove(); row.detail = null; }
  return row;
}

function tellDecision(row, request) {
  const best = request.candidates[0];
  say(row.id, request.request_id.length > 20 ? `${request.request_id.slice(0, 18)}…` : request.request_id);
  mark(row.id, "title", request.request_id);
  say(row.prompt, count(request.prompt_tokens));
  const replica = request.outcome?.replica ?? best.replica;
  say(row.replica, nameOf(replica));
  mark(row.replica, "title", replica);
  const share = request.prompt_tokens ? best.cached_tokens / request.prompt_tokens : 0;
  const bar = make("span");
  bar.style.width = `${100 * share}%`;
  row.matched.replaceChildren(make("span", { class: "matched" },
    make("span", { class: "meter", "aria-hidden": "true" }, bar), best.is_matched ? `${count(best.cached_tokens)}` : "unknown"));
  say(row.predicted, best.terms ? seconds(firstToken(best.terms)) : "–");
  say(row.first, request.first_token_s !== null ? seconds(request.first_token_s) : request.total_s !== null ? "none" : "…");
  say(row.cached, request.outcome ? count(request.outcome.delivered) : "…");
  row.reason.replaceChildren(make("span", { class: `chip chip-${request.reason}`, title: DECISIONS[request.reason] ?? "" }, request.reason));
  mark(row.button, "aria-label", `costs of ${request.request_id}`);
}

function firstToken(terms) { return (terms.backlog_s + terms.prefill_s) * terms.decode_slowdown; }

function toggle(name) {
  if (!opened.delete(name)) opened.add(name);
  const router = heard.get(shown);
  if (router) showDecisions(router);
}

function detail(request) {
  const rows = request.candidates.map((candidate, index) => {
    const { terms } = candidate;
    const cells = [
      nameOf(candidate.replica), candidate.is_matched ? count(candidate.cached_tokens) : "unknown",
      count(candidate.num_running), count(candidate.num_waiting), seconds(terms?.backlog_s), seconds(terms?.prefill_s),
      terms ? `× ${terms.decode_slowdown.toFixed(2)}` : "–", seconds(terms?.recompute_s),
      seconds(terms?.passed_s), seconds(terms?.alone_s), seconds(terms?.memory_pressure_s), seconds(terms?.preference_s),
      terms ? seconds(terms.total_s) : candidate.cost === null ? "–" : candidate.cost.toPrecision(3),
    ];
    return make("tr", { class: index ? null : "chosen" }, ...cells.map((text, at) => make("td", { class: at ? "num" : "mono" }, text)));
  });
  const hidden = request.num_candidates - request.candidates.length;
  const box = make("div", { class: "detail-box" }, make("p", {}, story(request)),
    make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "costs of the candidates" },
      table(["replica", "holds#", "runs#", "waits#", "ahead#", "prefill#", "decodes#", "recompute#", "passes#", "alone#", "memory#", "preference#", "cost#"], rows)));
  if (hidden > 0) box.append(make("p", { class: "quiet" }, `and ${plural(hidden, "dearer one")}`));
  return make("tr", { class: "detail" }, make("td", { colspan: "10" }, box));
}

function story(request) {
  const best = request.candidates[0];
  const parts = [`${request.policy} sent ${count(request.prompt_tokens)} tokens to ${nameOf(best.replica)}: ${DECISIONS[request.reason] ?? request.reason}.`];
  if (request.attempt > 1) parts.push(`It was attempt ${request.attempt}${request.excluded.length ? `, without ${request.excluded.map(nameOf).join(", ")}` : ""}.`);
  if (request.held_s > 0.0005) parts.push(`It was held here for ${seconds(request.held_s)}.`);
  if (request.outcome) {
    const { outcome } = request;
    const why = Object.entries(outcome.uncached).sort((a, b) => b[1] - a[1]).map(([name, tokens]) =>
      `${count(tokens)} ${(REASONS[name]?.[0] ?? name).toLowerCase()}`).join(", ");
    parts.push(`The engine found ${count(outcome.delivered)} tokens${outcome.delivered === outcome.captured ? ", as expected" : ""}${why ? `, and computed ${why}` : ""}.`);
  }
  if (request.rest_to !== null) parts.push(`The answer was cut off after its first token; attempt ${request.num_attempts} sent the rest to ${nameOf(request.rest_to)}.`);
  if (request.total_s !== null) parts.push(`Over after ${seconds(request.total_s)}, ${plural(request.output_tokens, "token")} out.`);
  if (request.shadow && !request.shadow.agrees) parts.push(`${request.shadow.policy} would have chosen ${nameOf(request.shadow.replica)}.`);
  return parts.join(" ");
}
