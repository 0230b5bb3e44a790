// The numbers at a glance.

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
    fleet.held ? `${count(fleet.held)} held here` : tokens ? `${count(tokens)} tokens ahead` : waiting ? "in the engines" : "nobody waits",
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
