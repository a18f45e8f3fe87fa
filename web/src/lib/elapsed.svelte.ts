/** Seconds that pass while something lasts. Knows nothing of what. */
export class Ticker {
  seconds = $state(0);

  /** Count with `read`, several times a second, until the function that comes back is called. */
  run(read: () => number, everyMs = 100): () => void {
    const tick = (): void => void (this.seconds = Math.max(0, read()));
    tick();
    const timer = setInterval(tick, everyMs);
    return () => clearInterval(timer);
  }
}
