import { expect, test } from "vitest";
import { ServerClock } from "./clock";

const date = (s: number): string => new Date(s * 1000).toUTCString();

test("clocks that can agree are taken to agree", () => {
  const clock = new ServerClock(() => 1000.9);
  clock.observe(date(1000), 1000.7, 1000.8);
  expect(clock.now()).toBe(1000.9);
});

test("a clock an hour off is corrected to within a second, and better with more responses", () => {
  let now = 1000;
  const clock = new ServerClock(() => now);
  for (let i = 0; i < 20; i += 1, now += 0.13) clock.observe(date(Math.floor(now + 3600.4)), now - 0.01, now);
  expect(Math.abs(clock.now() - (now + 3600.4))).toBeLessThan(0.15);
});

test("a server clock that is set starts the estimate anew", () => {
  const clock = new ServerClock(() => 1000);
  clock.observe(date(5000), 999.9, 1000);
  clock.observe(date(8000), 999.9, 1000);
  expect(Math.abs(clock.now() - 8000.5)).toBeLessThan(0.6);
});
