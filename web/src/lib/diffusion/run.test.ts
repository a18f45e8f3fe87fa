import { afterEach, expect, it, vi } from "vitest";
import { ApiError } from "../api";
import { cellsAt, filled, fold, perPass, textOf, visible, type DiffusionEvent, type Run } from "./run";

const END = "<end>";
const EVENTS: DiffusionEvent[] = [
  { type: "start", places: ["2", "+", "2", null, null, null] },
  { type: "pass", positions: [4], tokens: ["4"], confidences: [0.9] },
  { type: "pass", positions: [5, 3], tokens: [END, " "], confidences: [0.8, 0.5] },
  { type: "end", finish_reason: "stop", length: 5 },
];
const runOf = (events: readonly DiffusionEvent[]): Run => {
  const run = events.reduce<Run | null>(fold, null);
  if (run === null) throw new Error("no run");
  return run;
};
const drawn = (run: Run, at: number): string => textOf(cellsAt(run, at), "_", [END]);

afterEach(() => vi.unstubAllGlobals());

it("shows the text as it was after each pass", () => {
  const run = runOf(EVENTS);
  expect([0, 1, 2].map((at) => drawn(run, at))).toEqual(["2+2___", "2+2_4_", "2+2 4"]);
  expect(cellsAt(run, 1)).toEqual([
    { kind: "given", text: "2+2" },
    { kind: "masked" },
    { kind: "filled", text: "4", confidence: 0.9, pass: 1 },
    { kind: "masked" },
  ]);
});

it("cuts an answer at its end when it is over, and not before", () => {
  expect(cellsAt(runOf(EVENTS), 2)).toHaveLength(3);
  expect(cellsAt(runOf(EVENTS.slice(0, 3)), 2)).toHaveLength(4);
});

it("begins anew with each start", () => {
  expect(runOf([...EVENTS, ...EVENTS.slice(0, 1)])).toEqual({ places: ["2", "+", "2", null, null, null], passes: [], end: null });
});

it("counts places a pass", () => {
  expect(perPass(runOf(EVENTS))).toBe(1.5);
  expect(perPass(runOf(EVENTS.slice(0, 1)))).toBeNull();
});

it.each([
  ["a", "a"],
  [" ", "\u00a0"],
  ["\n", "↵"],
  ["\u001b", "\ufffd"],
  ["\u202e", "\ufffd"],
  [END, "∎"],
])("lets %j be seen", (token, shown) => expect(visible(token, [END])).toBe(shown));

/** A server that sends these texts, one after another. */
function sends(...pieces: string[]): void {
  const body = new ReadableStream<Uint8Array>({
    start(stream) {
      for (const piece of pieces) stream.enqueue(new TextEncoder().encode(piece));
      stream.close();
    },
  });
  vi.stubGlobal("fetch", () => Promise.resolve(new Response(body)));
}

async function read(): Promise<DiffusionEvent[]> {
  const events: DiffusionEvent[] = [];
  for await (const event of filled({ text: "2+2___", block_size: 4 }, new AbortController().signal)) events.push(event);
  return events;
}

it("reads events in pieces of any size", async () => {
  const all = EVENTS.map((event) => `data: ${JSON.stringify(event)}\n\n`).join(": ping\n\n") + "data: [DONE]\n\n";
  sends(all.slice(0, 30), all.slice(30, 31), all.slice(31));
  expect(await read()).toEqual(EVENTS);
});

it("tells a failure on the way, and a connection that is lost", async () => {
  sends(`data: ${JSON.stringify(EVENTS[0])}\n\n`, 'data: {"error":{"code":"engine_stopped","message":"Stopping."}}\n\n');
  await expect(read()).rejects.toThrow(new ApiError(500, "engine_stopped", "Stopping."));
  sends(`data: ${JSON.stringify(EVENTS[0])}\n\n`);
  await expect(read()).rejects.toMatchObject({ code: "unreachable" });
});
