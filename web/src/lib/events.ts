/**
 * Reads the event log of a run until its terminal event, whatever the connection does meanwhile.
 *
 * `fetch` rather than `EventSource`: it sees status codes, sets its own back-off, and says `after=` at each attempt.
 * Events are handed on by sequence number, each once and in order.
 */
import { ApiError, eventsPath, request } from "./api";
import { TERMINAL, type RunEvent } from "./protocol";

export interface Frame {
  id: string;
  data: string;
}

/** Server-sent events out of text that comes in pieces of any size. */
export class SseParser {
  #pending = "";
  #id = "";
  #data: string[] = [];

  push(text: string): Frame[] {
    const frames: Frame[] = [];
    this.#pending += text;
    // A lone CR at the very end may be the first half of CRLF: it waits for what comes next.
    const lines = this.#pending.split(/\r\n|\n|\r(?=[^\n])/);
    this.#pending = lines.pop() ?? "";
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length > 0) frames.push({ id: this.#id, data: this.#data.join("\n") });
        this.#data = [];
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "id") this.#id = value;
      else if (field === "data") this.#data.push(value);
    }
    return frames;
  }
}

export type Link = { state: "live" } | { state: "lost"; retryAt: number };

export interface Follower {
  onEvent(seq: number, event: RunEvent): void;
  onLink(link: Link): void;
}

const FIRST_DELAY_MS = 400;
const LONGEST_DELAY_MS = 10_000;
const SILENCE_MS = 40_000; // the server pings every 15 s

/**
 * Follow a run from after `after`. Resolves after the terminal event or when `signal` aborts.
 * Throws ApiError when the server answers that it does not know the run, or refuses it for good.
 */
export async function follow(runId: string, after: number, follower: Follower, signal: AbortSignal): Promise<void> {
  let seen = after;
  let failures = 0;
  while (!signal.aborted) {
    for await (const frame of frames(eventsPath(runId, seen), signal)) {
      if (frame === "open") {
        if (failures > 0) follower.onLink({ state: "live" });
        continue;
      }
      failures = 0;
      if (frame === "bytes") continue;
      const seq = Number(frame.id);
      if (!(seq > seen)) continue;
      const event = JSON.parse(frame.data) as RunEvent;
      seen = seq;
      follower.onEvent(seq, event);
      if (TERMINAL.has(event.type)) return;
    }
    if (signal.aborted) return;
    const delay = Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** failures) * (0.75 + Math.random() / 2);
    failures += 1;
    follower.onLink({ state: "lost", retryAt: Date.now() + delay });
    await pause(delay, signal);
  }
}

/** What one connection brings, until it ends or fails. A connection silent for too long counts as failed. */
async function* frames(path: string, signal: AbortSignal): AsyncGenerator<Frame | "open" | "bytes"> {
  const connection = new AbortController();
  const abort = (): void => connection.abort();
  signal.addEventListener("abort", abort);
  let silence = setTimeout(abort, SILENCE_MS);
  try {
    const response = await connect(path, connection.signal);
    const reader = response?.body?.getReader();
    if (reader === undefined) return;
    yield "open";
    const parser = new SseParser();
    const decoder = new TextDecoder();
    for (;;) {
      const { done, value } = await reader.read().catch(() => ({ done: true, value: undefined }));
      if (done) return;
      clearTimeout(silence);
      silence = setTimeout(abort, SILENCE_MS);
      yield "bytes";
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    clearTimeout(silence);
    signal.removeEventListener("abort", abort);
    connection.abort();
  }
}

/** The response, or null where another attempt may do better. */
async function connect(path: string, signal: AbortSignal): Promise<Response | null> {
  try {
    return await request(path, { signal, headers: { accept: "text/event-stream" } });
  } catch (error) {
    const forGood = error instanceof ApiError && error.status >= 400 && error.status < 500 && error.status !== 429;
    if (forGood) throw error;
    return null;
  }
}

/** Waits, but no longer than until the browser is back online or the reader has left. */
function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const end = (): void => {
      clearTimeout(timer);
      removeEventListener("online", end);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    addEventListener("online", end);
    signal.addEventListener("abort", end);
  });
}
