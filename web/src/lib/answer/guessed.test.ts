import { expect, test } from "vitest";
import { guessesGrew, guessesWithin, type Guess } from "./guessed";

test("guesses of a piece are places in the whole answer, and those that touch are one", () => {
  let guesses: readonly Guess[] = guessesGrew([], 0, "one two", [4, 7]);
  guesses = guessesGrew(guesses, 7, " three", [0, 2, 3, 6]);
  expect(guesses).toEqual([[4, 9], [10, 13]]);
  expect(guessesGrew(guesses, 13, " four", [])).toBe(guesses);
});

test("characters are counted as the server does", () => {
  expect(guessesGrew([], 3, "😀a😀b", [1, 2, 3, 4])).toEqual([[5, 6], [8, 9]]);
});

test("a part of the answer has its own guesses, counted from its start", () => {
  const guesses: Guess[] = [[0, 4], [6, 12], [20, 22]];
  expect(guessesWithin(guesses, 8, 21)).toEqual([[0, 4], [12, 13]]);
  expect(guessesWithin(guesses, 12, 20)).toEqual([]);
});
