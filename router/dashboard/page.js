"use strict";
// Asks /dashboard/data every second and shows what it says. Keeps the last answer of every Router it hears of,
// so that a lost connection leaves something to look at. Text only ever becomes text nodes.
(() => {
  const POLL_MS = 1000;
  const TIMEOUT_MS = 8000;
  const RETRY_MS = [1000, 2000, 4000, 8000, 15000];
  const SAME_ROUTER_TRIES = 3; // with several Routers behind one address, asked again for the one that is shown
  const KEPT_DECISIONS = 40, FOLDED_DECISIONS = 12;
  const LEAST_STEPS = 30; // of the chart, while a Router is young
  const LEFT_MS = 10000; // how long a replica that has left stays on the page
  const FEW = 8, FOLDED = 16; // replicas: below, wide cells; above, folded on a phone
  // Beside the page, whatever the service is mounted under; an address may not hold credentials, as the page's may.
  const DATA_URL = new URL("dashboard/data", location.origin + location.pathname).href;
  const FORMAT_VERSION = 1;

  const REASONS = { // of tokens, in the order told; the words of `python -m router explain`
    cold: ["New", "nobody is known to have computed them before"],
    diverged: ["Diverged", "computed before, but after something else: look for a date or a name further up"],
    evicted: ["Evicted", "cached once, evicted since, or gone with their replica"],
    elsewhere: ["Elsewhere", "another replica holds them and did not get the request"],
    stale_index: ["Stale index", "expected here, but the engine no longer had them"],
    other_salt: ["Other salt", "cached under another cache_salt only"],
    partial_block: ["Partial block", "behind the last full block, which alone can be cached"],
    capped_block: ["Last block", "the prompt ends with a full block, and one token must be computed"],
  };
  const DECISIONS = {
    prefix: "nobody holds more of the prompt",
    load: "somebody holds more, but would take longer",
    cold: "nobody holds any of it",
    blind: "its cache is unknown: silent, or another fingerprint",
    turn: "the policy does not look at prefixes",
  };

  // --- small parts ------------------------------------------------------------------------------

  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";

  function make(tag, attributes = {}, ...children) {
    return fill(document.createElement(tag), attributes, children);
  }
  function draw(tag, attributes = {}, ...children) {
    return fill(document.createElementNS(SVG, tag), attributes, children);
  }
  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "class") node.setAttribute("class", value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }
  function say(node, text) { // touches the page only where something changes
    if (node.textContent !== text) node.textContent = text;
  }
  function mark(node, name, value) {
    if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
  }
  function stored(storage, name) {
    try { return storage.getItem(name); } catch { return null; } // storage may be forbidden
  }
  function store(storage, name, value) {
    try { value === null ? storage.removeItem(name) : storage.setItem(name, value); } catch { /* not kept */ }
  }

  const whole = new Intl.NumberFormat("en");
  const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
  function count(value) { return value < 10000 ? whole.format(Math.round(value)) : short.format(value); }
  function percent(share, digits = 0) {
    if (share === null || share === undefined || Number.isNaN(share)) return "–";
    if (share > 0 && share < 0.01 && !digits) return "<1 %";
    if (share < 1 && share > 0.995 && !digits) return ">99 %";
    return `${(100 * share).toFixed(digits)} %`;
  }
  function seconds(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size < 0.0005) return "0 ms";
    if (size < 0.0995) return `${(1000 * value).toFixed(size < 0.00995 ? 1 : 0)} ms`;
    if (size < 0.9995) return `${(1000 * value).toFixed(0)} ms`;
    return `${value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0)} s`;
  }
  function ago(value) {
    if (value < 1.5) return "now";
    if (value < 90) return `${Math.round(value)} s ago`;
    if (value < 5400) return `${Math.round(value / 60)} min ago`;
    if (value < 129600) return `${Math.round(value / 3600)} h ago`;
    return `${Math.round(value / 86400)} days ago`;
  }
  function lasting(value) { return ago(value).replace(" ago", "").replace("now", "1 s"); }
  function plural(number, noun) { return `${count(number)} ${noun}${number === 1 ? "" : "s"}`; }
  function sum(items, of) { return items.reduce((total, item) => total + of(item), 0); }

  // --- what is known ----------------------------------------------------------------------------

  const heard = new Map(); // Router name -> { view, at, decisions: Map(number -> row), replicas: Map(id -> ...) }
  let shown = null; // the Router on the page
  let span = 0;
  let isPaused = false;
  let key = stored(sessionStorage, "warmpath.key");
  let failures = 0;
  let timer = 0;
  let request = null; // the AbortController of the question in flight
  let retryAt = 0;

  function take(view) {
    const now = performance.now();
    let router = heard.get(view.router);
    if (!router) {
      router = { decisions: new Map(), replicas: new Map(), isFirst: true };
      heard.set(view.router, router);
      // A Router that has gone stays to be looked at until its successor is heard.
      if (shown === null || now - heard.get(shown).at > LEFT_MS) shown = view.router;
    }
    router.view = view;
    router.at = now;
    for (const row of view.decisions) {
      row.isNew = !router.isFirst && !router.decisions.has(row.number);
      router.decisions.set(row.number, row);
    }
    if (router.decisions.size > 4 * KEPT_DECISIONS) {
      const numbers = [...router.decisions.keys()].sort((a, b) => b - a);
      for (const number of numbers.slice(2 * KEPT_DECISIONS)) {
        if (!opened.has(`${view.router}/${number}`)) router.decisions.delete(number);
      }
    }
    follow(router, view.fleet.replicas, now);
    router.isFirst = false;
  }

  function follow(router, replicas, now) { // who has joined and who has left
    const present = new Set(replicas.map((replica) => replica.id));
    for (const replica of replicas) {
      const known = router.replicas.get(replica.id);
      if (!known || known.leftAt) {
        router.replicas.set(replica.id, { row: replica, joinedAt: router.isFirst ? -Infinity : now });
      } else known.row = replica;
    }
    for (const [id, known] of router.replicas) {
      if (present.has(id)) continue;
      known.leftAt ??= now;
      if (now - known.leftAt > LEFT_MS) router.replicas.delete(id);
    }
  }

  // --- asking -----------------------------------------------------------------------------------

  async function ask() {
    const known = shown !== null ? heard.get(shown) : null;
    const query = new URLSearchParams({ span: String(span) });
    if (known) {
      query.set("router", shown);
      query.set("cursor", String(known.view.cursor));
    }
    const headers = { accept: "application/json" };
    if (key) headers.authorization = `Bearer ${key}`;
    request = new AbortController();
    const limit = setTimeout(() => request?.abort(new Error("no answer in time")), TIMEOUT_MS);
    try {
      // Without a key of the page's own the browser's may do: it asked for one before it showed the page.
      const credentials = key ? "omit" : "same-origin";
      const answer = await fetch(`${DATA_URL}?${query}`, { headers, credentials, cache: "no-store", signal: request.signal });
      if (answer.status === 401 || answer.status === 403) throw new Locked(answer.status);
      if (!answer.ok) throw new Error(`the Router answered ${answer.status}`);
      const view = await answer.json();
      if (view.version !== FORMAT_VERSION) throw new Outdated();
      return view;
    } finally {
      clearTimeout(limit);
      request = null;
    }
  }
  class Locked extends Error {
    constructor(status) { super("locked"); this.status = status; }
  }
  class Outdated extends Error {}
  const RESUMED = new Error("asked again"); // by the reader: no failure

  async function poll() {
    clearTimeout(timer);
    timer = 0;
    if (isPaused || document.hidden || request) return;
    const asked = span;
    try {
      for (let tries = 0; tries < SAME_ROUTER_TRIES; tries += 1) {
        const view = await ask();
        if (asked !== span) break; // another span has been chosen meanwhile
        take(view);
        if (view.router === shown) break;
      }
    } catch (error) {
      if (error !== RESUMED) lost(error);
      return;
    }
    failures = 0;
    show();
    timer = setTimeout(poll, asked === span ? POLL_MS : 0);
  }

  function lost(error) {
    if (error instanceof Locked) { lock(error.status); return; }
    if (error instanceof Outdated) {
      banner("This page is of another version than the Router.", "Reload", () => location.reload());
      return;
    }
    if (isPaused || document.hidden) return;
    const wait = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
    failures += 1;
    retryAt = performance.now() + wait;
    timer = setTimeout(poll, wait);
    tick();
  }

  function resume() {
    clearTimeout(timer);
    if (request) request.abort(RESUMED);
    retryAt = 0;
    timer = setTimeout(poll, 0);
  }

  // --- state of the page ------------------------------------------------------------------------

  function state(name, text) {
    mark($("status"), "data-state", name);
    say($("status-text"), text);
  }

  function banner(text, label = "Retry now", act = resume) {
    const box = $("banner");
    box.hidden = false;
    say($("banner-text"), text);
    say($("retry"), label);
    $("retry").onclick = act;
  }

  function tick() { // what changes with time alone
    const known = shown !== null ? heard.get(shown) : null;
    const age = known ? (performance.now() - known.at) / 1000 : 0;
    if (!$("login").hidden) return;
    if (failures > 0) {
      const left = Math.max(0, Math.ceil((retryAt - performance.now()) / 1000));
      const when = left > 0 ? `next try in ${left} s` : "trying";
      state("lost", "no connection");
      banner(known ? `Connection lost. What is shown is ${lasting(age)} old; ${when}.` : `No Router answers; ${when}.`);
    } else {
      $("banner").hidden = true;
      if (isPaused) state("paused", known ? `paused ${lasting(age)}` : "paused");
      else if (!known) state("connecting", "connecting");
      else if (age > 5) state("stale", `heard ${ago(age)}`);
      else state("live", "live");
    }
    mark($("main"), "data-stale", failures > 0 && age > 3);
    document.title = title(known);
  }

  function title(known) {
    if (!known) return "Warmpath";
    if (failures > 0) return "(no connection) Warmpath";
    const { fleet, traffic } = known.view;
    const hits = traffic.sums.prompt ? ` · ${percent(traffic.sums.delivered / traffic.sums.prompt)} hits` : "";
    return `Warmpath · ${plural(fleet.replicas.length, "replica")}${hits}`;
  }

  function lock(status) {
    clearTimeout(timer);
    const hadKey = key !== null;
    key = null;
    failures = 0;
    store(sessionStorage, "warmpath.key", null);
    if (!$("main").hidden) { location.reload(); return; } // nothing of what was shown stays in the page
    $("banner").hidden = true;
    $("login").hidden = false;
    mark(document.body, "data-locked", "true");
    const error = $("login-error");
    error.hidden = !hadKey;
    say(error, status === 403 ? "That key works, but is no operator's." : "That key is not known here.");
    state("locked", "locked");
    $("key").focus();
  }

  // --- showing ----------------------------------------------------------------------------------

  function show() {
    const router = heard.get(shown);
    if (!router) return;
    const view = router.view;
    $("login").hidden = true;
    mark(document.body, "data-locked", null);
    $("main").hidden = false;
    $("forget").hidden = key === null;
    say($("subject"), `${view.model} · ${view.policy}`);
    showRouters();
    common = findCommon(view.fleet.replicas.map((replica) => replica.id));
    showTiles(view);
    showTtft(view.traffic);
    showWhy(view.traffic.sums);
    showChains(view);
    showFleet(router);
    showDecisions(router);
    say($("foot"), `Router ${view.router}, up ${lasting(view.uptime_s)}, blocks of ${view.block_size} tokens. `
      + "Each Router shows what it has decided itself; replicas are as they reported to it.");
    tick();
  }

  function showRouters() {
    const names = [...heard.keys()].filter((name) => name === shown || performance.now() - heard.get(name).at < 60000);
    $("router-pick").hidden = names.length < 2;
    const select = $("router");
    if (names.join() !== select.dataset.names) {
      select.dataset.names = names.join();
      select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    }
    select.value = shown;
  }

  // --- tiles

  const tiles = new Map();
  function tile(id, value, unit, note, { name = id, level = "", meter = null, title: hint = null } = {}) {
    let parts = tiles.get(id);
    if (!parts) {
      parts = {
        name: make("div", { class: "tile-name" }), value: make("span"), unit: make("small"), note: make("div", { class: "tile-note" }),
        bar: make("span"), meter: null,
      };
      parts.meter = make("div", { class: "meter", "aria-hidden": "true" }, parts.bar);
      parts.box = make("div", { class: "tile" },
        parts.name,
        make("div", { class: "tile-value" }, parts.value, " ", parts.unit), parts.note, parts.meter);
      $("tiles").append(parts.box);
      tiles.set(id, parts);
    }
    say(parts.name, name);
    say(parts.value, value);
    say(parts.unit, unit);
    say(parts.note, note);
    mark(parts.note, "title", note);
    mark(parts.box, "title", hint);
    parts.note.className = `tile-note ${level}`;
    parts.meter.hidden = meter === null;
    parts.bar.style.width = `${100 * Math.min(1, meter ?? 0)}%`;
  }

  function showTiles({ fleet, traffic }) {
    const { replicas } = fleet;
    const sums = traffic.sums;
    const silent = replicas.filter((replica) => replica.is_silent).length;
    const draining = replicas.filter((replica) => replica.is_draining).length;
    const blind = replicas.filter((replica) => !replica.is_matched).length;
    const trouble = [[silent, "silent"], [draining, "draining"], [blind, "by load alone"]]
      .filter(([number]) => number).map(([number, word]) => `${number} ${word}`).join(", ");
    tile("Replicas", count(replicas.length), "", replicas.length ? trouble || "all heard" : "none is known",
      { level: silent || !replicas.length ? "bad" : draining || blind ? "warn" : "" });

    const running = sum(replicas, (replica) => replica.running);
    const slots = sum(replicas, (replica) => replica.slots);
    tile("Running", count(running), "", slots ? `of ${count(slots)} slots` : "", { meter: slots ? running / slots : 0 });

    const waiting = sum(replicas, (replica) => replica.waiting) + fleet.held;
    const tokens = sum(replicas, (replica) => replica.queued_tokens);
    tile("Queued", count(waiting), "",
      fleet.held ? `${count(fleet.held)} held here` : tokens ? `${count(tokens)} tokens ahead` : "nobody waits",
      { title: "Waiting in the engines, and held at this Router until a replica is nearly free" });

    const blocks = sum(replicas, (replica) => replica.blocks);
    const used = blocks ? sum(replicas, (replica) => replica.used * replica.blocks) / blocks : 0;
    const fullest = replicas.reduce((most, replica) => (replica.used > (most?.used ?? -1) ? replica : most), null);
    tile("KV in use", blocks ? percent(used) : "–", "", fullest ? `fullest ${percent(fullest.used)}` : "",
      { meter: used, level: fullest && fullest.used > 0.95 ? "warn" : "", title: fullest ? `fullest: ${fullest.id}` : null });

    const during = span ? "1 h" : "5 min";
    const hit = sums.prompt ? sums.delivered / sums.prompt : null;
    tile("hits", percent(hit), "",
      sums.prompt ? `${percent(sums.available / sums.prompt)} was cached` : "no prompt yet",
      { name: `Hit ratio, ${during}`, meter: hit ?? 0, title: "Prompt tokens taken from a cache; below it, those that were cached anywhere in the fleet" });

    tile("ttft", seconds(sums.p50_s), "p50", `p99 ${seconds(sums.p99_s)}`, { name: `First token, ${during}` });

    const elapsed = Math.max(traffic.step_s, Math.min(traffic.requests.length, traffic.num_steps) * traffic.step_s);
    const rate = sums.requests / elapsed;
    const perSecond = rate >= 2;
    tile("requests", sums.requests ? count(perSecond ? rate : rate * 60) : "0", perSecond ? "/ s" : "/ min",
      `${count(fleet.in_flight)} in flight`, { name: `Requests, ${during}` });

    const refused = fleet.refused_busy + fleet.refused_no_replica;
    tile("Refused", count(refused), "",
      refused ? `${count(fleet.refused_busy)} busy, ${count(fleet.refused_no_replica)} none` : "since the start",
      { level: refused ? "warn" : "", title: "Since this Router started: every replica full, and no replica at all" });
  }

  // --- time to first token

  const PAD = { left: 52, right: 8, top: 8, bottom: 22 };
  const TIME_STEPS = [10, 15, 20, 30, 60, 120, 300, 600, 900]; // seconds between two labels
  let plot = null; // what the pointer needs to know of the chart
  let pointed = null; // index of the step pointed at

  function showTtft(traffic) {
    const box = $("ttft");
    const width = box.clientWidth, height = box.clientHeight;
    if (!width) return;
    const values = [...traffic.p50_s, ...traffic.p99_s].filter((value) => value !== null);
    if (!values.length) {
      plot = null;
      box.replaceChildren(make("div", { class: "empty" },
        `No first token in the last ${span ? "hour" : "five minutes"}. Requests to /v1/chat/completions and /v1/completions show here.`));
      say($("ttft-read"), "");
      return;
    }
    const steps = Math.min(traffic.num_steps, Math.max(LEAST_STEPS, traffic.requests.length));
    const missing = steps - traffic.requests.length;
    const [low, high] = [Math.min(...values) / 1.15, Math.max(...values) * 1.15];
    const rateTop = height - PAD.bottom - 34;
    const x = (index) => PAD.left + ((index + missing + 0.5) / steps) * (width - PAD.left - PAD.right);
    const y = (value) => PAD.top + (1 - Math.log(value / low) / Math.log(high / low)) * (rateTop - PAD.top - 6);
    const svg = draw("svg", { role: "img", "aria-label": summary(traffic) });

    for (const value of ticks(low, high)) {
      svg.append(draw("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }),
        draw("text", { x: PAD.left - 8, y: y(value) + 4, "text-anchor": "end" }, seconds(value).replace(/\.0+ /, " ")));
    }
    const spanSeconds = steps * traffic.step_s;
    const every = TIME_STEPS.find((seconds) => spanSeconds / seconds <= Math.max(2, (width - PAD.left) / 90)) ?? 900;
    for (let back = 0; back <= spanSeconds; back += every) {
      const at = width - PAD.right - (back / spanSeconds) * (width - PAD.left - PAD.right);
      svg.append(draw("text", { x: at, y: height - 5, "text-anchor": back ? (at < PAD.left + 14 ? "start" : "middle") : "end" },
        back ? `−${every < 60 ? `${back} s` : `${back / 60} min`}` : "now"));
    }

    const most = Math.max(...traffic.requests, 1);
    const bar = Math.max(1, (width - PAD.left - PAD.right) / steps - 1);
    traffic.requests.forEach((number, index) => {
      if (!number) return;
      const tall = Math.max(2, (number / most) * 32);
      svg.append(draw("rect", { class: "rate", x: x(index) - bar / 2, y: height - PAD.bottom - tall, width: bar, height: tall }));
    });
    svg.append(draw("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: height - PAD.bottom, y2: height - PAD.bottom }),
      draw("text", { x: PAD.left - 8, y: height - PAD.bottom - 2, "text-anchor": "end" }, "0"),
      draw("text", { x: PAD.left - 8, y: height - PAD.bottom - 24, "text-anchor": "end" }, `${count(most)}`));

    for (const stretch of stretches(traffic.p50_s)) {
      const upper = stretch.map((index) => `${x(index)},${y(traffic.p99_s[index])}`);
      const lower = stretch.map((index) => `${x(index)},${y(traffic.p50_s[index])}`);
      if (stretch.length > 1) {
        svg.append(draw("polygon", { class: "band", points: [...upper, ...[...lower].reverse()].join(" ") }),
          draw("polyline", { class: "line-p99", points: upper.join(" ") }),
          draw("polyline", { class: "line-p50", points: lower.join(" ") }));
      }
      if (stretch.length < 4) {
        for (const index of stretch) {
          svg.append(draw("circle", { class: "dot-p99", cx: x(index), cy: y(traffic.p99_s[index]), r: 2.5 }),
            draw("circle", { class: "dot-p50", cx: x(index), cy: y(traffic.p50_s[index]), r: 3 }));
        }
      }
    }
    plot = { traffic, x, height, cursor: draw("line", { class: "cursor", y1: PAD.top, y2: height - PAD.bottom }) };
    svg.append(plot.cursor);
    box.replaceChildren(svg);
    point(pointed);
  }

  function stretches(values) { // steps with a value, joined over silences of a few steps
    const found = [];
    let last = -Infinity;
    values.forEach((value, index) => {
      if (value === null) return;
      if (index - last > 5) found.push([]);
      found[found.length - 1].push(index);
      last = index;
    });
    return found;
  }

  function ticks(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const digit of [1, 2, 5]) {
        const value = digit * 10 ** power;
        if (value >= low && value <= high) found.push(value);
      }
    }
    const tens = found.filter((value) => Math.abs(Math.log10(value) % 1) < 1e-9);
    return found.length > 6 && tens.length > 1 ? tens : found;
  }

  function summary(traffic) {
    const { sums } = traffic;
    return `Time to first token over the last ${span ? "hour" : "five minutes"}: p50 ${seconds(sums.p50_s)}, `
      + `p99 ${seconds(sums.p99_s)}, ${plural(sums.requests, "request")}.`;
  }

  function point(index) {
    pointed = index;
    if (!plot) return;
    const { traffic, x, cursor } = plot;
    if (index === null || index >= traffic.requests.length) {
      cursor.setAttribute("visibility", "hidden");
      say($("ttft-read"), summary(traffic));
      return;
    }
    mark(cursor, "visibility", "visible");
    mark(cursor, "x1", x(index));
    mark(cursor, "x2", x(index));
    const back = (traffic.requests.length - 1 - index) * traffic.step_s;
    const when = back ? `${lasting(back)} ago` : "now";
    const number = traffic.requests[index];
    say($("ttft-read"), number
      ? `${when}: ${plural(number, "request")}, p50 ${seconds(traffic.p50_s[index])}, p99 ${seconds(traffic.p99_s[index])}, `
        + `${percent(traffic.prompt[index] ? traffic.delivered[index] / traffic.prompt[index] : null)} of prompt tokens from cache`
      : `${when}: no first token`);
  }

  // --- why

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

  // --- chains

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
      if (button.contains(document.activeElement)) box.querySelector(".run")?.focus();
      button.remove();
      runs.delete(name);
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

  // --- fleet

  const cells = new Map(); // id -> parts
  let isUnfolded = false;
  const phone = matchMedia("(max-width: 720px)");

  function showFleet(router) {
    const box = $("fleet");
    const now = performance.now();
    const all = [...router.replicas.values()];
    if (!all.length) {
      cells.clear();
      box.replaceChildren(make("div", { class: "empty" },
        "No replica is known. Replicas show here once they are ready; until then requests are answered with 503."));
      mark(box, "data-size", null);
      $("fleet-more").hidden = true;
      return;
    }
    box.querySelector(".empty")?.remove();
    all.sort(ORDERS[$("order").value]);
    const isFolded = phone.matches && all.length > FOLDED && !isUnfolded;
    const visible = isFolded ? all.slice(0, FOLDED) : all;
    mark(box, "data-size", all.length <= FEW ? "few" : "many");
    const ids = new Set();
    visible.forEach((known, index) => {
      ids.add(known.row.id);
      const cell = showReplica(known, now);
      if (box.children[index] !== cell) box.insertBefore(cell, box.children[index] ?? null);
    });
    for (const [id, parts] of cells) {
      if (ids.has(id)) continue;
      parts.box.remove();
      cells.delete(id);
    }
    const more = $("fleet-more");
    more.hidden = !(phone.matches && all.length > FOLDED);
    say(more, isFolded ? `Show all ${all.length} replicas` : "Show fewer");
  }

  const byName = (a, b) => compareIds(a.row.id, b.row.id);
  function compareIds(a, b) { // replica-2 before replica-10, but no numbers are looked for in hexadecimal names
    const [, headA, tailA] = /^(.*?)(\d*)$/.exec(a), [, headB, tailB] = /^(.*?)(\d*)$/.exec(b);
    if (headA === headB && tailA && tailB) return tailA - tailB || (a < b ? -1 : 1);
    return a < b ? -1 : a > b ? 1 : 0;
  }

  let common = ""; // what all replicas' names begin with, up to a separator
  function nameOf(id) { return id.startsWith(common) ? id.slice(common.length) : id; }
  function findCommon(ids) {
    if (ids.length < 2) return "";
    let size = 0;
    while (ids.every((id) => id.length > size && id[size] === ids[0][size])) size += 1;
    const head = /^.*[#/:._-]/.exec(ids[0].slice(0, size))?.[0] ?? "";
    return ids.every((id) => id.length - head.length >= 4) ? head : ""; // what is left must be worth reading
  }

  const ORDERS = {
    name: byName,
    work: (a, b) => b.row.backlog_s - a.row.backlog_s || b.row.running + b.row.waiting - a.row.running - a.row.waiting || byName(a, b),
    kv: (a, b) => b.row.used - a.row.used || byName(a, b),
  };

  function showReplica(known, now) {
    const { row } = known;
    let parts = cells.get(row.id);
    if (!parts) {
      const value = () => make("dd");
      parts = { name: make("span", { class: "replica-name" }), chips: make("span"),
        used: make("span", { class: "used" }), kept: make("span", { class: "kept" }),
        running: value(), waiting: value(), ahead: value(), cache: value() };
      parts.box = make("div", { class: "replica", role: "listitem" },
        make("div", { class: "replica-head" }, parts.name, parts.chips),
        make("div", { class: "kv", "aria-hidden": "true" }, parts.kept, parts.used),
        make("dl", {}, make("dt", {}, "runs"), parts.running, make("dt", {}, "queue"), parts.waiting,
          make("dt", {}, "ahead"), parts.ahead, make("dt", {}, "KV"), parts.cache));
      cells.set(row.id, parts);
    }
    const hasLeft = Boolean(known.leftAt);
    const hasJoined = !hasLeft && now - known.joinedAt < LEFT_MS;
    const chip = hasLeft ? ["left", "bad"] : row.is_silent ? ["silent", "bad"] : row.is_draining ? ["draining", "warn"]
      : !row.is_matched ? ["by load alone", "warn"] : hasJoined ? ["joined", "good"] : null;
    say(parts.chips, chip ? chip[0] : "");
    mark(parts.chips, "class", chip ? `chip chip-${chip[1]}` : null);
    mark(parts.box, "data-left", hasLeft);
    mark(parts.box, "data-joined", hasJoined);
    mark(parts.box, "data-trouble", !hasLeft && (row.is_silent || row.is_draining));
    parts.used.style.width = `${100 * row.used}%`;
    parts.kept.style.width = `${100 * Math.min(1, Math.max(row.used, row.cached))}%`;
    say(parts.name, nameOf(row.id));
    say(parts.running, count(row.running));
    say(parts.waiting, count(row.waiting));
    say(parts.ahead, seconds(row.backlog_s));
    say(parts.cache, percent(row.used));
    mark(parts.box, "title", `${row.id}: ${row.running} of ${row.slots} slots run, ${row.waiting} wait, ${count(row.queued_tokens)} prompt tokens ahead, `
      + `${percent(row.used)} of ${count(row.blocks)} KV blocks in use, ${percent(row.cached)} hold content that may be found again`);
    return parts.box;
  }

  // --- decisions

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
        terms ? `× ${terms.decode_slowdown.toFixed(2)}` : "–", seconds(terms?.recompute_s), seconds(terms?.memory_pressure_s),
        terms ? seconds(terms.total_s) : candidate.cost === null ? "–" : candidate.cost.toPrecision(3),
      ];
      return make("tr", { class: index ? null : "chosen" }, ...cells.map((text, at) => make("td", { class: at ? "num" : "mono" }, text)));
    });
    const hidden = request.num_candidates - request.candidates.length;
    const box = make("div", { class: "detail-box" }, make("p", {}, story(request)),
      make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "costs of the candidates" },
        table(["replica", "holds#", "runs#", "waits#", "ahead#", "prefill#", "decodes#", "recompute#", "memory#", "cost#"], rows)));
    if (hidden > 0) box.append(make("p", { class: "quiet" }, `and ${plural(hidden, "dearer one")}`));
    return make("tr", { class: "detail" }, make("td", { colspan: "10" }, box));
  }

  function story(request) {
    const best = request.candidates[0];
    const parts = [`${request.policy} sent ${count(request.prompt_tokens)} tokens to ${nameOf(best.replica)}: ${DECISIONS[request.reason] ?? request.reason}.`];
    if (request.num_attempts > 1) parts.push(`It was attempt ${request.num_attempts}${request.excluded.length ? `, without ${request.excluded.map(nameOf).join(", ")}` : ""}.`);
    if (request.held_s > 0.0005) parts.push(`It was held here for ${seconds(request.held_s)}.`);
    if (request.outcome) {
      const { outcome } = request;
      const why = Object.entries(outcome.uncached).sort((a, b) => b[1] - a[1]).map(([name, tokens]) =>
        `${count(tokens)} ${(REASONS[name]?.[0] ?? name).toLowerCase()}`).join(", ");
      parts.push(`The engine found ${count(outcome.delivered)} tokens${outcome.delivered === best.cached_tokens ? ", as expected" : ""}${why ? `, and computed ${why}` : ""}.`);
    }
    if (request.total_s !== null) parts.push(`Over after ${seconds(request.total_s)}, ${plural(request.output_tokens, "token")} out.`);
    if (request.shadow && !request.shadow.agrees) parts.push(`${request.shadow.policy} would have chosen ${nameOf(request.shadow.replica)}.`);
    return parts.join(" ");
  }

  // --- what the reader does ---------------------------------------------------------------------

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const THEMES = ["system", "light", "dark"];
  let theme = THEMES.includes(stored(localStorage, "warmpath.theme")) ? stored(localStorage, "warmpath.theme") : "system";
  function paint() {
    const isDark = theme === "dark" || (theme === "system" && dark.matches);
    mark(document.documentElement, "data-theme", isDark ? "dark" : "light");
    say($("theme-name"), theme);
    mark($("theme"), "aria-label", `Theme: ${theme}`);
  }
  dark.addEventListener("change", paint);
  $("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    store(localStorage, "warmpath.theme", theme === "system" ? null : theme);
    paint();
  });
  paint();

  function pause(wanted) {
    isPaused = wanted;
    mark($("pause"), "aria-pressed", String(isPaused));
    say($("pause"), isPaused ? "Resume" : "Pause");
    if (isPaused) { clearTimeout(timer); failures = 0; } else resume();
    tick();
  }
  $("pause").addEventListener("click", () => pause(!isPaused));

  [0, 1].forEach((index) => $(`span-${index}`).addEventListener("click", () => {
    span = index;
    pointed = null;
    [0, 1].forEach((other) => mark($(`span-${other}`), "aria-pressed", String(other === span)));
    if (isPaused) pause(false);
    else resume();
  }));
  $("router").addEventListener("change", (event) => { shown = event.target.value; picked = zoomed = null; show(); resume(); });
  $("order").addEventListener("change", () => { const router = heard.get(shown); if (router) showFleet(router); });
  $("fleet-more").addEventListener("click", () => { isUnfolded = !isUnfolded; const router = heard.get(shown); if (router) showFleet(router); });
  $("decisions-more").addEventListener("click", () => {
    areAllDecisions = !areAllDecisions;
    const router = heard.get(shown);
    if (router) showDecisions(router);
  });
  $("icicle").addEventListener("keydown", step);
  $("icicle").addEventListener("mouseleave", () => { if (!$("icicle").contains(document.activeElement)) pick(null); });
  $("chain-table-box").addEventListener("toggle", () => { if ($("chain-table-box").open) refresh(); });

  $("ttft").addEventListener("pointermove", (event) => {
    if (!plot) return;
    const at = event.clientX - $("ttft").getBoundingClientRect().left;
    const number = plot.traffic.requests.length;
    let nearest = 0;
    for (let index = 1; index < number; index += 1) {
      if (Math.abs(plot.x(index) - at) < Math.abs(plot.x(nearest) - at)) nearest = index;
    }
    point(nearest);
  });
  $("ttft").addEventListener("pointerleave", () => point(null));
  $("ttft").addEventListener("blur", () => point(null));
  $("ttft").addEventListener("keydown", (event) => {
    if (!plot || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    const last = plot.traffic.requests.length - 1;
    const at = pointed ?? last + 1;
    point({ ArrowLeft: Math.max(0, at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last, Escape: null }[event.key]);
  });

  $("login").addEventListener("submit", (event) => {
    event.preventDefault();
    key = $("key").value.trim();
    if (!key) return;
    $("key").value = "";
    store(sessionStorage, "warmpath.key", key);
    state("connecting", "connecting");
    resume();
  });
  $("forget").addEventListener("click", () => lock(401));

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.key === "p") pause(!isPaused);
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) resume(); });
  addEventListener("online", resume);
  new ResizeObserver(() => {
    const router = shown !== null ? heard.get(shown) : null;
    if (router && !$("main").hidden) { showTtft(router.view.traffic); refresh(); showFleet(router); }
  }).observe($("main"));
  setInterval(tick, 1000);
  poll();
})();
