/**
 * What shows answers, which the first screen is made without. It is loaded at once where there are messages; else while
 * nothing else goes on, in parts that are each evaluated in a task of their own, so that one may go on writing.
 */
import { idle } from "../../lib/idle";

type View = typeof import("./Message.svelte").default;

const PARTS: readonly (() => Promise<unknown>)[] = [
  () => import("../../lib/text/markdown"),
  () => import("../../lib/text/sanitise"),
  () => import("./Message.svelte"),
];
const AGAIN_MS = 2_000;

class AnswerView {
  shown = $state.raw<View | null>(null); // null: it is not here yet
  #loading = false;
  #prepared = false;

  load(): void {
    if (this.#loading) return;
    this.#loading = true;
    import("./Message.svelte").then(
      ({ default: view }) => {
        this.shown = view;
        this.prepare();
      },
      () => setTimeout(() => ((this.#loading = false), this.load()), AGAIN_MS),
    );
  }

  /** Loads it for the first message that will be sent, and has the browser make ready what reads that. */
  prepare(): void {
    if (!this.#prepared) void this.#prepare().catch(() => (this.#prepared = false)); // where it cannot be loaded, `load` tries again
    this.#prepared = true;
  }

  async #prepare(): Promise<void> {
    const files = document.querySelector<HTMLTemplateElement>("#answers");
    if (files !== null) document.head.append(files.content); // all are fetched while the first is waited for
    for (const part of PARTS) {
      await idle();
      await part();
    }
    this.load();
    const { warmSteps } = await import("../../lib/text/warm");
    for (const step of warmSteps()) {
      await idle();
      step();
    }
  }
}

export const answerView = new AnswerView();
