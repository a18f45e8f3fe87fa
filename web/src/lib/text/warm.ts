/**
 * Reads a little of each kind of markdown while nothing else goes on: a browser makes patterns ready at their first use,
 * and the first words of the first answer should not wait for all of them.
 */
import { MarkdownStream } from "./markdown";
import { sanitise } from "./sanitise";

const KINDS = ["a *b* **c** `d` [e](f) <g>", "# a", "- a\n- b", "1. a", "> a", "```a\nb\n```", "| a |\n|---|\n| b |", "$a$"];

export function warm(left: readonly string[] = KINDS): void {
  const [kind, ...others] = left;
  if (kind === undefined) return;
  idle(() => {
    new MarkdownStream(sanitise).update(kind, true);
    warm(others);
  });
}

function idle(work: () => void): void {
  if ("requestIdleCallback" in globalThis) requestIdleCallback(work);
  else setTimeout(work, 50); // Safari
}
