// The micro-batches of one pipeline that may still be visible, in the order in which they completed.

const KEPT_S = 30; // more than is ever shown

export class Batches {
  #kept = [];

  /** `after` of the next request; null for all that there are. */
  last = null;

  add(pipeline, now) {
    this.#kept = [...this.#kept, ...pipeline.micro_batches.map(read)].filter((batch) => batch.end > now - KEPT_S);
    this.last = pipeline.last;
  }

  /** After a gap only the present matters; what was missed is not fetched. */
  forget() {
    this.#kept = [];
    this.last = null;
  }

  /** The micro-batches that overlap this interval. */
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
