/**
 * Puts the page's own HTML into rendered text. Characters that no text may have hold the places while markdown is read
 * and its HTML is made safe; then each is exchanged for what belongs there. Knows nothing of what a mark means.
 */
const [OPEN, CLOSE] = ["\uE000", "\uE001"];
const HELD = new RegExp(`\\s?${OPEN}(\\d+)${CLOSE}`, "g");
const TAG_OR_TEXT = /<[^>"]*(?:"[^"]*"[^>"]*)*>|[^<]+/g;

interface Place {
  readonly from: number;
  readonly to: number;
  readonly html: string;
}

/** `text` with a held place for each of `places`, which do not overlap. */
export function hold(text: string, places: readonly Place[]): string {
  const clean = text.replace(/[\uE000\uE001]/g, "\uFFFD"); // the length stays
  let held = "";
  let read = 0;
  places.forEach(({ from, to }, i) => {
    // The space keeps the place out of an address that the text ends with; a table's row ends with its last bar.
    const before = clean.slice(read, from);
    const bar = from === to ? (/\s*\|\s*$/.exec(before)?.[0] ?? "") : "";
    held += `${before.slice(0, before.length - bar.length)} ${OPEN}${i}${CLOSE}${bar}`;
    read = to;
  });
  return held + clean.slice(read);
}

/**
 * Serialised HTML with each held place exchanged. What is held inside a link, a button or code comes after it; what
 * got lost, say in an address, comes at the end.
 */
export function put(html: string, places: readonly Place[]): string {
  const missing = new Set(places.keys());
  let waiting = "";
  let inside = 0;
  let out = "";
  for (const [piece] of html.matchAll(TAG_OR_TEXT)) {
    if (!piece.startsWith("<")) {
      out += piece.replace(HELD, (_, number: string) => {
        const i = Number(number);
        if (!missing.delete(i)) return "";
        const mark = places[i]?.html ?? "";
        if (inside > 0) waiting += mark;
        return inside > 0 ? "" : mark;
      });
      continue;
    }
    out += piece.replace(HELD, "");
    if (/^<(a|code|pre|button)\b/i.test(piece)) inside += 1;
    else if (/^<\/(a|code|pre|button)\b/i.test(piece)) inside = Math.max(0, inside - 1);
    if (inside === 0 && waiting !== "") {
      out += waiting;
      waiting = "";
    }
  }
  const lost = [...missing].map((i) => places[i]?.html ?? "").join("");
  return waiting + lost === "" ? out : `${out}<p>${waiting}${lost}</p>`;
}
