/** A table of text, read from CSV (RFC 4180) or TSV. Knows nothing of how it is shown. */
export interface TextTable {
  readonly columns: readonly string[]; // of the first row
  readonly rows: readonly (readonly string[])[];
  readonly more: number; // rows beyond those
}

const MOST_ROWS = 500;
const MOST_COLUMNS = 60;

export function readTable(text: string, separator: "," | "\t"): TextTable {
  const [head = [], ...rows] = records(text.replace(/^\uFEFF/, ""), separator);
  const shown = rows.slice(0, MOST_ROWS).map((row) => row.slice(0, MOST_COLUMNS));
  return { columns: head.slice(0, MOST_COLUMNS), rows: shown, more: Math.max(0, rows.length - MOST_ROWS) };
}

function records(text: string, separator: string): string[][] {
  const found: string[][] = [];
  let row: string[] = [];
  let cell = "";
  let quoted = false;
  const endRow = (): void => {
    row.push(cell);
    if (row.length > 1 || cell !== "") found.push(row);
    row = [];
    cell = "";
  };
  for (let at = 0; at < text.length; at++) {
    const letter = text.charAt(at);
    if (quoted) {
      if (letter !== '"') cell += letter;
      else if (text[at + 1] === '"') cell += text.charAt(at++);
      else quoted = false;
    } else if (letter === '"' && cell === "") quoted = true;
    else if (letter === separator) {
      row.push(cell);
      cell = "";
    } else if (letter === "\n" || letter === "\r") {
      if (letter === "\r" && text[at + 1] === "\n") at++;
      endRow();
    } else cell += letter;
  }
  endRow();
  return found;
}

/** Would a spreadsheet compute a cell rather than show it? A number with a sign is none. */
export const hasFormulas = ({ columns, rows }: TextTable): boolean =>
  [columns, ...rows].some((row) => row.some((cell) => /^\s*[=@+-]/.test(cell) && !/^\s*[+-]?[\d.,]+(e[+-]?\d+)?\s*%?\s*$/i.test(cell)));

/** The table in a result of a tool that answers `{"columns": […], "rows": [[…]]}`, as SQL's does; null in any other. */
export function tableOf(result: string): TextTable | null {
  if (!result.startsWith("{")) return null;
  try {
    const { columns, rows } = JSON.parse(result) as { columns?: unknown; rows?: unknown };
    if (!Array.isArray(columns) || !Array.isArray(rows) || columns.length === 0 || !rows.every(Array.isArray)) return null;
    const text = (cell: unknown): string =>
      cell === null || cell === undefined ? "" : typeof cell === "object" ? JSON.stringify(cell) : `${cell as string}`;
    const shown = (rows as unknown[][]).slice(0, MOST_ROWS).map((row) => row.slice(0, MOST_COLUMNS).map(text));
    return { columns: columns.slice(0, MOST_COLUMNS).map(text), rows: shown, more: Math.max(0, rows.length - MOST_ROWS) };
  } catch {
    return null; // it was cut, or is something else
  }
}
