import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vitest/config";

export default defineConfig({
  plugins: [svelte()],
  build: {
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"], // the first with light-dark()
    assetsInlineLimit: 0, // data: URLs would need holes in the content security policy
    license: { fileName: "LICENSES.md" },
    modulePreload: { polyfill: false },
  },
  // `npm run dev` shows the page with hot reload in front of a server that `make serve` started.
  server: { proxy: { "/api": "http://127.0.0.1:8000", "/v1": "http://127.0.0.1:8000" } },
  test: { include: ["src/**/*.test.ts"], environment: "node" },
});
