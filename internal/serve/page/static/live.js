// The state of the fleet and the cluster, from the stream of the indexer's events.
import { request, bounded } from "./api.js";
import { clock, keep } from "./ui.js";

export const live = {
  ranks: new Map(), // by key(rank)
  expired: new Map(), // ranks with expired leases, as rows of the fleet; the index has none of the blocks
  missing: [],
  error: null, // the reason, if the state of the fleet is unavailable
  cluster: null,
  fleetAt: null, // time of the last event of the fleet; null: no event yet
};

export const key = (r) => r.instance + "\n" + r.rank;

const listeners = new Set();

// onChange calls f with "fleet" or "cluster" after a change of live. The returned function ends the calls.
export function onChange(f) {
  listeners.add(f);
  return () => listeners.delete(f);
}

let frame = 0;
const changed = new Set();
function tell(what) {
  changed.add(what);
  frame ||= setTimeout(() => {
    frame = 0;
    const all = [...changed];
    changed.clear();
    for (const what of all) for (const f of listeners) f(what);
  });
}

const take = {
  fleet(event) {
    live.fleetAt = event.at;
    clock.ahead = Date.parse(event.at) - Date.now();
    live.missing = event.missing || [];
    live.error = event.error || null;
    if (event.full) live.ranks = new Map();
    if (event.full || event.expired) live.expired = new Map((event.expired || []).map((w) => [key(w), { ...w,
      blocks: { device: 0, host: 0, disk: 0, external: 0 }, lease: w.lease.state, lease_host: w.lease.host, pid: w.lease.pid, expired: w.lease.expires, renewed: w.lease.renewed }]));
    for (const r of event.ranks) live.ranks.set(key(r), r);
    for (const r of event.gone || []) live.ranks.delete(key(r));
    tell("fleet");
  },
  cluster(event) {
    live.cluster = event;
    tell("cluster");
  },
};

// models returns the models of all nodes, without duplicates.
export function models() {
  const found = new Map();
  for (const n of live.cluster?.nodes || []) {
    for (const m of n.status?.models || []) found.set(m.model + "\n" + m.block_size, { model: m.model, block_size: m.block_size });
  }
  return [...found.values()].sort((a, b) => a.model < b.model ? -1 : a.model > b.model ? 1 : a.block_size - b.block_size);
}

// choices returns an option for every model: the fields of a request as JSON, and a text. The list always includes the
// chosen model.
export function choices(chosen) {
  const found = models();
  const list = found.map((m) => {
    const twice = found.filter((o) => o.model === m.model).length > 1;
    return [JSON.stringify(m), m.model + (twice ? ", blocks of " + m.block_size : "")];
  });
  return chosen ? keep(list, chosen, JSON.parse(chosen).model) : list;
}

const silence = 15000; // ms without data until a node counts as frozen; other nodes send data every five seconds

// watch reads the stream of server-sent events, and connects again after the end of the stream or a silence. The
// requests use fetch, because an EventSource cannot send the token. watch calls said with the state of the connection:
// "on", or "off" with the reason and the time of the last data in ms (0: never).
export async function watch(said) {
  let heard = 0;
  for (let tries = 0; ; tries++) {
    const stream = bounded(silence, "The indexer has sent nothing for " + silence / 1000 + " seconds. The page retries.");
    try {
      const reply = await request("v1/watch", { signal: stream.signal });
      said("on");
      tries = 0;
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      let parts = [];
      for (;;) {
        heard = Date.now();
        stream.wait();
        const { value, done } = await reader.read();
        if (done) break;
        parts.push(value);
        if (!value.includes("\n\n") && !(value.startsWith("\n") && parts.length > 1)) continue;
        const events = parts.join("").split("\n\n");
        parts = [events.pop()];
        for (const text of events) {
          const name = /^event: (.*)$/m.exec(text)?.[1];
          const data = /^data: (.*)$/m.exec(text)?.[1];
          if (take[name] && data) take[name](JSON.parse(data));
        }
      }
      said("off", "The indexer has ended the connection. The page connects again.", heard);
    } catch (e) {
      said("off", (stream.signal.reason || e).message, heard);
    }
    stream.abort(); // otherwise an unread stream stays open
    await new Promise((resolve) => setTimeout(resolve, Math.min(10000, 500 * 2 ** Math.min(tries, 5))));
  }
}
