/**
 * What an answer rests on: the passages that were found, and which sentence rests on which. The server counts
 * characters as Unicode code points and writes its labels into the text; here they are places in a JavaScript string.
 */
import type { CitationRef, CitationSources, SourceShown } from "../protocol";

export type Grounds = Omit<CitationSources, "type">;

/** The sentence `start` to `end` of the answer; from `from` on it is labels, which a mark stands in for. */
export interface Mark {
  readonly start: number;
  readonly from: number;
  readonly end: number;
  readonly support: CitationRef["support"];
  readonly citations: readonly SourceShown[];
  readonly beside?: boolean; // what is cited hardly answers the question
}

const ANSWERS = 0.5; // the probability from which on the server quotes a sentence as the answer

/** Where in `text` its code point number `points` is, counted on from `known`, a place that is known already. */
export function place(text: string, points: number, known: { points: number; at: number }): { points: number; at: number } {
  let { at } = known;
  for (let left = points - known.points; left > 0 && at < text.length; left -= 1) {
    at += (text.codePointAt(at) ?? 0) > 0xffff ? 2 : 1;
  }
  return { points, at };
}

/** The mark of a sentence. `text` is the answer so far, which has the whole sentence. */
export function markOf(text: string, ref: CitationRef): Mark {
  const start = place(text, ref.start, { points: 0, at: 0 });
  const end = place(text, ref.end, start).at;
  const labels =
    ref.support === "unsupported" ? " [unsupported]" : ref.citations.map((each) => ` [${each.label}]`).join("");
  const labelled = text.slice(start.at, end).endsWith(labels);
  const from = labelled ? end - labels.length : end;
  const beside = (ref.answers ?? 1) < ANSWERS;
  return { start: start.at, from, end, support: ref.support, citations: ref.citations, beside };
}

/** A passage in three pieces, the middle one being what is cited; all of it where nothing larger was found. */
export interface Passage {
  readonly before: string;
  readonly cited: string;
  readonly after: string;
}

export function passageOf(citation: SourceShown, sources: readonly SourceShown[]): Passage {
  const around = sources.find(
    (source) =>
      source.document === citation.document && source.start <= citation.start && citation.end <= source.end,
  );
  if (around === undefined) return { before: "", cited: citation.text, after: "" };
  const from = place(around.text, citation.start - around.start, { points: 0, at: 0 });
  const to = place(around.text, citation.end - around.start, from).at;
  return { before: around.text.slice(0, from.at), cited: around.text.slice(from.at, to), after: around.text.slice(to) };
}

/** What a reader calls a source: S3 is 3. */
export const numberOf = (label: string): string => /^S(\d+)$/.exec(label)?.[1] ?? label;
