// The prompt form and its streamed answer.

import { isStopped, Refused, streamed } from "./server.js";
import { count, rate, seconds, sentence } from "./words.js";

const PATHS = { completion: "v1/completions", chat: "v1/chat/completions" };
const part = (id) => document.getElementById(id);

/** `onRefusedKey` is called when the server no longer accepts the key. */
export function startPrompt(onRefusedKey) {
  const form = part("try");
  let running = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    running = new AbortController();
    setRunning(true);
    showStatus(...(await run(form, running, onRefusedKey)));
    setRunning(false);
    running = null;
  });
  part("stop").addEventListener("click", () => running?.abort());
  part("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
}

function setRunning(isRunning) {
  part("send").disabled = isRunning;
  part("stop").disabled = !isRunning;
  part("answer").ariaBusy = isRunning; // read aloud when it has ended, not token by token
  if (isRunning) part("stop").focus();
  else if (document.activeElement === document.body) part("send").focus();
}

/** Returns the text below the answer, and whether it is an error. */
async function run(form, running, onRefusedKey) {
  const kind = form.elements.kind.value;
  const progress = { begun: performance.now(), first: null, usage: null, finish: null };
  part("answer").textContent = "";
  showStatus("Waiting for the first token …");
  try {
    for await (const event of streamed(PATHS[kind], body(kind), running.signal)) take(event, progress);
  } catch (error) {
    if (isStopped(error)) return [`Stopped after ${seconds((performance.now() - progress.begun) / 1000)}.`];
    if (error instanceof Refused && error.status === 401) onRefusedKey(error);
    return [sentence(error.message), true];
  }
  return [summary(progress)];
}

function body(kind) {
  const text = part("prompt").value;
  const given = kind === "chat" ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  const numbers = { max_tokens: part("max-tokens").valueAsNumber, temperature: part("temperature").valueAsNumber };
  return { ...given, ...numbers, stream: true, stream_options: { include_usage: true } };
}

function take(event, progress) {
  progress.usage = event.usage ?? progress.usage;
  for (const choice of event.choices) {
    const text = choice.text ?? choice.delta?.content ?? "";
    const thought = choice.delta?.reasoning_content ?? "";
    progress.finish = choice.finish_reason ?? progress.finish;
    if (!text && !thought) continue;
    progress.first ??= performance.now();
    if (thought) append(thought, thoughtBlock());
    if (text) append(text, part("answer"));
    showStatus(`First token after ${seconds((progress.first - progress.begun) / 1000)} …`);
  }
}

/** Returns the block of the thought that grows at the end of the answer; a new one after other text. */
function thoughtBlock() {
  const last = part("answer").lastChild;
  if (last?.className === "thought") return last;
  const block = document.createElement("span");
  block.className = "thought";
  part("answer").append(block);
  return block;
}

/** Keeps the end visible if it was visible. */
function append(text, block) {
  const answer = part("answer");
  const isAtEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 8;
  block.append(text);
  if (isAtEnd) answer.scrollTop = answer.scrollHeight;
}

function summary({ begun, first, usage, finish }) {
  const tokens = usage?.completion_tokens ?? 0;
  const parts = [count(tokens, "token")];
  if (first !== null) parts.push(`first after ${seconds((first - begun) / 1000)}`);
  const spent = (performance.now() - (first ?? begun)) / 1000;
  if (tokens > 1 && spent > 0) parts.push(`then ${rate((tokens - 1) / spent)} per second`);
  if (finish === "length") parts.push("cut off at the maximum that was requested");
  return `${parts.join(", ")}.`;
}

function showStatus(text, isBad = false) {
  const status = part("answer-status");
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("bad", isBad);
}
