/** Marks of citations as HTML to be put into an answer's text. All of it is the page's own; titles are escaped. */
import { numberOf, type Mark } from "../answer/sources";
import { escape, type Insert } from "./markdown";
import { strings } from "../strings";

/** What stands in for the labels that the server wrote; nothing for a sentence that needs no source. */
export function insertsOf(marks: readonly Mark[]): Insert[] {
  return marks.flatMap((mark, i) => {
    const html = mark.support === "unsupported" ? UNSUPPORTED : buttons(mark, i) + (mark.beside ? BESIDE : "");
    return html === "" ? [] : [{ from: mark.from, to: mark.end, html }];
  });
}

const UNSUPPORTED =
  `<span class="cite none" title="${escape(strings.unsupportedLong)}">${escape(strings.unsupported)}</span>`;

const BESIDE = `<span class="cite none" title="${escape(strings.besideLong)}">${escape(strings.beside)}</span>`;

function buttons({ citations, support }: Mark, mark: number): string {
  const named = { elsewhere: strings.citeElsewhere, partial: strings.citePartial };
  const special = support === "elsewhere" || support === "partial" ? support : null;
  return citations
    .map(({ label, title, page }, i) => {
      const number = numberOf(label);
      const name = (special === null ? strings.cite : named[special])(number, title, page);
      return (
        `<button type="button" class="cite${special === null ? "" : ` ${special}`}" data-mark="${mark}" data-citation="${i}" ` +
        `aria-label="${escape(name)}" title="${escape(name)}">${special === "partial" ? "≈" : ""}${escape(number)}</button>`
      );
    })
    .join("");
}

/** Those of them that are in the characters `start` to `end`, counted from there. */
export function within(inserts: readonly Insert[], start: number, end: number): readonly Insert[] {
  if (start === 0 && (inserts.at(-1)?.to ?? 0) <= end) return inserts;
  return inserts
    .filter(({ to }) => start < to && to <= end)
    .map(({ from, to, html }) => ({ from: Math.max(0, from - start), to: to - start, html }));
}
