// The heat map of experts: a row for each layer, a column for each expert.

import { fetchJson } from "./server.js";
import { count, element, percent } from "./words.js";

const SPAN_S = 30; // of the choice "lately"
const SHADE = 0.85; // of an expert with three times its layer's mean, or more

export class Experts {
  #samples = []; // of the last SPAN_S: the time, and all tokens of every expert so far
  #load = null;

  constructor(section) {
    this.section = section;
    section.querySelector("fieldset").addEventListener("change", () => this.#show());
  }

  /** Fetches the load; false if the model has no experts, and the request need not be repeated. */
  async poll() {
    try {
      this.#add(await fetchJson("experts"));
    } catch (error) {
      if (error.code === "no_experts") this.section.hidden = true;
      return error.code !== "no_experts"; // the activity request shows what is wrong with the server
    }
    this.#show();
    return true;
  }

  #add(load) {
    const now = performance.now() / 1000;
    const last = this.#samples.at(-1)?.tokens;
    if (last && !grew(last, load.tokens_per_expert)) this.#samples = []; // a stage was loaded again
    this.#samples.push({ now, tokens: load.tokens_per_expert });
    while (now - this.#samples[0].now > SPAN_S) this.#samples.shift();
    this.#load = load;
  }

  #show() {
    if (!this.#load) return;
    const wantsAll = this.section.querySelector("input:checked").value === "all";
    const [first, last] = [this.#samples[0], this.#samples.at(-1)];
    const tokens = wantsAll ? last.tokens : last.tokens.map((row, l) => row.map((n, e) => n - first.tokens[l][e]));
    const span = wantsAll ? "since loading" : `in the last ${count(Math.round(last.now - first.now), "second")}`;
    const of = count(this.#load.pipelines, "pipeline");
    const legend = "Percent of each layer's tokens; outlined: the layer's busiest expert.";
    this.section.querySelector("#experts-note").textContent = `${legend} Of ${of}, ${span}.`;
    this.section.querySelector("table").replaceChildren(header(tokens[0].length), body(tokens));
    this.section.hidden = false;
  }
}

function grew(before, after) {
  const alike = before.length === after.length && before.every((row, layer) => row.length === after[layer].length);
  return alike && before.every((row, layer) => row.every((n, expert) => n <= after[layer][expert]));
}

function header(numExperts) {
  const columns = Array.from({ length: numExperts }, (_, expert) => element("th", { text: expert, scope: "col" }));
  return element("thead", {}, element("tr", {}, element("th", { text: "layer", scope: "col" }), ...columns));
}

function body(tokens) {
  return element("tbody", {}, ...tokens.map((row, layer) => {
    const sum = row.reduce((all, n) => all + n, 0);
    const cells = row.map((n) => cell(n, sum, row.length, n > 0 && n === Math.max(...row)));
    return element("tr", {}, element("th", { text: layer, scope: "row" }), ...cells);
  }));
}

function cell(tokens, sum, numExperts, isMost) {
  const share = sum ? tokens / sum : 0;
  const made = element("td", { text: sum ? percent(share) : "–", title: count(tokens, "token") });
  made.style.setProperty("--share", Math.min((share * numExperts) / 3, 1) * SHADE);
  made.classList.toggle("most", isMost);
  return made;
}
