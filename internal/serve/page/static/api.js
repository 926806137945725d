// Asking the indexer that served this page, with the token, if it wants one. The token is kept in this tab only.

const gate = document.getElementById("gate");
const key = "kvatlas-token";
const refused = "The indexer does not take this token.";
let waiting = null; // for a token
let unlock = null; // ends the waiting

export class Failure extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// unlocked waits until the reader has typed a token.
function unlocked(message) {
  document.getElementById("gate-error").textContent = message;
  waiting ||= new Promise((resolve) => { unlock = resolve; });
  if (!gate.open) gate.showModal();
  return waiting;
}
gate.addEventListener("cancel", (e) => e.preventDefault());
gate.addEventListener("close", () => { if (waiting && !gate.open) gate.showModal(); }); // Escape twice closes it all the same
document.getElementById("gate-form").addEventListener("submit", (e) => {
  e.preventDefault();
  const field = document.getElementById("gate-token"), token = field.value.trim();
  field.value = "";
  if (/[^ -~]/.test(token)) { // no header can have it
    document.getElementById("gate-error").textContent = refused;
    return;
  }
  sessionStorage.setItem(key, token);
  waiting = null;
  gate.close();
  unlock();
});

// request asks once it has a token that is good. What is no success is a Failure.
export async function request(path, options = {}) {
  for (;;) {
    const token = sessionStorage.getItem(key);
    const headers = { ...options.headers };
    if (token) headers.Authorization = "Bearer " + token;
    let reply;
    try {
      reply = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (e) {
      if (options.signal?.aborted) throw options.signal.reason;
      throw new Failure(0, "unreachable", "The indexer does not answer. It is asked again.");
    }
    if (reply.status === 401) {
      if (token === sessionStorage.getItem(key)) await unlocked(token ? refused : "");
      continue;
    }
    if (!reply.ok) {
      const body = await reply.json().catch(() => null);
      throw new Failure(reply.status, body?.error?.code, body?.error?.message || reply.status + " " + reply.statusText);
    }
    return reply;
  }
}

// ask asks with a body in JSON, or without one, and returns the answer.
export async function ask(method, path, body, signal) {
  const options = { method, signal };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  return (await request(path, options)).json();
}

// bounded is a controller of a request that is given up, with what is said of it, so many ms after wait was called last:
// a node that stands still would be waited for without an end. The time in which the reader looks for a token is none of
// the node's.
export function bounded(ms, message) {
  const of = new AbortController();
  let timer = 0;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => waiting ? wait() : of.abort(new Failure(0, "silent", message)), ms);
  };
  const abort = () => {
    clearTimeout(timer);
    of.abort();
  };
  wait();
  return { signal: of.signal, wait, abort };
}

const every = 5000; // ms between two looks
const enough = 30000; // ms that one may take

// looking asks again and again, one question at a time. question is given a signal that ends it, and returns an answer;
// take is given that, or the failure. look asks at once, end asks no more. pause is the time between two questions.
export function looking(question, take, pause = every) {
  let timer = 0;
  let asking = null;
  let ended = false;
  async function look() {
    clearTimeout(timer);
    asking?.abort();
    if (ended) return;
    const mine = asking = bounded(enough, "The indexer does not answer. It is asked again.");
    let answer = null, failure = null;
    try {
      answer = await question(mine.signal);
    } catch (e) {
      failure = mine.signal.reason || e;
    }
    mine.abort();
    if (mine !== asking || ended) return; // it was asked anew
    take(answer, failure);
    timer = setTimeout(look, pause);
  }
  const end = () => {
    ended = true;
    clearTimeout(timer);
    asking?.abort();
  };
  return { look, end };
}
