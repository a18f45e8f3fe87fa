import { expect, test } from "vitest";
import type { Model, StrategyInfo, ToolInfo } from "../api";
import {
  blocked,
  choosable,
  conflicts,
  DEFAULT,
  differs,
  fitted,
  hasRemotes,
  NOTHING,
  placeOf,
  settingsOf,
  stored,
  wishes,
  withOption,
  type Known,
  type Settings,
} from "./settings";
import { fieldsOf, fits, typed, type NumberField } from "./options";

const strategy = (name: string, properties: StrategyInfo["options"]["properties"] = {}): StrategyInfo => ({
  name, about: "", options: { properties }, origin: "ponder",
});
const tool = (name: string): ToolInfo => ({
  name, description: "", permission: "read", approval: "never", origin: "built in",
});
const models: Model[] = [
  { id: "small", thinks: true, tools: true },
  { id: "default", thinks: true, tools: true },
  { id: "plain", thinks: false, tools: false },
  { id: "auto", thinks: false, tools: false },
];
const n = { type: "integer", minimum: 1, maximum: 64, default: 4 };
const KNOWN: Known = {
  models,
  efforts: { low: { min_tokens: 0, max_tokens: 512, waits: 0, wait_text: "Wait" } },
  strategies: [strategy("budget", { max_tokens: { type: "integer" } }), strategy("best_of_n", { n }), strategy("tree")],
  tools: [tool("add"), tool("find")],
  collections: [{ id: 1, name: "Documents", documents: 3 }],
};
const set = (part: Partial<Settings>): Settings => ({ ...DEFAULT, ...part });

const EVERYTHING = set({
  model: "small",
  strategy: "best_of_n",
  options: { n: 6 },
  tools: ["add"],
  skills: ["pdf"],
  collections: [1],
  system: "Be kind.",
  sampling: { temperature: 0.2, seed: 7 },
  maxTokens: 50,
});

test("what is set is sent, and nothing else", () => {
  expect(wishes(DEFAULT)).toEqual({});
  expect(wishes(EVERYTHING)).toEqual({
    model: "small",
    strategy: "best_of_n",
    strategy_options: { n: 6 },
    tools: ["add"],
    skills: ["pdf"],
    collections: [1],
    system: "Be kind.",
    temperature: 0.2,
    seed: 7,
    max_tokens: 50,
  });
  expect(wishes(set({ effort: "none", sampling: { temperature: 0 }, tools: "all", collections: "all" }))).toEqual({
    reasoning_effort: "none", temperature: 0, tools: "all", collections: "all",
  });
  expect(differs(set({ tools: [], collections: [] }))).toBe(false);
});

test("an option that is the strategy's own value is not sent", () => {
  const [field] = fieldsOf(KNOWN.strategies?.[1]?.options ?? {});
  if (field === undefined) throw new Error("it has one");
  const six = { ...set({ strategy: "best_of_n" }), ...withOption(DEFAULT, field, 6) };
  expect(wishes(six).strategy_options).toEqual({ n: 6 });
  expect(withOption(six, field, 4)).toEqual({ options: {} });
  expect(withOption(six, field, undefined)).toEqual({ options: {} });
});

test.each<[Partial<Settings>, string[]]>([
  [{ model: "auto", tools: "all" }, ["auto-tools"]],
  [{ model: "auto", strategy: "best_of_n" }, ["auto-strategy"]],
  [{ effort: "low", strategy: "best_of_n" }, ["effort-strategy"]],
  [{ effort: "low", strategy: "budget" }, ["effort-strategy"]],
  [{ effort: "none", strategy: "best_of_n" }, []],
  [{ effort: "none", strategy: "budget" }, ["none-budget"]],
  [{ strategy: "tree", tools: ["add"] }, ["strategy-tools"]],
  [{ strategy: "best_of_n", tools: ["add"] }, []],
  [{ model: "plain", effort: "low" }, ["unthinking"]],
  [{ model: "plain", effort: "none" }, []],
  [{ model: "plain", strategy: "budget" }, ["unthinking"]],
  [{ model: "plain", tools: "all" }, ["toolless"]],
  [{ model: "auto", skills: ["pdf"] }, ["auto-tools"]],
  [{ model: "auto", skills: [] }, []],
])("what cannot go together is known: %j", (part, kinds) => {
  expect(conflicts(set(part), KNOWN).map(({ kind }) => kind)).toEqual(kinds);
});

test("a change is blocked by what it contradicts, and by nothing else", () => {
  const low = set({ effort: "low" });
  expect(blocked(low, "strategy", "tree", KNOWN)?.kind).toBe("effort-strategy");
  expect(blocked(low, "strategy", null, KNOWN)).toBeUndefined();
  expect(blocked(low, "model", "plain", KNOWN)?.kind).toBe("unthinking");
  expect(blocked(set({ effort: "low", strategy: "tree" }), "tools", null, KNOWN)).toBeUndefined();
});

test("what a chat keeps is what was sent, and a budget is the strategy of that name", () => {
  expect(settingsOf(wishes(EVERYTHING))).toEqual(EVERYTHING);
  expect(settingsOf({})).toEqual(DEFAULT);
  expect(settingsOf({ thinking: { max_tokens: 9 } })).toEqual(set({ strategy: "budget", options: { max_tokens: 9 } }));
  expect(settingsOf({ thinking: false, tools: "all" })).toEqual(set({ effort: "none", tools: "all" }));
  expect(settingsOf({ thinking: true, collections: [], temperature: 9 })).toEqual(DEFAULT);
});

test("no skills are none, and those that are gone are left out, not all of them", () => {
  const known = { ...KNOWN, skills: [{ name: "pdf", description: "" }] };
  expect(wishes(settingsOf({ skills: [] }))).toEqual({ skills: [] });
  expect(fitted(set({ skills: ["pdf", "old"] }), known)).toEqual({
    settings: set({ skills: ["pdf"] }), gone: [{ what: "skill", name: "old" }],
  });
  expect(fitted(set({ skills: ["old"] }), known).settings.skills).toEqual([]);
  expect(fitted(set({ model: "auto", skills: "all" }), known).settings).toEqual(set({ model: "auto" }));
});

test("a model that embeds is none to choose", () => {
  const known = { ...KNOWN, models: [...models, { id: "all-MiniLM-L6-v2", embeds: true }] };
  expect(choosable(known)).toEqual(choosable(KNOWN));
});

test("auto asks other servers, and is none", () => {
  expect(hasRemotes(KNOWN)).toBe(false);
  expect(hasRemotes({ ...KNOWN, models: [{ id: "small" }, { id: "auto", remote: true }] })).toBe(false);
  expect(hasRemotes({ ...KNOWN, models: [{ id: "small" }, { id: "big", remote: true }] })).toBe(true);
});

test("what the server knows stays as it is", () => {
  const kept = stored(JSON.stringify(EVERYTHING));
  expect(kept).toEqual(EVERYTHING);
  expect(fitted(kept, KNOWN)).toEqual({ settings: EVERYTHING, gone: [] });
});

test.each<[Partial<Settings>, Partial<Settings>, string[]]>([
  [{ model: "old" }, {}, ["model old"]],
  [{ effort: "high" }, {}, ["effort high"]],
  [{ strategy: "vote", options: { n: 3 } }, {}, ["strategy vote"]],
  [{ strategy: "best_of_n", options: { n: 99 } }, { strategy: "best_of_n" }, ["option n"]],
  [{ strategy: "best_of_n", options: { m: 1, n: 5 } }, { strategy: "best_of_n", options: { n: 5 } }, ["option m"]],
  [{ tools: ["add", "gone"] }, { tools: ["add"] }, ["tool gone"]],
  [{ tools: ["gone"] }, {}, ["tool gone"]],
  [{ collections: [1, 2] }, { collections: [1] }, ["collections "]],
  [{ collections: [2] }, {}, ["collections "]],
  [{ model: "plain", tools: "all" }, { model: "plain" }, ["conflict tools"]],
])("what is not there any more is left out and told: %j", (kept, left, told) => {
  const { settings, gone } = fitted(set(kept), KNOWN);
  expect(settings).toEqual(set(left));
  expect(gone.map(({ what, name }) => `${what} ${name}`)).toEqual(told);
  expect(fitted(set(kept), NOTHING)).toEqual({ settings: set(kept), gone: [] }); // not told: not judged
});

test("of two that never go together the second is left out, whatever the server knows", () => {
  const { settings, gone } = fitted(set({ effort: "low", strategy: "budget" }), NOTHING);
  expect(settings).toEqual(set({ strategy: "budget" }));
  expect(gone).toEqual([{ what: "conflict", name: "effort" }]);
});

test("a server without tools or documents offers none", () => {
  const bare = { ...KNOWN, tools: [], collections: [] };
  const { settings, gone } = fitted(set({ tools: "all", collections: "all" }), bare);
  expect(settings).toEqual(DEFAULT);
  expect(gone.map(({ what }) => what)).toEqual(["tools", "collections"]);
});

test.each([
  null, "", "{", "7", "null", '"x"', "[]",
  '{"model": 3, "effort": "huge", "strategy": [], "tools": [1], "collections": ["a"]}',
  '{"sampling": {"temperature": 9, "heat": 1, "top_p": 0}, "maxTokens": 0, "system": " "}',
  '{"options": {"n": 1}, "tools": [], "maxTokens": 1.5, "sampling": {"temperature": "warm"}}',
])("what was not written here is not read: %j", (text) => {
  expect(stored(text)).toEqual(DEFAULT);
});

test.each<[string | null, string, Partial<Settings>, unknown]>([
  ["strategy_options.n", "", { strategy: "best_of_n" }, { control: "strategy", field: "n" }],
  ["strategy_options.labels.sure", "", { strategy: "tree" }, { control: "strategy", field: "labels" }],
  ["strategy", "", { strategy: "tree" }, { control: "strategy", field: null }],
  ["max_tokens", "", { strategy: "budget", maxTokens: 9 }, { control: "strategy", field: "max_tokens" }],
  ["max_tokens", "", { maxTokens: 9 }, { control: "sampling", field: "max_tokens" }],
  ["temperature", "", { sampling: { temperature: 1 } }, { control: "sampling", field: "temperature" }],
  ["reasoning_effort", "", { effort: "low" }, { control: "thinking", field: null }],
  ["settings.temperature", "", { sampling: { temperature: 1 } }, { control: "sampling", field: "temperature" }],
  ["model", "model_not_found", { model: "plain" }, { control: "model", field: null }],
  ["tools[3]", "unknown_tool", { tools: ["add"] }, { control: "tools", field: null }],
  [null, "not_found", { collections: [2] }, { control: "documents", field: null }],
  [null, "not_found", {}, null],
  ["content", "", EVERYTHING, null],
  ["temperature", "", {}, null],
  ["system", "", { system: "Be kind." }, { control: "system", field: null }],
  ["strategy_options.n", "", {}, null],
])("a refusal of %j (%j) belongs where its cause is", (param, code, part, place) => {
  expect(placeOf(param, code, set(part), KNOWN)).toEqual(place);
});

test("a schema becomes fields; objects and lists have none", () => {
  const fields = fieldsOf({
    $defs: { Way: { enum: ["a", "b"] } },
    properties: {
      n,
      part: { anyOf: [{ type: "number", exclusiveMinimum: 0, maximum: 1 }, { type: "null" }], default: null },
      verifier: { enum: ["checker", "judge"], default: "judge", type: "string" },
      way: { $ref: "#/$defs/Way" },
      fast: { type: "boolean", default: true },
      text: { type: "string", maxLength: 3, default: "ab", description: "What is said." },
      labels: { type: "object", default: {} },
      list: { type: "array" },
      either: { anyOf: [{ type: "string" }, { type: "integer" }] },
    },
  });
  expect(fields.map(({ name, kind, initial }) => [name, kind, initial])).toEqual([
    ["n", "number", 4],
    ["part", "number", null],
    ["verifier", "choice", "judge"],
    ["way", "choice", null],
    ["fast", "choice", true],
    ["text", "text", "ab"],
  ]);
  expect(fields[5]?.about).toBe("What is said.");
  const accepted = (at: number, ...values: unknown[]): boolean[] =>
    values.map((value) => fits(fields[at] as NumberField, value));
  expect(accepted(0, 1, 64, 0, 65, 1.5, "4", NaN)).toEqual([true, true, false, false, false, false, false]);
  expect(accepted(1, 0, 0.1, 1, 1.1)).toEqual([false, true, true, false]);
  expect(accepted(2, "judge", "nobody", "checker")).toEqual([true, false, false]);
  expect(accepted(4, false, "false")).toEqual([true, false]);
  expect(accepted(5, "abc", "🌊🌊🌊", "abcd")).toEqual([true, true, false]);
  expect(["12", " 7 ", "", "x", "0", "1e1"].map((text) => typed(fields[0] as NumberField, text))).toEqual([
    12, 7, undefined, undefined, undefined, 10,
  ]);
});
