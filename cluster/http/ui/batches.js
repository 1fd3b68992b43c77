// The micro-batches of one pipeline that may still be seen, in the order in which they came back.

const KEPT_S = 30; // more than is ever shown

export class Batches {
  #kept = [];

  /** `after` of the next question; null: whatever there is. */
  last = null;

  add(pipeline, now) {
    this.#kept = [...this.#kept, ...pipeline.micro_batches.map(read)].filter((batch) => batch.end > now - KEPT_S);
    this.last = pipeline.last;
  }

  /** Who has not asked for a while wants to know what is now, and not to catch up. */
  forget() {
    this.#kept = [];
    this.last = null;
  }

  /** Those of which something happened between these times. */
  between(begin, end) {
    return this.#kept.filter((batch) => batch.end >= begin && batch.begin <= end);
  }
}

function read({ number, prefill_tokens: prefill, decodes, stages }) {
  const runs = stages.map(([stage, begin, busy, elapsed]) => ({ stage, begin, busy, end: begin + Math.max(busy, elapsed) }));
  const begin = Math.min(...runs.map((run) => run.begin));
  const end = Math.max(...runs.map((run) => run.end));
  return { number, prefill, decodes, runs, begin, end };
}
