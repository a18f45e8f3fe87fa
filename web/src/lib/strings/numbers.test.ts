import { describe, expect, it } from "vitest";
import { numbersOf } from "./numbers";

const NUMBERS = [0, 7, -7, 999, 1000, -1000, 12_345, 1_000_000, 987_654_321, 2 ** 53, 1.5, -1234.5678, 0.0004, NaN, Infinity];

describe("numbersOf", () => {
  it.each([["en", ","], ["de", "."]])("writes what Intl writes in %s", (language, mark) => {
    const [ours, theirs] = [numbersOf(language, mark), new Intl.NumberFormat(language)];
    expect(NUMBERS.map((n) => ours.format(n))).toEqual(NUMBERS.map((n) => theirs.format(n)));
  });
});
