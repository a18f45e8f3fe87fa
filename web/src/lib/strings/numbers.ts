/** Numbers as a language writes them. */
export interface Numbers {
  format(n: number): string;
}

/**
 * Writes whole numbers by itself, with the mark between its groups of three digits, and others by `Intl`: a browser takes
 * as long to make its first `Intl.NumberFormat` as to read the rest of the program.
 */
export function numbersOf(language: string, mark: string): Numbers {
  let others: Intl.NumberFormat | null = null;
  return {
    format: (n) =>
      Number.isSafeInteger(n)
        ? String(n).replace(/\B(?=(\d{3})+$)/g, mark)
        : (others ??= new Intl.NumberFormat(language)).format(n),
  };
}
