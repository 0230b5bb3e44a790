// What has been heard: the last answer of every Router, its decisions, who joined and who left.

const KEPT_DECISIONS = 40; // in the list; a few more in memory
const LEFT_MS = 10000; // how long a replica that has left stays on the page

const heard = new Map(); // Router name -> { view, at, decisions: Map(number -> row), replicas: Map(id -> ...) }
let shown = null; // the Router on the page
let span = 0;
let isPaused = false;
let key = stored(sessionStorage, "warmpath.key");
let failures = 0;
let isOutdated = false; // the Router has been replaced by one of another version
let timer = 0;
let request = null; // the AbortController of the question in flight
let retryAt = 0;

function take(view) {
  const now = performance.now();
  let router = heard.get(view.router);
  if (!router) {
    router = { decisions: new Map(), replicas: new Map(), isFirst: true };
    heard.set(view.router, router);
    shown ??= view.router;
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

function showSuccessor() { // of a Router that is silent while others answer: it has gone
  const latest = [...heard.values()].reduce((one, other) => (other.at > one.at ? other : one));
  if (latest.at - heard.get(shown).at > LEFT_MS) shown = latest.view.router;
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
