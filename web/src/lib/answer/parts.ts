/**
 * The course of an answer: thinking, text and calls in the order in which they came. Knows nothing of what a call
 * gives; it only names calls by their ids, and text by where in the answer it begins.
 */
import type { ThinkingDone } from "../protocol";

/** A Wait: before character `at` of the thinking's text the model would have stopped. */
export interface Wait {
  readonly at: number;
  readonly number: number;
  readonly of: number;
}

export interface Thought {
  readonly kind: "thinking";
  readonly open: boolean;
  readonly startedAt: number | null; // seconds since the epoch, the server's clock
  readonly text: string; // empty where the server does not show it
  readonly waits: readonly Wait[];
  readonly done: { readonly duration_s: number; readonly tokens: number | null } | null;
}

/** The answer from character `start` on, up to the next such part. */
export interface Text {
  readonly kind: "text";
  readonly start: number;
}

export interface Calls {
  readonly kind: "calls";
  readonly ids: readonly string[];
}

export type Part = Thought | Text | Calls;
type Parts = readonly Part[];

const NEW: Thought = { kind: "thinking", open: true, startedAt: null, text: "", waits: [], done: null };

const withLast = (parts: Parts, last: Part): Parts => [...parts.slice(0, -1), last];

/** The thinking under way, begun now if there is none. */
function thinking(parts: Parts): { before: Parts; thought: Thought } {
  const last = parts.at(-1);
  return last?.kind === "thinking" && last.open
    ? { before: parts.slice(0, -1), thought: last }
    : { before: parts, thought: NEW };
}

/** A Wait may come first: it is of the thinking that starts now. */
export function thinkingStarted(parts: Parts, startedAt: number): Parts {
  const { before, thought } = thinking(parts);
  return thought.startedAt === null
    ? [...closed(before), { ...thought, startedAt }]
    : [...closed(parts), { ...NEW, startedAt }];
}

export function thinkingGrew(parts: Parts, text: string): Parts {
  const { before, thought } = thinking(parts);
  return [...before, { ...thought, text: thought.text + text }];
}

export function waited(parts: Parts, number: number, of: number): Parts {
  const { before, thought } = thinking(parts);
  return [...before, { ...thought, waits: [...thought.waits, { at: thought.text.length, number, of }] }];
}

export function thinkingDone(parts: Parts, { duration_s, tokens }: Omit<ThinkingDone, "type">): Parts {
  const { before, thought } = thinking(parts);
  return [...before, { ...thought, open: false, done: { duration_s, tokens } }];
}

/** `start` is where in the answer the text that now comes begins. */
export function answerGrew(parts: Parts, start: number): Parts {
  return parts.at(-1)?.kind === "text" ? parts : [...closed(parts), { kind: "text", start }];
}

export function called(parts: Parts, id: string): Parts {
  const last = parts.at(-1);
  if (last?.kind !== "calls") return [...closed(parts), { kind: "calls", ids: [id] }];
  return last.ids.includes(id) ? parts : withLast(parts, { ...last, ids: [...last.ids, id] });
}

/** No thinking outlives what comes after it, nor its run. */
export function closed(parts: Parts): Parts {
  const last = parts.at(-1);
  return last?.kind === "thinking" && last.open ? withLast(parts, { ...last, open: false }) : parts;
}

/** The text of each part; empty for those that are none. */
export function textsOf(parts: Parts, text: string): string[] {
  return parts.map((part, i) => {
    if (part.kind !== "text") return "";
    const next = parts.slice(i + 1).find((later) => later.kind === "text");
    return text.slice(part.start, next?.start);
  });
}
