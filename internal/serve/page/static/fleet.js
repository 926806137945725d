// Fleet: all workers by tiers, as a map and as a list. The list has elements only for the visible rows.
import { ask } from "./api.js";
import { live, key, models, onChange } from "./live.js";
import { el, fill, setText, long, setLong, short, count, age, step, tiers, canvas, colour, tip, bare, tile, tileBox, hovering, busy, empty, code } from "./ui.js";

export const title = "Fleet";

const name = (r) => r.instance + (r.rank ? " / " + r.rank : "");
const order = ["schedulable", "unregistered", "catching up", "incomplete", "draining", "engine asleep", "engine silent",
  "unschedulable", "lease expired", "engine gone", "expired"]; // of states; the worst state is last

const notWell = (r) => ["bad", "warn"].includes(state(r)[1]);

// state returns the displayed state of a rank and the class of the mark.
function state(r) {
  if (r.expired) return ["expired", "gone"];
  if (r.engine === "gone") return ["engine gone", "bad"];
  if (r.engine === "asleep" && r.state !== "draining") return ["engine asleep", "gone"];
  if (r.lease === "expired") return ["lease expired", "bad"];
  if (r.state === "draining") return ["draining", "warn"];
  if (r.state === "unschedulable") return ["unschedulable", "bad"];
  if (r.engine === "silent") return ["engine silent", "warn"];
  if (r.state === "incomplete") return ["incomplete", "warn"];
  if (r.catching_up) return ["catching up", "warn"];
  return r.state ? ["schedulable", "good"] : ["unregistered", ""];
}

// lags returns the lag of each partition, in messages of the log, on the node with the smallest lag.
function lags() {
  const lag = new Map();
  for (const n of live.cluster?.nodes || []) {
    for (const p of n.status?.partitions || []) lag.set(p.partition, Math.min(p.lag, lag.get(p.partition) ?? Infinity));
  }
  return lag;
}

// places maps the key of each rank to the position by name. arrange sorts only after a change of the ranks, because the
// comparison of names is slow.
let places = new Map();
function arrange(all) {
  if (all.length === places.size && all.every((r) => places.has(key(r)))) return;
  const names = new Intl.Collator("en", { numeric: true }).compare;
  const named = all.map((r) => [name(r), key(r)]).sort((a, b) => names(a[0], b[0]));
  places = new Map(named.map(([, k], i) => [k, i]));
}

let lag = new Map();
const load = (r) => r.total_blocks && r.used_blocks ? r.used_blocks / r.total_blocks : 0;

// columns has the name, the order and the text of each column. heat: the colour depends on the largest value of the
// tier.
const columns = [
  { id: "worker", name: "Worker", by: (r) => places.get(key(r)), text: name },
  { id: "model", name: "Model", by: (r) => r.model, text: (r) => r.model },
  { id: "state", name: "State", by: (r) => order.indexOf(state(r)[0]), chip: true },
  ...tiers.map((t) => ({ id: t, name: t[0].toUpperCase() + t.slice(1), num: true, heat: true, by: (r) => r.blocks[t],
    text: (r) => r.blocks[t] ? short(r.blocks[t]) : "–" })),
  { id: "stored_rate", name: "Stored/s", num: true, by: (r) => r.stored_rate || 0, text: (r) => short(r.stored_rate || 0) },
  { id: "removed_rate", name: "Removed/s", num: true, by: (r) => r.removed_rate || 0, text: (r) => short(r.removed_rate || 0) },
  { id: "seen", name: "Last event", num: true, by: (r) => Date.parse(r.last_seen) || 0, text: (r) => age(r.last_seen) },
  { id: "lag", name: "Lag", num: true, by: (r) => lag.get(r.partition) || 0, text: (r) => lag.has(r.partition) ? short(lag.get(r.partition)) : "–" },
  { id: "load", name: "Load", num: true, by: (r) => (r.requests || 0) + load(r),
    text: (r) => r.used_blocks && r.total_blocks ? Math.round(100 * load(r)) + "%" : short(r.requests || 0) },
  { id: "lease", name: "Lease, role", by: (r) => (r.lease || "") + (r.role || ""),
    text: (r) => [r.lease || "none", r.role === "aggregated" ? "" : r.role].filter(Boolean).join(", ") },
];
const rowHeight = 36;

// The selections of the reader stay while the page is open.
const set = { text: "", model: "", state: "", sort: "worker", down: false };

export function show(place) {
  let list = []; // the displayed ranks, in order
  let living = 0; // the number of ranks that are not expired; expired ranks are at the end of the list
  let most = {}; // by tier: the most blocks of a rank
  let now = null; // the key of the current row
  let rows = []; // reused elements
  let opened = null; // the rank in the dialog. The dialog has the focus, so a repeated Enter presses no button

  const tiled = tileBox();
  const search = el("input", { type: "search", id: "fleet-search", placeholder: "name, host, endpoint", value: set.text,
    input: (e) => { set.text = e.target.value; refresh(); } });
  const model = el("select", { id: "fleet-model", change: (e) => { set.model = e.target.value; refresh(); } });
  const stateSelect = el("select", { id: "fleet-state", change: (e) => { set.state = e.target.value; refresh(); } },
    ["", "not well", "schedulable", "draining", "incomplete", "unschedulable", "engine silent", "engine asleep", "engine gone", "catching up", "unregistered", "expired"]
      .map((s) => el("option", { value: s, selected: s === set.state }, s || "any state")));
  const shown = el("span", { class: "soft", role: "status" });
  const { again, ...hover } = hovering((e) => {
    const r = list[at(e)];
    return r ? name(r) + "\n" + tiers.map((t) => t + " " + count(r.blocks[t])).join(", ") + "\n" + state(r)[0] : "";
  });
  const map = el("canvas", { role: "img", click: (e) => pick(at(e)), ...hover });
  const scale = el("div", { class: "scale", "aria-hidden": "true" });
  const mapCard = el("section", { class: "card", "aria-label": "Map of workers by tiers" },
    el("div", { class: "map" }, el("ul", { "aria-hidden": "true" }, tiers.map((t) => el("li", {}, t))), map, scale));
  const heads = columns.map((c) => el("div", { role: "columnheader", class: (c.num ? "num " : "text ") + "c-" + c.id },
    el("button", { type: "button", click: () => sort(c.id) }, c.name)));
  const top = el("div", { class: "row top", role: "row", "aria-rowindex": "1" }, heads,
    el("div", { role: "columnheader", class: "c-act plain" }, "Drain"));
  const sheet = el("div", { class: "sheet", role: "rowgroup" });
  const body = el("div", { class: "body", tabindex: "0", role: "grid", "aria-label": "Workers", "aria-colcount": columns.length + 1,
    scroll: () => draw(true), keydown: press }, el("div", { class: "heads", role: "rowgroup" }, top), sheet);
  const grid = el("div", { class: "grid" }, body);
  const room = () => body.clientHeight - top.offsetHeight; // height for rows
  const none = el("div", { class: "card" });
  const missing = el("div", { class: "notice warn", hidden: true });
  const details = el("dialog", { "aria-labelledby": "details-title", tabindex: "-1", close: () => { opened = null; body.focus(); } });

  place.append(el("div", { class: "view" },
    el("div", { class: "head" }, el("h1", {}, "Fleet"),
      el("div", { class: "fields", role: "search" },
        el("div", { class: "field" }, el("label", { for: "fleet-search" }, "Filter"), search),
        el("div", { class: "field" }, el("label", { for: "fleet-model" }, "Model"), model),
        el("div", { class: "field" }, el("label", { for: "fleet-state" }, "State"), stateSelect))),
    missing, tiled, mapCard, shown, grid, none, details));

  function sort(id) {
    if (set.sort === id) set.down = !set.down;
    else { set.sort = id; set.down = !!columns.find((c) => c.id === id).num; }
    refresh();
  }

  function refresh() {
    lag = lags();
    const wanted = set.text.toLowerCase().split(/\s+/).filter(Boolean);
    const all = [...live.ranks.values(), ...live.expired.values()];
    arrange(all);
    list = all.filter((r) => {
      if (set.model && r.model !== set.model) return false;
      if (set.state && (set.state === "not well" ? !notWell(r) : state(r)[0] !== set.state && r.state !== set.state)) return false;
      const text = wanted.length && (name(r) + " " + r.model + " " + (r.endpoint || "") + " " + (r.lease_host || "")).toLowerCase();
      return wanted.every((w) => text.includes(w));
    });
    const by = columns.find((c) => c.id === set.sort).by;
    const keyed = list.map((r) => [by(r), places.get(key(r)), r]);
    const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    keyed.sort((a, b) => (set.down ? compare(b[0], a[0]) : compare(a[0], b[0])) || a[1] - b[1]);
    list = keyed.map((k) => k[2]);
    const gone = list.filter((r) => r.expired);
    if (gone.length > 0) list = list.filter((r) => !r.expired).concat(gone);
    living = list.length - gone.length;
    most = {};
    const sum = { stored: 0, removed: 0, requests: 0, device: 0, host: 0, disk: 0, external: 0, not: 0 };
    for (const r of list.slice(0, living)) {
      for (const t of tiers) {
        most[t] = Math.max(most[t] || 0, r.blocks[t]);
        sum[t] += r.blocks[t];
      }
      sum.stored += r.stored_rate || 0;
      sum.removed += r.removed_rate || 0;
      sum.requests += r.requests || 0;
      if (notWell(r)) sum.not++;
    }
    tiled.replaceChildren(tile("Workers", count(new Set(list.slice(0, living).map((r) => r.instance)).size),
      count(living) + (living === 1 ? " rank" : " ranks")), tile("Not well", count(sum.not), sum.not === 1 ? "rank" : "ranks", sum.not ? "warn" : null),
    ...(gone.length > 0 ? [tile("Expired", count(gone.length), gone.length === 1 ? "rank" : "ranks")] : []),
    ...tiers.filter((t) => t === "device" || sum[t] > 0).map((t) => tile("Blocks in " + t, short(sum[t]))),
    tile("Stored", short(sum.stored), "blocks/s"), tile("Removed", short(sum.removed), "blocks/s"),
    tile("Under way", short(sum.requests), sum.requests === 1 ? "request" : "requests"));
    for (const [i, c] of columns.entries()) {
      if (c.id === set.sort) heads[i].setAttribute("aria-sort", set.down ? "descending" : "ascending");
      else heads[i].removeAttribute("aria-sort");
      setText(heads[i].firstChild, c.name + (c.id === set.sort ? (set.down ? " ↓" : " ↑") : ""));
    }
    const names2 = [...new Set(all.map((r) => r.model))].sort();
    if (fill(model, [["", "all models"], ...names2.map((m) => [m, m])], set.model)) grid.classList.toggle("one-model", names2.length < 2);
    setText(shown, live.fleetAt === null ? "" : list.length === all.length ? "" : count(list.length) + " of " + count(all.length) + " ranks are shown");
    shown.hidden = !shown.textContent;
    missing.hidden = live.missing.length === 0;
    setText(missing, "Partitions " + live.missing.join(", ") + " could not be read. Workers are missing here.");
    grid.hidden = list.length === 0;
    mapCard.hidden = living === 0;
    none.hidden = list.length > 0;
    if (!none.hidden) none.replaceChildren(live.fleetAt === null ? empty("Waiting for the indexer…") :
      live.error ? empty("The state of the fleet is unavailable", live.error.message) : all.length > 0 ? empty("No worker matches the filter", "Clear the filter to see all " + count(all.length) + ".") :
      empty("No workers yet", "Run a shim beside each engine. The worker then appears here within a second:",
        code("worker-shim run --engine-http http://127.0.0.1:8000 --nats nats://127.0.0.1:4222"),
        "Without an engine, run indexer demo: a fleet of simulated engines."));
    body.setAttribute("aria-rowcount", list.length + 1);
    sheet.style.height = list.length * rowHeight + "px"; // the style sheet limits the height of the body
    paint();
    draw();
    if (opened) describe();
  }

  // draw fills the visible rows. After scrolling, draw fills only the rows that were not visible before. A position of
  // the list keeps the same row element while the position is visible.
  function draw(scrolled) {
    const first = Math.max(0, Math.floor(body.scrollTop / rowHeight) - 2);
    const last = Math.min(list.length, first + Math.ceil(room() / rowHeight) + 5);
    while (rows.length < last - first) rows.push(makeRow());
    for (const [k, row] of rows.entries()) {
      const i = first + (k - first % rows.length + rows.length) % rows.length;
      const known = scrolled && !row.e.hidden && row.at === i && row.rank === list[i];
      row.e.hidden = i >= last;
      if (!row.e.hidden && !known) fillRow(row, list[i], i);
    }
    const current = rows.find((row) => !row.e.hidden && row.key === now);
    if (current) body.setAttribute("aria-activedescendant", current.e.id);
    else body.removeAttribute("aria-activedescendant");
  }

  function makeRow() {
    const cells = columns.map((c) => {
      const cell = el("div", { role: "gridcell", class: (c.num ? "num " : "text ") + "c-" + c.id }, c.id === "worker" ? long("") : el("span"));
      return { e: cell, text: cell.firstChild, class: cell.className };
    });
    const button = el("button", { type: "button", tabindex: "-1", click: (e) => { e.stopPropagation(); drain(row.rank); } });
    const row = { e: el("div", { class: "row", role: "row", id: "row-" + rows.length,
      click: () => { now = row.key; open(row.rank); draw(); } }, cells.map((c) => c.e),
    el("div", { role: "gridcell", class: "c-act" }, button)), cells, button };
    sheet.append(row.e);
    return row;
  }

  function fillRow(row, r, i) {
    row.key = key(r);
    row.rank = r;
    if (row.at !== i) {
      row.at = i;
      row.e.style.transform = "translateY(" + i * rowHeight + "px)";
      row.e.setAttribute("aria-rowindex", i + 2);
    }
    row.e.className = row.key === now ? "row now" : "row";
    row.e.setAttribute("aria-selected", row.key === now);
    for (const [k, c] of columns.entries()) {
      const cell = row.cells[k];
      if (c.chip) {
        const [text, kind] = state(r);
        const ago = r.expired ? " " + age(r.expired) : "";
        setText(cell.text, text + ago);
        row.e.dataset.ago = ago;
        cell.text.className = "chip " + kind;
        row.e.dataset.kind = kind;
        cell.e.title = r.why || r.engine_why || "";
        continue;
      }
      (c.id === "worker" ? setLong : setText)(cell.text, r.expired && c.num ? "–" : c.text(r));
      if (c.heat) cell.e.className = cell.class + " s" + step(r.blocks[c.id], most[c.id]);
      else if (!c.num) cell.e.title = c.text(r);
    }
    row.button.hidden = !r.state;
    setText(row.button, r.state === "draining" ? "Undrain" : "Drain");
    row.button.setAttribute("aria-label", row.button.textContent + " " + r.instance);
  }

  // press handles the keys of the list.
  function press(e) {
    if (e.target !== body || !bare(e)) return;
    const page = Math.max(1, Math.floor(room() / rowHeight) - 1);
    let i = list.findIndex((r) => key(r) === now);
    const to = { ArrowDown: i + 1, ArrowUp: i < 0 ? 0 : i - 1, PageDown: i + page, PageUp: i - page, Home: 0, End: list.length - 1 }[e.key];
    if (to !== undefined) {
      i = Math.max(0, Math.min(list.length - 1, to));
      select(i);
    } else if (e.key === "Enter" && i >= 0) open(list[i]);
    else if (e.key.toLowerCase() === "d" && i >= 0 && list[i].state) drain(list[i]);
    else return;
    e.preventDefault();
  }

  function select(i) {
    if (!list[i]) return;
    now = key(list[i]);
    if (body.scrollTop > i * rowHeight) body.scrollTop = i * rowHeight;
    body.scrollTop = Math.max(body.scrollTop, (i + 1) * rowHeight - room());
    draw();
  }

  // drain opens the details of a worker, with the focus on the button to drain or undrain the worker.
  function drain(r) {
    open(r);
    details.querySelector(".drain")?.focus();
  }

  function open(r) {
    opened = { key: key(r), rank: r, said: "" };
    describe();
    if (!details.open) details.showModal();
    details.focus();
  }

  function describe() {
    const there = live.ranks.has(opened.key);
    const r = opened.rank = live.ranks.get(opened.key) || live.expired.get(opened.key) || opened.rank;
    const facts = r.expired ? [["State", "expired " + age(r.expired) + " ago: the blocks are cleared, and the worker is not chosen"],
      ["Model", r.model], ["Lease", "renewed last " + age(r.renewed) + " ago, by process " + r.pid + " on " + r.lease_host],
      ["Remedy", "start the worker-shim again; for a permanent removal: indexer workers remove " + r.instance]] : [["State", state(r)[0] + (r.why ? ": " + r.why : "")], ["Model", r.model + ", blocks of " + r.block_size + " tokens"],
      ["Role", r.role || "–"], ["Serves at", r.endpoint || "–"],
      ["Blocks", tiers.filter((t) => t === "device" || r.blocks[t]).map((t) => count(r.blocks[t]) + " in " + t).join(", ") +
        (r.pending ? "; " + count(r.pending) + " wait for a parent" : "")],
      ["Stored, removed", count(r.stored) + ", " + count(r.removed) + " blocks in incarnation " + r.incarnation],
      ["Rates", count(r.stored_rate || 0) + " stored, " + count(r.removed_rate || 0) + " removed blocks/s"],
      ["Lag", lag.has(r.partition) ? count(lag.get(r.partition)) + " messages of partition " + r.partition : "unknown"],
      ["Last event", age(r.last_seen) + (Date.parse(r.last_seen) > 0 ? " ago" : "")],
      ["Lease", (r.lease || "none") + (r.lease_host ? ", on " + r.lease_host : "")],
      ["Engine", (r.engine || "not reported") + (r.engine_why ? ": " + r.engine_why : "")],
      ["Under way", count(r.requests || 0) + (r.requests === 1 ? " request, " : " requests, ") + count(r.prefill_tokens || 0) + " tokens to prefill, " + count(r.active_blocks || 0) + " blocks"],
      ["Device memory", r.total_blocks ? count(r.used_blocks || 0) + " of " + count(r.total_blocks) + " blocks" : "not reported"]];
    if (!there && !r.expired) facts.unshift(["Gone", "the index no longer has this rank; below is the last state"]);
    if (!details.firstChild) {
      details.append(el("h2", { id: "details-title" }), el("dl", { class: "facts" }), el("p", { class: "error", role: "alert" }),
        el("div", { class: "actions" }, el("button", { type: "button", class: "drain main", click: change }),
          el("button", { type: "button", click: () => details.close() }, "Close")));
    }
    const [head, dl, error, actions] = details.children;
    setText(head, name(r));
    while (dl.children.length < 2 * facts.length) dl.append(el("dt"), el("dd"));
    while (dl.children.length > 2 * facts.length) dl.lastChild.remove();
    for (const [i, f] of facts.entries()) {
      setText(dl.children[2 * i], f[0]);
      setText(dl.children[2 * i + 1], f[1]);
    }
    setText(error, opened.said);
    const button = actions.firstChild;
    button.hidden = !r.state || !there;
    setText(button, r.state === "draining" ? "Undrain: allow new requests" : "Drain: no new requests");
  }

  async function change(e) {
    const of = opened;
    await busy(e.target, async () => {
      try {
        const drain = of.rank.state !== "draining";
        await ask("PATCH", "v1/workers/" + encodeURIComponent(of.rank.instance), drain ? { drain, why: "drained on the page" } : { drain });
        of.said = "";
      } catch (failure) {
        of.said = failure.message;
      }
    });
    if (opened === of) describe();
  }

  // paint draws the map, with a column for each rank in the order of the list. With more ranks than pixels, a column is
  // for several ranks and shows the most blocks of a rank.
  function paint() {
    if (mapCard.hidden) return;
    const { g, width, height } = canvas(map);
    const h = height / tiers.length;
    const steps = [colour("--sunken")];
    for (let i = 1; i <= 8; i++) steps.push(colour("--h" + i));
    const columns = Math.min(living, Math.floor(width));
    const w = width / columns;
    for (let x = 0; x < columns; x++) {
      const from = Math.floor(x * living / columns), to = Math.max(from + 1, Math.floor((x + 1) * living / columns));
      for (const [y, t] of tiers.entries()) {
        let n = 0;
        for (let i = from; i < to; i++) n = Math.max(n, list[i].blocks[t]);
        g.fillStyle = steps[step(n, most[t])];
        const gap = w > 6 ? 1 : 0;
        g.fillRect(x * w, y * h, w - gap, h - 1);
      }
    }
    map.setAttribute("aria-label", "Blocks of " + living + " ranks: at most " + tiers.map((t) => count(most[t]) + " in " + t).join(", "));
    scale.replaceChildren("none ", el("span", {}, [0, 1, 2, 3, 4, 5, 6, 7, 8].map((i) => el("i", { class: i ? "s" + i : "s0" }))),
      " most of the tier", el("span", { class: "of" }, living > columns ? "a column is " + Math.ceil(living / columns) +
        " ranks, with the value of the fullest" : "a column is a rank, in the order of the list"));
    again();
  }

  function at(e) {
    const box = map.getBoundingClientRect();
    const i = Math.floor((e.clientX - box.left) / box.width * Math.min(living, Math.floor(box.width)));
    return Math.max(0, Math.min(living - 1, Math.floor(i * living / Math.min(living, Math.floor(box.width)))));
  }
  const pick = (i) => select(i);

  const stop = onChange((what) => (what === "fleet" || what === "cluster") && refresh());
  const resized = () => { paint(); draw(); };
  addEventListener("resize", resized);
  addEventListener("theme", resized);
  const aging = setInterval(() => { draw(); if (opened) describe(); }, 1000); // ages must grow without events, too
  refresh();
  return () => {
    stop();
    clearInterval(aging);
    tip(null, "");
    removeEventListener("resize", resized);
    removeEventListener("theme", resized);
  };
}
