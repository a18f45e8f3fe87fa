import { expect, test } from "vitest";
import { blocksOf, cut, PART, partAt, partsOf, spanIn, spanOf, wordsIn } from "./text";

/** A text of lines of uneven length, with characters that take two units each. */
const text = [...Array.from({ length: 900 }, (_, i) => `Line ${i} ${"🌊 ".repeat(i % 37)}`).join("\n")];

function parts(points: readonly string[]): string[] {
  const { length } = points;
  return Array.from({ length: partsOf(length) }, (_, part) => {
    const { start, end } = spanOf(part, length);
    return cut(points.slice(start, end).join(""), part, length).text.join("");
  });
}

test("the parts together are the text, each from line to line", () => {
  const all = parts(text);
  expect(all.length).toBeGreaterThan(2);
  expect(all.join("")).toBe(text.join(""));
  expect(all.slice(0, -1).every((part) => part.endsWith("\n"))).toBe(true);
});

test.each([
  ["without lines", Array.from({ length: 3 * PART }, () => "x")],
  ["of words alone", [..."word ".repeat(PART)]],
  ["that ends in the place where a line is looked for", [...`${"x".repeat(PART + 10)}\nend`]],
  ["of one character", ["x"]],
  ["of nothing", []],
])("a text %s is whole too", (_, points) => {
  expect(parts(points).join("")).toBe(points.join(""));
});

test("a place is in the part that was cut for it, or in the one before", () => {
  for (const place of [0, PART - 1, PART, PART + 400, text.length - 1]) {
    const part = partAt(place, text.length);
    const { start, end } = spanOf(part, text.length);
    const made = cut(text.slice(start, end).join(""), part, text.length);
    expect(place < made.start + made.text.length).toBe(true);
    expect(place >= made.start || part > 0).toBe(true);
  }
});

test("what is cited is marked, also over several blocks", () => {
  const part = { start: 100, text: [..."# The dam\nIt was 🌊 built.\n## More\nEnd."] };
  const at = 100 + part.text.join("").indexOf("dam");
  const blocks = blocksOf(part, { start: at, end: 100 + 10 + 8 }, true);
  expect(blocks.map(({ rank }) => rank)).toEqual([1, 0, 2, 0]);
  const marked = blocks.flatMap(({ runs }) => runs.filter((run) => run.marked).map((run) => run.text));
  expect(marked).toEqual(["dam\n", "It was 🌊"]);
  const all = blocks.flatMap(({ runs }) => runs.map((run) => run.text)).join("");
  expect(all).toBe("The dam\nIt was 🌊 built.\nMore\nEnd.");
});

test("in code a # is no heading", () => {
  const blocks = blocksOf({ start: 0, text: [..."# a comment\nx = 1"] }, null, false);
  expect(blocks).toEqual([{ rank: 0, runs: [{ text: "# a comment\nx = 1", marked: false }] }]);
});

test.each([
  ["?start=3&end=9", { start: 3, end: 9 }],
  ["?start=9&end=3", null],
  ["?start=-1&end=3", null],
  ["?start=x&end=3", null],
  ["?start=3", null],
  ["", null],
])("the span of %s", (query, span) => {
  expect(spanIn(query)).toEqual(span);
});

test.each([
  ["The dam was finished.", "when was the DAM finished?", ["finished"]],
  ["The dam, the Damned.", "the dam", ["The", "dam", "the"]],
  ["ダムは1931年に完成した。", "1931年に", ["1931年に"]],
  ["Nothing.", "?", []],
  ["a.b (c)", "a.b (c) $&", []],
])("of %s the words of %s are marked", (text, query, marked) => {
  const pieces = wordsIn(text, query);
  expect(pieces.map((piece) => piece.text).join("")).toBe(text);
  expect(pieces.filter((piece) => piece.marked).map((piece) => piece.text)).toEqual(marked);
});
