import { expect, test } from "vitest";
import { EMPTY, reduce, shownParts, type Answer } from "../answer";
import type { RunEvent } from "../protocol";
import { delegatedBy } from "./agents";

const CALL: RunEvent = { type: "tool.call", call_id: "c1", name: "delegate", agent: null, arguments: "{}" };
const one: RunEvent = { type: "agent.started", agent: "a1", call_id: "c1", instructions: "Find it.", tools: ["find"] };
const other: RunEvent = { ...one, agent: "a2", instructions: "Count it.", tools: [] };
const find: RunEvent = { type: "tool.call", call_id: "c2", name: "find", agent: "a1", arguments: "{}" };
const done: RunEvent = { type: "agent.done", agent: "a1", text: "Here.", failed: false, limit: null, tokens: 9, seconds: 1 };
const fold = (events: readonly RunEvent[]): Answer => events.reduce((answer, event, i) => reduce(answer, i + 1, event), EMPTY);

test("a sub-agent's calls stand under it, and not in the answer's course", () => {
  const answer = fold([CALL, one, other, find, done]);
  expect(shownParts(answer).map(({ part }) => part)).toEqual([{ kind: "calls", ids: ["c1"] }]);
  const [caller, found] = answer.calls;
  const delegated = caller === undefined ? null : delegatedBy(caller, answer.agents, answer.calls);
  expect(delegated?.agents.map(({ id, state }) => [id, state])).toEqual([["a1", "done"], ["a2", "running"]]);
  expect(delegated?.agents.map((agent) => delegated.calls(agent))).toEqual([[found], []]);
  expect(found === undefined ? 0 : delegatedBy(found, answer.agents, answer.calls)).toBeNull();
});

test("one that fails says why, and one that runs is cut when its run ends", () => {
  const failed = fold([CALL, one, other, { ...done, failed: true, text: "No." }]);
  expect(failed.agents[0]).toMatchObject({ state: "failed", done: { text: "No." } });
  const over = reduce(failed, 9, { type: "run.failed", code: "x", message: "It ended.", retryable: true });
  expect(over.agents.map(({ state }) => state)).toEqual(["failed", "cut"]);
});

test("an event that comes again changes nothing, and one of an unknown agent neither", () => {
  const answer = fold([CALL, one, done]);
  expect(reduce(answer, 3, done)).toBe(answer);
  expect(reduce(answer, 4, { ...done, agent: "a9" }).agents).toEqual(answer.agents);
});
