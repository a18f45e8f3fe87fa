// The page's service worker: what is needed to open the page is kept, so that it opens without a connection. Answers of
// the server are never kept: requests to its interfaces, streams among them, pass by.
const KEPT = "ponder-page";
const SHELL = ["/favicon.svg", "/manifest.webmanifest"];
const INTERFACES = /^\/(api|v1|mcp|metrics|health|share|openapi\.json)(\/|$)/;

/** Keeps a page, with the files that its first load asks for and none of an earlier build. */
async function keepPage(page) {
  const kept = await caches.open(KEPT);
  const before = await kept.match("/");
  if (before?.headers.get("etag") === page.headers.get("etag")) return;
  const named = new Set((await page.clone().text()).match(/(?<=(?:src|href)=")\/assets\/[\w./-]+/g));
  const old = (await kept.keys()).filter(({ url }) => !named.has(new URL(url).pathname));
  await kept.addAll([...SHELL, ...named]);
  await kept.put("/", page);
  await Promise.all(old.filter(({ url }) => new URL(url).pathname.startsWith("/assets/")).map((each) => kept.delete(each)));
}

async function install() {
  const page = await fetch("/", { cache: "no-cache" });
  if (!page.ok) throw new Error(`the page answered ${page.status}`);
  await keepPage(page);
  await self.skipWaiting();
}

/** Answers from the server, or with what was kept where that does not answer. */
async function freshest(event, name) {
  try {
    const response = await fetch(event.request);
    if (response.ok && name === "/" && new URL(response.url).pathname === "/") event.waitUntil(keepPage(response.clone()));
    return response;
  } catch (error) {
    const kept = await caches.match(name);
    if (kept === undefined) throw error;
    return kept;
  }
}

/** A file whose name carries a hash of its content does not change. */
async function unchanging(event) {
  const kept = await caches.match(event.request);
  if (kept !== undefined) return kept;
  const response = await fetch(event.request);
  if (response.ok) {
    const copy = response.clone();
    event.waitUntil(caches.open(KEPT).then((open) => open.put(event.request, copy)));
  }
  return response;
}

self.addEventListener("install", (event) => event.waitUntil(install()));

self.addEventListener("activate", (event) => {
  const forget = async () => {
    const names = await caches.keys();
    await Promise.all(names.filter((name) => name !== KEPT).map((name) => caches.delete(name)));
    await self.clients.claim();
  };
  event.waitUntil(forget());
});

self.addEventListener("fetch", (event) => {
  const { method, mode, url } = event.request;
  const { origin, pathname } = new URL(url);
  if (method !== "GET" || origin !== self.location.origin || INTERFACES.test(pathname)) return;
  if (mode === "navigate") event.respondWith(freshest(event, "/"));
  else if (pathname.startsWith("/assets/")) event.respondWith(unchanging(event));
  else if (SHELL.includes(pathname)) event.respondWith(freshest(event, pathname));
});
