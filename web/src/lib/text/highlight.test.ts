import hljs from "highlight.js/lib/core";
import python from "highlight.js/lib/languages/python";
import xml from "highlight.js/lib/languages/xml";
import { expect, test } from "vitest";
import { onlySpans } from "./highlight";

test("what the highlighter writes needs no sanitiser, whatever the code", () => {
  hljs.registerLanguage("python", python);
  hljs.registerLanguage("xml", xml);
  const code = `<script>alert(1)</script> <img src=x onerror="y"> def f(x): return '<b>' # "&lt;" <span class="a">`;
  for (const language of ["python", "xml"]) {
    const { value } = hljs.highlight(code, { language, ignoreIllegals: true });
    expect(value).toContain("<span");
    expect(onlySpans(value)).toBe(true);
  }
});

test.each([
  "<script>x</script>",
  '<span class="a" onclick="x">b</span>',
  "<span onclick=x>b</span>",
  '<span class="a"><img src=x onerror=y></span>',
  "<sp<span class=\"a\">an onclick=x>",
  "<",
])("anything else is found out: %s", (html) => {
  expect(onlySpans(html)).toBe(false);
});
