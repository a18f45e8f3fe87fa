import { expect, test } from "vitest";
import { Pace } from "./pace";
import { refusals, type Candidate } from "./refuse";

const file = (name: string, size = 10, type = ""): Candidate => ({ name, size, type });

test.each<[Candidate, string | null]>([
  [file("a.pdf", 10, "application/pdf"), null],
  [file("a.txt", 0), "empty"],
  [file("a.png", 10, "image/png"), "media"],
  [file("a.svg", 10, "image/svg+xml"), null], // text, which the server may read
  [file("a.mp4", 10, "video/mp4"), "media"],
  [file("A.ZIP"), "archive"],
  [file("a.tar.gz"), "archive"],
  [file("a.pdf", 1_000_000), "large"],
  [{ ...file("a", 4096), folder: true }, "folder"],
])("%j: %s", (given, refusal) => {
  expect(refusals([given], 1_000_000)).toEqual([refusal]);
});

test("of two files of a name the second is refused, unless the first was", () => {
  expect(refusals([file("a.txt"), file("a.txt"), file("b.txt", 0), file("b.txt")], null)).toEqual([
    null, "twice", "empty", null,
  ]);
});

test("without a limit no file is too large", () => {
  expect(refusals([file("a.txt", 1e15)], null)).toEqual([null]);
});

test("what is left is told by what was done, once that is enough to tell", () => {
  const pace = new Pace();
  expect(pace.left(100)).toBeNull();
  pace.add(10, 0.5);
  expect(pace.left(100)).toBeNull();
  pace.add(10, 1.5);
  expect(pace.left(100)).toBeCloseTo(10);
  expect(pace.left(0)).toBe(0);
});
