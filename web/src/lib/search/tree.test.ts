import { expect, test } from "vitest";
import type { Node } from "../answer/search";
import { COLUMN, layOut, ROW, step } from "./tree";
import { fit, reveal, zoom } from "./view";

const node = (id: number, parent: number | null, depth = 0): Node => ({
  id, parent, depth, text: `${id}`, score: null, pruned: null, chosen: false,
});
//  0 ─┬─ 1 ─┬─ 3
//     │     └─ 4
//     └─ 2
const TREE = [node(0, null), node(1, 0, 1), node(2, 0, 1), node(3, 1, 2), node(4, 1, 2)];

/** A tree of `count` states, each below one that came before it. */
function grown(count: number): Node[] {
  let state = 7;
  const nodes = [node(0, null)];
  for (let id = 1; id < count; id += 1) {
    state = (state * 48271) % 2147483647;
    const parent = nodes[state % nodes.length];
    nodes.push(node(id, parent?.id ?? 0, (parent?.depth ?? 0) + 1));
  }
  return nodes;
}

test("leaves have rows of their own and parents the middle of their children", () => {
  const { of, width, height } = layOut(TREE);
  expect([0, 1, 2, 3, 4].map((id) => of.get(id)?.x)).toEqual([0, COLUMN, COLUMN, 2 * COLUMN, 2 * COLUMN]);
  expect([3, 4, 2, 1, 0].map((id) => (of.get(id)?.y ?? -1) / ROW)).toEqual([0, 1, 2, 0.5, 1.25]);
  expect([width, height]).toEqual([3 * COLUMN, 3 * ROW]);
});

test("no two of many states stand in the same place", () => {
  const nodes = grown(2000);
  const places = layOut(nodes).places.map(({ x, y }) => `${x},${y}`);
  expect(new Set(places).size).toBe(nodes.length);
});

test("a state whose parent is not there is a root, and a chain may be deep", () => {
  expect(layOut([node(5, 4, 3)]).roots.map(({ id }) => id)).toEqual([5]);
  const chain = Array.from({ length: 20_000 }, (_, id) => node(id, id === 0 ? null : id - 1, id));
  expect(layOut(chain).height).toBe(ROW);
});

test("arrow keys go to the parent, the first child and the neighbours of a column", () => {
  const layout = layOut(TREE);
  expect(step(layout, 4, "parent")).toBe(1);
  expect(step(layout, 0, "child")).toBe(1);
  expect(step(layout, 1, "next")).toBe(2);
  expect(step(layout, 2, "previous")).toBe(1);
  expect(step(layout, 2, "child")).toBe(2);
  expect(step(layout, 0, "parent")).toBe(0);
});

const BOX = { width: 400, height: 300 };

test("a drawing fits its box both ways, and is never larger than it is", () => {
  const view = fit({ width: 1600, height: 100 }, BOX, 20);
  expect([view.sx, view.sy]).toEqual([0.225, 1]);
  expect([view.x, view.y]).toEqual([20, 100]);
});

test("a zoom keeps the point under the hand, and makes the scales equal before it goes on", () => {
  const whole = fit({ width: 600, height: 2600 }, BOX, 20);
  const near = zoom(whole, 2, 100, 50, whole);
  expect((50 - near.y) / near.sy).toBeCloseTo((50 - whole.y) / whole.sy);
  expect([near.sx, near.sy]).toEqual([whole.sx, whole.sy * 2]);
  const nearer = zoom(near, 5, 100, 50, whole);
  expect(nearer.sx).toBe(nearer.sy);
  expect(zoom(nearer, 0.001, 100, 50, whole)).toMatchObject({ sx: whole.sx, sy: whole.sy });
});

test("a point out of sight is brought into it", () => {
  const view = { sx: 1, sy: 1, x: 0, y: 0 };
  expect(reveal(view, 1000, 50, BOX, 10)).toMatchObject({ x: -610, y: 0 });
  expect(reveal(view, 200, 150, BOX, 10)).toEqual(view);
});
