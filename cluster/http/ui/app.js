// Asks the server what goes on, a few times a second while somebody looks, and draws in between.

import { Clock } from "./clock.js";
import { Experts } from "./experts.js";
import { Pipeline } from "./pipeline.js";
import { startPrompt } from "./prompt.js";
import { asked, key, Refused } from "./server.js";
import { colours } from "./timeline.js";
import { count, sentence } from "./words.js";

const ASK_MS = 350;
const EXPERTS_MS = 2000;
const STALE_MS = 4000; // after which nobody wants to catch up with what was missed
const RETRY_MS = [500, 1000, 2000, 5000];

const part = (id) => document.getElementById(id);
const clock = new Clock();
const experts = new Experts(part("experts"));
const pipelines = new Map();
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const page = { timer: 0, failures: 0, nextExperts: 0, heardAt: 0, isAsking: false, hasModel: false, wantsKey: false, pausedAt: null };
let colour = colours();

async function ask() {
  clearTimeout(page.timer);
  if (document.hidden || page.pausedAt !== null || page.wantsKey || page.isAsking) return;
  page.isAsking = true;
  if (performance.now() - page.heardAt > STALE_MS) for (const pipeline of pipelines.values()) pipeline.batches.forget();
  try {
    await askModel();
    const told = await asked(`activity${query()}`);
    if (!page.wantsKey) take(told); // the prompt may have heard that the key is no longer good
    askExperts();
  } catch (error) {
    fail(error);
  }
  page.isAsking = false;
  page.timer = setTimeout(ask, page.failures ? wait() : ASK_MS);
}

const wait = () => RETRY_MS[Math.min(page.failures, RETRY_MS.length) - 1];

function query() {
  const known = [...pipelines].filter(([, pipeline]) => pipeline.batches.last !== null);
  const after = known.map(([name, pipeline]) => `after=${encodeURIComponent(`${name}:${pipeline.batches.last}`)}`);
  return after.length ? `?${after.join("&")}` : "";
}

/** Once, and again when the server was away: it may be another. */
async function askModel() {
  if (page.hasModel) return;
  const [model] = (await asked("v1/models")).data;
  part("model").textContent = model.id;
  part("model").hidden = false;
  document.title = `${model.id} · Tramontane`;
  part("max-tokens").max = model.max_model_len;
  page.hasModel = true;
  page.nextExperts = 0;
}

/** The timeline does not wait for it: the door asks every stage. */
async function askExperts() {
  if (performance.now() < page.nextExperts) return;
  page.nextExperts = Infinity;
  const hasExperts = await experts.look();
  page.nextExperts = hasExperts ? performance.now() + EXPERTS_MS : Infinity;
}

function take(told) {
  clock.hear(told.now);
  page.heardAt = performance.now();
  const names = told.pipelines.map(({ name }) => name);
  for (const [name, pipeline] of pipelines) {
    if (names.includes(name)) continue;
    pipeline.card.remove();
    pipelines.delete(name);
  }
  for (const each of told.pipelines) {
    if (!pipelines.has(each.name)) pipelines.set(each.name, new Pipeline(each.name, part("pipelines")));
    pipelines.get(each.name).tell(each, told.now);
  }
  page.failures = 0;
  part("watch").hidden = false;
  part("forget").hidden = key.get() === null;
  say(told.pipelines.length ? "" : "No pipeline can tell what it does now; the server may be starting one.");
  showRunning();
}

function fail(error) {
  if (error instanceof Refused && error.status === 401) return askForKey(error);
  page.failures += 1;
  page.hasModel = false;
  const next = `Trying again in ${count(Math.ceil(wait() / 1000), "second")}.`;
  say(`${sentence(error.message)} ${next}`);
  showState("away", error instanceof Refused ? "Trouble" : "Server away");
}

function askForKey() {
  const wasGiven = key.get() !== null;
  key.forget();
  page.wantsKey = true;
  part("watch").hidden = part("forget").hidden = true;
  part("key-form").hidden = false;
  part("key-told").textContent = wasGiven ? "The server does not take this key." : "";
  say("");
  showState("asking", "Key needed");
  part("key").focus();
}

function say(text) {
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
  if (calm.matches && at - lastDrawn < 1000) return; // who wants no motion gets a picture a second
  lastDrawn = at;
  const span = Number(document.querySelector("#span input:checked").value);
  for (const pipeline of pipelines.values()) pipeline.draw(page.pausedAt ?? clock.now(), span, colour);
}

part("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.keep(part("key").value.trim());
  part("key").value = "";
  part("key-form").hidden = true;
  page.wantsKey = false;
  ask();
});
part("forget").addEventListener("click", () => {
  key.forget();
  location.reload();
});
part("pause").addEventListener("click", () => {
  page.pausedAt = page.pausedAt === null ? clock.now() : null;
  part("pause").textContent = page.pausedAt === null ? "Pause" : "Go on";
  showRunning();
  ask();
});
document.addEventListener("visibilitychange", ask);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (colour = colours()));
startPrompt(askForKey);
requestAnimationFrame(animate);
ask();
