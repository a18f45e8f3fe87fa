import { expect, test } from "vitest";
import { indentJson } from "./json";

test("JSON is indented and none of its values changed", () => {
  const text = '{"a":[1, 2.50,{"b":"x, {y}: \\"z\\""}],"big":12345678901234567890,"no":{ },"none":[]}';
  const shown = indentJson(text);
  expect(shown).toBe(
    '{\n  "a": [\n    1,\n    2.50,\n    {\n      "b": "x, {y}: \\"z\\""\n    }\n  ],\n' +
      '  "big": 12345678901234567890,\n  "no": {},\n  "none": []\n}',
  );
  expect(JSON.parse(shown)).toEqual(JSON.parse(text));
});

test("what is no JSON stays as it is", () => {
  expect(indentJson('{"cut": "o')).toBe('{"cut": "o');
});
