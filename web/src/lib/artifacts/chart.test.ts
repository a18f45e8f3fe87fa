import { expect, test } from "vitest";
import { chartOf, ticksOf } from "./chart";
import { readTable } from "./table";

const of = (csv: string): ReturnType<typeof chartOf> => chartOf(readTable(csv, ","));

test("words are the labels of bars, and every column of numbers is a series", () => {
  expect(of("id,city,people,area\n1,Bonn,3,141\n2,Ulm,,118.7\n")).toEqual({
    kind: "bar",
    label: "city",
    labels: ["Bonn", "Ulm"],
    series: [
      { name: "people", values: [3, null] },
      { name: "area", values: [141, 118.7] },
    ],
  });
});

test("moments and numbers that rise are the labels of lines", () => {
  expect(of("n,day\n1,2026-01-01\n2,2026-01-02")).toMatchObject({ kind: "line", label: "day" });
  expect(of("year,n\n2024,5\n2025,4")).toMatchObject({ kind: "line", label: "year" });
  expect(of("x,y\n1,5\n2,4")).toMatchObject({ kind: "line", label: "x" });
  expect(of("x,y\n2,5\n1,4")).toMatchObject({ kind: "bar", label: "x" });
  expect(of("w,n\n" + "a,1\n".repeat(41))).toMatchObject({ kind: "line" });
});

test("without numbers, or with one row, there is no chart", () => {
  expect([of("a,b\nx,y\nz,w"), of("a,b\nx,1"), of("city_id\n1\n2"), of(""), of("a,b\nx,1\ny,n/a")]).toEqual(
    Array(5).fill(null),
  );
});

test("the scale has round numbers, and zero", () => {
  const scale = (...values: number[]): number[] => ticksOf([{ name: "", values }]);
  expect(scale(3, 97)).toEqual([0, 20, 40, 60, 80, 100]);
  expect(scale(-40, 60)).toEqual([-40, -20, 0, 20, 40, 60]);
  expect(scale(0, 0)).toEqual([0, 0.2]);
  for (const values of [[1e-9], [1e300], [-1e300, 1e300], [0.3, 0.7], [-5]]) {
    const ticks = scale(...values);
    expect(ticks.length).toBeGreaterThan(1);
    expect(ticks.length).toBeLessThan(9);
    expect(Math.min(...ticks)).toBeLessThanOrEqual(Math.min(0, ...values));
    expect(Math.max(...ticks)).toBeGreaterThanOrEqual(Math.max(0, ...values));
  }
});
