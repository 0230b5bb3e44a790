// Whether what is shown is live, old, paused or locked, in the head, the banner, the title and the login.

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
  if (isOutdated) {
    state("lost", "another version");
    banner("This page is of another version than the Router.", "Reload", () => location.reload());
  } else if (failures > 0) {
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
