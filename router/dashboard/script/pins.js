// Prefixes that are held, whichever Router was asked for them. Their names are drawn at random.

function showPins(view) {
  const pins = view.pins ?? [];
  $("pins-card").hidden = !pins.length;
  if (!pins.length) return;
  const more = view.num_pins - pins.length;
  say($("pins-note"), `${plural(sum(pins, (pin) => pin.tokens * pin.replicas.length), "token")} that nothing evicts`
    + (more ? `, and ${count(more)} more of them` : ""));
  $("pins").replaceChildren(table(["prefix", "tokens#", "copies", "held by", "time left#"], pins.map(showPin), "cards"));
}

function showPin(pin) {
  const isShort = pin.replicas.length < pin.copies;
  const cell = (name, kind, ...content) => make("td", { class: kind, "data-name": name }, ...content);
  return make("tr", {},
    cell("prefix", "mono", pin.name),
    cell("tokens", "num", count(pin.tokens)),
    cell("copies", null, `${pin.replicas.length} of ${pin.copies}`,
      isShort ? make("span", { class: "chip chip-warn" }, "being made again") : null),
    cell("held by", "mono", pin.replicas.map(nameOf).join(", ") || "–"),
    cell("time left", "num", lasting(pin.left_s)));
}
