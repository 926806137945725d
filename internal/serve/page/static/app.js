// The page: the views, the theme and the stream of events.
import { watch, live, onChange } from "./live.js";
import { setText, time } from "./ui.js";
import * as fleet from "./fleet.js";
import * as cluster from "./cluster.js";
import * as prefixes from "./prefixes.js";
import * as funnel from "./funnel.js";
import * as ask from "./ask.js";
import * as whatif from "./whatif.js";

const views = { fleet, prefixes, funnel, ask, whatif, cluster };
const place = document.getElementById("view");
let leave = null; // closes the displayed view

function show() {
  const name = location.hash.replace(/^#\//, "").split("?")[0];
  const view = views[name] ? name : "fleet";
  leave?.();
  place.replaceChildren();
  leave = views[view].show(place);
  for (const a of document.querySelectorAll(".bar nav a")) {
    if (a.getAttribute("href") === "#/" + view) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  document.title = views[view].title + " · kvatlas";
}
document.querySelector(".skip").addEventListener("click", (e) => {
  e.preventDefault(); // the address keeps the name of the view
  document.getElementById("main").focus();
});
addEventListener("hashchange", () => {
  if (!location.hash.startsWith("#/")) return;
  show();
  document.getElementById("main").focus({ preventScroll: true });
  scrollTo(0, 0);
});

// The theme: light, dark, or the theme of the system.
const themes = ["auto", "light", "dark"];
const button = document.getElementById("theme");
let theme = localStorage.getItem("kvatlas-theme") || "auto";
function dress() {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  button.textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[theme];
  button.setAttribute("aria-label", "Theme: " + theme);
  dispatchEvent(new Event("theme"));
}
button.addEventListener("click", () => {
  theme = themes[(themes.indexOf(theme) + 1) % themes.length];
  localStorage.setItem("kvatlas-theme", theme);
  dress();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("theme")));

// The state of the connection.
const status = document.getElementById("live");
const alert = document.getElementById("alert");
let stands = "connecting", why = "", since = 0;
function say() {
  const of = live.cluster ? " · " + live.cluster.node : "";
  setText(status, { connecting: "connecting", on: "live" + of, off: "not live" }[stands]);
  const text = stands === "off" ? "Not live" + (since ? " since " + time(since) : "") + ": " + why :
    live.error ? "The state of the fleet is unavailable: " + live.error.message : "";
  alert.hidden = !text;
  setText(alert, text);
}
onChange(say);

dress();
if (!location.hash.startsWith("#/")) history.replaceState(null, "", "#/fleet");
show();
watch((...said) => {
  [stands, why, since] = said;
  status.className = "live " + stands;
  say();
});
