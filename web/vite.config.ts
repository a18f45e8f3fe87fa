import { svelte } from "@sveltejs/vite-plugin-svelte";
import type { Plugin } from "vite";
import { defineConfig } from "vitest/config";
import { de } from "./src/lib/strings/de";
import { en } from "./src/lib/strings/en";

interface Modules {
  getModuleInfo(id: string): { isEntry: boolean; importers: string[] } | null;
}

/**
 * What the first screen is made by is one file: over HTTP/1.1 and a slow network each further one is another wait. That
 * is all that the entry imports, and what that imports; what is imported when it is needed stays apart, but for what is smaller than a request.
 */
const SMALL = /\/(parts\/Bar\.svelte|chat\/CopyButton\.svelte|text\/clipboard\.ts)/; // and used by several of those

function initial(id: string, modules: Modules, seen = new Set<string>()): string | null {
  if (seen.has(id)) return null;
  seen.add(id);
  const info = modules.getModuleInfo(id);
  const isInitial = SMALL.test(id) || info?.isEntry || info?.importers.some((importer) => initial(importer, modules, seen) !== null);
  return isInitial ? "initial" : null;
}

/**
 * The two faces of the first screen, which index.html preloads, are used if they are there when it is painted, and else
 * from the next visit on: one that came later would wrap the headline anew and move what is below it.
 */
const FIRST_FACES = /font-display: swap;(?=[^}]*-latin-wght-normal\.woff2)/g;

const facesStay: Plugin = {
  name: "faces-stay",
  enforce: "pre",
  transform: (code, id) => (/@fontsource-variable\/.*\/wght\.css$/.test(id) ? code.replace(FIRST_FACES, "font-display: optional;") : undefined),
};

const WORDS = ["welcome", "message", "placeholder"] as const;

/** Fills the words of the first screen, in each language, into index.html. */
const headline: Plugin = {
  name: "headline",
  transformIndexHtml: (html) =>
    WORDS.reduce(
      (page, name) => page.replace(`%${name.toUpperCase()}_EN%`, en[name]).replace(`%${name.toUpperCase()}_DE%`, de[name]),
      html,
    ),
};

const PROGRAM = '<template id="program">';
const ANSWERS = '<template id="answers">';
const ANSWER_VIEW = "/components/chat/Message.svelte";

interface Output {
  type: string;
  facadeModuleId?: string | null;
  imports?: string[];
  viteMetadata?: { importedCss: Set<string> };
}

/** Links to the files that answers are shown by, but for those that the first screen is made by. */
function answerLinks(bundle: Record<string, Output>, html: string): string {
  const view = Object.keys(bundle).find((name) => bundle[name]?.facadeModuleId?.endsWith(ANSWER_VIEW));
  if (view === undefined) throw new Error(`Nothing was built of ${ANSWER_VIEW}`);
  const [scripts, styles] = [[view], new Set<string>()];
  for (const name of scripts) {
    const { imports = [], viteMetadata } = bundle[name] ?? {};
    scripts.push(...imports.filter((each) => !scripts.includes(each) && !html.includes(`/${each}"`)));
    for (const each of viteMetadata?.importedCss ?? []) styles.add(each);
  }
  return [
    ...scripts.map((name) => `<link rel="modulepreload" crossorigin href="/${name}">`),
    ...[...styles].map((name) => `<link rel="preload" as="style" crossorigin href="/${name}">`),
  ].join("");
}

/**
 * The program's script waits in the template that index.html has for it, where no browser asks for it before the script
 * below that does: Vite puts it into the head. In another wait the files that answers are shown by, for
 * components/chat/answerView.svelte.ts; the service worker keeps what either names.
 */
const programWaits: Plugin = {
  name: "program-waits",
  apply: "build",
  transformIndexHtml: {
    order: "post",
    handler(html, { bundle }) {
      const [script] = /<script type="module" crossorigin src="[^"]+"><\/script>/.exec(html) ?? [];
      if (script === undefined || !html.includes(PROGRAM)) throw new Error("index.html has no program, or no place for it");
      const links = answerLinks(bundle ?? {}, html);
      return html.replace(script, "").replace(PROGRAM, PROGRAM + script).replace(ANSWERS, ANSWERS + links);
    },
  },
};

/**
 * The styles of what the entry imports are in index.html, as the script before its first paint is: each would be another
 * wait over a slow network. app/page.py allows them by their hashes.
 */
const stylesInside: Plugin = {
  name: "styles-inside",
  apply: "build",
  transformIndexHtml: {
    order: "post",
    handler: (html, { bundle }) =>
      html.replace(/<link rel="stylesheet"[^>]*href="\/([^"]+)">/g, (link, name: string) => {
        const styles = bundle?.[name];
        return styles?.type === "asset" ? `<style>${styles.source.toString()}</style>` : link;
      }),
  },
};

export default defineConfig({
  plugins: [facesStay, headline, programWaits, stylesInside, svelte()],
  build: {
    rolldownOptions: { output: { codeSplitting: { groups: [{ name: initial }] } } },
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"], // the first with light-dark()
    assetsInlineLimit: 0, // data: URLs would need holes in the content security policy
    manifest: "chunks.json", // app/page.py sends for a chat's parts with its page
    license: { fileName: "LICENSES.md" },
    modulePreload: { polyfill: false },
  },
  // `npm run dev` shows the page with hot reload in front of a server that `make serve` started.
  server: { proxy: { "/api": "http://127.0.0.1:8000", "/v1": "http://127.0.0.1:8000" } },
  test: { include: ["src/**/*.test.ts"], environment: "node" },
});
