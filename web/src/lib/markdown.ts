/**
 * Markdown that grows. The text is cut into top-level blocks; a block that can no longer change is frozen: its HTML is
 * made once and never again. Only the last block is rendered as text arrives, so the cost of a token does not
 * grow with the length of the answer.
 *
 * HTML in the text is shown, not run; images become links, as fetching one would tell its host about the chat.
 */
import { Marked, type Token, type Tokens, type TokensList } from "marked";

export interface Block {
  readonly html: string;
  readonly frozen: boolean;
  readonly source: string;
}

type Sanitise = (html: string) => string;

const ESCAPES: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text: string): string => text.replace(/[&<>"']/g, (character) => ESCAPES[character] ?? character);

const SAFE_LINK = /^(https?:|mailto:|#|\/(?!\/))/i;

function link(href: string, title: string | null | undefined, inner: string): string {
  if (!SAFE_LINK.test(href)) return inner;
  const hint = title ? ` title="${escape(title)}"` : "";
  return `<a href="${escape(href)}"${hint} target="_blank" rel="noopener noreferrer nofollow">${inner}</a>`;
}

/** `copy` is the label of the button on a block of code; what a click does is the page's concern. */
function parser(copy: string): Marked {
  return new Marked({
    gfm: true,
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
  #frozen: Block[] = [];
  #live: Block[] = [];
  #frozenEnd = 0; // characters of #text that the frozen blocks cover
  #links: TokensList["links"] = {};
  #ended = false;

  constructor(sanitise: Sanitise, copy = "Copy") {
    this.#sanitise = sanitise;
    this.#marked = parser(copy);
  }

  /** The blocks of `text`, which is usually the last text and more. Ended text has no block that may still change. */
  update(raw: string, ended = false): readonly Block[] {
    const text = raw.replace(/\r\n?/g, "\n"); // as the lexer does: lengths must agree
    if (this.#ended && text === this.#text) return this.#frozen;
    if (this.#ended || !text.startsWith(this.#text)) this.#reset();
    // A link may be defined after its use, in a block that was frozen before the definition came: read it all again.
    if (ended && text.includes("]:")) this.#reset();
    this.#ended = ended;
    return this.#advance(text, ended);
  }

  #advance(text: string, ended: boolean): readonly Block[] {
    this.#text = text;
    const tail = this.#lex(text.slice(this.#frozenEnd));
    const settled = ended ? tail.length : settledTokens(tail);
    this.#freeze(tail.slice(0, settled));
    const before = this.#live;
    this.#live = tail
      .slice(settled)
      .filter(visible)
      .map((token, i) => (before[i]?.source === token.raw ? before[i] : this.#block(token, false)));
    return [...this.#frozen, ...this.#live];
  }

  #reset(): void {
    this.#text = "";
    this.#frozen = [];
    this.#live = [];
    this.#frozenEnd = 0;
    this.#links = {};
    this.#ended = false;
  }

  #lex(text: string): TokensList {
    const lexer = new this.#marked.Lexer(this.#marked.defaults);
    Object.assign(lexer.tokens.links, this.#links);
    return lexer.lex(text);
  }

  #freeze(tokens: Token[]): void {
    const blocks = tokens.filter(visible).map((token) => this.#block(token, true));
    if (blocks.length > 0) this.#frozen = [...this.#frozen, ...blocks];
    for (const token of tokens) {
      this.#frozenEnd += token.raw.length;
      if (token.type === "def") this.#links[token.tag] ??= { href: token.href, title: token.title };
    }
  }

  #block(token: Token, frozen: boolean): Block {
    return { html: this.#sanitise(this.#marked.parser([token])), frozen, source: token.raw };
  }
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
