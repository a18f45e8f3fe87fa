/** Keeps the end of the conversation in view while it grows, until the reader scrolls up. */
const NEAR = 48; // px from the end that still count as there

/** `grows`: whether what is shown is read from its end; the first screen is read from its beginning. */
export class BottomKeeper {
  held = $state(true);
  constructor(private readonly grows: () => boolean) {}

  #top = 0;

  readonly stick = (): void => {
    this.held = true;
    this.#toEnd();
  };

  /** Stay where the reader is, until the end is gone to again. */
  readonly release = (): void => {
    this.held = false;
  };

  /** Attach to what grows. */
  readonly keep = (node: Element): (() => void) => {
    const observer = new ResizeObserver(() => {
      if (!this.grows()) return;
      if (this.held) this.#toEnd();
      else this.#look();
    });
    observer.observe(node);
    return () => observer.disconnect();
  };

  watch(): () => void {
    const look = (): void => this.#look();
    addEventListener("scroll", look, { passive: true });
    return () => removeEventListener("scroll", look);
  }

  // Growth below moves the end away without anyone scrolling: only a way up lets go.
  #look(): void {
    const { scrollTop, scrollHeight, clientHeight } = document.documentElement;
    if (scrollHeight - clientHeight - scrollTop < NEAR) this.held = true;
    else if (scrollTop < this.#top) this.held = false;
    this.#top = scrollTop;
  }

  #toEnd(): void {
    document.documentElement.scrollTop = document.documentElement.scrollHeight;
    this.#top = document.documentElement.scrollTop;
  }
}
