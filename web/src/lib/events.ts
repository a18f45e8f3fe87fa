/**
 * Reads the event log of a run until its terminal event, whatever the connection does meanwhile.
 *
 * `fetch` rather than `EventSource`: it sees status codes, sets its own back-off, and says `after=` at each attempt.
 * Events are handed on by sequence number, each once and in order. So a stream may be let go at any time: a page that
 * nobody sees has none, and one for which there is no place reads in short requests.
 */
import { ApiError, eventsPath, request } from "./api";
import { onHidden, onWake, shown } from "./awake";
import { takePlace, type Place } from "./places";
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

export type Link = { state: "live" } | { state: "lost"; retryAt: number; retry: () => void };

export interface Follower {
  onEvent(seq: number, event: RunEvent): void;
  onLink(link: Link): void;
}

const FIRST_DELAY_MS = 400;
const LONGEST_DELAY_MS = 10_000;
const SILENCE_MS = 40_000; // the server pings every 15 s
const HIDDEN_MS = 5_000;
const BETWEEN_READS_MS = 700; // where there is no place for a stream

/**
 * Follow a run from after `after`. Resolves after the terminal event or when `signal` aborts.
 * Throws ApiError when the server answers that it does not know the run, or refuses it for good.
 */
export async function follow(runId: string, after: number, follower: Follower, signal: AbortSignal): Promise<void> {
  let seen = after;
  let failures = 0;
  while (!signal.aborted) {
    await shown(signal);
    const place = await takePlace();
    const stay = new Stay(place, signal);
    let opened = false;
    try {
      for await (const frame of frames(eventsPath(runId, seen, place !== null), stay.signal)) {
        if (frame === "open") {
          opened = true;
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
    } finally {
      stay.end();
      place?.free();
    }
    if (stay.left) continue;
    if (opened && place === null) {
      await new Pause(BETWEEN_READS_MS, signal).over;
      continue;
    }
    const delay = Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** failures) * (0.75 + Math.random() / 2);
    failures += 1;
    const pause = new Pause(delay, signal);
    follower.onLink({ state: "lost", retryAt: Date.now() + delay, retry: pause.end });
    await pause.over;
  }
}

/** How long one connection is kept: until nobody sees the page, others have a turn, or it may have died unnoticed. */
class Stay {
  readonly #leaving = new AbortController();
  readonly #ends: (() => void)[];

  constructor(place: Place | null, reader: AbortSignal) {
    const leave = (): void => this.#leaving.abort();
    this.#ends = [onHidden(HIDDEN_MS, leave), onWake(leave)];
    reader.addEventListener("abort", leave);
    this.#ends.push(() => reader.removeEventListener("abort", leave));
    if (place !== null && Number.isFinite(place.forMs)) {
      const timer = setTimeout(leave, place.forMs);
      this.#ends.push(() => clearTimeout(timer));
    }
    if (reader.aborted) leave();
  }

  get signal(): AbortSignal {
    return this.#leaving.signal;
  }

  /** Was the connection let go, rather than lost? */
  get left(): boolean {
    return this.#leaving.signal.aborted;
  }

  end(): void {
    for (const end of this.#ends) end();
  }
}

/** A wait that ends early when somebody says so, the machine wakes up, or the reader leaves. */
class Pause {
  readonly over: Promise<void>;
  end: () => void = () => undefined;

  constructor(ms: number, reader: AbortSignal) {
    this.over = new Promise((resolve) => {
      const end = (): void => {
        clearTimeout(timer);
        deaf();
        reader.removeEventListener("abort", end);
        resolve();
      };
      const timer = setTimeout(end, ms);
      const deaf = onWake(end);
      reader.addEventListener("abort", end);
      if (reader.aborted) end();
      this.end = end;
    });
  }
}

/** What one connection brings, until it ends or fails. A connection silent for too long counts as failed. */
async function* frames(path: string, signal: AbortSignal): AsyncGenerator<Frame | "open" | "bytes"> {
  if (signal.aborted) return;
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
