// Functions for all views: elements, and the format of numbers and times.

// el creates an element. A function among the attributes becomes an event listener. Attributes with the value null,
// undefined or false are omitted.
export function el(tag, attributes, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") e.addEventListener(name, value);
    else if (name === "class") e.className = value;
    else e.setAttribute(name, value === true ? "" : value);
  }
  e.append(...children.flat(2).filter((c) => c !== null && c !== undefined && c !== false));
  return e;
}

// bare reports whether a key was pressed without Alt, Ctrl and Meta. Browsers use keys with a modifier: Alt and the
// left arrow go back a page.
export const bare = (e) => !(e.altKey || e.ctrlKey || e.metaKey);

// setText sets the text of an element, if the text differs.
export function setText(e, text) {
  text = String(text);
  if (e.textContent !== text) e.textContent = text;
}

// long returns an element with a text. A narrow element cuts the middle of the text, because names of pods differ at
// the end. setLong changes the text.
export const long = (text) => setLong(el("span", { class: "long" }, el("span"), el("span")), text);
export function setLong(e, text) {
  setText(e.firstChild, text.slice(0, -6));
  setText(e.lastChild, text.slice(-6));
  return e;
}

// pick returns a select, and the field with the label and the select. change is called with the selected value.
export function pick(id, name, list, change) {
  const select = el("select", { id, change: (e) => change?.(e.target.value) });
  fill(select, list);
  return [select, el("div", { class: "field" }, el("label", { for: id }, name), select)];
}

// keep adds the chosen value to options without this value: a model or a node is absent for a moment while a node
// restarts.
export const keep = (list, chosen, name = chosen) =>
  !chosen || list.some(([value]) => value === chosen) ? list : [...list, [chosen, name + " (not there now)"]];

// fill sets the options of a select, and reports whether the options changed. An option is a value and a text. The
// option with the value chosen is selected.
export function fill(select, list, chosen) {
  list = keep(list, chosen);
  const text = JSON.stringify(list);
  if (select.dataset.of === text) return false;
  select.dataset.of = text;
  select.replaceChildren(...list.map(([value, name]) => el("option", { value, selected: value === chosen }, name)));
  return true;
}

const whole = new Intl.NumberFormat("en-US");
export const count = (n) => whole.format(n);

// short formats a number in at most five characters: 12,345 is 12.3k.
export function short(n) {
  if (n < 10000) return n < 100 && n !== Math.round(n) ? n.toFixed(1) : whole.format(Math.round(n));
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (n >= size) return (n / size).toFixed(n / size < 100 ? 1 : 0) + unit;
  }
}

export function bytes(n) {
  let unit = 0;
  while (n >= 1024 && unit < 4) { n /= 1024; unit++; }
  return (unit === 0 ? n : n.toFixed(n < 10 ? 1 : 0)) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
}

// clock.ahead is the time of the indexer minus the time of this computer, in milliseconds.
export const clock = { ahead: 0 };

// time formats a time of day, with the date unless the date is today.
export function time(at, digits) {
  const t = new Date(at);
  const date = t.toDateString() === new Date().toDateString() ? "" :
    t.toLocaleDateString("en-GB", { day: "numeric", month: "short" }) + ", ";
  return date + t.toLocaleTimeString("en-GB", digits);
}

// age formats the duration since a time of the indexer.
export function age(time, now = Date.now() + clock.ahead) {
  const at = Date.parse(time);
  if (!at || at < 0) return "never";
  const s = Math.max(0, Math.round((now - at) / 1000));
  if (s < 60) return s + " s";
  if (s < 3600) return Math.floor(s / 60) + " min";
  if (s < 86400) return Math.floor(s / 3600) + " h";
  return Math.floor(s / 86400) + " d";
}

export const percent = (part, all) => all > 0 ? (100 * part / all).toFixed(part && part < all / 100 ? 2 : 0) + "%" : "–";

// step returns a step of the scale of colours, from 0 to 8.
export const step = (n, most) => n > 0 && most > 0 ? Math.max(1, Math.min(8, Math.ceil(8 * n / most))) : 0;

// colour returns a colour of the style sheet.
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const tiers = ["device", "host", "disk", "external"];

export function empty(title, ...rest) {
  return el("div", { class: "empty" }, el("strong", {}, title), ...rest.map((r) =>
    typeof r === "string" ? el("span", {}, r) : r));
}

export const code = (text) => el("code", {}, text);

export function tile(name, value, unit, kind) {
  const number = el("dd", { class: kind }, value);
  if (unit) number.append(" ", el("small", {}, unit));
  return el("div", { class: "tile" }, el("dt", {}, name), number);
}

// tileBox returns a box of tiles in rows of about the same length. Ten tiles form two rows of five, even with space for
// nine tiles in a row.
export function tileBox(...tiles) {
  const box = el("dl", { class: "tiles" }, ...tiles);
  const lay = () => {
    const most = Math.max(2, Math.floor((box.clientWidth + 1) / 137)); // a tile has at least 136 pixels, a line has 1
    const rows = Math.ceil(box.children.length / most);
    box.style.setProperty("--in-row", Math.ceil(box.children.length / rows) || 1);
  };
  new ResizeObserver(lay).observe(box);
  new MutationObserver(lay).observe(box, { childList: true });
  return box;
}

// busy disables a button during work. A disabled button loses the focus, so busy restores the focus after the work.
export async function busy(button, work) {
  const focused = document.activeElement === button;
  button.disabled = true;
  try {
    await work();
  } finally {
    button.disabled = false;
    if (focused && document.activeElement === document.body) button.focus({ preventScroll: true });
  }
}

// meter returns a bar with the used part of a limit.
export function meter(used, limit) {
  if (!limit) return el("span", {}, bytes(used));
  const bar = el("i");
  bar.style.width = Math.min(100, 100 * used / limit) + "%";
  return el("span", {}, el("span", { class: "meter" + (used > 0.8 * limit ? " full" : ""), "aria-hidden": "true" }, bar),
    bytes(used) + " of " + bytes(limit));
}

// canvas fits a canvas to the element, and returns a drawing context and the size, in units of the page.
export function canvas(c, height) {
  const scale = window.devicePixelRatio || 1;
  const width = c.clientWidth;
  if (height) c.style.height = height + "px";
  else height = c.clientHeight;
  if (c.width !== Math.round(width * scale) || c.height !== Math.round(height * scale)) {
    c.width = Math.round(width * scale);
    c.height = Math.round(height * scale);
  }
  const g = c.getContext("2d");
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  return { g, width, height };
}

// tip shows text beside the pointer. An empty text hides the tip.
const shown = el("div", { class: "tip", role: "tooltip", hidden: true });
export function tip(event, text) {
  if (!shown.isConnected) document.body.append(shown);
  shown.hidden = !text;
  if (!text) return;
  setText(shown, text);
  const { width, height } = shown.getBoundingClientRect();
  shown.style.left = Math.max(8, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px";
  shown.style.top = (event.clientY + 18 + height < innerHeight ? event.clientY + 18 : event.clientY - height - 10) + "px";
}

// hovering returns listeners for the pointer. The listeners show the result of words(event) beside the pointer. A view
// calls again after a change of the content under the pointer.
export function hovering(words) {
  let last = null;
  const again = () => last && tip(last, words(last));
  return { again, pointermove: (e) => { last = e; again(); }, pointerleave: (e) => { last = null; tip(e, ""); } };
}

// onDraw calls draw after every change of the window's size or the theme. The returned function removes the listeners.
export function onDraw(draw) {
  for (const what of ["resize", "theme"]) addEventListener(what, draw);
  return () => { for (const what of ["resize", "theme"]) removeEventListener(what, draw); };
}
