/**
 * The server's clock as seen from here, so that elapsed times survive a reload and a wrong local clock.
 *
 * Every response bounds the offset from both sides. When the bounds allow an offset of zero the clocks are taken to
 * agree, which spares the half second of doubt that a Date header in whole seconds leaves.
 */
export class ServerClock {
  #low = -Infinity;
  #high = Infinity;

  constructor(private readonly localNow: () => number = () => Date.now() / 1000) {}

  /** A response with this Date header was asked for at `sent` and came at `received` (local seconds). */
  observe(date: string | null, sent: number, received: number): void {
    const stamp = date === null ? NaN : Date.parse(date) / 1000;
    if (!Number.isFinite(stamp)) return;
    const [low, high] = [stamp - received, stamp + 1 - sent]; // the header drops the fraction of its second
    const apart = low > this.#high || high < this.#low; // one of the clocks was set: begin anew
    this.#low = apart ? low : Math.max(this.#low, low);
    this.#high = apart ? high : Math.min(this.#high, high);
  }

  /** Seconds since the epoch on the server. */
  now(): number {
    const agrees = this.#low <= 0 && this.#high >= 0;
    return this.localNow() + (agrees ? 0 : (this.#low + this.#high) / 2);
  }
}

export const clock = new ServerClock();
