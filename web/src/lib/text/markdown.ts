/**
 * Markdown that grows. The text is cut into top-level blocks; a block that can no longer change is frozen: its HTML is
 * made once and never again. Only the last block is rendered as text arrives, so the cost of a token does not
 * grow with the length of the answer.
 *
 * HTML in the text is shown, not run; images become links, as fetching one would tell its host about the chat.
 *
 * Text that nests deeper than a person would write it is shown as it stands from there on, and so is a block that the
 * parser fails on: what a model repeats a thousand times costs its form, never the chat that it is in.
 *
 * Marks are the page's own HTML in the place of characters of the text. They come later than the text, so they change
 * blocks that are frozen, but never what is a block.
 */
import { Marked, Tokenizer, type Token, type Tokens, type TokensList } from "marked";
import { formulas } from "./formulas";
import { hold, put } from "./marks";

/** `html`, which is trusted, stands for the characters `from` to `to`; for none where the two are the same. */
export interface Insert {
  readonly from: number;
  readonly to: number;
  readonly html: string;
}

export interface Block {
  readonly html: string;
  readonly frozen: boolean;
  readonly source: string;
  readonly start: number; // of its source in the text
}

interface Rendered extends Block {
  readonly token: Token;
  readonly inserts: readonly Insert[];
}

type Sanitise = (html: string) => string;

const ESCAPES: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
export const escape = (text: string): string => text.replace(/[&<>"']/g, (each) => ESCAPES[each] ?? each);

const MAX_NESTING = 16; // quotes and lists within each other; as many of emphasis, links and strikethrough

const MAX_INLINE = 8_000; // characters of one paragraph whose emphasis and links are looked for

const NESTING = ["blockquote", "list", "emStrong", "del", "link", "reflink"] as const;

/** Marked's tokenizers of what may hold its own kind, which read nothing more from `MAX_NESTING` levels on. */
function shallow(): Record<string, unknown> {
  const depths = { block: 0, inline: 0 };
  const limited = (name: (typeof NESTING)[number]): unknown => {
    const kind = name === "blockquote" || name === "list" ? "block" : "inline";
    const read = Tokenizer.prototype[name] as (this: unknown, ...text: string[]) => unknown;
    return function (this: unknown, ...text: string[]): unknown {
      if (depths[kind] === MAX_NESTING) return undefined;
      depths[kind] += 1;
      try {
        return read.apply(this, text);
      } finally {
        depths[kind] -= 1;
      }
    };
  };
  return Object.fromEntries(NESTING.map((name) => [name, limited(name)]));
}

const SAFE_LINK = /^(https?:|mailto:|#|\/(?!\/))/i;

function link(href: string, title: string | null | undefined, inner: string): string {
  if (!SAFE_LINK.test(href)) return inner;
  const hint = title ? ` title="${escape(title)}"` : "";
  return `<a href="${escape(href)}"${hint} target="_blank" rel="noopener noreferrer nofollow">${inner}</a>`;
}

/**
 * `copy` is the label of the button on a block of code; what a click does is the page's concern. `growing` says whether
 * the text may go on.
 */
function parser(copy: string, growing: () => boolean): Marked {
  return new Marked(formulas(escape, growing), {
    gfm: true,
    tokenizer: shallow(),
    renderer: {
      html: ({ text, block }: Tokens.HTML | Tokens.Tag) => (block ? `<p>${escape(text)}</p>` : escape(text)),
      heading({ depth, tokens }: Tokens.Heading) {
        const level = Math.min(6, depth + 1); // the first level is the chat's own title
        return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
      },
      link({ href, title, tokens }: Tokens.Link) {
        return link(href, title, this.parser.parseInline(tokens));
      },
      image: ({ href, title, text }: Tokens.Image) => link(href, title, escape(text || href)),
      code({ text, lang }: Tokens.Code) {
        const language = (lang ?? "").match(/^\S+/)?.[0] ?? "";
        return (
          `<figure class="code"><figcaption><span>${escape(language)}</span>` +
          `<button type="button" data-copy>${escape(copy)}</button></figcaption>` +
          `<pre tabindex="0"><code data-language="${escape(language.toLowerCase())}">${escape(text.replace(/\n$/, ""))}</code></pre></figure>`
        );
      },
      table(token: Tokens.Table) {
        const row = (cells: Tokens.TableCell[]): string =>
          `<tr>${cells.map((cell) => this.tablecell(cell)).join("")}</tr>`;
        return (
          `<div class="table" tabindex="0"><table><thead>${row(token.header)}</thead>` +
          `<tbody>${token.rows.map(row).join("")}</tbody></table></div>`
        );
      },
    },
  });
}

export class MarkdownStream {
  readonly #marked: Marked;
  readonly #sanitise: Sanitise;
  #text = "";
  #frozen: Rendered[] = [];
  #live: Rendered[] = [];
  #frozenEnd = 0; // characters of #text that the frozen blocks cover
  #open: number[] = []; // depths of the headings that the next one may stand below
  #links: TokensList["links"] = {}; // that frozen blocks define
  #defined: TokensList["links"] = {}; // these, and the ones of the blocks that may still change
  #ended = false;
  #inserts: readonly Insert[] = NONE; // as they were given
  #places: readonly Insert[] = NONE; // in the text as it is here

  constructor(sanitise: Sanitise, copy = "Copy") {
    this.#sanitise = sanitise;
    this.#marked = parser(copy, () => !this.#ended);
  }

  /**
   * The blocks of `text`, which is usually the last text and more. Ended text has no block that may still change.
   * `inserts` are in the order of the text, and are in place of what was given before.
   */
  update(raw: string, ended = false, inserts: readonly Insert[] = NONE): readonly Block[] {
    const text = raw.replace(/\r\n?/g, "\n"); // as the lexer does: lengths must agree
    const marked = inserts !== this.#inserts;
    this.#inserts = inserts;
    if (this.#ended && text === this.#text && !marked) return this.#frozen;
    if ((this.#ended && text !== this.#text) || !text.startsWith(this.#text)) this.#reset();
    // A link may be defined after its use, in a block that was frozen before the definition came: read it all again.
    if (ended && !this.#ended && text.includes("]:")) this.#reset();
    this.#places = text.length === raw.length ? inserts : inserts.map((insert) => moved(insert, raw));
    if (marked) this.#frozen = this.#frozen.map((block) => this.#block(block.token, block.start, true, block));
    if (this.#ended) return this.#frozen;
    this.#ended = ended;
    return this.#advance(text, ended);
  }

  #advance(text: string, ended: boolean): readonly Block[] {
    this.#text = text;
    const tail = this.#lex(text.slice(this.#frozenEnd), this.#links);
    this.#defined = tail.links;
    const settled = ended ? tail.length : settledTokens(tail);
    this.#freeze(tail.slice(0, settled));
    const before = this.#live;
    let start = this.#frozenEnd;
    const open = [...this.#open];
    this.#live = [];
    for (const token of tail.slice(settled)) {
      nest(token, open);
      if (visible(token)) this.#live.push(this.#block(token, start, false, before[this.#live.length]));
      start += token.raw.length;
    }
    return [...this.#frozen, ...this.#live];
  }

  #reset(): void {
    this.#text = "";
    this.#frozen = [];
    this.#live = [];
    this.#frozenEnd = 0;
    this.#open = [];
    this.#links = this.#defined = {};
    this.#ended = false;
  }

  #lex(text: string, links: TokensList["links"]): TokensList {
    const lexer = new this.#marked.Lexer(this.#marked.defaults);
    Object.assign(lexer.tokens.links, links);
    const inline = lexer.inlineTokens.bind(lexer);
    lexer.inlineTokens = (source, tokens = []) => {
      if (source.length <= MAX_INLINE) return inline(source, tokens);
      tokens.push({ type: "text", raw: source, text: source, escaped: false });
      return tokens;
    };
    try {
      return lexer.lex(text);
    } catch (error) {
      console.error("This text is shown without its form, as its markdown could not be read", error);
      return Object.assign([verbatim(text)], { links });
    }
  }

  #freeze(tokens: Token[]): void {
    const blocks: Rendered[] = [];
    for (const token of tokens) {
      nest(token, this.#open);
      if (visible(token)) blocks.push(this.#block(token, this.#frozenEnd, true, this.#live[blocks.length]));
      this.#frozenEnd += token.raw.length;
      if (token.type === "def") this.#links[token.tag] ??= { href: token.href, title: token.title };
    }
    if (blocks.length > 0) this.#frozen = [...this.#frozen, ...blocks];
  }

  /** `before` is what stood in its place, and stays if nothing of it changed. */
  #block(token: Token, start: number, frozen: boolean, before: Rendered | undefined): Rendered {
    const end = start + token.raw.length;
    const inserts = this.#places.filter(({ to }) => start < to && to <= end);
    const there = before?.source === token.raw && before.start === start && depthOf(before.token) === depthOf(token);
    const same = there && alike(before.inserts, inserts);
    if (same && before.frozen === frozen) return before;
    const html = same && !frozen ? before.html : this.#render(token, start, inserts);
    return { html, frozen, source: token.raw, token, start, inserts };
  }

  #render(token: Token, start: number, inserts: readonly Insert[]): string {
    if (inserts.length === 0) return this.#html(token);
    const local = inserts.map(({ from, to, html }) => ({ from: Math.max(0, from - start), to: to - start, html }));
    const read = token.type === "code" ? [] : this.#lex(hold(token.raw, local), this.#defined);
    const [held, ...more] = read.filter(visible);
    const whole = held?.type === token.type && more.length === 0; // else they would change what the block is
    if (whole && isHeading(held)) held.depth = depthOf(token);
    return put(this.#html(whole ? held : token), local);
  }

  #html(token: Token): string {
    try {
      return this.#sanitise(this.#marked.parser([token]));
    } catch (error) {
      console.error("This block is shown without its form, as it could not be written as HTML", error);
      return `<p>${escape(token.raw)}</p>`;
    }
  }
}

const NONE: readonly Insert[] = [];

/** A text as one paragraph that has no form. */
const verbatim = (raw: string): Token => ({
  type: "paragraph", raw, text: raw, tokens: [{ type: "text", raw, text: raw, escaped: false }],
});

const alike = (some: readonly Insert[], others: readonly Insert[]): boolean =>
  some.length === others.length &&
  some.every(({ from, to, html }, i) => from === others[i]?.from && to === others[i].to && html === others[i].html);

/** The place of an insert once every line ends with one character. */
function moved(insert: Insert, raw: string): Insert {
  const at = (place: number): number => place - (raw.slice(0, place).match(/\r\n/g)?.length ?? 0);
  return { ...insert, from: at(insert.from), to: at(insert.to) };
}

const isHeading = (token: Token): token is Tokens.Heading => token.type === "heading";
const depthOf = (token: Token): number => (isHeading(token) ? token.depth : 0);

/** Gives a heading the depth at which it stands: one below those that are `open` above it, whatever it was written as. */
function nest(token: Token, open: number[]): void {
  if (!isHeading(token)) return;
  while ((open.at(-1) ?? 0) >= token.depth) open.pop();
  open.push(token.depth);
  token.depth = open.length;
}

const visible = (token: Token): boolean => token.type !== "space" && token.type !== "def";

/**
 * How many tokens from the start can no longer change: those before the last block, once that block has a whole line.
 * (Before that, its first line may still turn out to belong to the block above it.)
 */
function settledTokens(tokens: Token[]): number {
  const last = tokens.findLastIndex(visible);
  return last > 0 && tokens[last]?.raw.includes("\n") ? last : 0;
}
