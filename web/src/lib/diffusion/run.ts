/**
 * A text filled by masked diffusion: what is asked for, the passes as they are streamed, and the text after each of
 * them. Knows nothing of how it is drawn.
 */
import { ApiError, request } from "../api";
import { SseParser } from "../events";

/** A masked-diffusion model, as `GET /api/server` describes it. */
export interface DiffusionModel {
  model: string;
  mask: string; // the character of a masked place
  ends: string[]; // tokens that end an answer
  block_sizes: number[];
  answer_tokens: number;
  max_tokens: number;
}

/** A request. Either so many places a pass, or all that are likely enough. */
export interface Filling {
  text: string;
  block_size: number;
  tokens_per_step?: number;
  threshold?: number;
  temperature?: number;
  seed?: number;
}

export interface Pass {
  type: "pass";
  positions: number[];
  tokens: string[];
  confidences: number[]; // probabilities that the model gave them
}

export interface Start {
  type: "start";
  places: (string | null)[]; // null: masked
}

export interface End {
  type: "end";
  finish_reason: "stop" | "length" | "deadline";
  length: number; // places that stand
}

export type DiffusionEvent = Start | Pass | End;

/** A text in the making, or made. */
export interface Run {
  readonly places: readonly (string | null)[];
  readonly passes: readonly Pass[];
  readonly end: End | null;
}

/** Text that was given, a masked place, or a place that a pass filled, counted from 1. */
export type Cell =
  | { kind: "given"; text: string }
  | { kind: "masked" }
  | { kind: "filled"; text: string; confidence: number; pass: number };

/** Reads the events of a run. Throws ApiError where it is refused or fails; leaving it ends the run. */
export async function* filled(wanted: Filling, signal: AbortSignal): AsyncGenerator<DiffusionEvent> {
  const headers = { "content-type": "application/json" };
  const reply = await request("/api/diffusion", { method: "POST", headers, body: JSON.stringify(wanted), signal });
  if (reply.body === null) return;
  const parser = new SseParser();
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError(0, "unreachable", "");
      for (const { data } of parser.push(value)) {
        if (data === "[DONE]") return;
        const event = JSON.parse(data) as DiffusionEvent | { error: { code: string; message: string } };
        if ("error" in event) throw new ApiError(500, event.error.code, event.error.message);
        yield event;
      }
    }
  } finally {
    void reader.cancel().catch(() => undefined);
  }
}

/** The run with one event more. */
export function fold(run: Run | null, event: DiffusionEvent): Run {
  if (event.type === "start" || run === null)
    return { places: event.type === "start" ? event.places : [], passes: [], end: null };
  return event.type === "pass" ? { ...run, passes: [...run.passes, event] } : { ...run, end: event };
}

/** The text after `at` of its passes. What was given is joined; after the last pass an answer is cut at its end. */
export function cellsAt({ places, passes, end }: Run, at: number): Cell[] {
  const by = new Map<number, Cell>();
  passes.slice(0, at).forEach(({ positions, tokens, confidences }, i) => {
    positions.forEach((position, j) =>
      by.set(position, { kind: "filled", text: tokens[j] ?? "", confidence: confidences[j] ?? 0, pass: i + 1 }),
    );
  });
  const cells: Cell[] = [];
  const length = end !== null && at >= passes.length ? end.length : places.length;
  for (const [position, text] of places.slice(0, length).entries()) {
    const last = cells.at(-1);
    if (text === null) cells.push(by.get(position) ?? { kind: "masked" });
    else if (last?.kind === "given") last.text += text;
    else cells.push({ kind: "given", text });
  }
  return cells;
}

/** The cells as a text. `hides`: tokens that are no part of it. */
export function textOf(cells: readonly Cell[], mask: string, hides: readonly string[]): string {
  return cells.map((cell) => (cell.kind === "masked" ? mask : hides.includes(cell.text) ? "" : cell.text)).join("");
}

/** A token so that it is seen: what ends a text, white space, and what has no shape. */
export function visible(token: string, ends: readonly string[]): string {
  if (ends.includes(token)) return "∎";
  return token.replace(/\n/g, "↵").replace(/\s/g, "\u00a0").replace(/\p{C}/gu, "\ufffd");
}

/** Places that a pass filled, in the mean; null before the first. */
export function perPass({ passes }: Run): number | null {
  const all = passes.reduce((sum, { positions }) => sum + positions.length, 0);
  return passes.length === 0 ? null : all / passes.length;
}
