// Polls the server a few times a second while the page is visible, and draws in between.

import { Clock } from "./clock.js";
import { Experts } from "./experts.js";
import { Pipeline } from "./pipeline.js";
import { startPrompt } from "./prompt.js";
import { fetchJson, key, Refused } from "./server.js";
import { colors } from "./timeline.js";
import { count, sentence } from "./words.js";

const POLL_MS = 350;
const EXPERTS_MS = 2000;
const STALE_MS = 4000; // after a longer gap the missed micro-batches are not fetched
const RETRY_MS = [500, 1000, 2000, 5000];

const part = (id) => document.getElementById(id);
const clock = new Clock();
const experts = new Experts(part("experts"));
const pipelines = new Map();
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const page = { timer: 0, failures: 0, nextExperts: 0, updatedAt: 0, isPolling: false, hasModel: false, wantsKey: false, pausedAt: null };
let color = colors();

async function poll() {
  clearTimeout(page.timer);
  if (document.hidden || page.pausedAt !== null || page.wantsKey || page.isPolling) return;
  page.isPolling = true;
  if (performance.now() - page.updatedAt > STALE_MS) for (const pipeline of pipelines.values()) pipeline.batches.forget();
  try {
    await fetchModel();
    const state = await fetchJson(`activity${query()}`);
    if (!page.wantsKey) update(state); // a prompt may have found out that the key is no longer valid
    updateExperts();
  } catch (error) {
    fail(error);
  }
  page.isPolling = false;
  page.timer = setTimeout(poll, page.failures ? wait() : POLL_MS);
}

const wait = () => RETRY_MS[Math.min(page.failures, RETRY_MS.length) - 1];

function query() {
  const known = [...pipelines].filter(([, pipeline]) => pipeline.batches.last !== null);
  const after = known.map(([name, pipeline]) => `after=${encodeURIComponent(`${name}:${pipeline.batches.last}`)}`);
  return after.length ? `?${after.join("&")}` : "";
}

/** Fetches the model once, and again when the server was away: it may be another one. */
async function fetchModel() {
  if (page.hasModel) return;
  const [model] = (await fetchJson("v1/models")).data;
  part("model").textContent = model.id;
  part("model").hidden = false;
  document.title = `${model.id} · Tramontane`;
  part("max-tokens").max = model.max_model_len;
  page.hasModel = true;
  page.nextExperts = 0;
}

/** The timeline does not wait for this request, for which the server calls every stage. */
async function updateExperts() {
  if (performance.now() < page.nextExperts) return;
  page.nextExperts = Infinity;
  const hasExperts = await experts.poll();
  page.nextExperts = hasExperts ? performance.now() + EXPERTS_MS : Infinity;
}

function update(state) {
  clock.synchronize(state.now);
  page.updatedAt = performance.now();
  const names = state.pipelines.map(({ name }) => name);
  for (const [name, pipeline] of pipelines) {
    if (names.includes(name)) continue;
    pipeline.card.remove();
    pipelines.delete(name);
  }
  for (const each of state.pipelines) {
    if (!pipelines.has(each.name)) pipelines.set(each.name, new Pipeline(each.name, part("pipelines")));
    pipelines.get(each.name).update(each, state.now);
  }
  page.failures = 0;
  part("watch").hidden = false;
  part("forget").hidden = key.get() === null;
  showTrouble(state.pipelines.length ? "" : "No pipeline reports its activity now; the server may be starting one.");
  showRunning();
}

function fail(error) {
  if (error instanceof Refused && error.status === 401) return askForKey(error);
  page.failures += 1;
  page.hasModel = false;
  const next = `Trying again in ${count(Math.ceil(wait() / 1000), "second")}.`;
  showTrouble(`${sentence(error.message)} ${next}`);
  showState("away", error instanceof Refused ? "Trouble" : "Server away");
}

function askForKey() {
  const wasGiven = key.get() !== null;
  key.forget();
  page.wantsKey = true;
  part("watch").hidden = part("forget").hidden = true;
  part("key-form").hidden = false;
  part("key-status").textContent = wasGiven ? "The server does not take this key." : "";
  showTrouble("");
  showState("asking", "Key needed");
  part("key").focus();
}

function showTrouble(text) {
  const trouble = part("trouble");
  if (trouble.textContent !== text) trouble.textContent = text;
  trouble.hidden = !text;
}

function showState(state, text) {
  const shown = part("state");
  if (shown.textContent !== text) shown.textContent = text;
  shown.dataset.state = state;
}

function showRunning() {
  if (page.pausedAt === null) showState("live", "Live");
  else showState("paused", "Paused");
}

let lastDrawn = 0;
function animate(at) {
  requestAnimationFrame(animate);
  if (calm.matches && at - lastDrawn < 1000) return; // with reduced motion one picture a second is drawn
  lastDrawn = at;
  const span = Number(document.querySelector("#span input:checked").value);
  for (const pipeline of pipelines.values()) pipeline.draw(page.pausedAt ?? clock.now(), span, color);
}

part("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.keep(part("key").value.trim());
  part("key").value = "";
  part("key-form").hidden = true;
  page.wantsKey = false;
  poll();
});
part("forget").addEventListener("click", () => {
  key.forget();
  location.reload();
});
part("pause").addEventListener("click", () => {
  page.pausedAt = page.pausedAt === null ? clock.now() : null;
  part("pause").textContent = page.pausedAt === null ? "Pause" : "Resume";
  showRunning();
  poll();
});
document.addEventListener("visibilitychange", poll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (color = colors()));
startPrompt(askForKey);
requestAnimationFrame(animate);
poll();
