import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { Frames } from "./frames";

beforeEach(() => {
  vi.useFakeTimers();
  const frames = new Map<number, ReturnType<typeof setTimeout>>();
  let count = 0;
  vi.stubGlobal("performance", { now: () => Date.now() });
  vi.stubGlobal("requestAnimationFrame", (call: () => void) => {
    frames.set(++count, setTimeout(call, 16 - (Date.now() % 16)));
    return count;
  });
  vi.stubGlobal("cancelAnimationFrame", (frame: number) => clearTimeout(frames.get(frame)));
  vi.setSystemTime(0);
});

afterEach(() => {
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

/** How often work that takes so long is done in a second in which it is asked for all the time. */
async function done(cost_ms: number): Promise<number> {
  const frames = new Frames();
  let times = 0;
  const end = Date.now() + 1000;
  while (Date.now() < end) {
    frames.ask(() => {
      times += 1;
      vi.setSystemTime(Date.now() + cost_ms);
    });
    await vi.advanceTimersByTimeAsync(4);
  }
  return times;
}

test("work that costs little is done once a frame, however often it is asked for", async () => {
  expect(await done(2)).toBeGreaterThan(50);
});

test("work that costs much leaves as much time free as it takes", async () => {
  const times = await done(40);
  expect(times).toBeGreaterThan(7);
  expect(times).toBeLessThanOrEqual(13);
});

test("what was called off is not done, and can be asked for again", async () => {
  const frames = new Frames();
  const did: string[] = [];
  frames.ask(() => did.push("first"));
  frames.cancel();
  frames.ask(() => did.push("second"));
  await vi.advanceTimersByTimeAsync(50);
  expect(did).toEqual(["second"]);
});
