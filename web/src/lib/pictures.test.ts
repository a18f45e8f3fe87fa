import { expect, test } from "vitest";
import { fitted, isPicture } from "./pictures";

test("a picture is made smaller to fit, never larger, and keeps its shape", () => {
  expect(fitted(4000, 1000)).toEqual([2048, 512]);
  expect(fitted(300, 4096)).toEqual([150, 2048]);
  expect(fitted(640, 480)).toEqual([640, 480]);
  expect(fitted(60000, 1)).toEqual([2048, 1]);
});

test("only files that models read are pictures", () => {
  const file = (type: string): File => new File(["x"], "x", { type });
  expect(["image/png", "image/jpeg", "image/webp", "image/gif"].map((type) => isPicture(file(type)))).toEqual(
    Array(4).fill(true),
  );
  expect(["image/svg+xml", "application/pdf", ""].map((type) => isPicture(file(type)))).toEqual(Array(3).fill(false));
});
