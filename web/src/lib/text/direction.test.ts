import { expect, test } from "vitest";
import { directionOf } from "./direction";

test("the first letter decides, whatever stands before it", () => {
  expect(["abc", "1. אבג abc", "«کتاب» the", "世界", "x אבג"].map(directionOf)).toEqual(["ltr", "rtl", "rtl", "ltr", "ltr"]);
  expect(["", "12 + 34", "…"].map(directionOf)).toEqual(["auto", "auto", "auto"]);
});
