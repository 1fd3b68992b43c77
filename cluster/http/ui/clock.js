// The server's wall clock, told with every answer and guessed between answers.

const JUMP_S = 1; // further off than this, it is another clock
const SHARE = 0.1; // of a new difference that is believed, so that slow answers do not make the timeline shake

export class Clock {
  #ahead = null;

  hear(serverNow) {
    const ahead = serverNow - performance.now() / 1000;
    const off = this.#ahead === null ? Infinity : Math.abs(ahead - this.#ahead);
    this.#ahead = off > JUMP_S ? ahead : this.#ahead + SHARE * (ahead - this.#ahead);
  }

  now() {
    return this.#ahead === null ? 0 : performance.now() / 1000 + this.#ahead;
  }
}
