// Requests to the server, with the key if there is one, and errors as readable messages.

const KEY = "tramontane.key"; // in this tab's storage
const TIMEOUT_MS = 15000;

export const key = {
  get: () => sessionStorage.getItem(KEY),
  keep: (given) => sessionStorage.setItem(KEY, given),
  forget: () => sessionStorage.removeItem(KEY),
};

/** The server answered with an error. */
export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** No response came, or it took too long. */
export class Away extends Error {}

export async function fetchJson(path) {
  const answer = await request(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  try {
    return await answer.json();
  } catch {
    throw new Away("the server's answer cannot be read");
  }
}

/** Yields the JSON object of every event as it comes. `signal` ends it. */
export async function* streamed(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const answer = await request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  let rest = "";
  for await (const text of texts(answer.body)) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield checked(JSON.parse(data));
    }
  }
  throw new Away("the server's answer broke off");
}

function checked(event) {
  if (event.error) throw new Refused(200, event.error.message, event.error.code);
  return event;
}

async function* texts(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader(); // Safari's streams cannot be iterated over
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    throw isStopped(error) ? error : new Away("the server went away before the answer had ended");
  }
}

export const isStopped = (error) => error.name === "AbortError";

async function request(path, options) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    throw isStopped(error) ? error : new Away("the server does not answer");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

async function refusal(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // Ray Serve's own errors are plain text
  }
  return new Refused(answer.status, error.message ?? `the server answered with HTTP ${answer.status}`, error.code);
}
