import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { Toasts } from "./toasts.svelte";

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

const texts = (toasts: Toasts): string[] => toasts.shown.map(({ text }) => text);

test("a notice goes after a while, but not while it is looked at", () => {
  const toasts = new Toasts();
  toasts.say("one");
  vi.advanceTimersByTime(15_000);
  toasts.say("two");
  vi.advanceTimersByTime(6_000);
  expect(texts(toasts)).toEqual(["two"]);
  const [two] = toasts.shown;
  if (two === undefined) throw new Error("it is gone");
  toasts.hold(two);
  vi.advanceTimersByTime(3_600_000);
  expect(texts(toasts)).toEqual(["two"]);
  toasts.start(two);
  vi.advanceTimersByTime(21_000);
  expect(texts(toasts)).toEqual([]);
});

test("the last thing that can be taken back is, once", () => {
  const toasts = new Toasts();
  const undone: string[] = [];
  const undo = (name: string) => async (): Promise<void> => void undone.push(name);
  toasts.say("a", undo("a"));
  toasts.say("b", undo("b"));
  toasts.say("said");
  expect(toasts.undoLast()).toBe(true);
  expect(toasts.undoLast()).toBe(true);
  expect(toasts.undoLast()).toBe(false);
  expect(undone).toEqual(["b", "a"]);
  expect(texts(toasts)).toEqual(["said"]);
});
