/**
 * The first screen as index.html has it, until the program is there: what it says of the model, until the server is
 * heard, and what was written meanwhile.
 */
const found = document.documentElement.dataset.prerendered === undefined ? null : document.querySelector<HTMLElement>(".prerendered");
const form = found?.querySelector<HTMLElement>(".early");

/** Words that were written before there was a composer for them. */
export interface Early {
  readonly words: string;
  readonly sent: boolean; // Enter was pressed
  readonly selection: readonly [number, number] | null; // where one is writing; null: elsewhere
}

let early: Early | null = null;

function written(): Early | null {
  const box = [...(form?.querySelectorAll("textarea") ?? [])].find((each) => each.value !== "" || each === document.activeElement);
  if (box === undefined) return null;
  const selection = box === document.activeElement ? ([box.selectionStart, box.selectionEnd] as const) : null;
  return { words: box.value, sent: form?.dataset.sent !== undefined, selection };
}

export const prerendered = {
  about: found?.querySelector(".about")?.textContent ?? "",

  /** Resolves when no character is half written by an input method, which would be lost with its field. */
  async settled(): Promise<void> {
    while (form?.dataset.composing === "yes") {
      await new Promise((resume) => form.addEventListener("compositionend", resume, { once: true }));
    }
  },

  /** Makes room for the page, which takes what was written in the same task. */
  remove(): void {
    early = written();
    document.querySelector(".prerendered")?.remove();
  },

  /** What was written, once. */
  take(): Early | null {
    const taken = early;
    early = null;
    return taken;
  },
};
