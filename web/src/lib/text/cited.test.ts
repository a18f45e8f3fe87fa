import { expect, test } from "vitest";
import { markOf, passageOf, type Mark } from "../answer/sources";
import { insertsOf, within } from "./cited";
import { MarkdownStream, type Insert } from "./markdown";
import type { CitationRef, SourceShown } from "../protocol";

const identity = (html: string): string => html;
const source = (label: string, text = "", start = 0, end = text.length): SourceShown => ({
  label, document: 1, title: 'A "title" <b>', page: 2, start, end, text, score: 0.5,
});
const html = (blocks: readonly { html: string }[]): string => blocks.map((block) => block.html).join("");

/** Where «n» stands in a text is a mark that says n, in place of a label before it. */
function marked(text: string): { text: string; inserts: Insert[] } {
  const inserts: Insert[] = [];
  let plain = "";
  for (const piece of text.split(/(«[^»]*»)/)) {
    const label = / \[S\d\]$/.exec(plain)?.[0] ?? "";
    const html = `<i>${piece.slice(1, -1)}</i>`;
    if (piece.startsWith("«")) inserts.push({ from: plain.length - label.length, to: plain.length, html });
    else plain += piece;
  }
  return { text: plain, inserts };
}

function render(given: string): string {
  const { text, inserts } = marked(given);
  return html(new MarkdownStream(identity).update(text, true, inserts));
}

test("marks stand where their labels stood", () => {
  expect(render("One. [S1]«a» Two *three. [S2]«b»* four.")).toBe(
    "<p>One.<i>a</i> Two <em>three.<i>b</i></em> four.</p>\n",
  );
  const list = render("- One. [S1]«a»\n- Two.«b»\n\nEnd.");
  expect(list).toMatch(/<li>One\.<i>a<\/i><\/li>\s*<li>Two\.<i>b<\/i><\/li>/);
});

test("marks come after links and code, not into them", () => {
  expect(render("See https://example.org/x«a» now.")).toContain("</a><i>a</i> now.");
  expect(render("Call `f. [S1]«a» g`.")).toContain("</code><i>a</i>.");
  const code = render("```\nx = 1\n```«a»\n\nEnd.");
  expect(code).toContain("</figure><p><i>a</i></p>");
  expect(code).not.toMatch(/[\uE000\uE001]/);
  expect(render("| a | b |\n|---|---|\n| 1 | 2. |«a»\n\nEnd.")).toMatch(/<td>2\.<i>a<\/i><\/td>/);
});

test("a text that has the characters that hold places cannot make a mark", () => {
  expect(render("\uE0000\uE001 One.«a»")).toBe("<p>\uFFFD0\uFFFD One.<i>a</i></p>\n");
});

test("marks that come when their block is frozen change it and no other", () => {
  const { text, inserts } = marked("First.«a»\n\nSecond.«b»\n\nThird\nand more");
  const stream = new MarkdownStream(identity);
  const [first, second] = stream.update(text);
  expect(second?.frozen).toBe(true);
  const after = stream.update(text, false, inserts.slice(1));
  expect(after[0]).toBe(first);
  expect(after[1]?.html).toBe("<p>Second.<i>b</i></p>\n");
  expect(html(stream.update(text, true, inserts))).toBe(html(new MarkdownStream(identity).update(text, true, inserts)));
  expect(html(stream.update(text, true, inserts.slice(0, 1)))).toContain("<p>Second.</p>");
});

test("marks are in place after line ends of two characters, and links defined later are links still", () => {
  const text = "One\r\nis one.\r\n\r\nA [link][ref].\r\n\r\n[ref]: https://example.org/there\r\n";
  const end = text.indexOf("[ref].") + 6;
  const shown = html(new MarkdownStream(identity).update(text, true, [{ from: end, to: end, html: "<i>a</i>" }]));
  expect(shown).toMatch(/<a href="https:\/\/example.org\/there"[^>]*>link<\/a>\.<i>a<\/i>/);
});

test("a sentence's mark is a button for each source, with its title made safe", () => {
  const mark: Mark = { start: 0, from: 4, end: 9, support: "supported", citations: [source("S1"), source("S12")] };
  const [insert] = insertsOf([mark]);
  expect(insert?.html.match(/<button/g)).toHaveLength(2);
  expect(insert?.html).toContain(">12</button>");
  expect(insert?.html).not.toContain("<b>");
  expect(insert?.html).not.toContain("≈");
  const [partly] = insertsOf([{ ...mark, support: "partial" }]);
  expect(partly?.html).toContain(">≈12</button>");
  expect(partly?.html).toContain("only in part");
  expect(insertsOf([{ ...mark, support: "plain", citations: [] }])).toEqual([]);
  expect(insertsOf([{ ...mark, support: "unsupported", citations: [] }])[0]?.html).toContain("no source");
});

test("a sentence that a source supports, but that hardly answers, says so behind its sources", () => {
  const ref: CitationRef = {
    type: "citation.ref", sentence: 1, start: 0, end: 9, support: "supported", answers: null, citations: [source("S1")],
  };
  const shown = (answers: number | null): string => insertsOf([markOf("One. [S1]", { ...ref, answers })])[0]?.html ?? "";
  expect(shown(0.12)).toMatch(/<\/button><span class="cite none"[^>]*>may not answer<\/span>$/);
  expect(shown(0.8)).toMatch(/<\/button>$/);
  expect(shown(null)).toMatch(/<\/button>$/);
});

test("marks of a part of the answer are counted from where it begins", () => {
  const inserts = [4, 14, 24].map((to) => ({ from: to - 2, to, html: `${to}` }));
  expect(within(inserts, 10, 20)).toEqual([{ from: 2, to: 4, html: "14" }]);
  expect(within(inserts, 0, 30)).toBe(inserts);
});

test("a sentence without labels is marked at its end", () => {
  const ref: CitationRef = { type: "citation.ref", sentence: 1, start: 0, end: 4, support: "plain", answers: null, citations: [] };
  expect(markOf("Yes. More", ref)).toMatchObject({ from: 4, end: 4 });
});

test("what is cited is found in its passage, in characters as the server counts them", () => {
  const found = source("S1", "🌊🌊 Built in 1931. Then.", 50, 73);
  expect(passageOf(source("S1", "Built in 1931.", 53, 67), [found])).toEqual({
    before: "🌊🌊 ", cited: "Built in 1931.", after: " Then.",
  });
  expect(passageOf(source("S1", "Elsewhere.", 5, 15), [found])).toEqual({ before: "", cited: "Elsewhere.", after: "" });
});
