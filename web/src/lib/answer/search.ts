/** A search for an answer, as a tree of states, and answers of which one was chosen. Knows nothing of drawing. */
import type {
  CandidateChosen,
  CandidateDone,
  SearchDone,
  SearchMerge,
  SearchNode,
  SearchPrune,
  SearchScore,
  SearchSelect,
} from "../protocol";

export interface Node {
  readonly id: number;
  readonly parent: number | null;
  readonly depth: number;
  readonly text: string;
  readonly score: number | null; // 0 to 1
  readonly pruned: SearchPrune["why"] | null;
  readonly chosen: boolean; // on the way to the answer
}

export interface Search {
  readonly nodes: readonly Node[]; // as they were found: a state after the one that it follows
  readonly merges: readonly Omit<SearchMerge, "type">[]; // steps to states that were there already
  readonly done: Omit<SearchDone, "type"> | null;
}

export interface Candidates {
  readonly list: readonly Omit<CandidateDone, "type">[];
  readonly chosen: Omit<CandidateChosen, "type"> | null;
}

export type SearchEvent = SearchNode | SearchMerge | SearchScore | SearchPrune | SearchSelect | SearchDone;

const NOTHING: Search = { nodes: [], merges: [], done: null };

export function reduceSearch(before: Search | null, event: SearchEvent): Search {
  const search = before ?? NOTHING;
  switch (event.type) {
    case "search.node": {
      const { node: id, parent, depth, text } = event;
      const found: Node = { id, parent, depth, text, score: null, pruned: null, chosen: false };
      return indexOf(search, id) < 0 ? { ...search, nodes: [...search.nodes, found] } : search;
    }
    case "search.merge": {
      const { node, parent, text } = event;
      return { ...search, merges: [...search.merges, { node, parent, text }] };
    }
    case "search.score":
      return changed(search, event.node, { score: event.value });
    case "search.prune":
      return changed(search, event.node, { pruned: event.why });
    case "search.select":
      return changed(search, event.node, { chosen: true });
    case "search.done": {
      const { type: _, ...done } = event;
      return { ...search, done };
    }
  }
}

/** Where in `nodes` a state is; nearly always at the place of its number. */
function indexOf({ nodes }: Search, id: number): number {
  return nodes[id]?.id === id ? id : nodes.findIndex((node) => node.id === id);
}

function changed(search: Search, id: number, change: Partial<Node>): Search {
  const at = indexOf(search, id);
  const node = search.nodes[at];
  return node === undefined ? search : { ...search, nodes: search.nodes.with(at, { ...node, ...change }) };
}

/** The state with a number. */
export const nodeOf = (search: Search, id: number): Node | undefined => search.nodes[indexOf(search, id)];

export function reduceCandidates(before: Candidates | null, event: CandidateDone | CandidateChosen): Candidates {
  const { list, chosen } = before ?? { list: [], chosen: null };
  if (event.type === "candidate.chosen") {
    const { type: _, ...made } = event;
    return { list, chosen: made };
  }
  const { type: _, ...whole } = event;
  return { list: [...list.filter((each) => each.index !== whole.index), whole], chosen };
}
