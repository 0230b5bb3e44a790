// Time to first token as a chart: two percentiles on a logarithmic scale above the requests of each step.

const LEAST_STEPS = 30; // of the chart, while a Router is young

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
