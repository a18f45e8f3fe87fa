/** Colours for code. The highlighter and each language are fetched when the first block asks for them. */
import type { HLJSApi, LanguageFn } from "highlight.js";
import { sanitise } from "./sanitise";

type Load = () => Promise<{ default: LanguageFn }>;

const LANGUAGES: Record<string, Load> = {
  bash: () => import("highlight.js/lib/languages/bash"),
  c: () => import("highlight.js/lib/languages/c"),
  cpp: () => import("highlight.js/lib/languages/cpp"),
  css: () => import("highlight.js/lib/languages/css"),
  diff: () => import("highlight.js/lib/languages/diff"),
  go: () => import("highlight.js/lib/languages/go"),
  java: () => import("highlight.js/lib/languages/java"),
  javascript: () => import("highlight.js/lib/languages/javascript"),
  json: () => import("highlight.js/lib/languages/json"),
  markdown: () => import("highlight.js/lib/languages/markdown"),
  python: () => import("highlight.js/lib/languages/python"),
  rust: () => import("highlight.js/lib/languages/rust"),
  sql: () => import("highlight.js/lib/languages/sql"),
  typescript: () => import("highlight.js/lib/languages/typescript"),
  xml: () => import("highlight.js/lib/languages/xml"),
  yaml: () => import("highlight.js/lib/languages/yaml"),
};

const ALIASES: Record<string, string> = {
  "c++": "cpp",
  console: "bash",
  html: "xml",
  js: "javascript",
  jsx: "javascript",
  md: "markdown",
  patch: "diff",
  py: "python",
  python3: "python",
  rs: "rust",
  sh: "bash",
  shell: "bash",
  svelte: "xml",
  svg: "xml",
  toml: "yaml",
  ts: "typescript",
  tsx: "typescript",
  yml: "yaml",
  zsh: "bash",
};

const LONGEST = 50_000; // characters; colouring more would hold the page up

let core: HLJSApi | null = null;
const loading = new Map<string, Promise<void>>();

function load(language: string, fetchLanguage: Load): Promise<void> {
  let pending = loading.get(language);
  if (pending === undefined) {
    pending = Promise.all([import("highlight.js/lib/core"), fetchLanguage()]).then(async ([hljs, definition]) => {
      await pause();
      hljs.default.registerLanguage(language, definition.default);
      hljs.default.highlight("", { language }); // makes its grammar ready, which is most of the work
      await pause();
      core = hljs.default;
    });
    loading.set(language, pending);
    pending.catch(() => loading.delete(language)); // offline: the next block may try again
  }
  return pending;
}

/** Lets the page be painted, and go on after that. */
const pause = (): Promise<void> => new Promise((resume) => setTimeout(resume));

/** Is it text and spans with classes alone, as the highlighter writes it? Anything else goes through the sanitiser. */
export const onlySpans = (html: string): boolean => !html.replace(/<span class="[\w -]*">|<\/span>/g, " ").includes("<");

/** Colour every block of code under `root`: at once when the language is here, else when it has come. */
export function highlight(root: HTMLElement): void {
  for (const code of root.querySelectorAll<HTMLElement>("code[data-language]")) {
    const named = code.dataset.language ?? "";
    const language = ALIASES[named] ?? named;
    const fetchLanguage = Object.hasOwn(LANGUAGES, language) ? LANGUAGES[language] : undefined;
    const text = code.textContent;
    if (fetchLanguage === undefined || text.length > LONGEST) continue;
    const paint = (): void => {
      if (core === null || !code.isConnected) return; // replaced by a longer one meanwhile
      const html = core.highlight(text, { language, ignoreIllegals: true }).value;
      code.innerHTML = onlySpans(html) ? html : sanitise(html);
    };
    if (core?.getLanguage(language)) paint();
    else load(language, fetchLanguage).then(paint, () => undefined);
  }
}
