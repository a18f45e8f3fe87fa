/**
 * TeX in markdown: `$…$` and `\(…\)` in a line, `$$…$$` and `\[…\]` in a line or as a block of their own. What a dollar
 * sign means is decided as in pandoc: one that opens has no space behind it, one that closes none before it and no
 * digit behind it, so prices stay prices. Gives HTML with the source in it; typesetting is the page's concern.
 */
import type { MarkedExtension, TokenizerThis, Tokens } from "marked";

interface Formula extends Tokens.Generic {
  readonly tex: string;
  readonly display: boolean;
  readonly open: boolean; // its end has not come yet
}

const TALL = /\\(?:[dtc]?frac|binom|sum|prod|int|lim|begin)\b/; // takes about two lines once it is set
const HELD = "\uE000"; // a place that something else will be put into; no formula goes over it
const BLOCK = /^ {0,3}(?:\$\$((?:(?!\$\$|\n[ \t]*\n)[^\uE000])+)\$\$|\\\[((?:(?!\\\]|\n[ \t]*\n)[^\uE000])+)\\\])[ \t]*(?:\n|$)/;
const OPEN = /^ {0,3}(?:\$\$|\\\[)(?:(?!\n[ \t]*\n)[\s\S])*$/;
const DOUBLE = /^(?:\$\$((?:(?!\$\$|\n[ \t]*\n)[^\uE000])+)\$\$|\\\[((?:(?!\\\]|\n[ \t]*\n)[^\uE000])+)\\\])/;
const SINGLE = /^(?:\$(?!\s|\$)((?:\\[^\n]|[^\\$\n\uE000])+?)(?<!\s)\$(?!\d)|\\\(((?:(?!\\\)|\n[ \t]*\n)[^\uE000])+)\\\))/;

/** `growing` says whether the text may go on: a block whose end has not come is then kept apart. */
export function formulas(escape: (text: string) => string, growing: () => boolean): MarkedExtension {
  const formula = (type: string, found: RegExpExecArray | null, display: boolean): Formula | undefined => {
    const tex = (found?.[1] ?? found?.[2] ?? "").trim();
    return found === null || tex === "" ? undefined : { type, raw: found[0], tex, display, open: false };
  };
  const renderer = (token: Tokens.Generic): string => {
    const { tex, display, open } = token as Formula;
    const tag = token.type === "formulas" ? "div" : "span";
    const kind = open ? "formula open" : !display ? "formula" : TALL.test(tex) ? "formula display tall" : "formula display";
    return `<${tag} class="${kind}">${escape(tex)}</${tag}>`;
  };
  return {
    extensions: [
      {
        name: "formulas",
        level: "block",
        start: (src: string) => src.match(/\n {0,3}(?:\$\$|\\\[)/)?.index,
        tokenizer(this: TokenizerThis, src: string): Formula | undefined {
          const closed = formula("formulas", BLOCK.exec(src), true);
          if (closed !== undefined || !growing() || src.includes(HELD)) return closed;
          const raw = OPEN.exec(src)?.[0];
          return raw === undefined ? undefined : { type: "formulas", raw, tex: raw, display: true, open: true };
        },
        renderer,
      },
      {
        name: "formula",
        level: "inline",
        start: (src: string) => src.match(/\$|\\[([]/)?.index,
        tokenizer(this: TokenizerThis, src: string): Formula | undefined {
          return formula("formula", DOUBLE.exec(src), true) ?? formula("formula", SINGLE.exec(src), false);
        },
        renderer,
      },
    ],
  };
}
