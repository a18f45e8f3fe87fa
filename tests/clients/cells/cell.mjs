// Cells of a client in JavaScript: the same lines as `tests.clients.cell` prints, and its conversations from the
// environment. A client's module is copied beside its `node_modules`, where Node finds its packages.

import { readFileSync } from "node:fs";

export const [, , url] = process.argv;
export const talk = JSON.parse(process.env.CONVERSATIONS);

export function assert(holds, ...said) {
  if (!holds) throw new Error(`not so: ${JSON.stringify(said)}`);
}

export function same(found, expected) {
  assert(JSON.stringify(found) === JSON.stringify(expected), found, expected);
}

export async function refused(promise, status, word) {
  const error = await promise.then(
    () => new Error("it was accepted"),
    (error) => error,
  );
  assert((error.status ?? error.statusCode) === status && error.message.includes(word), error.message);
}

export async function counters() {
  const lines = (await (await fetch(`${url}/metrics`)).text()).split("\n");
  const sum = (start, part = "") =>
    lines
      .filter((line) => line.startsWith(`ponder_${start}`) && line.includes(part))
      .reduce((all, line) => all + Number(line.split(" ").at(-1)), 0);
  return { cancelled: sum("requests_total{", 'outcome="cancelled"'), open: sum("sequences_open") };
}

export async function stops(beginAndLeave) {
  const before = await counters();
  await beginAndLeave();
  for (let tries = 0; tries < 1000; tries++) {
    const found = await counters();
    if (found.open === 0) return assert(found.cancelled === before.cancelled + 1, "it was written to the end");
  }
  throw new Error("the answer goes on");
}

export function cached(shares) {
  assert(shares.length >= talk.STEPS && Math.min(...shares) >= 0.95, shares);
  const [least, most] = [Math.min(...shares), Math.max(...shares)].map((share) => `${(100 * share).toFixed(1)}%`);
  return `${least} to ${most} of the prompts from turn 2 on cached`;
}

export async function run(client, name, cells) {
  const { version } = JSON.parse(readFileSync(new URL(`./node_modules/${name}/package.json`, import.meta.url)));
  for (const [feature, cell] of Object.entries(cells)) {
    const names = process.argv.slice(3);
    if (names.includes(`-${feature}`)) continue;
    if (!names.includes(feature) && !names.every((each) => each.startsWith("-"))) continue;
    const line = { client, package: name, version, feature };
    try {
      const remark = await cell();
      console.log(JSON.stringify({ ...line, result: "works", ...(remark ? { remark } : {}) }));
    } catch (error) {
      console.error(error);
      console.log(JSON.stringify({ ...line, result: "fails", remark: String(error).slice(0, 600) }));
    }
  }
}
