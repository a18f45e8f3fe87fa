/**
 * Colours what was guessed in a rendered block, by the browser's own highlights: nothing of its HTML is changed. The
 * characters are those of the source; they are found again in the rendered text, in order. What is not found there, say
 * an entity, is not coloured, and neither is anything where the browser has no highlights.
 */
import type { Guess } from "../answer/guessed";

const NAME = "guessed"; // of the highlight, in app.css
const OWN = "figcaption, .formula, .cite"; // text that the page, not the model, put there

let shared: Highlight | null = null;

function highlight(): Highlight | null {
  if (typeof Highlight === "undefined") return null;
  if (shared === null) CSS.highlights.set(NAME, (shared = new Highlight()));
  return shared;
}

/** Where in `source` each of `texts` begins, which follow each other there; null for one that is not found. */
export function placesOf(texts: readonly string[], source: string): (number | null)[] {
  let at = 0;
  return texts.map((text) => {
    const found = text.trim() === "" ? -1 : source.indexOf(text, at);
    if (found < 0) return null;
    at = found + text.length;
    return found;
  });
}

interface Line {
  readonly node: Text;
  readonly at: number;
  readonly text: string;
}

/** The lines of all text nodes: indentation and marks of quotes are in the source alone. */
function linesOf(root: HTMLElement): Line[] {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const lines: Line[] = [];
  while (walker.nextNode() !== null) {
    const node = walker.currentNode as Text;
    if (node.parentElement?.closest(OWN)) continue;
    let at = 0;
    for (const text of node.data.split("\n")) {
      lines.push({ node, at, text });
      at += text.length + 1;
    }
  }
  return lines;
}

/** Colours `guesses`, places in `source`, under `root`, now and whenever something there is put in anew. */
export function colour(root: HTMLElement, source: string, guesses: readonly Guess[]): (() => void) | undefined {
  const ranges = highlight();
  if (ranges === null || guesses.length === 0) return undefined;
  let painted: Range[] = [];
  const clear = (): void => {
    for (const range of painted) ranges.delete(range);
    painted = [];
  };
  const paint = (): void => {
    clear();
    const lines = linesOf(root);
    const places = placesOf(lines.map(({ text }) => text), source);
    lines.forEach(({ node, at, text }, i) => {
      const start = places[i];
      if (typeof start !== "number") return;
      for (const [from, to] of guesses) {
        if (to <= start || start + text.length <= from) continue;
        const range = new Range();
        range.setStart(node, at + Math.max(from - start, 0));
        range.setEnd(node, at + Math.min(to - start, text.length));
        painted.push(range);
        ranges.add(range);
      }
    });
  };
  paint();
  const observer = new MutationObserver(paint); // code gets its colours, and formulas their form, when they are there
  observer.observe(root, { childList: true, subtree: true });
  return () => {
    observer.disconnect();
    clear();
  };
}
