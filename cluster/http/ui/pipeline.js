// The card of one pipeline: its figures, its stages and their micro-batches.

import { Batches } from "./batches.js";
import { batchAt, draw } from "./timeline.js";
import { count, element, percent, rate, seconds } from "./words.js";

const HINT = "Point at a micro-batch, or move to it with the arrow keys, to read what is in it.";
const LATE_S = 0.9; // behind the server's clock: micro-batches are reported when they have completed

export class Pipeline {
  batches = new Batches();
  #picked = null;
  #numStages = 0;
  #view = { begin: 0, end: 1 };

  constructor(name, place) {
    const made = document.getElementById("pipeline").content.cloneNode(true);
    this.card = made.firstElementChild;
    this.card.setAttribute("aria-label", `Pipeline ${name}`);
    this.#part("h2").textContent = name;
    this.#part(".picked").textContent = HINT;
    this.canvas = this.#part("canvas");
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#pick(null));
    this.canvas.addEventListener("blur", () => this.#pick(null));
    this.canvas.addEventListener("keydown", (event) => this.#step(event));
    place.append(this.card);
  }

  #part(selector) {
    return this.card.querySelector(selector);
  }

  update(state, now) {
    this.batches.add(state, now);
    this.#showStages(state);
    this.#showFigures(state);
    const facts = [count(state.stages.length, "stage")];
    if (state.recoveries) facts.push(count(state.recoveries, "recovery", "recoveries"));
    this.#part(".facts").textContent = facts.join(" · ");
    const shares = state.stages.map(({ label }, stage) => `${label} busy ${percent(state.busy[stage] ?? 0)}`);
    const how = "Arrow keys move through the micro-batches.";
    this.canvas.setAttribute("aria-label", `Timeline of micro-batches. ${shares.join(", ")}. ${how}`);
  }

  #showStages({ stages, busy }) {
    const list = this.#part(".stages");
    if (this.#numStages !== stages.length || stages.some(({ label }, i) => list.children[i].dataset.label !== label)) {
      this.#numStages = stages.length;
      list.replaceChildren(...stages.map(stageBox));
    }
    for (const [stage, box] of [...list.children].entries()) {
      const share = Math.min(Math.max(busy[stage] ?? 0, 0), 1);
      box.querySelector("meter").value = share;
      box.querySelector(".share span").textContent = percent(share);
    }
  }

  #showFigures(state) {
    const idle = state.busy.length ? 1 - state.busy.reduce((sum, share) => sum + share, 0) / state.busy.length : null;
    const figures = [
      ["Tokens per second", rate(state.tokens_per_s), "of all requests"],
      ["Running", state.running.toLocaleString("en"), `${state.waiting.toLocaleString("en")} waiting`],
      ["First token", ...spread(state.first_token_s)],
      ["Between tokens", ...spread(state.inter_token_s)],
      ["Bubble", idle === null ? "–" : percent(Math.max(idle, 0)), "of the last 10 s"],
      ["Cache", state.pages ? percent(state.pages_held / state.pages) : "–", `${state.pages_held.toLocaleString("en")} of ${count(state.pages, "page")}, ${state.pages_cached.toLocaleString("en")} cached`],
    ];
    const tiles = figures.map(([name, value, more]) =>
      element("div", {}, element("dt", { text: name }), element("dd", {}, value, element("small", { text: more }))),
    );
    this.#part(".figures").replaceChildren(...tiles);
  }

  draw(now, span, color) {
    this.#view = { begin: now - LATE_S - span, end: now - LATE_S };
    const { begin, end } = this.#view;
    const from = this.#part(".from");
    if (from.textContent !== `${span} s ago`) from.textContent = `${span} s ago`;
    draw(this.canvas, this.batches.between(begin, end), this.#numStages, this.#view, this.#picked, color);
  }

  #point(event) {
    const seen = this.batches.between(this.#view.begin, this.#view.end);
    this.#pick(batchAt(this.canvas, seen, this.#numStages, this.#view, event.offsetX, event.offsetY));
  }

  #step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.#pick(null);
    if (!by) return;
    event.preventDefault();
    const seen = this.batches.between(this.#view.begin, this.#view.end);
    const at = seen.indexOf(this.#picked);
    this.#pick((at < 0 ? seen.at(-1) : seen[Math.min(Math.max(at + by, 0), seen.length - 1)]) ?? null);
  }

  #pick(batch) {
    if (batch === this.#picked) return;
    this.#picked = batch;
    this.#part(".picked").textContent = batch ? describe(batch) : HINT;
  }
}

function stageBox({ label }) {
  const [, name, layers] = /^(\S+ \S+)\s*(.*)$/.exec(label) ?? [label, label, ""];
  const title = element("div", { className: "name" }, element("span", { text: name }));
  if (layers) title.append(element("span", { className: "layers", text: layers }));
  const meter = element("meter", { min: 0, max: 1, ariaLabel: `${name} busy, last 10 s` });
  const share = element("div", { className: "share" }, meter, element("span"));
  const box = element("li", {}, element("div", {}, title, share));
  box.dataset.label = label;
  return box;
}

function spread(times) {
  return times ? [seconds(times.p50), `p95 ${seconds(times.p95)}`] : ["–", "none lately"];
}

function describe(batch) {
  const held = [];
  if (batch.prefill) held.push(`${count(batch.prefill, "token")} of prompts`);
  if (batch.decodes) held.push(count(batch.decodes, "decode"));
  const stays = batch.runs.map((run) => seconds(run.end - run.begin)).join(", ");
  return `Micro-batch ${batch.number}: ${held.join(" and ")}; in its stages for ${stays}; ${seconds(batch.end - batch.begin)} in all.`;
}
