import { expect, test } from "vitest";
import { showingOf } from "./api";
import { hasFormulas, readTable, tableOf } from "./table";

test("quoted cells keep separators, ends of lines and quotes", () => {
  const { columns, rows } = readTable('\uFEFFa,"b, c"\r\n"x ""y""","1\n2"\r\n\r\n3,\n', ",");
  expect([columns, rows]).toEqual([["a", "b, c"], [['x "y"', "1\n2"], ["3", ""]]]);
  expect(readTable("a\tb,c\n1\t2", "\t").rows).toEqual([["1", "2"]]);
  expect(readTable("", ",")).toEqual({ columns: [], rows: [], more: 0 });
});

test("a long table is cut and says by how much", () => {
  const { rows, more } = readTable("a\n" + "1\n".repeat(600), ",");
  expect([rows.length, more]).toEqual([500, 100]);
});

test("cells that a spreadsheet would compute are found, and numbers are none", () => {
  const has = (cell: string): boolean => hasFormulas({ columns: ["a"], rows: [[cell]], more: 0 });
  expect(["=1+1", "@SUM(A1)", "+cmd|' /C calc'!A0", "-2+3", " =1", "\t=1"].map(has)).toEqual(Array(6).fill(true));
  expect(["-2.5", "+3", "-1e-9", "-5 %", "a=b", ""].map(has)).toEqual(Array(6).fill(false));
});

test("only what can do no harm in the page is shown by the page", () => {
  const of = (media_type: string, size = 9): string =>
    showingOf({ id: "a", name: "a", version: 1, media_type, size });
  expect(["text/html", "image/svg+xml", "image/png"].map((type) => of(type))).toEqual(
    Array(3).fill("frame"),
  );
  expect([of("text/csv"), of("text/plain"), of("application/json")]).toEqual(["table", "text", "text"]);
  expect([of("application/pdf"), of("application/octet-stream"), of("text/csv", 2e6)]).toEqual(Array(3).fill("none"));
});

test("a result of SQL is a table, and nothing else is", () => {
  expect(tableOf('{"columns": ["a", "b"], "rows": [[1, null], ["<b>", 2.5]], "truncated": "more"}')).toEqual({
    columns: ["a", "b"],
    rows: [["1", ""], ["<b>", "2.5"]],
    more: 0,
  });
  expect(['{"columns": ["a"], "rows": [[1', '{"columns": [], "rows": []}', '{"columns": 1, "rows": [1]}', "[]", "text"].map(tableOf)).toEqual(
    Array(5).fill(null),
  );
});
