import { expect, test } from "vitest";
import { MarkdownStream } from "./markdown";

const identity = (html: string): string => html;
const whole = (text: string): string => html(new MarkdownStream(identity).update(text, true));
const html = (blocks: readonly { html: string }[]): string => blocks.map((block) => block.html).join("");

const TEXT = [
  "A *first* paragraph\nof two lines with [a link][ref] used before it is defined.",
  "Setext heading\n===",
  "- one\n- two\n\n  with a paragraph\n\n- three\n  1. deep\n  2. deeper",
  "1. first\n\n2. second after a blank line",
  "```python\ndef f(x):\n\n    return x\n```",
  "    indented code\n\n    goes on",
  "> a quote\nlazily continued\n\n> another quote",
  "| a | b |\n|---|---|\n| 1 | `2` |",
  "<div onclick=alert(1)>\nraw\n</div>",
  "Text\r\nwith carriage returns\r\n\r\nand more.",
  "---",
  "[ref]: https://example.org/there",
  "Euler: $e^{i\\pi} + 1 = 0$, or \\(a_1*b*c\\); it costs $5 and $10, or $$x^2$$ there.",
  "$$\n\\sum_{i=1}^n i\n- \\frac{n}{2} &lt; 3\n$$",
  "\\[\na < b\n\\]\nat once below",
  "$$\nnever closed\n\nso it is text",
  "```\nnever closed",
].join("\n\n");

/** A seeded source of numbers in [0, 1), so that a failure can be seen again. */
function random(seed: number): () => number {
  let state = seed;
  return () => (state = (state * 48271) % 2147483647) / 2147483647;
}

test("headings step down one level at a time, below the title of the chat, whatever they are written as", () => {
  const text = "### a\n\ntext\n\n##### b\n\n### c\n\n# d\n\n###### e\n\n## f";
  const levels = (blocks: string): string[] => [...blocks.matchAll(/<(h\d)>(\w)/g)].map(([, tag, name]) => `${name}${tag}`);
  const expected = ["ah2", "bh3", "ch2", "dh2", "eh3", "fh3"];
  expect(levels(whole(text))).toEqual(expected);
  const stream = new MarkdownStream(identity);
  for (let end = 0; end < text.length; end += 1) stream.update(text.slice(0, end));
  expect(levels(html(stream.update(text, true)))).toEqual(expected);
  const to = text.indexOf(" b") + 2;
  expect(levels(html(stream.update(text, true, [{ from: to, to, html: "!" }])))).toEqual(expected);
});

test("text in pieces ends as the same HTML as text in one piece", () => {
  const expected = whole(TEXT);
  for (let seed = 1; seed <= 60; seed += 1) {
    const next = random(seed);
    const longest = 1 + Math.floor(next() * 40);
    const stream = new MarkdownStream(identity);
    for (let end = 0; end < TEXT.length; end += 1 + Math.floor(next() * longest)) stream.update(TEXT.slice(0, end));
    expect(html(stream.update(TEXT, true)), `seed ${seed}`).toBe(expected);
  }
});

test("a block is rendered no more once it is frozen", () => {
  let rendered = 0;
  const stream = new MarkdownStream((html) => ((rendered += 1), html));
  const paragraphs = "Several words of one paragraph.\n\n".repeat(200);
  for (let end = 0; end < paragraphs.length; end += 7) stream.update(paragraphs.slice(0, end));
  stream.update(paragraphs, true);
  expect(rendered).toBeLessThan(paragraphs.length / 7 + 200 * 3);
});

test("frozen blocks keep their identity, so the page leaves them alone", () => {
  const stream = new MarkdownStream(identity);
  const [first] = stream.update("One.\n\nTwo\nlines");
  expect(first?.frozen).toBe(true);
  expect(stream.update("One.\n\nTwo\nlines and more\n\nThree\n")[0]).toBe(first);
});

test("a text that does not continue the last one starts afresh", () => {
  const stream = new MarkdownStream(identity);
  stream.update("One.\n\nTwo\n\nThree\n");
  expect(html(stream.update("Other.", true))).toBe(whole("Other."));
});

test("HTML is shown as text, images become links, and scripts are no links", () => {
  expect(whole("<script>alert(1)</script>")).not.toContain("<script>");
  expect(whole("a <b onclick=x>b</b>")).toContain("&lt;b onclick=x&gt;");
  expect(whole("![dot](https://example.org/x.png)")).toContain('<a href="https://example.org/x.png"');
  expect(whole("![dot](https://example.org/x.png)")).not.toContain("<img");
  expect(whole("[x](javascript:alert(1))")).not.toContain("href");
  expect(whole('```"><img src=x>\ncode\n```')).not.toContain("<img");
});

test.each([
  ["It is $x<1$.", '<p>It is <span class="formula">x&lt;1</span>.</p>\n'],
  ["$5 and $10, US$3 or CA$4, $ 2 $", "<p>$5 and $10, US$3 or CA$4, $ 2 $</p>\n"],
  ["\\$x$", "<p>$x$</p>\n"],
  ["`$x$` and \\(y\\)", '<p><code>$x$</code> and <span class="formula">y</span></p>\n'],
  ["a $$b$$ c", '<p>a <span class="formula display">b</span> c</p>\n'],
  ["$$\na\n\\\\\n- b\n$$", '<div class="formula display">a\n\\\\\n- b</div>'],
  ["$$\\frac{1}{2}$$", '<div class="formula display tall">\\frac{1}{2}</div>'],
  ["$\\frac{1}{2}$", '<p><span class="formula">\\frac{1}{2}</span></p>\n'],
  ["text\n\\[ a \\]\nmore", '<p>text</p>\n<div class="formula display">a</div><p>more</p>\n'],
  ["$$\nnever closed", "<p>$$\nnever closed</p>\n"],
  ["$\n$ and $$$$ and \\(\\)", "<p>$\n$ and $$$$ and ()</p>\n"],
])("formulas in %j", (text, expected) => {
  expect(whole(text)).toBe(expected);
});

test("a formula whose end has not come is kept apart, and what follows it when it never does is text", () => {
  const stream = new MarkdownStream(identity);
  expect(html(stream.update("One\n\n$$\na\n- b\n"))).toBe('<p>One</p>\n<div class="formula open">$$\na\n- b\n</div>');
  expect(html(stream.update("One\n\n$$\na\n- b\n$$\n\nTwo"))).toContain('<div class="formula display">a\n- b</div>');
  const other = new MarkdownStream(identity);
  other.update("$$\na\n- b\n");
  expect(html(other.update("$$\na\n- b\n", true))).toContain("<li>b</li>");
});

test("a mark goes beside a formula, never into it", () => {
  const text = "So $a = b$ holds.";
  const stream = new MarkdownStream(identity);
  const marked = html(stream.update(text, true, [{ from: text.length, to: text.length, html: "<b>1</b>" }]));
  expect(marked).toContain('<span class="formula">a = b</span> holds.');
  expect(marked).toContain("<b>1</b>");
});

const REPEATED = [
  "1. ", "1) ", "- ", "* ", "+ ", "> ", "> - ", "- > 1. ", "- [ ] ", "*a ", "**_a ", "~~a ", "[", "[*a ", "![", "[a](b) ", "[[a]",
  "`", "```\n", "<", "<div>", "</", "&amp;", "$", "\\(", "|a", "| a | b |\n", "#", "---\n", "a\n===\n", "_a_b", "a@b.c ", "[a]: b\n",
];

/** Characters of a text that a reader sees; repetition must lose none of the words. */
const words = (html: string): number => (html.replace(/<[^>]*>/g, "").match(/[ab]/g) ?? []).length;

test.each(REPEATED)("%j repeated is read, stored and streamed, to the same end", (unit) => {
  for (const times of [20, 1500]) {
    const text = `a ${unit}b\n\n${unit.repeat(times)}b\n\nb`;
    const stored = whole(text);
    expect(words(stored)).toBeGreaterThanOrEqual(3);
    const stream = new MarkdownStream(identity);
    const step = Math.ceil(text.length / 12);
    for (let end = 0; end < text.length; end += step) stream.update(text.slice(0, end));
    expect(html(stream.update(text, true))).toBe(stored);
  }
});

test("repetitions of several kinds within each other are read", () => {
  for (let seed = 1; seed <= 40; seed += 1) {
    const next = random(seed);
    const pick = (): string => REPEATED[Math.floor(next() * REPEATED.length)] ?? "";
    const text = Array.from({ length: 6 }, () => (pick() + pick()).repeat(1 + Math.floor(next() * 300))).join("");
    expect(whole(text).length, `seed ${seed}`).toBeGreaterThan(0);
  }
}, 60_000);

test("lists and quotes nest as deep as a person writes them, and no deeper", () => {
  const deep = (html: string, tag: string): number => html.split(`<${tag}>`).length - 1;
  expect(deep(whole("> ".repeat(9) + "a"), "blockquote")).toBe(9);
  expect(deep(whole("> ".repeat(900) + "a"), "blockquote")).toBe(16);
  expect(whole("> ".repeat(900) + "a")).toContain("a");
});

test("a paragraph too long for emphasis to be looked for is whole", () => {
  const long = "*a* ".repeat(3000);
  expect(words(whole(long))).toBe(3000);
  expect(whole(long)).not.toContain("<em>");
  expect(whole("*a* ".repeat(300))).toContain("<em>a</em>");
});
