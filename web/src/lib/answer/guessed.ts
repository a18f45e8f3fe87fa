/**
 * What of an answer was guessed before the model sampled it. The server counts characters of each piece as Unicode code
 * points; here they are places in the whole answer, a JavaScript string.
 */
import { place } from "./sources";

export type Guess = readonly [from: number, to: number];

/** The guesses with those of `text`, which begins at `start` of the answer: `points` are from, to, from, to … in it. */
export function guessesGrew(
  before: readonly Guess[],
  start: number,
  text: string,
  points: readonly number[],
): readonly Guess[] {
  if (points.length === 0) return before;
  const guesses = [...before];
  let known = { points: 0, at: 0 };
  const places = points.map((point) => start + (known = place(text, point, known)).at);
  for (let i = 0; i + 1 < places.length; i += 2) {
    const [from, to] = [places[i] ?? start, places[i + 1] ?? start];
    const last = guesses.at(-1);
    if (last?.[1] === from) guesses[guesses.length - 1] = [last[0], to];
    else guesses.push([from, to]);
  }
  return guesses;
}

/** Those in the characters `start` to `end`, counted from there. */
export const guessesWithin = (guesses: readonly Guess[], start: number, end: number): readonly Guess[] =>
  guesses
    .filter(([from, to]) => from < end && start < to)
    .map(([from, to]) => [Math.max(from, start) - start, Math.min(to, end) - start]);
