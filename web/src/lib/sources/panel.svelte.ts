/** Which passage is looked at beside the conversation: one at a time, whichever answer or call it stands behind. */
import { passageOf, type Passage } from "../answer/sources";
import type { SourceShown, ToolSource } from "../protocol";

export interface Looked {
  readonly title: string;
  readonly label: string | null; // as the answer names it
  readonly document: number | null;
  readonly page: number | null;
  readonly start: number; // code points of the document's text
  readonly end: number;
  readonly text: string; // what these characters were
  readonly passage: Passage; // what is known of what stands around them
  readonly whole: boolean; // the passage itself was asked for, so nothing in it stands out
  readonly score: number | null;
}

class Panel {
  looked = $state.raw<Looked | null>(null);

  /** A source of an answer, or what in it supports a sentence. */
  cite(citation: SourceShown, sources: readonly SourceShown[], whole: boolean): void {
    const passage = whole ? { before: "", cited: citation.text, after: "" } : passageOf(citation, sources);
    const document = citation.document > 0 ? citation.document : null; // a page of the web has a number below 0
    this.looked = { ...citation, document, passage, whole };
  }

  /** A source of a call's result; false where it is no place in a document. */
  consult(source: ToolSource): void {
    if (!isPlace(source)) return;
    const { title, page, start, end, text } = source;
    const passage = { before: "", cited: text, after: "" };
    const document = Number(source.document);
    this.looked = { title, label: null, document, page, start, end, text, passage, whole: false, score: null };
  }

  close(): void {
    this.looked = null;
  }
}

type Place = ToolSource & { text: string; start: number; end: number };

/** Is a source a passage of one of the user's documents? */
export const isPlace = (source: ToolSource): source is Place =>
  /^\d{1,15}$/.test(`${source.document ?? ""}`) && source.start !== null && source.end !== null && source.text !== null;

export const panel = new Panel();
