/** What is asked for again and again while somebody looks. Knows nothing of what it is. */
import { ApiError } from "../api";

export class Watched<T> {
  value = $state.raw<T | null>(null); // the newest
  refused = $state.raw<ApiError | null>(null); // why there is no newer one
  #asking = false;

  constructor(private readonly load: () => Promise<T>) {}

  /** Ask now. What comes of two at once is one. */
  async refresh(): Promise<void> {
    if (this.#asking) return;
    this.#asking = true;
    try {
      this.value = await this.load();
      this.refused = null;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.refused = error;
    } finally {
      this.#asking = false;
    }
  }

  /** Ask at once and then at intervals while the page is seen, until the function that comes back is called. */
  watch(everyMs: number): () => void {
    let timer = 0;
    const look = (): void => {
      clearInterval(timer);
      if (document.hidden) return;
      void this.refresh();
      timer = setInterval(() => void this.refresh(), everyMs);
    };
    document.addEventListener("visibilitychange", look);
    look();
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", look);
    };
  }
}
