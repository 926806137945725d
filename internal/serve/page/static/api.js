// Requests to the indexer that served this page, with the token if the indexer requires a token. Only this tab keeps
// the token.

const gate = document.getElementById("gate");
const key = "kvatlas-token";
const refused = "The indexer rejects this token.";
let waiting = null; // a promise that resolves after the input of a token; null: no dialog is open
let unlock = null; // resolves waiting

export class Failure extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// unlocked opens the dialog for the token. The promise resolves after the input.
function unlocked(message) {
  document.getElementById("gate-error").textContent = message;
  waiting ||= new Promise((resolve) => { unlock = resolve; });
  if (!gate.open) gate.showModal();
  return waiting;
}
gate.addEventListener("cancel", (e) => e.preventDefault());
gate.addEventListener("close", () => { if (waiting && !gate.open) gate.showModal(); }); // a second Escape closes the dialog anyway
document.getElementById("gate-form").addEventListener("submit", (e) => {
  e.preventDefault();
  const field = document.getElementById("gate-token"), token = field.value.trim();
  field.value = "";
  if (/[^ -~]/.test(token)) { // invalid in a header
    document.getElementById("gate-error").textContent = refused;
    return;
  }
  sessionStorage.setItem(key, token);
  waiting = null;
  gate.close();
  unlock();
});

// request sends a request. After status 401 the reader enters a token, and request retries. Other errors throw a
// Failure.
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
      throw new Failure(0, "unreachable", "The indexer does not answer.");
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

// ask sends a request with a body in JSON, or without a body, and returns the answer.
export async function ask(method, path, body, signal) {
  const options = { method, signal };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  return (await request(path, options)).json();
}

// bounded returns a controller that aborts a request with message, ms after the last call of wait. A frozen node would
// otherwise block the request forever. Time in the dialog for the token does not count.
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

const every = 5000; // ms between two requests
const enough = 30000; // ms until a request is aborted

// looking repeats a request, with at most one request in flight. question sends the request and returns the answer; the
// signal aborts the request. take(answer, failure) is called after each request. look aborts a request in flight and
// sends the next request at once. end stops the requests. pause is the time from an answer to the next request, in ms.
export function looking(question, take, pause = every) {
  let timer = 0;
  let asking = null;
  let ended = false;
  async function look() {
    clearTimeout(timer);
    asking?.abort();
    if (ended) return;
    const mine = asking = bounded(enough, "The indexer does not answer. The page retries.");
    let answer = null, failure = null;
    try {
      answer = await question(mine.signal);
    } catch (e) {
      failure = mine.signal.reason || e;
    }
    mine.abort();
    if (mine !== asking || ended) return; // a later call of look or end aborted this request
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
