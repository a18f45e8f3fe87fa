/**
 * What reading markdown costs a browser once: it makes each pattern ready at its first uses, and the first words of the
 * first answer should not wait for all of them. In steps that are short on a slow phone, too.
 */
import { Lexer } from "marked";
import { MarkdownStream } from "./markdown";
import { sanitise } from "./sanitise";

const KINDS = ["a", "a *b* **c** `d` [e](f) <g>", "# a", "- a\n- b", "1. a", "> a", "```a\nb\n```", "| a |\n|---|\n| b |", "$a$"];

/** Each step is to be done by itself. */
export function warmSteps(): (() => void)[] {
  const { block, inline } = Lexer.rules;
  const patterns = [...Object.values(block.gfm), ...Object.values(inline.gfm)].filter((rule) => rule instanceof RegExp);
  return [
    // V8 reads a pattern at its first use, and makes code of it at the next.
    ...[...patterns, ...patterns].map((pattern) => () => void pattern.exec("a b")),
    () => void sanitise("<p>a</p>"),
    ...KINDS.map((kind) => () => void new MarkdownStream(sanitise).update(kind, true)),
  ];
}
