// Asking for the data: once a second, sooner while there is more, later after failures, not at all while nobody looks.

const POLL_MS = 1000;
const MORE_MS = 250; // after an answer that is full of decisions: more have changed than it tells
const FULL = 12; // decisions in one
const TIMEOUT_MS = 8000;
const RETRY_MS = [1000, 2000, 4000, 8000, 15000];
const SAME_ROUTER_TRIES = 3; // with several Routers behind one address, asked again for the one that is shown
const FORMAT_VERSION = 1;
// Beside the page, whatever the service is mounted under; an address may not hold credentials, as the page's may.
const DATA_URL = new URL("dashboard/data", location.origin + location.pathname).href;

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
  if (failures > 0) aloud("Connected again.");
  failures = 0;
  showSuccessor();
  show();
  const isFull = heard.get(shown).view.decisions.length >= FULL;
  timer = setTimeout(poll, asked !== span ? 0 : isFull ? MORE_MS : POLL_MS);
}

function lost(error) {
  if (error instanceof Locked) { lock(error.status); return; }
  if (error instanceof Outdated) {
    isOutdated = true;
    tick();
    return; // nothing of what it says can be trusted to be understood
  }
  if (isPaused || document.hidden) return;
  const wait = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
  failures += 1;
  if (failures === 1) aloud("Connection lost.");
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
