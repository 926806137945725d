// Capacity: the hit rate of a model's prompts by size of the caches. The card has a curve for a cache that all workers
// share, and a curve for a cache in each worker, as routed. The view of the funnel shows the card.
import { ask, looking } from "./api.js";
import { el, setText, count, short, canvas, colour, bare, hovering } from "./ui.js";

const plotHeight = 200, margin = 44; // of the plot; the margin is for the axis
const lines = { shared: ["--h4", "one cache for all workers"], routed: ["--h8", "a cache in each worker, as routed"] };
const pause = 60000; // ms; every request reads the samples of all nodes
const rate = (share) => (100 * share).toFixed(1) + "%";

// capacityCard returns the card and functions. look(model) selects the model, draw redraws, end stops the requests.
export function capacityCard() {
  let model = "", of = null; // the model, and the last answer with the curve
  let current = -1; // the index of the point selected by keyboard; -1: none

  const { again, ...hover } = hovering((e) => { const p = of?.points[at(e)]; return p ? words(p) : ""; });
  const plot = el("canvas", { id: "capacity-plot", tabindex: "0", role: "application", "aria-describedby": "capacity-now",
    "aria-label": "Hit rate by blocks of the caches: arrows move", ...hover, keydown: press });
  const now = el("p", { id: "capacity-now", class: "small", role: "status" });
  const advice = el("ul", { class: "advice" });
  const note = el("p", { class: "soft" });
  const shown = el("div", { class: "view" }, el("div", { class: "icicle" }, plot), now, el("ul", { class: "legend" },
    Object.values(lines).map(([shade, text], i) => el("li", {}, el("i", { class: i ? "f-reused" : "f-seen" }), text)),
    el("li", {}, "lines: sizes of the tiers")), advice);
  const card = el("section", { class: "card", hidden: true }, el("h2", {}, "Hit rate by size of the caches"), note, shown);

  const { look, end } = looking((signal) => model && ask("GET", "v1/capacity?" + new URLSearchParams({ model }), undefined, signal),
    (answer, failure) => {
      of = answer || (failure ? null : of);
      card.hidden = !of;
      if (of) refresh();
    }, pause);

  function refresh() {
    const there = of.points.length > 0;
    shown.hidden = !there;
    setText(note, there ? count(of.blocks) + " blocks of " + of.block_size + " tokens, " + rate(of.rate) + " sampled" :
      of.disabled.length ? "Nodes run without samples (--capacity-samples 0)." : "Too few requests so far.");
    advice.replaceChildren(...of.advice.map((text) => el("li", {}, text)));
    card.dataset.points = of.points.length;
    draw();
  }

  // place returns the position of a number of blocks, as a share of the width. The scale is logarithmic.
  function place(blocks) {
    const from = Math.log(of.points[0].blocks || 1), to = Math.log(of.points.at(-1).blocks || 1);
    return to > from ? Math.max(0, Math.min(1, (Math.log(blocks || 1) - from) / (to - from))) : 0.5;
  }

  function draw() {
    if (card.hidden || !of?.points.length) return;
    current = Math.min(current, of.points.length - 1);
    const { g, width } = canvas(plot, plotHeight);
    const high = plotHeight - 24, soft = colour("--soft"), text = colour("--text");
    const x = (blocks) => margin + (width - margin - 4) * place(blocks), y = (share) => 8 + (high - 8) * (1 - share);
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    g.textAlign = "right";
    for (const part of [0, 0.5, 1]) {
      g.fillStyle = colour("--line");
      g.fillRect(margin, Math.round(y(part)), width - margin, 1);
      g.fillStyle = soft;
      g.fillText(100 * part + "%", margin - 6, y(part));
    }
    let size = 0;
    for (const tier of of.tiers) {
      size += tier.blocks;
      g.fillStyle = soft;
      g.fillRect(Math.round(x(size)), 8, 1, high - 8);
      g.textAlign = place(size) > 0.8 ? "right" : "left";
      g.fillText(tier.tier + (tier.share_bound ? ", beyond the curve" : ""), x(size) + (place(size) > 0.8 ? -4 : 4), 16);
    }
    for (const [name, [shade]] of Object.entries(lines)) {
      g.strokeStyle = colour(shade);
      g.lineWidth = 2;
      g.beginPath();
      for (const p of of.points) if (p[name] !== undefined) g.lineTo(x(p.blocks), y(p[name]));
      g.stroke();
    }
    if (current >= 0) {
      const p = of.points[current];
      g.fillStyle = text;
      g.fillRect(Math.round(x(p.blocks)), 8, 2, high - 8);
    }
    g.fillStyle = soft;
    g.textAlign = "left";
    g.fillText(short(of.points[0].blocks) + " blocks", margin, plotHeight - 8);
    g.textAlign = "right";
    g.fillText(short(of.points.at(-1).blocks), width, plotHeight - 8);
    setText(now, current >= 0 ? words(of.points[current]) : "");
    again();
  }

  const words = (p) => count(p.blocks) + " blocks: " + rate(p.shared) + " with one cache" +
    (p.routed === undefined ? "" : ", " + rate(p.routed) + " as routed");

  // at returns the index of the point nearest to the pointer.
  function at(e) {
    const area = plot.getBoundingClientRect(), part = (e.clientX - area.left - margin) / (area.width - margin - 4);
    let best = 0;
    for (const [i, p] of of.points.entries()) {
      if (Math.abs(place(p.blocks) - part) < Math.abs(place(of.points[best].blocks) - part)) best = i;
    }
    return best;
  }

  function press(e) {
    if (!bare(e) || !of?.points.length) return;
    const last = of.points.length - 1;
    const to = { ArrowLeft: current < 0 ? last : current - 1, ArrowRight: current + 1, Home: 0, End: last, Escape: -1 }[e.key];
    if (to === undefined) return;
    current = e.key === "Escape" ? -1 : Math.max(0, Math.min(last, to));
    e.preventDefault();
    draw();
  }

  return { card, draw, end, look: (name) => {
    if (name === model) return;
    model = name;
    of = null;
    current = -1;
    card.hidden = true;
    look();
  } };
}
