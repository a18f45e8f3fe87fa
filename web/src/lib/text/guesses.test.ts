import { expect, test } from "vitest";
import { placesOf } from "./guesses";

test("rendered text is found again in its source, past what markdown is made of", () => {
  const source = "- **bold** and `code`, [a link](https://a.org/a)\n- second";
  const texts = ["bold", " and ", "code", ", ", "a link", "\n", "second"];
  expect(placesOf(texts, source)).toEqual([4, 10, 16, 21, 24, null, 51]);
});

test("what is not in the source has no place, and what follows keeps its own", () => {
  expect(placesOf(["a & b", "c"], "a &amp; b *c*")).toEqual([null, 11]);
});

test("a text that is there twice is found twice, in order", () => {
  expect(placesOf(["one", "two", "one"], "one two one")).toEqual([0, 4, 8]);
});
