// Asking the indexer that served this page, with the token, if it wants one. The token is kept in this tab only.

const gate = document.getElementById("gate");
const key = "kvatlas-token";
let waiting = null; // for a token

export class Failure extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// locked reports whether the reader is asked for a token.
export const locked = () => waiting !== null;

// unlocked waits until the reader has typed a token.
function unlocked(message) {
  document.getElementById("gate-error").textContent = message;
  waiting ||= new Promise((resolve) => {
    gate.addEventListener("cancel", (e) => e.preventDefault());
    document.getElementById("gate-form").addEventListener("submit", (e) => {
      e.preventDefault();
      sessionStorage.setItem(key, document.getElementById("gate-token").value.trim());
      document.getElementById("gate-token").value = "";
      gate.close();
      waiting = null;
      resolve();
    }, { once: true });
    if (!gate.open) gate.showModal();
  });
  return waiting;
}

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
      if (options.signal?.aborted) throw e;
      throw new Failure(0, "unreachable", "The indexer does not answer. It is asked again.");
    }
    if (reply.status === 401) {
      if (token === sessionStorage.getItem(key)) await unlocked(token ? "The indexer does not take this token." : "");
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

const every = 5000; // ms between two looks

// looking asks again and again, one question at a time. question is given a signal that ends it, and returns an answer;
// take is given that, or the failure. look asks at once, end asks no more.
export function looking(question, take) {
  let timer = 0;
  let asking = null;
  let ended = false;
  async function look() {
    clearTimeout(timer);
    asking?.abort();
    if (ended) return;
    const mine = asking = new AbortController();
    let answer = null, failure = null;
    try {
      answer = await question(mine.signal);
    } catch (e) {
      failure = e;
    }
    if (mine !== asking || ended) return; // it was asked anew
    take(answer, failure);
    timer = setTimeout(look, every);
  }
  const end = () => {
    ended = true;
    clearTimeout(timer);
    asking?.abort();
  };
  return { look, end };
}
