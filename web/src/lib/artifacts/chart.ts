/** The chart that fits a table of text, and its scale. Knows nothing of how it is drawn. */
import type { TextTable } from "./table";

export interface Series {
  readonly name: string;
  readonly values: readonly (number | null)[]; // null: the cell is empty
}

export interface Chart {
  readonly kind: "bar" | "line";
  readonly label: string; // the column that `labels` are of
  readonly labels: readonly string[];
  readonly series: readonly Series[];
}

const MOST_SERIES = 4;
const MOST_BARS = 40;
const NUMBER = /^\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*$/i;
const MOMENT = /^\d{4}(-\d{2}(-\d{2}([T ]\d{2}:\d{2}.*)?)?)?$/;
const KEY = /^(id|.*_id)$/i;

/** Lines where the labels are moments, or numbers that rise, or too many for bars; null where no column has numbers. */
export function chartOf({ columns, rows }: TextTable): Chart | null {
  if (rows.length < 2) return null;
  const cells = columns.map((_, at) => rows.map((row) => row[at] ?? ""));
  const numeric = cells.map((column) => column.some(Boolean) && column.every((cell) => cell === "" || NUMBER.test(cell)));
  const moment = cells.findIndex((column) => column.every((cell) => MOMENT.test(cell)));
  const words = numeric.indexOf(false);
  const by = moment >= 0 ? moment : words >= 0 ? words : 0;
  const drawn = columns.map((_, at) => at).filter((at) => numeric[at] && at !== by && !KEY.test(columns[at] ?? ""));
  const labels = cells[by];
  if (labels === undefined || drawn.length === 0) return null;
  const rises = numeric[by] === true && labels.every((label, i) => i === 0 || Number(label) > Number(labels[i - 1]));
  return {
    kind: moment >= 0 || rises || rows.length > MOST_BARS ? "line" : "bar",
    label: columns[by] ?? "",
    labels,
    series: drawn.slice(0, MOST_SERIES).map((at) => ({
      name: columns[at] ?? "",
      values: (cells[at] ?? []).map((cell) => (cell === "" ? null : Number(cell))),
    })),
  };
}

/** Round numbers from at or below the least value, or 0, to at or above the largest, or 0. */
export function ticksOf(series: readonly Series[]): number[] {
  const known = series.flatMap(({ values }) => values.filter((value) => value !== null));
  const low = known.reduce((least, value) => Math.min(least, value), 0);
  const high = known.reduce((most, value) => Math.max(most, value), 0);
  const span = high - low || 1;
  const power = 10 ** Math.floor(Math.log10(span / 4));
  const step = power * ([1, 2, 5, 10].find((each) => each * power * 5 >= span) ?? 10);
  const first = Math.floor(low / step);
  const last = Math.max(first + 1, Math.ceil(high / step));
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}
