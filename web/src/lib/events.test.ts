import { afterEach, expect, test, vi } from "vitest";
import { ApiError } from "./api";
import { follow, SseParser, type Frame, type Link } from "./events";
import type { RunEvent } from "./protocol";

const LOG: RunEvent[] = [
  { type: "run.started", model: "m", started_at: 1, max_tokens: 9, strategy: null },
  { type: "answer.delta", text: "one ", guessed: [] },
  { type: "answer.delta", text: "two — ünïcode", guessed: [] },
  { type: "answer.done", text: "one two — ünïcode", finish_reason: "stop", outcome: "answered" },
  { type: "run.failed", code: "x", message: "m", retryable: true },
];
const sse = (from: number, to: number): string =>
  LOG.slice(from, to)
    .map((event, i) => `id: ${from + i + 1}\r\nevent: ${event.type}\r\ndata: ${JSON.stringify(event)}\r\n\r\n`)
    .join(": ping\r\n\r\n");

test.each(["\n", "\r\n", "\r"])("frames are the same wherever the stream is split (line ends %j)", (end) => {
  const text = sse(0, LOG.length).replaceAll("\r\n", end) + `data: a${end}data: b${end}${end}x`;
  const expected = new SseParser().push(text);
  expect(expected).toHaveLength(LOG.length + 1);
  expect(expected.at(-1)?.data).toBe("a\nb");
  for (let cut = 0; cut <= text.length; cut += 1) {
    const parser = new SseParser();
    const frames: Frame[] = [...parser.push(text.slice(0, cut)), ...parser.push(text.slice(cut))];
    expect(frames, `cut at ${cut}`).toEqual(expected);
  }
});

function answers(...replies: (() => Response | Promise<Response>)[]): string[] {
  const asked: string[] = [];
  vi.stubGlobal("fetch", async (path: string, { signal }: { signal: AbortSignal }) => {
    asked.push(path);
    const response = await (replies[asked.length - 1] ?? replies.at(-1))?.();
    // As a browser does: who aborts has no body to read any more.
    const body = response?.body?.pipeThrough(new TransformStream(), { signal });
    return body === undefined ? response : new Response(body, response);
  });
  return asked;
}

interface Read {
  seqs: number[];
  links: Link[];
}

async function read(signal = new AbortController().signal, into: Read = { seqs: [], links: [] }): Promise<Read> {
  await follow("r", 0, { onEvent: (seq) => into.seqs.push(seq), onLink: (link) => into.links.push(link) }, signal);
  return into;
}

afterEach(() => {
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

async function withoutWaiting<T>(work: Promise<T>): Promise<T> {
  await vi.runAllTimersAsync();
  return work;
}

/** What `follow` needs of a browser: clocks, a page that can be hidden, and locks that other tabs may hold. */
function browser(taken = 0): EventTarget & { hidden: boolean } {
  vi.useFakeTimers();
  const [page, view] = [Object.assign(new EventTarget(), { hidden: false }), new EventTarget()];
  const held = new Set(Array.from({ length: taken }, (_, i) => `ponder.stream.${i}`));
  const request = async (name: string, _: object, use: (lock: object | null) => Promise<void> | null) => {
    if (held.has(name)) return use(null);
    held.add(name);
    await use({ name });
    held.delete(name);
  };
  vi.stubGlobal("document", page);
  vi.stubGlobal("navigator", { locks: { request } });
  vi.stubGlobal("addEventListener", view.addEventListener.bind(view));
  vi.stubGlobal("removeEventListener", view.removeEventListener.bind(view));
  return page;
}

function show(page: EventTarget & { hidden: boolean }, shown: boolean): void {
  page.hidden = !shown;
  page.dispatchEvent(new Event("visibilitychange"));
}

/** A response that says so much and stays open; `cancelled` tells whether its reader left. */
function open(text: string): { reply: () => Response; cancelled: () => boolean } {
  let cancelled = false;
  const body = new ReadableStream<Uint8Array>({
    start: (out) => out.enqueue(new TextEncoder().encode(text)),
    cancel: () => void (cancelled = true),
  });
  return { reply: () => new Response(body), cancelled: () => cancelled };
}

test("a reader that was cut off asks for what comes after its last event, and hands on each once", async () => {
  browser();
  const asked = answers(
    () => new Response(sse(0, 2)),
    () => Promise.reject(new TypeError("network")),
    () => new Response("", { status: 503 }),
    () => new Response(sse(0, LOG.length)), // a server that repeats itself
  );
  const { seqs, links } = await withoutWaiting(read());
  expect(seqs).toEqual([1, 2, 3, 4, 5]);
  expect(asked.map((path) => path.split("?")[1])).toEqual(["after=0", "after=2", "after=2", "after=2"]);
  expect(links.map(({ state }) => state)).toEqual(["lost", "lost", "lost", "live"]);
});

test("a run that the server does not know is an error, not a reason to try again", async () => {
  browser();
  const asked = answers(() => new Response("{}", { status: 404 }));
  await expect(read()).rejects.toThrow(ApiError);
  expect(asked).toHaveLength(1);
});

test("a wait for the next attempt ends when one says so", async () => {
  browser();
  const asked = answers(
    () => Promise.reject(new TypeError("network")),
    () => Promise.reject(new TypeError("network")),
    () => new Response(sse(0, LOG.length)),
  );
  const into: Read = { seqs: [], links: [] };
  const reading = read(undefined, into);
  for (const attempts of [1, 2]) {
    await vi.advanceTimersByTimeAsync(0);
    expect(asked).toHaveLength(attempts);
    const link = into.links.at(-1);
    expect(link?.state === "lost" && link.retryAt > Date.now()).toBe(true);
    if (link?.state === "lost") link.retry();
  }
  await vi.advanceTimersByTimeAsync(0);
  expect((await reading).seqs).toEqual([1, 2, 3, 4, 5]);
});

test("a page that is hidden lets its stream go, and goes on where it was when it is shown", async () => {
  const page = browser();
  const first = open(sse(0, 2));
  const asked = answers(first.reply, () => new Response(sse(2, LOG.length)));
  const reading = read();
  await vi.advanceTimersByTimeAsync(1000);
  show(page, false);
  await vi.advanceTimersByTimeAsync(3000);
  expect(first.cancelled()).toBe(false);
  await vi.advanceTimersByTimeAsync(60_000);
  expect(first.cancelled()).toBe(true);
  expect(asked).toHaveLength(1);
  show(page, true);
  const { seqs, links } = await withoutWaiting(reading);
  expect(seqs).toEqual([1, 2, 3, 4, 5]);
  expect(asked[1]).toContain("after=2");
  expect(links).toEqual([]); // nothing was lost
});

test("a machine that slept reads on over a new connection at once", async () => {
  browser();
  const first = open(sse(0, 2));
  const asked = answers(first.reply, () => new Response(sse(2, LOG.length)));
  const reading = read();
  await vi.advanceTimersByTimeAsync(1000);
  vi.setSystemTime(Date.now() + 3_600_000);
  await vi.advanceTimersByTimeAsync(2000);
  expect(first.cancelled()).toBe(true);
  expect((await reading).seqs).toEqual([1, 2, 3, 4, 5]);
  expect(asked[1]).toContain("after=2");
});

test("where all places are taken it reads in short requests, until there is one", async () => {
  browser(4);
  const asked = answers(
    () => new Response(sse(0, 2)),
    () => new Response(": nothing new\n\n"),
    () => new Response(sse(2, LOG.length)),
  );
  const { seqs, links } = await withoutWaiting(read());
  expect(seqs).toEqual([1, 2, 3, 4, 5]);
  expect(asked.map((path) => path.split("?")[1])).toEqual([
    "after=0&follow=false",
    "after=2&follow=false",
    "after=2&follow=false",
  ]);
  expect(links).toEqual([]);
});

test("a reader that leaves ends quietly", async () => {
  browser();
  const leaving = new AbortController();
  answers(() => new Response(sse(0, 1)));
  const reading = read(leaving.signal);
  leaving.abort();
  await withoutWaiting(reading);
});
