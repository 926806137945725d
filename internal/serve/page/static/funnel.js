// Funnel: the tokens of all prompts of a model. The steps show the reusable tokens and the reused tokens, and the
// causes of the losses between the steps.
import { ask, looking } from "./api.js";
import { live, models, onChange } from "./live.js";
import { causes, steps } from "./causes.js";
import { curl } from "./shell.js";
import { capacityCard } from "./capacity.js";
import { el, setText, count, short, canvas, colour, tip, bare, time, tile, tileBox, hovering, empty, code, pick, fill, onDraw } from "./ui.js";

export const title = "Funnel";

const windows = [["1m", "1 minute"], ["5m", "5 minutes"], ["10m", "10 minutes"], ["30m", "30 minutes"], ["1h", "1 hour"]];
const views = { fleet: "Look at the fleet", cluster: "Look at the cluster", ask: "Ask for a prompt" };
const chartHeight = 180, margin = 44; // of the chart; the margin is for the axis
const shades = { asked: "--h2", seen: "--h4", held: "--h5", selected: "--h6", reused: "--h8" };

const set = { model: "", since: "10m", chart: "tokens" }; // the selections of the reader

const unreported = "not reported"; // in place of the share of the step reused
const share = (part, all) => (all > 0 ? (100 * part / all).toFixed(1) + "%" : "–");
const span = (ms) => (ms < 1000 ? Math.round(ms) + " ms" : ms < 60000 ? (ms / 1000).toFixed(1) + " s" : Math.round(ms / 60000) + " min");

export function show(place) {
  let funnel = null; // the last answer of the indexer
  let bars = []; // of the chart
  let current = -1; // the index of the bar selected by keyboard; -1: none

  const [model, modelField] = pick("funnel-model", "Model", [], (v) => { set.model = v; funnel = null; look(); caches.look(v); });
  const [since, sinceField] = pick("funnel-since", "Window", windows, (v) => { set.since = v; funnel = null; look(); });
  const [kind, kindField] = pick("funnel-chart", "Shown as", [["tokens", "tokens"], ["share", "share of the asked tokens"]],
    (v) => { set.chart = v; draw(); });
  since.value = set.since;
  kind.value = set.chart;
  const error = el("p", { class: "error", role: "alert" });
  const missing = el("div", { class: "notice warn", hidden: true });
  const tiles = tileBox();
  const rows = {}; // by step: the row, and the losses by cause
  const list = el("ol", { class: "funnel" }, Object.keys(steps).map((s) => {
    rows[s] = { ...line(steps[s]), losses: el("ul"), causes: {} };
    rows[s].fill.className = "f-" + s;
    return el("li", { "data-step": s }, rows[s].losses, el("div", { class: "line step" }, rows[s].parts));
  }));
  const { again, ...hover } = hovering((e) => { const b = bars[at(e)]; return b ? words(b) : ""; });
  const chart = el("canvas", { id: "funnel-time", tabindex: "0", role: "application", "aria-describedby": "funnel-now",
    "aria-label": "Tokens of each step over time: arrows move", ...hover, keydown: press });
  const now = el("p", { id: "funnel-now", class: "small", role: "status" });
  const per = el("span", { class: "soft small" });
  const rests = el("div", { class: "view" });
  const box = el("div", { class: "view" }, tiles, el("div", { class: "view halves" },
    el("section", { class: "card", "aria-label": "Steps" }, list, el("ul", { class: "legend" },
      el("li", {}, el("i", { class: "f-mend" }), "lost; open a cause for the remedy"), el("li", {}, el("i", { class: "f-lost" }), "lost; nothing to correct, or unknown"))),
    el("div", { class: "view" }, el("section", { class: "card" }, el("div", { class: "head" }, el("h2", {}, "Over time"), per, kindField), el("div", { class: "icicle" }, chart), now,
      el("ul", { class: "legend" }, Object.keys(steps).map((s) => el("li", {}, el("i", { class: "f-" + s }), s)))), rests)));
  const none = el("div", { class: "card" });
  const caches = capacityCard();
  place.append(el("div", { class: "view" }, el("div", { class: "head" }, el("h1", {}, "Funnel"),
    el("div", { class: "fields" }, modelField, sinceField)), error, missing, box, none, caches.card));

  // line returns the elements of a row: the name, the bar, the number of tokens and the share.
  function line(text, chip) {
    const fill = el("i");
    const name = el("span", { class: "name" }, el("strong", {}, text[0]), text[1] && el("span", { class: "soft small" }, text[1]), chip);
    const tokens = el("span", { class: "tokens" }), part = el("span", { class: "part-of" });
    return { fill, tokens, part, parts: [name, el("span", { class: "track", "aria-hidden": "true" }, fill), tokens, part] };
  }

  function fillLine(l, from, to, tokens, asked) {
    l.fill.style.left = 100 * from / (asked || 1) + "%";
    l.fill.style.width = 100 * (to - from) / (asked || 1) + "%";
    setText(l.tokens, count(tokens));
    setText(l.part, share(tokens, asked));
  }

  function options() {
    if (!fill(model, [...new Set(models().map((m) => m.model))].map((m) => [m, m]), set.model)) return;
    set.model = model.value;
    look();
    caches.look(set.model);
  }

  const { look, end } = looking((signal) => set.model &&
    ask("GET", "v1/funnel?" + new URLSearchParams({ model: set.model, since: set.since }), undefined, signal), (answer, failure) => {
    funnel = answer || funnel;
    setText(error, failure ? failure.message : "");
    refresh();
  });

  function refresh() {
    const there = funnel && funnel.requests > 0;
    box.hidden = !there;
    none.hidden = there;
    const unheard = funnel?.missing || [];
    missing.hidden = unheard.length === 0;
    setText(missing, "No answer from " + unheard.join(", ") + ". The records of " + (unheard.length === 1 ? "this node" : "these nodes") + " are missing here.");
    if (!there) {
      none.replaceChildren(funnel ? empty("No requests for " + funnel.model + " since " + time(funnel.from),
        "The funnel appears here after the first query or choice for a prompt. Select a longer window, or send a request:",
        code(curl(location.origin, "/v1/select", { model: funnel.model, tokens: [1, 2, 3], request_id: "r1" }))) :
        live.cluster && !models().length ? empty("No model yet", "Run a shim beside each engine. The models then appear here:",
          code("worker-shim run --engine-http http://127.0.0.1:8000 --nats nats://127.0.0.1:4222"),
          "Without an engine, run indexer demo: a fleet of simulated engines.") : empty("Waiting for the indexer…"));
      return;
    }
    const of = Object.fromEntries(funnel.steps.map((s) => [s.step, s.tokens]));
    tiles.replaceChildren(tile("Requests", count(funnel.requests)), tile("Routed", count(funnel.routed), share(funnel.routed, funnel.requests)),
      tile("Reuse known", count(funnel.reported), share(funnel.reported, funnel.routed) + " of routed"),
      tile("Reused", funnel.reported ? share(of.reused, of.asked) : unreported, funnel.reported ? "of the asked tokens" : "by any engine"), tile("At best", share(of.seen, of.asked), "with a cache of any size"));
    let before = of.asked;
    for (const s of funnel.steps) {
      const row = rows[s.step];
      fillLine(row, 0, s.tokens, s.tokens, of.asked);
      if (s.not_reported) setText(row.part, unreported);
      losses(row, s.lost, before, of.asked);
      before = s.tokens;
    }
    list.dataset.requests = funnel.requests;
    draw();
    basis();
  }

  // losses shows each cause with a bar. The bars lie side by side, up to the end of the previous step's bar.
  function losses(row, lost, to, asked) {
    const focus = document.activeElement;
    const items = lost.map((l) => {
      const [why, remedy, view, calm] = causes[l.cause] || [l.cause, ""];
      const c = row.causes[l.cause] ||= cause(l.cause, why, remedy, view, calm);
      fillLine(c, to - l.tokens, to, l.tokens, asked);
      to -= l.tokens;
      const workers = (l.workers || []).map((w) => w.worker + (w.tier ? " (" + w.tier + ")" : "") + ": " + count(w.tokens) + " tokens, " + span(w.age_ms) + " before");
      setText(c.who, workers.length ? "By " + workers.join("; ") : "");
      c.who.hidden = !workers.length;
      return c.item;
    });
    if (items.length !== row.losses.children.length || items.some((e, i) => row.losses.children[i] !== e)) {
      row.losses.replaceChildren(...items);
      if (row.losses.contains(focus)) focus.focus({ preventScroll: true });
    }
    row.losses.hidden = !items.length;
  }

  function cause(name, why, remedy, view, calm) {
    const l = line([name.replaceAll("_", " ")]);
    l.fill.className = calm ? "f-lost" : "f-mend";
    l.who = el("p", { class: "who" });
    l.item = el("li", { "data-cause": name }, el("details", {}, el("summary", { class: "line" }, l.parts), el("div", { class: "remedy" },
      el("p", {}, "Reason: " + why + "."), l.who, remedy && el("p", {}, el("strong", {}, "Remedy: "), remedy + "."),
      view && el("a", { href: "#/" + view }, views[view]))));
    return l;
  }

  // draw shows the steps over time, with at most 60 bars. A bar joins the buckets of a period. The period is a multiple
  // of the longest bucket.
  function draw() {
    if (!funnel || box.hidden) return;
    const widest = Math.max(10, ...funnel.buckets.map((b) => b.seconds)) * 1000;
    const from = Math.floor(Date.parse(funnel.from) / widest) * widest, to = Date.parse(funnel.to);
    const wide = Math.max(1, Math.ceil((to - from) / 60 / widest)) * widest;
    bars = Array.from({ length: Math.max(1, Math.ceil((to - from) / wide)) }, (_, i) => ({ from: from + i * wide, to: from + (i + 1) * wide, requests: 0,
      reported: 0, asked: 0, seen: 0, held: 0, selected: 0, reused: 0 }));
    for (const b of funnel.buckets) {
      const bar = bars[Math.floor((Date.parse(b.from) - from) / wide)];
      if (bar) for (const k of ["requests", "reported", ...Object.keys(steps)]) bar[k] += b[k];
    }
    current = Math.min(current, bars.length - 1);
    const shares = set.chart === "share";
    const most = shares ? 1 : Math.max(1, ...bars.map((b) => b.asked));
    const { g, width } = canvas(chart, chartHeight);
    const high = chartHeight - 24, w = (width - margin) / bars.length;
    const soft = colour("--soft"), rule = colour("--line");
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    g.textAlign = "right";
    for (const part of [0, 0.5, 1]) {
      const y = 8 + (high - 8) * (1 - part);
      g.fillStyle = rule;
      g.fillRect(margin, Math.round(y), width - margin, 1);
      g.fillStyle = soft;
      if (shares || most > 1 || part !== 0.5) g.fillText(shares ? 100 * part + "%" : short(most * part), margin - 6, y);
    }
    for (const [i, b] of bars.entries()) {
      const x = margin + i * w, gap = w > 4 ? 1 : 0;
      for (const s of Object.keys(steps)) {
        const tall = (high - 8) * (shares ? b.asked && b[s] / b.asked : b[s] / most);
        g.fillStyle = colour(shades[s]);
        g.fillRect(x, high - tall, w - gap, tall);
      }
      if (i === current) {
        g.strokeStyle = colour("--text");
        g.lineWidth = 2;
        g.strokeRect(x, 8, w - gap, high - 8);
      }
    }
    g.fillStyle = soft;
    g.textAlign = "left";
    g.fillText(time(from), margin, chartHeight - 8);
    g.textAlign = "right";
    g.fillText(time(to), width, chartHeight - 8);
    setText(per, "each bar is " + (wide % 60000 ? wide / 1000 + " seconds" : wide / 60000 + " min"));
    chart.dataset.asked = bars.reduce((sum, b) => sum + b.asked, 0);
    chart.dataset.reused = bars.reduce((sum, b) => sum + b.reused, 0);
    setText(now, current >= 0 ? words(bars[current]) : "");
    again();
  }

  const words = (b) => time(b.from) + " to " + time(b.to) + ": " + count(b.requests) + (b.requests === 1 ? " request" : " requests") + "\n" +
    Object.keys(steps).map((s) => s + " " + (s === "reused" && !b.reported ? unreported :
      count(b[s]) + (s === "asked" ? "" : ", " + share(b[s], b.asked)))).join("\n");

  function at(e) {
    const area = chart.getBoundingClientRect();
    return Math.floor((e.clientX - area.left - margin) / (area.width - margin) * bars.length);
  }

  function press(e) {
    if (!bare(e)) return;
    const to = { ArrowLeft: current < 0 ? bars.length - 1 : current - 1, ArrowRight: current + 1, Home: 0, End: bars.length - 1, Escape: -1 }[e.key];
    if (to === undefined) return;
    current = e.key === "Escape" ? -1 : Math.max(0, Math.min(bars.length - 1, to));
    e.preventDefault();
    draw();
  }

  // basis shows the records behind the numbers, for each node.
  function basis() {
    const columns = [["Recorded since", (n) => time(n.from)], ["Blocks remembered since", (n) => time(n.history_from)], ["Blocks forgotten", "history_lost"],
      ["Requests dropped", "dropped"], ["Messages unread", "events_unread"], ["Choices not reported in time", "forgotten"],
      ["Questions unanswered", "peers_unheard"]];
    const left = rests.querySelector(".scroll")?.scrollLeft || 0;
    const focused = document.activeElement?.matches(".basis");
    const decided = Object.entries(funnel.decisions).sort((a, b) => b[1] - a[1]);
    const table = el("div", { class: "scroll basis", tabindex: "0", role: "region", "aria-label": "Records of the nodes" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Node"), columns.map(([name]) => el("th", { scope: "col", class: "num" }, name)))),
      el("tbody", {}, funnel.nodes.map((n) => el("tr", {}, el("th", { scope: "row" }, n.node), columns.map(([, of]) =>
        typeof of === "function" ? el("td", { class: "num" }, of(n)) : el("td", { class: "num" },
          n[of] && of !== "forgotten" && of !== "history_lost" ? el("span", { class: "chip warn" }, count(n[of])) : count(n[of]))))))));
    rests.replaceChildren(el("section", { class: "card" }, el("h2", {}, "Records behind the numbers"),
      el("p", { class: "soft" }, "From " + time(funnel.from) + " to " + time(funnel.to) + ", on " + count(funnel.nodes.length) +
        (funnel.nodes.length === 1 ? " node" : " nodes") + (decided.length ? ". Choices: " + decided.map(([o, n]) => count(n) + " " + o.replaceAll("_", " ")).join(", ") : "") +
        ". The counts of a node begin at the start of the node."), table));
    table.scrollLeft = left;
    if (focused) table.focus({ preventScroll: true });
  }

  const stop = onChange((what) => what === "cluster" && (options(), refresh()));
  const still = onDraw(() => { draw(); caches.draw(); });
  options();
  refresh();
  return () => {
    end();
    caches.end();
    stop();
    still();
    tip(null, "");
  };
}
