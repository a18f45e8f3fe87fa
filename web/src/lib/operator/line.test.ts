import { describe, expect, it } from "vitest";
import { areaPath, linePath, topOf } from "./line";

describe("a small chart", () => {
  it("goes through its values from left to right, the largest on top", () => {
    expect(linePath([0, 1, 2], 2, 10, 4)).toBe("M0 4h.01L5 2L10 0");
  });

  it("has a gap where nothing is known", () => {
    expect(linePath([1, null, 1], 1, 10, 4)).toBe("M0 0h.01M10 0h.01");
    expect(areaPath([1, 1, null, 1], 1, 9, 4)).toBe("M0 4L0 0L3 0L3 4ZM9 4L9 0L9 4Z");
  });

  it("draws nothing of nothing", () => {
    expect(linePath([null, null], 1, 10, 4)).toBe("");
    expect(areaPath([], 1, 10, 4)).toBe("");
  });

  it("does not leave its box", () => {
    expect(linePath([5], 2, 10, 4)).toBe("M0 0h.01");
  });

  it.each([
    [[], 1],
    [[null, 0], 1],
    [[0.3, null], 0.5],
    [[7], 10],
    [[2], 2],
    [[1234], 2000],
  ])("has a round number on top: %j", (values, top) => {
    expect(topOf(values)).toBeCloseTo(top);
  });
});
