// Ask: for a prompt, the blocks of each worker, the rule that ended each prefix, the choice of a worker, and the costs.
// Nothing is booked. The page sends the prompt to the indexer. The indexer does not store the prompt. A recorded
// request has only hashes.
import { ask } from "./api.js";
import { choices, onChange } from "./live.js";
import { el, setText, long, count, percent, tiers, tip, time, busy, empty, pick, fill } from "./ui.js";

export const title = "Ask";

// stops maps the rule that ended a worker's prefix to a text.
const stops = {
  query_ends: () => "holds the whole prompt",
  unknown_block: (n) => "block " + n + " is unknown: no worker of the node holds this block",
  not_held: (n) => "does not hold block " + n,
  held_in_earlier_tier: (n) => "holds block " + n + " only in a tier before the present tier of the prefix",
  part_of_chunk: (n) => "the engine loads the chunk of block " + n + " only as a whole",
  group_lacks_blocks: (n, p) => "a group of the model (" + (p.group ? p.group.kind + (p.group.window ? " of " + p.group.window + " tokens" : "") : "?") +
    ") lacks blocks for a prefix of more than " + n + " blocks",
  draft_model: (n) => "the engine computes block " + n + " again for the draft model",
};
const reasons = {
  nothing_cached: "No worker holds the first block of this prompt.", no_whole_block: "The prompt is shorter than one block.",
  none_allowed: "No allowed worker serves the model.", not_tokenized: "The text could not be tokenized.",
};
const most = 200; // displayed strips, or rows of costs
const set = { model: "" }; // the selections of the reader
const page = 10; // recorded requests in a list

// decisions maps the outcome of a choice to a text.
const decisions = {
  best: "best", lost_to_load: "lost to load", bypass: "bypass", cold: "no worker held it", pinned: "pinned", no_index: "index incomplete",
  no_worker: "no worker",
};

// parse returns the numbers in a text, as texts. Spaces, commas, semicolons, brackets and quotes divide numbers.
function parse(text) {
  const strange = /[^0-9\s,;[\]()"'-]/.exec(text);
  if (strange) throw new Error("“" + strange[0] + "” is no part of a number: paste ids like 1, 2, 3, or select “text”");
  const list = text.match(/-?\d+/g);
  if (!list) throw new Error("Paste the prompt first.");
  return list;
}

export function show(place) {
  let turn = null; // identifies the last query
  let listing = null; // identifies the last requested list
  const [model, modelField] = pick("ask-model", "Model", [], (v) => { set.model = v; if (past.open) list(); });
  const prompt = el("textarea", { id: "ask-prompt", rows: "5", spellcheck: "false", autocomplete: "off",
    placeholder: "[128000, 882, 128001, …]" });
  const lora = el("input", { id: "ask-lora", autocomplete: "off" });
  const salt = el("input", { id: "ask-salt", autocomplete: "off" });
  const error = el("p", { class: "error", role: "alert" });
  const button = el("button", { type: "submit", class: "main" }, "Ask");
  const result = el("div", { class: "view" });
  const recorded = el("div", {});
  const past = el("details", { class: "card recorded", toggle: () => past.open && list() },
    el("summary", {}, "Or take a recorded request"), recorded);
  const kinds = [["tokens", "token ids"], ["prompt", "text"], ["hashes", "local hashes"], ["engine_hashes", "engine hashes"]];
  const form = el("form", { class: "card view", submit: send },
    el("div", { class: "fields" },
      modelField,
      el("div", { class: "field" }, el("label", { for: "ask-lora" }, "LoRA (if any)"), lora),
      el("div", { class: "field" }, el("label", { for: "ask-salt" }, "Cache salt (if any)"), salt)),
    el("fieldset", { class: "modes" }, el("legend", { class: "sr" }, "Form of the prompt"),
      kinds.map(([id, text], i) => el("label", {}, el("input", { type: "radio", name: "ask-kind", value: id, checked: i === 0 }), text))),
    el("div", { class: "field" }, el("label", { for: "ask-prompt" }, "Prompt"), prompt),
    error,
    el("div", { class: "fields" }, button, el("span", { class: "soft small" }, "Nothing is booked, and the prompt is not stored. Ctrl+Enter also sends the prompt.")));
  prompt.addEventListener("keydown", (e) => { if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) form.requestSubmit(); });
  place.append(el("div", { class: "view" }, el("div", { class: "head" }, el("h1", {}, "Ask")),
    el("div", { class: "view sides" }, el("div", { class: "view" }, form, past), result)));
  result.append(el("div", { class: "card" }, empty("Paste a prompt to find the holders",
    "For each worker: the blocks by tier, the rule that ended the prefix, and the cost of the choice.")));

  const listModels = () => {
    const found = choices(set.model);
    if (!fill(model, found.length ? found : [["", "no model yet"]], set.model) || set.model === model.value) return;
    set.model = model.value;
    if (past.open) list();
  };

  async function send(e) {
    e.preventDefault();
    setText(error, "");
    const kind = form.querySelector("[name=ask-kind]:checked").value;
    const query = { explain: true };
    try {
      if (!model.value) throw new Error("No node serves a model yet: run a shim beside an engine first.");
      Object.assign(query, JSON.parse(model.value));
      if (kind === "prompt") {
        if (!prompt.value) throw new Error("Type the prompt first.");
        query.prompt = prompt.value;
      } else if (kind === "tokens") query.tokens = parse(prompt.value).map(Number);
      else query[kind] = parse(prompt.value);
      if (kind === "engine_hashes") query.explain = false;
      if (lora.value) query.lora_name = lora.value;
      if (salt.value) query.cache_salt = salt.value;
    } catch (failure) {
      setText(error, failure.message);
      return;
    }
    setText(button, "Asking…");
    await busy(button, async () => {
      try {
        await inquire(query);
        result.scrollIntoView({ block: "nearest" });
      } catch (failure) {
        setText(error, failure.message);
      }
    });
    setText(button, "Ask");
  }

  // inquire requests the holders of a prompt and the choice of a worker, and shows the answers. record is the record of
  // a recorded request, also shown.
  async function inquire(query, record) {
    const mine = turn = {};
    const [found, chosen] = await Promise.allSettled([ask("POST", "v1/find", query),
      ask("POST", "v1/select", { ...query, explain: true, advisory: true })]);
    if (mine !== turn) return; // a later query replaced this query
    if (found.status === "rejected") throw found.reason;
    present(found.value, chosen, record);
  }

  // list shows the newest recorded requests of the model, or the newest requests before the id before.
  async function list(before) {
    const mine = listing = {};
    try {
      if (!model.value) throw new Error("No node serves a model yet.");
      const of = JSON.parse(model.value).model;
      const found = await ask("POST", "v1/recorded", { model: of, limit: page, ...(before && { before }) });
      if (mine !== listing) return;
      const older = document.activeElement?.matches(".older"), focused = recorded.contains(document.activeElement);
      recorded.replaceChildren(...table(of, found, before));
      if (focused) (older && recorded.querySelector(".older") || recorded.querySelector(".fields button")).focus();
    } catch (failure) {
      if (mine !== listing) return;
      const focused = recorded.contains(document.activeElement);
      const again = el("button", { type: "button", click: () => list(before) }, "Retry");
      recorded.replaceChildren(el("p", { class: "error", role: "alert" }, failure.message), el("div", { class: "fields" }, again));
      if (focused) again.focus();
    }
  }

  function table(of, found, before) {
    const heads = ["Time", "Request", "Blocks", "Held at most", "Chosen", "It held", "Choice"];
    return [found.missing && el("div", { class: "notice warn" }, "No answer from " + found.missing.join(", ") + ". Records of these nodes are missing here."),
      found.requests.length ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Recorded requests" }, el("table", { id: "recorded" },
        el("thead", {}, el("tr", {}, heads.map((h, i) => el("th", { scope: "col", class: [2, 3, 5].includes(i) ? "num" : null }, h)))),
        el("tbody", {}, found.requests.map((r) => el("tr", { "data-id": r.id }, el("td", {}, clock(r.at)), el("th", { scope: "row" }, r.blocks > 0 ?
          el("button", { type: "button", class: "link", title: "show the present holders of the blocks", click: (e) => take(r, e.target) }, name(r)) : name(r)),
          el("td", { class: "num" }, count(r.blocks)), el("td", { class: "num" }, count(r.held)), el("td", {}, r.worker || "–"),
          el("td", { class: "num" }, r.worker ? count(r.selected || 0) : "–"),
          el("td", {}, r.decision ? decisions[r.decision] || r.decision : "only queried")))))) :
        empty(before ? "No older requests are kept" : "No requests for " + of + " are recorded yet"),
      el("div", { class: "fields" }, el("button", { type: "button", click: () => list() }, before ? "Newest" : "Refresh"),
        found.more && el("button", { type: "button", class: "older", click: () => list(found.requests.at(-1).id) }, "Older"),
        el("span", { class: "soft small" }, "Each node keeps hashes of the newest requests and of a sample of the last hour: at most 128 requests and 32,768 blocks of a model. Text and tokens are not kept."))].filter(Boolean);
  }

  // name returns the id of a request, or without an id, a part of the record's id.
  const name = (r) => r.request_id || r.id.split("-")[0].slice(-8);
  const clock = (at) => time(at,
    { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3 });

  // take opens a recorded request.
  async function take(r, at) {
    setText(error, "");
    await busy(at, async () => {
      try {
        const [record] = (await ask("POST", "v1/recorded", { model: r.model, id: r.id })).requests;
        if (record.hashes?.length) await inquire({ model: r.model, block_size: r.block_size, hashes: record.hashes, explain: true }, record);
        else {
          turn = {};
          result.replaceChildren(el("section", { class: "card" }, was(record), el("p", {}, "The request has more blocks than the limit for kept hashes.")));
        }
        result.scrollIntoView({ block: "nearest" });
      } catch (failure) {
        setText(error, failure.message);
        error.scrollIntoView({ block: "nearest" });
      }
    });
  }

  // was returns a paragraph about a record.
  function was(r) {
    const blocks = (n) => count(n) + (n === 1 ? " block" : " blocks");
    return el("p", { id: "recorded-as" }, el("strong", {}, "Request " + name(r)), ", at " + clock(r.at) + " by " + r.node + ": ",
      r.worker ? r.worker + " was chosen (" + (decisions[r.decision] || r.decision) + ") and held " + blocks(r.selected || 0) + " of " + count(r.blocks) :
        r.decision ? "no worker could be chosen for " + blocks(r.blocks) : blocks(r.blocks) + " were only queried",
      ". No worker held more than " + blocks(r.held) + "; the shared store had " + blocks(r.shared) + " from the start." +
      (r.restricted ? " The request excluded workers. This view includes all workers." : "") + (r.incomplete ? " The index lacked partitions at that time." : ""));
  }

  function present(a, chosen, record) {
    const best = a.workers[0];
    const total = (o) => o.device + o.host + o.disk + o.external;
    const missing = !a.complete && el("div", { class: "notice warn" }, "Partitions " + (a.missing || []).join(", ") +
      " could not be read. Workers are missing here.");
    const tokenized = a.tokenize_error && el("div", { class: "notice warn" }, a.tokenize_error);
    const shown = a.workers.slice(0, most);
    tip(null, ""); // the element under the pointer was removed
    result.replaceChildren(...[missing, tokenized, record && el("section", { class: "card" }, was(record),
      el("p", { class: "soft" }, "The present holders and costs follow. A query by hashes excludes the shared store.")),
      el("section", { class: "card" }, el("div", { class: "head" }, el("h2", {}, count(a.blocks) + " blocks of " + a.block_size + " tokens" +
        (a.prompt_tokens ? ", from " + count(a.prompt_tokens) + " tokens" : "")), legend()),
      a.reason && el("p", {}, reasons[a.reason] || a.reason),
      a.blocks > 0 && shown.length > 0 ? el("div", { id: "strips" }, shown.map((o) => strip(a, o, total(o), chosen.value))) :
        a.blocks > 0 && !a.reason ? empty("No worker serves this model") : null,
      a.blocks > 0 && store(a),
      a.workers.length > most && el("p", { class: "soft small" }, "The best " + most + " of " + count(a.workers.length) + " ranks are shown.")),
      choice(a, chosen, best)].filter(Boolean));
  }

  function legend() {
    return el("ul", { class: "legend" }, tiers.map((t) => el("li", {}, el("i", { class: "t-" + t }), t)),
      el("li", {}, el("i", { class: "t-store" }), "shared store"));
  }

  function piece(from, to, blocks, kind, text) {
    const i = el("i", { class: kind });
    i.style.left = 100 * from / blocks + "%";
    i.style.width = 100 * (to - from) / blocks + "%";
    i.addEventListener("pointermove", (e) => tip(e, text));
    i.addEventListener("pointerleave", (e) => tip(e, ""));
    return i;
  }

  const blocksOf = (from, to) => to - from === 1 ? "block " + from : "blocks " + from + " to " + (to - 1);

  function strip(a, o, depth, choice) {
    const chosen = choice?.worker === o.instance && (choice.rank || 0) === (o.rank || 0);
    const runs = o.path?.held || depths(o);
    const end = el("b", { title: "the prefix ends here" });
    end.style.left = "min(" + 100 * depth / a.blocks + "%, calc(100% - 2px))";
    const rule = o.path ? (stops[o.path.stop] || (() => o.path.stop))(depth, o.path) : "";
    const parts = tiers.filter((t) => o[t] > 0).map((t) => count(o[t]) + " in " + t);
    const also = [rule, o.path?.behind ? count(o.path.behind) + " more after the end, of no use" : "", o.l3 ? count(o.l3) + " more from the store" : "",
      o.guessed > o.device ? "guess of device blocks: " + count(o.guessed) : "", o.engine ? "engine " + o.engine : "", o.catching_up ? "the shim is catching up" : "",
      o.bound ? "upper bound: the needs of some groups are unknown" : ""].filter(Boolean);
    return el("div", { class: "strip", "data-worker": o.instance, "data-depth": depth }, el("div", { class: "name", title: o.instance },
      long(o.instance + (o.rank ? " / " + o.rank : "")), chosen && el("span", { class: "chip good" }, "chosen")),
      el("div", { class: "track", "aria-hidden": "true" }, runs.map((r) => piece(r.from, r.to, a.blocks,
        "t-" + r.tiers[0] + (r.tiers.length > 1 ? " two" : ""), blocksOf(r.from, r.to) + " in " + r.tiers.join(" and "))), depth > 0 && end),
      el("div", { class: "share" }, count(depth) + " blocks, " + percent(depth, a.blocks)),
      el("div", { class: "why" }, [parts.join(", "), also.join("; ")].filter(Boolean).join(" · ")));
  }

  // depths returns the runs of a rank from the numbers by tier, if the answer has no path.
  function depths(o) {
    const runs = [];
    let from = 0;
    for (const t of tiers) {
      if (o[t] > 0) runs.push({ from, to: from + o[t], tiers: [t] });
      from += o[t];
    }
    return runs;
  }

  function store(a) {
    if (a.l3.status === "not_configured") return el("p", { class: "soft small" }, "No worker of the model has a shared store.");
    return el("div", { class: "strip" }, el("div", { class: "name" }, "shared store"),
      el("div", { class: "track", "aria-hidden": "true" }, (a.l3.ranges || []).map(([from, to]) =>
        piece(from, to, a.blocks, "t-store", blocksOf(from, to) + " in the shared store"))),
      el("div", { class: "share" }, count(a.l3.total) + " blocks, " + percent(a.l3.total, a.blocks)),
      el("div", { class: "why" }, a.l3.status + (a.l3.reason ? ": " + a.l3.reason : "")));
  }

  function choice(a, chosen) {
    if (chosen.status === "rejected") {
      return el("section", { class: "card" }, el("h2", {}, "The choice"), el("p", {}, "None: " + chosen.reason.message));
    }
    const s = chosen.value, x = s.explanation || {};
    const name = (c) => c.worker + (c.rank ? " / " + c.rank : "");
    const list = [...(x.candidates || [])].sort((p, q) => p.cost - q.cost);
    const n = (v) => v === undefined ? "–" : (Math.round(v * 1000) / 1000 || 0).toLocaleString("en-US");
    const terms = list.some((c) => c.terms);
    const head = ["Worker", "Cost", "Probability", "Cached tokens", ...(terms ? ["Raw prefill", "Device credit", "Host credit", "Disk credit", "Store credit",
      "Decode", "Requests", "Taints"] : (list[0]?.scores || []).map((p) => p.scorer))];
    return el("section", { class: "card" }, el("div", { class: "head" }, el("h2", {}, "The choice: " + name(s)),
      el("span", { class: "soft" }, "policy " + s.policy + ", " + count(s.candidates) + (s.candidates === 1 ? " candidate" : " candidates"))),
    el("p", {}, "The worker has " + count(s.cached_tokens) + " of " + count(s.isl_tokens) + " tokens, and would compute " + count(s.effective_prefill_tokens) + "."),
    list.length > 0 && el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Costs" }, el("table", { id: "costs" },
      el("thead", {}, el("tr", {}, head.map((h, i) => el("th", { scope: "col", class: i ? "num" : null }, h)))),
      el("tbody", {}, list.slice(0, most).map((c) => {
        const t = c.terms;
        const cells = [n(c.cost), n(c.probability), count(c.estimate.cached_tokens), ...(terms ? t ? [n(t.raw_prefill), n(-t.device_credit), n(-t.host_credit),
          n(-t.disk_credit), n(-t.shared_credit), n(t.decode), n(t.active_requests), "×" + n(t.taint_factor)] : Array(8).fill("–") :
          (c.scores || []).map((p) => n(p.cost)))];
        return el("tr", { class: c.chosen ? "chosen" : null }, el("th", { scope: "row" }, name(c), c.chosen && el("span", { class: "chip good" }, "chosen")),
          cells.map((v) => el("td", { class: "num" }, v)));
      })))),
    (x.dropped || []).length > 0 && el("p", { class: "soft" }, "Not considered: " + x.dropped.slice(0, 50).map((d) => name(d) + " " + d.reason).join("; ")));
  }

  const stop = onChange((what) => what === "cluster" && listModels());
  listModels();
  return () => {
    turn = listing = {};
    stop();
    tip(null, "");
  };
}
