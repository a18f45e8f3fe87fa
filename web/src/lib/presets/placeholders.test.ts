import { expect, test } from "vitest";
import { matching, nextPlace, soughtIn } from "./placeholders";

test("places are found one after the other", () => {
  const text = "Put {{text}} into {{language}}, {not} {{\n}} this.";
  expect(nextPlace(text, 0)).toEqual([4, 12]);
  expect(nextPlace(text, 12)).toEqual([18, 30]);
  expect(nextPlace(text, 30)).toBeNull();
  expect(nextPlace("{{}}", 0)).toEqual([0, 4]);
});

test.each([["/", ""], ["/su", "su"], ["/a b", null], ["a/b", null], ["/x\n", null], ["", null], ["//", "/"]])(
  "%j looks for %j",
  (draft, sought) => expect(soughtIn(draft)).toBe(sought),
);

test("names that begin with it come first, and case is nothing", () => {
  const prompts = ["fix", "prefix", "Fixed", "sum"].map((name) => ({ name }));
  expect(matching(prompts, "FIX").map(({ name }) => name)).toEqual(["fix", "Fixed", "prefix"]);
  expect(matching(prompts, "").length).toBe(4);
  expect(matching(prompts, "z")).toEqual([]);
});
