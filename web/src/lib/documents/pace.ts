/** How fast something goes, and so how long what is left of it takes. Knows nothing of what is counted. */
const SURE_S = 1; // of work, before which a guess is none

export class Pace {
  #done = 0;
  #seconds = 0;

  /** So much was done in so many seconds of work. */
  add(done: number, seconds: number): void {
    this.#done += done;
    this.#seconds += seconds;
  }

  /** Seconds, or null as long as too little is known. */
  left(amount: number): number | null {
    return this.#seconds < SURE_S || this.#done <= 0 ? null : (amount * this.#seconds) / this.#done;
  }
}
