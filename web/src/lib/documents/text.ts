/**
 * A document's text in parts that are loaded when they come near the window, so that a million characters open as fast
 * as a page. Places are counted in code points, as the server counts them. Pure.
 */
export const PART = 8000; // characters, about
const SEEK = 1000; // characters after a part's own in which a line's end is looked for

export const partsOf = (characters: number): number => Math.max(1, Math.ceil(characters / PART));
export const partAt = (place: number, characters: number): number =>
  Math.min(Math.floor(place / PART), partsOf(characters) - 1);

/** What of the text has to be loaded for a part. */
export const spanOf = (part: number, characters: number): { start: number; end: number } => ({
  start: part * PART,
  end: Math.min((part + 1) * PART + SEEK, characters),
});

export interface Part {
  readonly start: number;
  readonly text: readonly string[]; // one code point each
}

/** The part in what was loaded for it: from line's end to line's end, where there are any. */
export function cut(loaded: string, part: number, characters: number): Part {
  const points = [...loaded];
  const { start } = spanOf(part, characters);
  const from = part === 0 ? 0 : border(points, 0);
  const last = part === partsOf(characters) - 1;
  const to = last ? points.length : border(points, PART);
  return { start: start + from, text: points.slice(from, to) };
}

/** The place after the first line's end from `at` on, or else after the first space; `at` where neither is near. */
function border(points: readonly string[], at: number): number {
  const near = points.slice(at, at + SEEK);
  const line = near.findIndex((point) => point === "\n" || point === "\f");
  const end = line < 0 ? near.indexOf(" ") : line;
  return end < 0 ? at : at + end + 1;
}

/** A stretch of text: is it marked, and with which heading's rank (0: none)? */
export interface Block {
  readonly rank: number;
  readonly runs: readonly { readonly text: string; readonly marked: boolean }[];
}

const HEADING = /^(#{1,6})[ \t]+\S/;

/** A part as blocks, with what is in the span marked. `headings`: lines that begin with # are some. */
export function blocksOf({ start, text }: Part, span: { start: number; end: number } | null, headings: boolean): Block[] {
  const blocks: Block[] = [];
  let from = 0;
  let at = 0;
  const flush = (to: number, rank: number, skip = 0): void => {
    if (to > from) blocks.push({ rank, runs: runsOf(text, from + skip, to, start, span) });
    from = to;
  };
  while (at < text.length) {
    let end = at;
    while (end < text.length && text[end] !== "\n") end += 1;
    const next = Math.min(end + 1, text.length);
    const hashes = headings && text[at] === "#" ? HEADING.exec(text.slice(at, at + 16).join("")) : null;
    if (hashes?.[1] !== undefined) {
      flush(at, 0);
      flush(next, hashes[1].length, hashes[1].length + 1);
    }
    at = next;
  }
  flush(text.length, 0);
  return blocks;
}

function runsOf(
  text: readonly string[],
  from: number,
  to: number,
  start: number,
  span: { start: number; end: number } | null,
): Block["runs"] {
  const [a, b] = span === null ? [to, to] : [span.start - start, span.end - start].map((at) => Math.min(Math.max(at, from), to));
  const pieces = [
    { text: text.slice(from, a).join(""), marked: false },
    { text: text.slice(a, b).join(""), marked: true },
    { text: text.slice(b, to).join(""), marked: false },
  ];
  return pieces.filter((piece) => piece.text !== "");
}

/** The span of an address, as `?start=7&end=19` says it; null where it says none. */
export function spanIn(query: string): { start: number; end: number } | null {
  const given = new URLSearchParams(query);
  const [start, end] = ["start", "end"].map((name) => (/^\d{1,15}$/.test(given.get(name) ?? "") ? Number(given.get(name)) : NaN));
  return start !== undefined && end !== undefined && start < end ? { start, end } : null;
}

/** A text with the words of a query apart, whatever their case. */
export function wordsIn(text: string, query: string): { text: string; marked: boolean }[] {
  const all = [...new Set(query.toLowerCase().match(/[\p{L}\p{N}]{2,}/gu) ?? [])];
  if (all.length === 0) return [{ text, marked: false }];
  const cjk = /[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]/;
  const telling = all.filter((word) => word.length > 3 || /\p{N}/u.test(word) || cjk.test(word)); // "the" tells nothing
  const words = telling.length > 0 ? telling : all;
  const any = words.map((word) => (cjk.test(word) ? word : `(?<![\\p{L}\\p{N}])${word}(?![\\p{L}\\p{N}])`)).join("|");
  return text
    .split(new RegExp(`(${any})`, "giu"))
    .map((piece, i) => ({ text: piece, marked: i % 2 === 1 }))
    .filter((piece) => piece.text !== "");
}
