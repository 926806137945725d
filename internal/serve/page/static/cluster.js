// Cluster: nodes, partitions with the nodes that serve them, snapshots, the storage of the log, and NATS.
import { ask } from "./api.js";
import { live, onChange } from "./live.js";
import { el, setText, short, count, age, bytes, clock, meter, tile, tileBox, busy, empty } from "./ui.js";

export const title = "Cluster";

// states maps the state of a partition on a node to the displayed text and the class of the mark.
const states = {
  serving: ["serving", ""], resync_needed: ["resync needed", "warn"], catching_up: ["catching up", "warn"],
  restoring: ["restoring", "warn"], unavailable: ["unavailable", "bad"],
};

// numeric has the names of the columns with numbers in the table of nodes.
const numeric = new Set(["Partitions", "Holdings", "Memory", "Queries"]);

let compared = null; // the last comparison of replicas

export function show(place) {
  const compare = el("button", { type: "button", click: verify }, "Compare replicas now");
  const said = el("span", { class: "soft small", role: "status" });
  const content = el("div", { class: "view" });
  place.append(el("div", { class: "view" }, el("div", { class: "head" }, el("h1", {}, "Cluster"),
    el("div", { class: "fields" }, said, compare)), content));

  async function verify() {
    setText(said, "Comparing checksums of all blocks on all nodes…");
    await busy(compare, async () => {
      try {
        const status = await ask("GET", "v1/verify");
        compared = { at: Date.now() + clock.ahead, by: new Map((status.replicas || []).map((r) => [r.partition, r])) };
        setText(said, "");
      } catch (failure) {
        setText(said, failure.message);
      }
    });
    refresh();
  }

  // equal returns a mark: equal, different or not compared replicas of a partition.
  function equal(partition, replicas) {
    const found = compared?.by.get(partition);
    if (!found || found.replicas.length < 2) return el("span", { class: "soft" }, replicas > 1 ? "not compared" : "one replica");
    return found.equal ? el("span", { class: "chip good" }, "equal") : el("span", { class: "chip bad" },
      "differ: " + found.replicas.map((r) => r.node + " " + r.checksum.slice(0, 6) + " at " + r.seq).join(", "));
  }

  function refresh() {
    if (!live.cluster) {
      content.replaceChildren(el("div", { class: "card" }, empty("Waiting for the indexer…", "The indexer requests the status of all nodes. The replies may need a few seconds.")));
      return;
    }
    const tables = () => [...place.querySelectorAll(".scroll")];
    const at = tables().map((t) => t.scrollLeft), focus = tables().indexOf(document.activeElement);
    const good = live.cluster.nodes.filter((n) => n.status);
    const gone = new Set(good.flatMap((n) => n.status.cluster?.gone || []));
    for (const n of live.cluster.nodes) gone.delete(n.node);
    const nodes = live.cluster.nodes.concat([...gone].sort().map((node) => ({ node, error: { message:
      "the node is gone: it was killed, or is disconnected from NATS; the record is deleted ten minutes after the end of the node" } })));
    const partitions = new Map(); // by number, then by node
    for (const n of good) {
      for (const p of n.status.partitions || []) {
        if (!partitions.has(p.partition)) partitions.set(p.partition, new Map());
        partitions.get(p.partition).set(n.node, p);
      }
    }
    const one = good.find((n) => n.node === live.cluster.node)?.status || good[0]?.status;
    const unserved = one?.cluster?.unserved || [];
    for (const p of unserved) if (!partitions.has(p)) partitions.set(p, new Map());
    const numbers = [...partitions.keys()].sort((a, b) => a - b);
    const all = numbers.flatMap((p) => [...partitions.get(p).values()]);
    const problems = nodes.flatMap((n) => n.error ? [(n.error.message.includes(n.node) ? "" : n.node + ": ") + n.error.message] :
      (n.status.problems || []).map((p) => n.node + ": " + p));
    const zoned = nodes.some((n) => n.zone);
    const sum = (f) => good.reduce((s, n) => s + (f(n.status) || 0), 0);

    const engines = one?.engines;
    const ill = engines && [[engines.silent, "silent"], [engines.gone, "gone"], [engines.asleep, "asleep"], [engines.catching_up, "catching up"]].filter(([n]) => n)
      .map(([n, how]) => count(n) + " " + how).join(", ");

    content.replaceChildren(...[
      problems.length > 0 && el("div", { class: "notice warn" }, el("strong", {}, problems.length === 1 ? "One problem" : problems.length + " problems"),
        el("ul", {}, problems.slice(0, 50).map((p) => el("li", {}, p)))),
      tileBox(...[tile("Nodes", good.length + (good.length < nodes.length ? " of " + nodes.length : ""), "answer",
        good.length < nodes.length ? "warn" : null),
        tile("Partitions", count(numbers.length), one?.cluster ? one.cluster.copies + (one.cluster.copies === 1 ? " replica" : " replicas") + " each" : ""),
        engines && tile("Engines", count(engines.connected), "connected" + (ill && ", " + ill), ill ? "warn" : null),
        tile("Largest lag", short(Math.max(0, ...all.map((p) => p.lag))), "messages"),
        tile("Distinct blocks", short(Math.max(0, ...good.map((n) => n.status.index.distinct))), "on the fullest node"),
        tile("Index memory", bytes(sum((s) => s.index.bytes)), "on all nodes"),
        tile("Requests under way", short(Math.max(0, ...good.map((n) => (n.status.load?.models || []).reduce((s, m) => s + m.requests, 0)))))].filter(Boolean)),
      el("div", { class: "view halves" }, el("div", { class: "view" },
      el("section", { class: "card" }, el("h2", {}, "Nodes"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Nodes" }, el("table", {},
        el("thead", {}, el("tr", {}, ["Node", zoned && "Zone", "State", "Up for", "Version", "Partitions", "Holdings", "Memory", "Snapshots", "Queries"]
          .filter(Boolean).map((h) => el("th", { scope: "col", class: numeric.has(h) ? "num" : null }, h)))),
        el("tbody", {}, nodes.map((n) => nodeRow(n, zoned)))))),
      one && el("section", { class: "card" }, el("h2", {}, "NATS"), el("dl", { class: "facts" },
        el("dt", {}, "Namespace"), el("dd", {}, one.namespace),
        el("dt", {}, "Storage of the account"), el("dd", {}, meter(one.store.bytes, one.store.limit), refused(one.store)),
        el("dt", {}, "Snapshots"), el("dd", {}, meter(one.snapshot_bucket.bytes, one.snapshot_bucket.limit), refused(one.snapshot_bucket))))),
      el("section", { class: "card" }, el("h2", {}, "Partitions"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Partitions" }, el("table", { id: "partitions" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Partition"), good.map((n) => el("th", { scope: "col" }, n.node)),
          el("th", { scope: "col" }, "Replicas" + (compared ? ", " + age(new Date(compared.at)) + " ago" : "")),
          ["Ranks", "Snapshot", "Log"].map((h) => el("th", { scope: "col", class: h === "Ranks" ? "num" : null }, h)))),
        el("tbody", {}, numbers.map((p) => partitionRow(p, partitions.get(p), good))))),
        el("p", { class: "soft small" }, "Behind: messages of the log that the node has not applied yet. W marks the node that writes the partition's snapshots."))),
    ].filter(Boolean));
    for (const [i, t] of tables().entries()) t.scrollLeft = at[i] || 0;
    tables()[focus]?.focus({ preventScroll: true });
  }

  const refused = (usage) => usage.refused ? el("span", { class: "error" }, " rejects writes: " + usage.refused) : null;

  function nodeRow(n, zoned) {
    const self = n.node === live.cluster.node ? el("span", { class: "soft" }, " this node") : null;
    const zone = zoned && el("td", {}, n.zone || el("span", { class: "soft" }, "–"));
    if (!n.status) {
      return el("tr", {}, el("th", { scope: "row" }, n.node, self), zone, el("td", {}, el("span", { class: "chip bad" }, "no answer")),
        el("td", { colspan: "7", class: "wrap" }, n.error.message));
    }
    const s = n.status;
    const held = s.index.blocks.device + s.index.blocks.host + s.index.blocks.disk + s.index.blocks.external;
    const leaving = s.cluster?.nodes?.find((m) => m.node === n.node)?.leaving;
    const answered = (s.requests || []).filter((r) => r.operation === "find" && r.outcome === "ok").reduce((sum, r) => sum + r.count, 0);
    return el("tr", {}, el("th", { scope: "row" }, n.node, self), zone,
      el("td", {}, leaving ? el("span", { class: "chip warn" }, "leaving") : s.ready ? el("span", { class: "chip good" }, "ready") :
        el("span", { class: "chip warn" }, "not ready")),
      el("td", {}, age(s.since)), el("td", {}, s.version), el("td", { class: "num" }, count((s.partitions || []).length)),
      el("td", { class: "num" }, count(held)), el("td", { class: "num" }, bytes(s.index.bytes)),
      el("td", {}, count(s.snapshots.written) + " written" + (s.snapshots.failed ? ", " + s.snapshots.failed + " failed" : "")),
      el("td", { class: "num" }, short(answered)));
  }

  function partitionRow(number, by, nodes) {
    const list = [...by.values()];
    const writer = list.find((p) => p.writer)?.writer;
    const newest = list.reduce((best, p) => !best || p.snapshot_seq > best.snapshot_seq ? p : best, null);
    return el("tr", {}, el("th", { scope: "row" }, number),
      nodes.map((n) => {
        const p = by.get(n.node);
        if (!p) return el("td", {}, el("span", { class: "part none soft" }, "–"));
        const [text, kind] = p.behind ? ["behind", "warn"] : states[p.state] || [p.state, "warn"];
        return el("td", {}, el("span", { class: "part " + kind }, text + (p.lag ? ", " + short(p.lag) + " behind" : "")),
          writer === n.node && [" ", el("abbr", { class: "soft", title: "writes the partition's snapshots" }, "W")]);
      }),
      el("td", { class: "wrap" }, list.length === 0 ? el("span", { class: "chip bad" }, "no node serves it") : equal(number, list.length)),
      el("td", { class: "num" }, count(Math.max(0, ...list.map((p) => p.ranks)))),
      el("td", {}, newest && newest.snapshot_seq > 0 ? age(newest.snapshot_time) + ", " + bytes(newest.snapshot_bytes) : "none yet"),
      el("td", {}, newest ? meter(newest.log.bytes, newest.log.limit) : "–", newest && refused(newest.log)));
  }

  const stop = onChange((what) => what === "cluster" && refresh());
  refresh();
  return stop;
}
