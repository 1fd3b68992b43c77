// The server's wall clock: in every response, and extrapolated between responses.

const JUMP_S = 1; // a larger difference means another clock
const SHARE = 0.1; // weight of a new difference, so that slow responses do not make the timeline shake

export class Clock {
  #ahead = null;

  synchronize(serverNow) {
    const ahead = serverNow - performance.now() / 1000;
    const off = this.#ahead === null ? Infinity : Math.abs(ahead - this.#ahead);
    this.#ahead = off > JUMP_S ? ahead : this.#ahead + SHARE * (ahead - this.#ahead);
  }

  now() {
    return this.#ahead === null ? 0 : performance.now() / 1000 + this.#ahead;
  }
}
