/**
 * Where the states of a search stand when they are drawn as a tree, root at the left: a column for each depth, a row
 * for each leaf, and a parent in the middle of its children. Linear in the states. Knows nothing of how they are drawn.
 */
import type { Node } from "../answer/search";

export const COLUMN = 190;
export const ROW = 28;

export interface Place {
  readonly node: Node;
  readonly x: number;
  readonly y: number;
  readonly parent: Place | null;
}

export interface Layout {
  readonly places: readonly Place[]; // in the order of the states
  readonly of: ReadonlyMap<number, Place>; // by a state's number
  readonly children: ReadonlyMap<number, readonly Node[]>;
  readonly roots: readonly Node[];
  readonly width: number;
  readonly height: number;
}

/** A state whose parent is not among them is a root of its own. Parents stand before their children. */
export function layOut(nodes: readonly Node[]): Layout {
  const known = new Set(nodes.map((node) => node.id));
  const children = new Map<number, Node[]>();
  const roots: Node[] = [];
  for (const node of nodes) {
    if (node.parent === null || !known.has(node.parent)) roots.push(node);
    else if (children.has(node.parent)) children.get(node.parent)?.push(node);
    else children.set(node.parent, [node]);
  }

  const y = new Map<number, number>();
  let rows = 0;
  // Deepest first and each in order: a leaf takes the next row, a parent comes when its children have theirs.
  const left = roots.toReversed().map((node) => ({ node, entered: false }));
  for (let next = left.pop(); next !== undefined; next = left.pop()) {
    const { node, entered } = next;
    const below = children.get(node.id) ?? [];
    const [first, last] = [below[0], below.at(-1)];
    if (first === undefined || last === undefined) y.set(node.id, ROW * rows++);
    else if (entered) y.set(node.id, ((y.get(first.id) ?? 0) + (y.get(last.id) ?? 0)) / 2);
    else left.push({ node, entered: true }, ...below.toReversed().map((child) => ({ node: child, entered: false })));
  }

  const of = new Map<number, Place>();
  let deepest = 0;
  for (const node of nodes) {
    const parent = node.parent === null ? null : (of.get(node.parent) ?? null);
    const depth = parent === null ? 0 : parent.x / COLUMN + 1;
    deepest = Math.max(deepest, depth);
    of.set(node.id, { node, x: depth * COLUMN, y: y.get(node.id) ?? 0, parent });
  }
  const places = nodes.map((node) => of.get(node.id)).filter((place) => place !== undefined);
  return { places, of, children, roots, width: (deepest + 1) * COLUMN, height: Math.max(1, rows) * ROW };
}

export type Direction = "parent" | "child" | "next" | "previous";

/** The state that one comes to from `id`: up, down, or to its neighbour in the same column. */
export function step(layout: Layout, id: number, to: Direction): number {
  const here = layout.of.get(id);
  if (here === undefined) return layout.roots[0]?.id ?? id;
  if (to === "parent") return here.parent?.node.id ?? id;
  if (to === "child") return layout.children.get(id)?.[0]?.id ?? id;
  const column = layout.places.filter((place) => place.x === here.x);
  const beside = column.filter(({ y }) => (to === "next" ? y > here.y : y < here.y));
  beside.sort((a, b) => Math.abs(a.y - here.y) - Math.abs(b.y - here.y));
  return beside[0]?.node.id ?? id;
}
