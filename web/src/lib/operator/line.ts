/** The path of a small chart, in a box of `width` by `height`, whose y grows downwards. */

/** Lines through what is known; where a value is null there is a gap. A value alone is a short stroke. */
export function linePath(values: readonly (number | null)[], most: number, width: number, height: number): string {
  const step = width / Math.max(1, values.length - 1);
  let path = "";
  let drawn = false; // the one before
  values.forEach((value, i) => {
    if (value !== null) {
      const at = `${round(i * step)} ${round(height * (1 - Math.min(1, value / most)))}`;
      path += drawn ? `L${at}` : `M${at}h.01`;
    }
    drawn = value !== null;
  });
  return path;
}

/** What is below the lines, down to the ground. */
export function areaPath(values: readonly (number | null)[], most: number, width: number, height: number): string {
  const step = width / Math.max(1, values.length - 1);
  let path = "";
  let from: number | null = null;
  for (let i = 0; i <= values.length; i += 1) {
    const value = values[i] ?? null;
    if (value === null) {
      if (from !== null) path += `L${round((i - 1) * step)} ${height}Z`;
      from = null;
      continue;
    }
    const at = `${round(i * step)} ${round(height * (1 - Math.min(1, value / most)))}`;
    path += from === null ? `M${round(i * step)} ${height}L${at}` : `L${at}`;
    from ??= i;
  }
  return path;
}

/** A round number at or above the largest value, for the top of the box. */
export function topOf(values: readonly (number | null)[]): number {
  const most = Math.max(0, ...values.map((value) => value ?? 0));
  if (most === 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(most));
  return ([1, 2, 5, 10].find((n) => n * unit >= most * (1 - 1e-9)) ?? 10) * unit;
}

const round = (n: number): number => Math.round(n * 100) / 100;
