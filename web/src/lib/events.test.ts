import { afterEach, expect, test, vi } from "vitest";
import { ApiError } from "./api";
import { follow, SseParser, type Frame } from "./events";
import type { RunEvent } from "./protocol";

const LOG: RunEvent[] = [
  { type: "run.started", model: "m", started_at: 1, max_tokens: 9 },
  { type: "answer.delta", text: "one " },
  { type: "answer.delta", text: "two — ünïcode" },
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
  vi.stubGlobal("fetch", (path: string) => {
    asked.push(path);
    return Promise.resolve((replies[asked.length - 1] ?? replies.at(-1))?.());
  });
  return asked;
}

async function read(signal = new AbortController().signal): Promise<{ seqs: number[]; links: string[] }> {
  const seqs: number[] = [];
  const links: string[] = [];
  await follow("r", 0, { onEvent: (seq) => seqs.push(seq), onLink: ({ state }) => links.push(state) }, signal);
  return { seqs, links };
}

afterEach(() => {
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

async function withoutWaiting<T>(work: Promise<T>): Promise<T> {
  await vi.runAllTimersAsync();
  return work;
}

function browser(): void {
  vi.useFakeTimers();
  vi.stubGlobal("addEventListener", () => undefined);
  vi.stubGlobal("removeEventListener", () => undefined);
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
  expect(links).toEqual(["lost", "lost", "lost", "live"]);
});

test("a run that the server does not know is an error, not a reason to try again", async () => {
  browser();
  const asked = answers(() => new Response("{}", { status: 404 }));
  await expect(read()).rejects.toThrow(ApiError);
  expect(asked).toHaveLength(1);
});

test("a reader that leaves ends quietly", async () => {
  browser();
  const leaving = new AbortController();
  answers(() => new Response(sse(0, 1)));
  const reading = read(leaving.signal);
  leaving.abort();
  await withoutWaiting(reading);
});
