// Prefixes: the tree of blocks that workers share, as an icicle. The width of a run is the number of blocks in the run
// and in all runs after the run. The colour is the number of ranks that hold the run.
import { ask, looking } from "./api.js";
import { live, models, choices, onChange } from "./live.js";
import { el, setText, count, short, step, canvas, colour, tip, bare, tiers, tile, tileBox, hovering, percent, empty, pick, fill, onDraw } from "./ui.js";

export const title = "Prefixes";

const rowHeight = 30;

const set = { model: "", node: "" }; // the selections of the reader

// layout builds a tree of the runs. A node has the children, the sum of all blocks in the subtree, and the position
// from 0 to 1 in width. The path of a node has the first hashes of all runs from the root, and identifies the run in
// the next tree.
function layout(runs) {
  const root = { blocks: 0, depth: 0, holders: 0, children: [], level: -1, parent: null, path: "" };
  const nodes = runs.map((r) => ({ ...r, children: [] }));
  for (const n of nodes) {
    n.parent = n.parent < 0 ? root : nodes[n.parent];
    n.parent.children.push(n);
  }
  for (let i = nodes.length - 1; i >= 0; i--) nodes[i].sum = nodes[i].blocks + nodes[i].children.reduce((s, c) => s + c.sum, 0);
  root.sum = root.children.reduce((s, c) => s + c.sum, 0);
  place(root, 0, 1);
  return { root, nodes };
}

function place(n, from, to) {
  n.from = from;
  n.to = to;
  let at = from;
  for (const c of n.children.sort((a, b) => b.holders - a.holders || b.sum - a.sum || (a.hash < b.hash ? -1 : 1))) {
    const width = (to - from) * c.sum / n.sum; // the rest of the width is for the blocks of n
    c.level = n.level + 1;
    c.path = n.path + "/" + c.hash;
    place(c, at, at + width);
    at += width;
  }
}

export function show(place_) {
  let tree = null; // the last answer of the indexer
  let laid = null;
  let other = false; // the reader has selected another tree since the last answer
  let zoomed = ""; // the path of the zoomed run; empty: the root
  let current = null; // the run selected by keyboard or click; null: none

  const [model, modelField] = pick("prefix-model", "Model", [], (v) => { set.model = v; zoomed = ""; current = null; other = true; look(); });
  const [node, nodeField] = pick("prefix-node", "Node", [], (v) => { set.node = v; other = true; look(); });
  const crumbs = el("div", { class: "crumbs", role: "navigation", "aria-label": "Zoom" });
  const { again, ...hover } = hovering((e) => { const n = at(e); return n ? words(n) : ""; });
  const picture = el("canvas", { id: "icicle", tabindex: "0", role: "application", ...hover,
    click: (e) => { const n = at(e); if (n) { current = n; zoom(n); } }, keydown: press, "aria-describedby": "icicle-now",
    "aria-label": "Icicle of prefixes: arrows move, Enter zooms, Escape goes back" });
  const now = el("p", { id: "icicle-now", class: "small", role: "status" });
  const said = el("p", { class: "soft small" });
  const error = el("p", { class: "error", role: "alert" });
  const scale = el("div", { class: "scale" });
  const box = el("div", { class: "card view" }, el("div", { class: "head" }, crumbs, scale), el("div", { class: "icicle" }, picture), now, said);
  const tiles = tileBox();
  const missing = el("div", { class: "notice warn", hidden: true });
  const none = el("div", { class: "card", hidden: true });
  place_.append(el("div", { class: "view" }, el("div", { class: "head" }, el("h1", {}, "Prefixes"), el("div", { class: "fields" },
    modelField, nodeField)), error, missing, tiles, box, none));

  function options() {
    const nodes = (live.cluster?.nodes || []).map((n) => n.node);
    const changed = fill(model, choices(set.model), set.model);
    if (!fill(node, [["", "all nodes"], ...nodes.map((n) => [n, n])], set.node) && !changed) return;
    set.model = model.value;
    set.node = node.value;
    look();
  }

  const { look, end } = looking((signal) => set.model && ask("POST", "v1/prefixes", { ...JSON.parse(set.model), node: set.node }, signal),
    (answer, failure) => {
      tree = answer || (other ? null : tree); // a tree of another model must not appear under this model's name
      other = false;
      setText(error, failure ? failure.message : "");
      laid = tree && layout(tree.runs);
      current = laid && current && nearest(current.path);
      zoomed = (laid && nearest(zoomed))?.path || "";
      draw();
    });

  const focus = () => laid.nodes.find((n) => n.path === zoomed) || laid.root;

  // nearest returns the run at a path. If the tree lacks the run, nearest returns the last run of the path in the tree,
  // or null.
  function nearest(path) {
    for (; path; path = path.slice(0, path.lastIndexOf("/"))) {
      const n = laid.nodes.find((n) => n.path === path);
      if (n) return n;
    }
    return null;
  }

  function zoom(n) {
    zoomed = n.path === zoomed ? (n.parent || n).path : n.path;
    draw();
  }

  function draw() {
    const there = laid && laid.nodes.length > 0;
    box.hidden = tiles.hidden = !there;
    none.hidden = there;
    missing.hidden = !tree || tree.complete;
    if (!missing.hidden) {
      setText(missing, (tree.missing.length === 1 ? "Partition " : "Partitions ") + tree.missing.join(", ") + " could not be read. Workers are missing here." +
        (tree.unheard ? " No answer from " + tree.unheard.join(", ") + "." : ""));
    }
    if (!there) {
      none.replaceChildren(live.cluster && !models().length || tree ? empty("No prefixes yet", "Prefixes appear here after an engine has stored blocks of a prompt.") :
        empty("Waiting for the indexer…"));
      return;
    }
    const top = focus();
    const most = laid.root.children.reduce((m, c) => Math.max(m, c.holders), 1);
    const levels = 1 + deepest(top) - Math.max(0, top.level);
    const { g, width } = canvas(picture, Math.max(2, levels) * rowHeight);
    const colours = [0, 1, 2, 3, 4, 5, 6, 7, 8].map((i) => i ? colour("--h" + i) : colour("--sunken"));
    const ink = [colour("--h-low"), colour("--h-high")];
    const line = colour("--surface"), mark = colour("--text");
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    const span = top.to - top.from || 1;
    for (const n of laid.nodes) {
      const above = n.to >= top.to - 1e-12 && n.from <= top.from + 1e-12 && n.level < top.level;
      if (above || n.from >= top.to || n.to <= top.from) continue;
      const x = Math.max(0, (n.from - top.from) / span * width), w = Math.min(width, (n.to - top.from) / span * width) - x;
      const y = (n.level - Math.max(0, top.level)) * rowHeight;
      n.box = [x, y, w, rowHeight];
      const s = step(n.holders, most);
      g.fillStyle = colours[s];
      g.fillRect(x, y, Math.max(w, .5), rowHeight - 1);
      if (w > 3) {
        g.fillStyle = line;
        g.fillRect(x + w - 1, y, 1, rowHeight - 1);
      }
      const text = short(n.blocks) + (w > 140 ? (n.blocks === 1 ? " block, held by " : " blocks, held by ") + short(n.holders) : "");
      if (w > 16 && g.measureText(text).width < w - 10) {
        g.fillStyle = ink[s > 5 ? 1 : 0];
        g.fillText(text, x + 6, y + rowHeight / 2);
      }
      if (n === current) {
        g.strokeStyle = mark;
        g.lineWidth = 2;
        g.strokeRect(x + 1, y + 1, Math.max(w - 3, 2), rowHeight - 3);
      }
    }
    const way = [];
    for (let n = top; n; n = n.parent) way.unshift(n);
    const names = way.map((n) => n === laid.root ? "all prompts" : n.hash.slice(0, 8));
    if (crumbs.dataset.of !== names.join()) {
      const paths = way.map((n) => n.path);
      const focused = crumbs.contains(document.activeElement);
      crumbs.dataset.of = names.join();
      crumbs.replaceChildren(...way.flatMap((n, i) => [i ? "›" : "", el("button", { type: "button", disabled: i === way.length - 1,
        click: () => { zoomed = paths[i]; draw(); } }, names[i])]));
      if (focused) picture.focus(); // the button with the focus was removed
    }
    scale.replaceChildren("held by 1 ", el("span", { "aria-hidden": "true" }, [1, 2, 3, 4, 5, 6, 7, 8].map((i) => el("i", { class: "s" + i }))),
      " by " + count(most));
    const more = tree.total_runs - laid.nodes.length;
    let shown = 0, shared = 0, copies = 0, longest = 0; // blocks
    for (const n of laid.nodes) {
      shown += n.blocks;
      copies += n.blocks * n.holders;
      if (n.holders < 2) continue;
      shared += n.blocks;
      longest = Math.max(longest, n.depth + n.blocks);
    }
    tiles.replaceChildren(tile("Ranks", count(tree.ranks)), tile("Blocks in runs", short(tree.total_blocks), "some may be evicted"),
      tile("Held by several ranks", percent(shared, shown), more > 0 ? "of the blocks shown" : "of the blocks"),
      tile("Copies of a block", (copies / shown).toFixed(1), "on average"), tile("Longest shared prefix", short(longest), "blocks"));
    setText(said, count(laid.nodes.length) + (laid.nodes.length === 1 ? " run" : " runs") + " with " + count(shown) + " of " + count(tree.total_blocks) + " blocks" +
      (more > 0 ? ", with the most blocks times holders; " + count(more) + " more runs are not shown" : "") + ". " + (tree.node ? tree.node + " has " : "All nodes have ") +
      count(tree.ranks) + (tree.ranks === 1 ? " rank" : " ranks") + " of the model, in " + (tree.partitions.length > 8 ?
      count(tree.partitions.length) + " partitions" : (tree.partitions.length === 1 ? "partition " : "partitions ") + tree.partitions.join(", ")) + ".");
    picture.dataset.runs = laid.nodes.length;
    picture.dataset.blocks = shown;
    setText(now, current ? words(current).replaceAll("\n", "; ") : "The width is the number of blocks, with all following blocks. Point at a run for the holders; click to zoom.");
    again();
  }

  const deepest = (n) => n.children.reduce((d, c) => Math.max(d, deepest(c)), n.level);

  function words(n) {
    const who = n.workers.map((p) => p.instance + (p.rank ? " / " + p.rank : "")).join(", ");
    const ranks = (c) => count(c) + (c === 1 ? " rank" : " ranks");
    const held = tiers.filter((t) => n.tiers[t]).map((t) => ranks(n.tiers[t]) + " in " + t);
    return count(n.blocks) + (n.blocks === 1 ? " block" : " blocks") + " after " + count(n.depth) + ", first " + n.hash + "\nheld by " +
      (held.length === 1 ? held[0] : ranks(n.holders)) + ": " + who + (n.holders > n.workers.length ? ", …" : "") +
      (held.length > 1 ? "\n" + held.join(", ") : "");
  }

  function at(e) {
    const area = picture.getBoundingClientRect();
    const x = e.clientX - area.left, y = e.clientY - area.top;
    const top = focus();
    const span = top.to - top.from || 1;
    const level = Math.floor(y / rowHeight) + Math.max(0, top.level);
    const where = top.from + x / area.width * span;
    return laid?.nodes.find((n) => n.level === level && n.from <= where && where < n.to);
  }
  function press(e) {
    if (!laid || !bare(e)) return;
    const top = focus();
    const from = current || (top === laid.root ? null : top);
    const beside = (d) => {
      const all = from?.parent?.children || [];
      return all[all.indexOf(from) + d] || from;
    };
    const to = {
      ArrowDown: () => (from ? from.children[0] || from : laid.root.children[0]), ArrowUp: () => from && (from.parent === laid.root ? from : from.parent),
      ArrowLeft: () => beside(-1), ArrowRight: () => beside(1), Home: () => top.children[0] || top,
    }[e.key];
    if (to) {
      current = to() || laid.root.children[0];
      while (!(current.path + "/").startsWith(zoomed + "/")) zoomed = zoomed.slice(0, zoomed.lastIndexOf("/")); // until the run is visible
    }
    else if (e.key === "Enter" && current) zoom(current);
    else if (e.key === "Escape" && zoomed) zoom(top);
    else return;
    e.preventDefault();
    draw();
  }

  const stop = onChange((what) => what === "cluster" && options());
  const still = onDraw(() => laid && draw());
  options();
  draw();
  return () => {
    end();
    stop();
    still();
    tip(null, "");
  };
}
