// What if: a report of a replay of the recorded traffic on a changed fleet. The browser reads the file and does not
// send the file.
import { parse, mostBytes } from "./report.js";
import { el, setText, count, canvas, colour, tip, bare, time, tile, tileBox, hovering, empty, code, onDraw } from "./ui.js";

export const title = "What if";

const plotHeight = 220, margin = 52; // of the plot; a margin is for an axis
const kept = { report: null, file: "" }; // the open report, also while another view is displayed

const rate = (share) => (100 * share).toFixed(1) + "%";
const seconds = (s) => (s === 0 ? "unknown" : s < 1 ? (1000 * s).toFixed(0) + " ms" : s.toFixed(2) + " s");
const signed = (x, digits, unit) => (x < 0 ? "−" : "+") + Math.abs(x).toFixed(digits) + unit;
const points = (x) => signed(100 * x, 1, " points");
const relative = (x) => (x === null ? "unknown" : signed(100 * x, 0, "%"));

// rows has the name, the text and the difference of b to a for each figure. The plot shows the figures with an error of
// the replay.
const rows = {
  workers: ["Workers", count],
  hitRate: ["Hit rate", rate, (a, b) => points(b - a)],
  mean: ["TTFT mean", seconds, (a, b) => relative(b / a - 1)],
  p50: ["TTFT p50", seconds, (a, b) => relative(b / a - 1)],
  p99: ["TTFT p99", seconds, (a, b) => relative(b / a - 1)],
  perSecond: ["Requests a second", (n) => (n === 0 ? "unknown" : n.toFixed(2)), (a, b) => relative(b / a - 1)],
  computed: ["Computed prompt tokens", count, (a, b) => relative(b / a - 1)],
  hours: ["Worker hours", (n) => (n < 100 ? n.toPrecision(3) : count(Math.round(n))), (a, b) => relative(b / a - 1)],
};
const columns = { measured: "Measured", history: "History", baseline: "Today’s fleet", changed: "Changed", expected: "Expected" };

export function show(place) {
  let bars = []; // of the plot
  let current = -1; // the index of the bar selected by keyboard; -1: none
  let turn = null; // identifies the last opened file

  const file = el("input", { id: "whatif-file", type: "file", accept: ".json,application/json", change: () => {
    if (file.files.length) read(file.files[0]);
    file.value = ""; // the same file may be opened again
  } });
  const error = el("p", { class: "error", role: "alert" });
  const about = el("p", { class: "soft" });
  const tiles = tileBox();
  const { again, ...hover } = hovering((e) => { const b = bars[at(e)]; return b ? words(b) : ""; });
  const plot = el("canvas", { id: "whatif-plot", tabindex: "0", role: "application", "aria-describedby": "whatif-now",
    "aria-label": "Measured and predicted figures: arrows move", ...hover, keydown: press });
  const now = el("p", { id: "whatif-now", class: "small", role: "status" });
  const legend = el("ul", { class: "legend" });
  const table = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "All figures" });
  const notes = el("ul", { class: "advice" });
  const box = el("div", { class: "view" }, about,
    el("section", { class: "view", "aria-label": "Error of the replay" }, tiles, el("p", { class: "soft small" },
      "The replay of the history against the measurement. A predicted effect below this error is noise.")),
    el("section", { class: "card" }, el("h2", {}, "The effect"), el("div", { class: "icicle" }, plot), now, legend),
    el("section", { class: "card" }, el("h2", {}, "All figures"), table),
    el("section", { class: "card" }, el("h2", {}, "Notes"), notes));
  const none = el("div", { class: "card" }, empty("No report yet",
    "Predict more or fewer workers, more memory, a host tier or another policy from the recorded traffic (indexer serve --record):",
    code("indexer what-if --since 24h --model MODEL --workers +2 --json > report.json"),
    "Then open the report here, or drop the file on this page. The file stays in this browser."));
  place.append(el("div", { class: "view" }, el("div", { class: "head" }, el("h1", {}, "What if"), el("div", { class: "fields" },
    el("div", { class: "field" }, el("label", { for: "whatif-file" }, "Report of indexer what-if --json"), file))), error, none, box));

  // read shows the report in a file. After a failure, the page keeps the earlier report.
  async function read(from) {
    const mine = turn = {};
    let failure = "";
    try {
      if (from.size > mostBytes) throw new Error("The file has more than 16 MiB.");
      const report = parse(await from.text());
      if (mine !== turn) return;
      kept.report = report;
      kept.file = from.name;
      current = -1;
    } catch (e) {
      if (mine !== turn) return;
      failure = from.name + ": " + e.message;
    }
    setText(error, failure);
    refresh();
  }

  // Without these listeners, the browser leaves the page for a dropped file.
  const carries = (e) => e.dataTransfer?.types.includes("Files");
  const over = (e) => { if (carries(e)) e.preventDefault(); };
  const drop = (e) => {
    if (!carries(e)) return;
    e.preventDefault();
    if (e.dataTransfer.files.length) read(e.dataTransfer.files[0]);
  };
  addEventListener("dragover", over);
  addEventListener("drop", drop);

  function refresh() {
    const r = kept.report;
    none.hidden = !!r;
    box.hidden = !r;
    if (!r) return;
    setText(about, kept.file + ": " + count(r.replayed) + " requests of " + r.model + " from " + time(r.from) + " to " + time(r.to) +
      ", the second half measured. " + (r.changes.length ? "Changes: " + r.changes.join("; ") + "." : "No changes."));
    const e = r.historyError;
    tiles.replaceChildren(tile("Error of the hit rate", points(e.hitRate)), ...["mean", "p50", "p99"].map((of) =>
      tile("Error of the " + rows[of][0], relative(e[of]))));
    const other = r.expected ? "expected" : "history";
    legend.replaceChildren(...[["f-seen", columns.measured], ["f-reused", columns[other]]].map(([shade, name]) =>
      el("li", {}, el("i", { class: shade }), name)), ...(r.expected ? [el("li", {}, "line: error of the replay")] : []));
    const known = (of) => of === "hitRate" || e[of] !== null && r.measured[of] > 0 && r[other][of] > 0;
    bars = Object.keys(e).filter(known).flatMap((of) => ["measured", other].map((column) => {
      const value = r[column][of], around = column === "expected" ? Math.abs(e[of]) * (of === "hitRate" ? 1 : value) : 0;
      return { of, column, value, around };
    }));
    figures(r);
    notes.replaceChildren(...r.notes.map((n) => el("li", {}, n)));
    notes.parentElement.hidden = !r.notes.length;
    plot.dataset.bars = bars.length;
    draw();
  }

  // figures fills the table. The expected figures include the difference to the measured figures.
  function figures(r) {
    const shown = Object.keys(columns).filter((c) => r[c]);
    table.replaceChildren(el("table", {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Figure"), shown.map((c) => el("th", { scope: "col", class: "num" }, columns[c])))),
      el("tbody", {}, Object.entries(rows).map(([of, [name, write]]) => el("tr", { "data-figure": of }, el("th", { scope: "row" }, name),
        shown.map((c) => el("td", { class: "num" }, write(r[c][of]), c === "expected" && effect(r, of))))))));
  }

  // effect returns the difference of an expected figure, with a mark if the error of the replay is at least as large.
  // The difference of the worker hours is relative to today's fleet, because the measured figures have only workers
  // with requests.
  function effect(r, of) {
    const a = (of === "hours" ? r.baseline : r.measured)[of], b = r.expected[of], difference = rows[of][2];
    if (!difference || a === 0 || b === 0 && of !== "hitRate") return null;
    const error = r.historyError[of], size = Math.abs(of === "hitRate" ? b - a : b / a - 1);
    const noise = error !== undefined && error !== null && size <= Math.abs(error);
    return [" ", el("span", { class: noise ? "chip warn" : "chip" }, difference(a, b) + (noise ? ", noise" : ""))];
  }

  // draw shows the hit rate on an axis of shares, and times on a second axis.
  function draw() {
    if (box.hidden) return;
    current = Math.min(current, bars.length - 1);
    const { g, width } = canvas(plot, plotHeight);
    const high = plotHeight - 24, soft = colour("--soft");
    const axes = [[bars.filter((b) => b.of === "hitRate"), 1, (v) => 100 * v + "%"]];
    const times = bars.filter((b) => b.of !== "hitRate");
    if (times.length) axes.push([times, 1.05 * Math.max(...times.map((b) => b.value + b.around)), (v) => (v ? seconds(v) : "0")]);
    const wide = (width - margin * axes.length) / (bars.length || 1); // of a bar with the gap
    let left = 0;
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    for (const [list, top, write] of axes) {
      const y = (v) => 8 + (high - 8) * (1 - v / top);
      left += margin;
      g.textAlign = "right";
      for (const part of [0, 0.5, 1]) {
        g.fillStyle = colour("--line");
        g.fillRect(left, Math.round(y(top * part)), wide * list.length, 1);
        g.fillStyle = soft;
        g.fillText(write(top * part), left - 6, y(top * part));
      }
      for (const [i, b] of list.entries()) {
        const gap = wide * 0.15, x = left + (i % 2 ? 0 : gap); // the two bars of a figure touch
        b.middle = left + wide / 2;
        g.fillStyle = colour(b.column === "measured" ? "--h4" : "--h8");
        g.fillRect(x, y(b.value), wide - gap, high - y(b.value));
        const upper = y(Math.min(top, b.value + b.around)), low = y(Math.max(0, b.value - b.around));
        for (const [shade, thick] of b.around ? [["--surface", 6], ["--text", 2]] : []) {
          g.fillStyle = colour(shade);
          g.fillRect(Math.round(x + (wide - gap - thick) / 2), upper, thick, low - upper);
        }
        if (bars.indexOf(b) === current) {
          g.strokeStyle = colour("--text");
          g.lineWidth = 2;
          g.strokeRect(x, 8, wide - gap, high - 8);
        }
        left += wide;
        if (i % 2 === 0) continue;
        g.fillStyle = soft;
        g.textAlign = "center";
        g.fillText(rows[b.of][0], left - wide, plotHeight - 8, 2 * wide);
      }
    }
    setText(now, current >= 0 ? words(bars[current]) : "");
    again();
  }

  const words = (b) => rows[b.of][0] + ", " + columns[b.column].toLowerCase() + ": " + rows[b.of][1](b.value) +
    (b.around ? ", ± " + (b.of === "hitRate" ? (100 * b.around).toFixed(1) + " points" : seconds(b.around)) + " by the error of the replay" : "");

  // at returns the index of the bar nearest to the pointer.
  function at(e) {
    const x = e.clientX - plot.getBoundingClientRect().left;
    let best = 0;
    for (const [i, b] of bars.entries()) if (Math.abs(b.middle - x) < Math.abs(bars[best].middle - x)) best = i;
    return best;
  }

  function press(e) {
    if (!bare(e) || !bars.length) return;
    const last = bars.length - 1;
    const to = { ArrowLeft: current < 0 ? last : current - 1, ArrowRight: current + 1, Home: 0, End: last, Escape: -1 }[e.key];
    if (to === undefined) return;
    current = e.key === "Escape" ? -1 : Math.max(0, Math.min(last, to));
    e.preventDefault();
    draw();
  }

  const still = onDraw(draw);
  refresh();
  return () => {
    turn = null;
    still();
    removeEventListener("dragover", over);
    removeEventListener("drop", drop);
    tip(null, "");
  };
}
