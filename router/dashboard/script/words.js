// How numbers, times and reasons are said.

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
  prefix: "nobody that could be chosen holds more of the prompt",
  load: "somebody holds more, but would take longer",
  cold: "nobody that could be chosen holds any of it",
  blind: "its cache is unknown: silent, or another fingerprint",
  turn: "the policy does not look at prefixes",
};

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
