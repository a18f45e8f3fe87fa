/**
 * Work that changes the page, at most once an animation frame. Where a frame with it takes long, the next ones go
 * without it for as long again: a slow machine shows the same in larger steps, and still scrolls and takes what is typed.
 */
export class Frames {
  #frame = 0;
  #restUntil = 0; // ms, as performance.now()

  /** Do it at the next frame that is free. Asking again before that changes nothing. */
  ask(work: () => void): void {
    this.#frame ||= requestAnimationFrame(() => this.#at(work));
  }

  /** What was asked for is not done. */
  cancel(): void {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
  }

  #at(work: () => void): void {
    this.#frame = 0;
    const began = performance.now();
    if (began < this.#restUntil) return this.ask(work);
    work();
    // A timer runs when the frame has been laid out and painted.
    setTimeout(() => {
      const now = performance.now();
      this.#restUntil = now + (now - began);
    });
  }
}
