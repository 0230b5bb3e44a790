// Shows one answer, hears the reader, and starts. The last of the parts.

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
  showPins(view);
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
  aloud($("ttft-read").textContent);
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
