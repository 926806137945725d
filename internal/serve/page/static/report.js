// Reports of predictions in JSON. parse copies only defined fields of the right type and range, so a view needs no
// further checks.

export const mostBytes = 16 << 20; // of a file
const mostNotes = 100, longest = 2000; // characters of a text

const fail = (what) => { throw new Error("This is no report of indexer what-if --json: " + what + "."); };

const object = (v, name) => (v && typeof v === "object" && !Array.isArray(v) ? v : fail(name + " is no object"));

const number = (of, field, from = 0, to = Number.MAX_VALUE) => {
  const v = of[field];
  return typeof v === "number" && v >= from && v <= to ? v : fail(field + " is no number from " + from + " to " + to);
};

const text = (v, name) => (typeof v === "string" && v.length <= longest ? v : fail(name + " is no text"));

const moment = (of, field) => {
  const v = text(of[field], field);
  return Number.isNaN(Date.parse(v)) ? fail(field + " is no time") : v;
};

// figures are the values of a replay, or of the measurement. A time or a speed of 0 is unknown.
const figures = (v, name) => {
  const of = object(v, name);
  return { workers: number(of, "workers"), requests: number(of, "requests"), hitRate: number(of, "hit_rate", 0, 1),
    mean: number(of, "ttft_mean_s"), p50: number(of, "ttft_p50_s"), p99: number(of, "ttft_p99_s"), perSecond: number(of, "requests_per_s"),
    computed: number(of, "computed_prompt_tokens"), hours: number(of, "worker_hours") };
};

// errors are the differences of a replay from the measurement. The difference of the hit rate is absolute. The other
// differences are relative; null is unknown.
const errors = (v, name) => {
  const of = object(v, name), relative = (field) => (of[field] === undefined ? null : number(of, field, -1));
  return { hitRate: number(of, "hit_rate", -1, 1), mean: relative("ttft_mean"), p50: relative("ttft_p50"), p99: relative("ttft_p99") };
};

// amount describes a size of memory.
const amount = (v, name) => {
  const of = object(v, name);
  if (of.factor !== undefined) return number(of, "factor") + " times as much";
  return of.tokens === undefined ? "none" : number(of, "tokens").toLocaleString("en-US") + " tokens on each worker";
};

// changes describes the changes of a fleet.
const changes = (v) => {
  const of = object(v, "changes"), list = [];
  if (of.workers !== undefined) {
    const n = number(of, "workers", -1e6, 1e6);
    list.push("workers: " + (n > 0 ? "+" : "") + n);
  }
  if (of.capacity !== undefined) list.push("device memory: " + amount(of.capacity, "capacity"));
  if (of.host_tier !== undefined) list.push("host memory: " + amount(of.host_tier, "host_tier"));
  if (of.policy !== undefined) list.push("policy: " + text(of.policy, "policy"));
  if (of.routers !== undefined) list.push("routers: " + number(of, "routers"));
  return list;
};

// parse reads a report. The error describes the first fault.
export function parse(json) {
  let v;
  try {
    v = JSON.parse(json);
  } catch {
    fail("the file is no JSON");
  }
  const of = object(v, "the file");
  const notes = of.notes === null || of.notes === undefined ? [] : of.notes;
  if (!Array.isArray(notes) || notes.length > mostNotes) fail("notes is no short list");
  if ((of.changed === undefined) !== (of.expected === undefined)) fail("one of changed and expected is missing");
  return { model: text(of.model, "model"), from: moment(of, "from"), to: moment(of, "to"),
    replayed: number(object(of.counts, "counts"), "replayed"),
    measured: figures(of.measured, "measured"), history: figures(of.history, "history"), baseline: figures(of.baseline, "baseline"),
    historyError: errors(of.history_error, "history_error"), baselineError: errors(of.baseline_error, "baseline_error"),
    changed: of.changed === undefined ? null : figures(of.changed, "changed"),
    expected: of.expected === undefined ? null : figures(of.expected, "expected"),
    changes: changes(of.changes), notes: notes.map((n) => text(n, "a note")) };
}
