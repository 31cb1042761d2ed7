// Requests to the service: the token, deadlines, one error for "it said no" and one for "it did not answer".

const TOKEN = "lockstep-token";
const DEADLINE_MS = 15_000;
const SLOWEST_MS = 30_000;
const HIDDEN_MS = 30_000;

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    [this.status, this.code] = [status, code];
  }
}

export class Unreachable extends Error {}

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (text) => sessionStorage.setItem(TOKEN, text),
  forget: () => sessionStorage.removeItem(TOKEN),
};

let askForToken = () => Promise.resolve();

/** `ask(wasWrong)` returns when there is a token to try. */
export function onTokenWanted(ask) {
  let asking = null;
  askForToken = (used) => {
    if (token.get() !== used) return Promise.resolve(); // somebody else has just been given another one
    asking ??= ask(used !== null).finally(() => (asking = null));
    return asking;
  };
}

export const jobPath = (id, ...rest) => ["/api/jobs", encodeURIComponent(id), ...rest].join("/");

/** A response that says yes. `signal` ends it early, `deadlineMs` late. */
export async function send(method, path, { body, headers = {}, signal, deadlineMs = DEADLINE_MS } = {}) {
  for (;;) {
    const used = token.get();
    const authorization = used === null ? {} : { Authorization: `Bearer ${used}` };
    const ends = [signal, deadlineMs ? AbortSignal.timeout(deadlineMs) : null].filter(Boolean);
    let response;
    try {
      response = await fetch(path, {
        method,
        body,
        headers: { ...headers, ...authorization },
        signal: AbortSignal.any(ends),
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Unreachable(error.name === "TimeoutError" ? "it took too long" : "no connection");
    }
    if (response.status === 401) {
      await askForToken(used);
      continue;
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

async function refusal(response) {
  const said = await response.json().catch(() => null);
  const error = said?.error ?? {};
  const message = typeof error.message === "string" ? error.message : `the service answered ${response.status}`;
  return new ApiError(response.status, error.code ?? "error", message);
}

export async function getJson(path, options) {
  return (await send("GET", path, options)).json();
}

export async function postJson(path, value, options) {
  const headers = { "Content-Type": "application/json" };
  return (await send("POST", path, { body: JSON.stringify(value), headers, ...options })).json();
}

/** Uploads by XMLHttpRequest: fetch cannot tell how far it is. */
export function upload(path, file, onProgress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    request.setRequestHeader("Content-Type", "application/jsonl");
    if (token.get() !== null) request.setRequestHeader("Authorization", `Bearer ${token.get()}`);
    request.responseType = "json";
    request.upload.onprogress = (event) => event.lengthComputable && onProgress(event.loaded / event.total);
    request.onerror = () => reject(new Unreachable("no connection"));
    request.onload = () => {
      const error = request.response?.error;
      if (request.status < 300) resolve(request.response);
      else
        reject(new ApiError(request.status, error?.code, error?.message ?? `the service answered ${request.status}`));
    };
    request.send(file);
  });
}

/** Messages of an event stream, from `lastId` on: [id, event, data]. By fetch, because EventSource sends no token. */
export async function* follow(path, { lastId, signal }) {
  const headers = lastId ? { "Last-Event-ID": lastId } : {};
  const response = await send("GET", path, { headers, signal, deadlineMs: 0 });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const messages = (waiting + value).split("\n\n");
    waiting = messages.pop();
    for (const message of messages) {
      const fields = Object.fromEntries(
        message.split("\n").map((line) => [line.split(":", 1)[0], line.replace(/^[^:]*: ?/, "")]),
      );
      if ("data" in fields) yield [fields.id ?? null, fields.event ?? "message", JSON.parse(fields.data)];
    }
  }
}

// --- asking again and again ---------------------------------------------------------------------------------------

/** Whether the service answers, for the banner: an event "service" on the document with {up, retryMs}. */
function tell(detail) {
  document.dispatchEvent(new CustomEvent("service", { detail }));
}

/** Work until `signal`, with pauses: longer ones while nobody looks, and while the service does not answer. */
export async function poll(work, signal, periodMs = 2000) {
  let failures = 0;
  while (!signal.aborted) {
    let pauseMs = document.hidden ? HIDDEN_MS : periodMs;
    try {
      const outcome = await work();
      failures = 0;
      tell({ up: true });
      if (outcome === "done") return;
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Unreachable) && !(error instanceof ApiError && error.status >= 500)) throw error;
      failures += 1;
      pauseMs = Math.max(pauseMs, Math.min(periodMs * 2 ** (failures - 1), SLOWEST_MS));
      tell({ up: false, message: error.message, retryMs: pauseMs });
    }
    await pause(pauseMs, signal);
  }
}

/** Ends early when the page is looked at again, or somebody wants to try now. */
export function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const ended = new AbortController();
    const end = () => {
      clearTimeout(timer);
      ended.abort();
      resolve();
    };
    const timer = setTimeout(end, milliseconds);
    const options = { signal: ended.signal };
    document.addEventListener("visibilitychange", () => document.hidden || end(), options);
    document.addEventListener("retry", end, options);
    signal.addEventListener("abort", end, options);
  });
}
