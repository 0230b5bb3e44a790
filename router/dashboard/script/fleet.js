// A cell for each replica, whoever they are and however many.

const FEW = 8, FOLDED = 16; // replicas: below, wide cells; above, folded on a phone

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
