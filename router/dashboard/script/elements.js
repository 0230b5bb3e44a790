// Making and changing elements, and keeping small things. Text only ever becomes text nodes.

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
function aloud(text) { // for who hears the page
  say($("aloud"), text);
}
function stored(storage, name) {
  try { return storage.getItem(name); } catch { return null; } // storage may be forbidden
}
function store(storage, name, value) {
  try { value === null ? storage.removeItem(name) : storage.setItem(name, value); } catch { /* not kept */ }
}
