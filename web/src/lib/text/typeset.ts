/** Sets the formulas in a text. KaTeX, its style and its fonts are fetched when the first formula asks for them. */
import type katex from "katex";

const LONGEST = 5_000; // characters; setting more would hold the page up
const KEPT = 300; // formulas; a block that grows is rendered again and again

let core: typeof katex | null = null;
let loading: Promise<void> | null = null;
const set = new Map<string, HTMLElement | null>(); // by source; null: it is not TeX

async function load(): Promise<void> {
  const [{ default: loaded }] = await Promise.all([import("katex"), import("katex/dist/katex.min.css")]);
  await import("katex/contrib/copy-tex"); // what is copied is the source
  core = loaded;
}

/** Set every formula under `root`: at once when KaTeX is here, else when it has come. What is not TeX stays as it is. */
export function typeset(root: HTMLElement): void {
  const places = root.querySelectorAll<HTMLElement>(".formula:not(.open, .set)");
  if (places.length === 0) return;
  const paint = (): void => places.forEach(put);
  if (core !== null) return paint();
  loading ??= load().catch((error: unknown) => {
    loading = null; // offline: the next formula may try again
    throw error;
  });
  loading.then(paint, () => undefined);
}

function put(place: HTMLElement): void {
  const display = place.classList.contains("display");
  const tex = place.textContent;
  const made = tex.length > LONGEST ? null : formula(tex, display);
  if (made === null) return;
  place.replaceChildren(made.cloneNode(true));
  place.classList.add("set");
}

function formula(tex: string, display: boolean): HTMLElement | null {
  const key = `${display ? "d" : "i"}${tex}`;
  let made = set.get(key);
  if (made === undefined) {
    made = document.createElement("span");
    try {
      core?.render(tex, made, { displayMode: display, throwOnError: true, strict: "ignore", trust: false, maxSize: 30 });
    } catch {
      made = null;
    }
    if (set.size >= KEPT) set.clear();
    set.set(key, made);
  }
  return made;
}
