/**
 * How a person wants the next answers made: what is sent for it, what cannot go together, and what the server does not
 * know any more. Pure; knows nothing of the page, nor of how anything is kept.
 */
import type { Budget, Collection, Effort, KeptSettings, Model, SkillInfo, StrategyInfo, ToolInfo, Wishes } from "../api";
import { fieldsOf, fits, isValue, type Field, type Value } from "./options";
import { SAMPLING, type Sampling } from "./sampling";

export const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh"] as const;
export const AUTO = "auto";
const BUDGET = "budget"; // the one strategy that several models together can follow
export const SYSTEM_CHARACTERS = 100_000; // the server takes no more
const TOOLLESS: ReadonlySet<string> = new Set(["tree", "beam"]); // strategies that hold no form, so take no tools

/** null: as the server has it. Without tools and documents that is none of them. */
export interface Settings {
  readonly model: string | null;
  readonly effort: Effort | null;
  readonly strategy: string | null;
  readonly options: Readonly<Record<string, Value>>; // of the strategy, where they are not its own
  readonly tools: "all" | readonly string[] | null; // none chosen yet: an empty list
  readonly skills: "all" | readonly string[] | null; // null: all that a chosen tool reads; none: an empty list
  readonly collections: "own" | "all" | readonly number[] | null; // all: also those that others share
  readonly system: string | null; // what the model reads before everything
  readonly sampling: Sampling;
  readonly maxTokens: number | null;
}

export const DEFAULT: Settings = {
  model: null,
  effort: null,
  strategy: null,
  options: {},
  tools: null,
  skills: null,
  collections: null,
  system: null,
  sampling: {},
  maxTokens: null,
};

/** What there is to choose from, each null as long as the server has not told. */
export interface Known {
  readonly models: readonly Model[] | null;
  readonly efforts: Readonly<Record<string, Budget>> | null;
  readonly strategies: readonly StrategyInfo[] | null;
  readonly tools: readonly ToolInfo[] | null;
  readonly collections: readonly Collection[] | null; // those with documents
  readonly skills?: readonly SkillInfo[] | null;
}

export const NOTHING: Known = { models: null, efforts: null, strategies: null, tools: null, collections: null };

const some = <T extends string | readonly unknown[]>(list: T | null): list is T => list !== null && list.length > 0;

export function wishes(settings: Settings): Wishes {
  const { model, effort, strategy, options, tools, skills, collections, system, sampling, maxTokens } = settings;
  return {
    ...(model !== null && { model }),
    ...(effort !== null && { reasoning_effort: effort }),
    ...(strategy !== null && { strategy }),
    ...(strategy !== null && Object.keys(options).length > 0 && { strategy_options: { ...options } }),
    ...(some(tools) && { tools }),
    ...(skills !== null && { skills }),
    ...(some(collections) && { collections }),
    ...(system !== null && { system }),
    ...sampling,
    ...(maxTokens !== null && { max_tokens: maxTokens }),
  };
}

export const differs = (settings: Settings): boolean => Object.keys(wishes(settings)).length > 0;

/** The models to choose from: the first is the one that answers where none is chosen. */
export const choosable = ({ models }: Known): readonly Model[] =>
  (models ?? []).filter(({ id, embeds }) => id !== "default" && embeds !== true);

export const modelOf = ({ model }: Settings, known: Known): Model | undefined =>
  model === null ? choosable(known)[0] : choosable(known).find(({ id }) => id === model);

/** Whether a model is another server's. */
export const isRemote = ({ id, remote }: Model): boolean => remote === true && id !== AUTO;

/** Whether something of a chat may leave this server at all. */
export const hasRemotes = ({ models }: Known): boolean => (models ?? []).some(isRemote);

export const strategyOf = ({ strategy }: Settings, known: Known): StrategyInfo | undefined =>
  known.strategies?.find(({ name }) => name === strategy);

export const fieldsOfStrategy = (settings: Settings, known: Known): readonly Field[] =>
  fieldsOf(strategyOf(settings, known)?.options ?? {});

/** The settings with an option of the strategy; undefined, or the strategy's own value: nothing is sent for it. */
export function withOption({ options }: Settings, field: Field, value: Value | undefined): Partial<Settings> {
  const { [field.name]: _, ...others } = options;
  return { options: value === undefined || value === field.initial ? others : { ...others, [field.name]: value } };
}

export type Part = "model" | "effort" | "strategy" | "tools";

/** Two settings that cannot go together. The server would refuse them. */
export interface Conflict {
  readonly kind:
    | "auto-tools"
    | "auto-strategy"
    | "effort-strategy"
    | "none-budget"
    | "strategy-tools"
    | "unthinking"
    | "toolless";
  readonly between: readonly [Part, Part];
  readonly name: string; // of the model or strategy that does not take the other
}

export function conflicts(settings: Settings, known: Known): Conflict[] {
  const { model, effort, strategy } = settings;
  const asked = modelOf(settings, known);
  const calls = settings.tools !== null || some(settings.skills); // skills are read by a tool
  const found: Conflict[] = [];
  const add = (kind: Conflict["kind"], one: Part, other: Part, name: string): void =>
    void found.push({ kind, between: [one, other], name });
  if (strategy !== null && effort !== null && effort !== "none") add("effort-strategy", "strategy", "effort", strategy);
  if (strategy === BUDGET && effort === "none") add("none-budget", "strategy", "effort", strategy);
  if (strategy !== null && TOOLLESS.has(strategy) && calls) {
    add("strategy-tools", "strategy", "tools", strategy);
  }
  if (model === AUTO && strategy !== null && strategy !== BUDGET) add("auto-strategy", "model", "strategy", model);
  if (model === AUTO && calls) add("auto-tools", "model", "tools", model);
  if (asked?.thinks === false) {
    if (effort !== null && effort !== "none") add("unthinking", "model", "effort", asked.id);
    if (strategy === BUDGET) add("unthinking", "model", "strategy", asked.id);
  }
  if (asked?.tools === false && model !== AUTO && calls) {
    add("toolless", "model", "tools", asked.id);
  }
  return found;
}

/** Why one of the settings cannot be changed like this; undefined where it can. */
export function blocked<P extends Part>(
  settings: Settings,
  part: P,
  value: Settings[P],
  known: Known,
): Conflict | undefined {
  return conflicts({ ...settings, [part]: value }, known).find(({ between }) => between.includes(part));
}

/** What was kept and is left out now, as it is not there any more or goes with nothing else. */
export interface Gone {
  readonly what: "model" | "effort" | "strategy" | "option" | "tool" | "tools" | "skill" | "collections" | "conflict";
  readonly name: string;
}

/** The settings as far as the server knows what they name. What it has not told of stays as it is. */
export function fitted(before: Settings, known: Known): { settings: Settings; gone: readonly Gone[] } {
  const gone: Gone[] = [];
  let settings = before;
  const drop = (change: Partial<Settings>, what: Gone["what"], name = ""): void => {
    settings = { ...settings, ...change };
    gone.push({ what, name });
  };
  if (settings.model !== null && known.models !== null && modelOf(settings, known) === undefined) {
    drop({ model: null }, "model", settings.model);
  }
  const { effort } = settings;
  if (effort !== null && effort !== "none" && known.efforts !== null && known.efforts[effort] === undefined) {
    drop({ effort: null }, "effort", effort);
  }
  if (settings.strategy !== null && known.strategies !== null) {
    if (strategyOf(settings, known) === undefined) drop({ strategy: null, options: {} }, "strategy", settings.strategy);
    const fields = fieldsOfStrategy(settings, known);
    for (const [name, value] of Object.entries(settings.options)) {
      const field = fields.find((each) => each.name === name);
      if (field !== undefined && fits(field, value)) continue;
      const { [name]: _, ...others } = settings.options;
      drop({ options: others }, "option", name);
    }
  }
  if (settings.tools !== null && known.tools !== null) {
    const names = new Set(known.tools.map(({ name }) => name));
    let left = settings.tools;
    if (names.size === 0) drop({ tools: null }, "tools");
    else if (left !== "all") {
      for (const name of left.filter((each) => !names.has(each))) {
        left = left.filter((each) => each !== name);
        drop({ tools: left.length > 0 ? left : null }, "tool", name);
      }
    }
  }
  if (settings.skills !== null && settings.skills !== "all" && known.skills) {
    const names = new Set(known.skills.map(({ name }) => name));
    let left = settings.skills;
    for (const name of left.filter((each) => !names.has(each))) {
      left = left.filter((each) => each !== name);
      drop({ skills: left }, "skill", name);
    }
  }
  if (settings.collections !== null && known.collections !== null) {
    const ids = new Set(known.collections.map(({ id }) => id));
    const { collections: kept } = settings;
    const left = typeof kept === "string" ? kept : kept.filter((id) => ids.has(id));
    if (ids.size === 0) drop({ collections: null }, "collections");
    else if (left.length < kept.length) drop({ collections: left.length > 0 ? left : null }, "collections");
  }
  for (let [conflict] = conflicts(settings, known); conflict !== undefined; [conflict] = conflicts(settings, known)) {
    const part = conflict.between[1];
    const change = part === "strategy" ? { options: {} } : part === "tools" ? { skills: null } : {};
    drop({ ...change, [part]: null }, "conflict", part);
  }
  return { settings, gone };
}

/** What a browser kept, as far as it is what was written here. */
export function stored(text: string | null): Settings {
  let kept: unknown;
  try {
    kept = JSON.parse(text ?? "null");
  } catch {
    return DEFAULT;
  }
  return typeof kept === "object" && kept !== null ? read(kept as Record<string, unknown>) : DEFAULT;
}

/** What the server keeps of a chat, as far as it can be set here: a budget is the strategy of that name. */
export function settingsOf(kept: KeptSettings): Settings {
  const { thinking } = kept;
  const budget = typeof thinking === "object" ? thinking : null;
  return read({
    ...kept,
    effort: kept.reasoning_effort ?? (thinking === false ? "none" : null),
    strategy: budget === null ? kept.strategy : BUDGET,
    options: budget ?? kept.strategy_options,
    sampling: kept,
    maxTokens: kept.max_tokens,
  });
}

const isNone = (value: unknown): boolean => Array.isArray(value) && value.length === 0;

function read(given: Record<string, unknown>): Settings {
  const string = (value: unknown): string | null => (typeof value === "string" ? value : null);
  const number = (value: unknown, least: number, most: number): number | null =>
    typeof value === "number" && value >= least && value <= most ? value : null;
  const list = <T>(value: unknown, is: (each: unknown) => each is T): "all" | readonly T[] | null =>
    value === "all" ? value : Array.isArray(value) && value.length > 0 && value.every(is) ? [...new Set(value)] : null;
  const strategy = string(given.strategy);
  const options = typeof given.options === "object" && given.options !== null ? Object.entries(given.options) : [];
  const values = options.filter((each): each is [string, Value] => isValue(each[1]));
  const maxTokens = number(given.maxTokens, 1, Number.MAX_SAFE_INTEGER);
  const system = string(given.system);
  const drawn = typeof given.sampling === "object" && given.sampling !== null ? given.sampling : {};
  const sampling = SAMPLING.flatMap((field) => {
    const value: unknown = Reflect.get(drawn, field.name);
    return fits(field, value) ? [[field.name, value]] : [];
  });
  return {
    model: string(given.model),
    effort: EFFORTS.find((effort) => effort === given.effort) ?? null,
    strategy,
    options: strategy === null ? {} : Object.fromEntries(values),
    tools: list(given.tools, (each) => typeof each === "string"),
    skills: isNone(given.skills) ? [] : list(given.skills, (each) => typeof each === "string"),
    collections:
      given.collections === "own" ? "own" : list(given.collections, (each): each is number => Number.isSafeInteger(each)),
    system: system !== null && isSystem(system) ? system : null,
    sampling: Object.fromEntries(sampling) as Sampling,
    maxTokens: Number.isSafeInteger(maxTokens) ? maxTokens : null,
  };
}

/** Whether a text can be a system prompt: some words, and not too many of them. */
export const isSystem = (text: string): boolean => text.trim() !== "" && [...text].length <= SYSTEM_CHARACTERS;

export type ControlName = "model" | "thinking" | "strategy" | "tools" | "documents" | "system" | "sampling";

/** Where on the page a refusal belongs: a control, and in it a field, where it is about one. */
export interface Place {
  readonly control: ControlName;
  readonly field: string | null;
}

/** The place of what a refusal is about; null where it is about nothing that is set here. */
export function placeOf(param: string | null, code: string, settings: Settings, known: Known): Place | null {
  const [name = "", option = null] = (param ?? "").replace(/^settings\./, "").split(/[.[]/, 2);
  const { strategy, system, sampling, maxTokens } = settings;
  const inStrategy = strategy !== null && fieldsOfStrategy(settings, known).some((field) => field.name === name);
  if (name === "strategy" || name === "strategy_options") {
    return strategy === null ? null : { control: "strategy", field: name === "strategy" ? null : option };
  }
  if (Object.hasOwn(sampling, name)) return { control: "sampling", field: name };
  if (name === "system" && system !== null) return { control: "system", field: null };
  if (name === "max_tokens" && maxTokens !== null && strategy !== BUDGET) return { control: "sampling", field: name };
  if (inStrategy) return { control: "strategy", field: name };
  if (name === "model" && settings.model !== null) return { control: "model", field: null };
  if (["reasoning_effort", "thinking"].includes(name) && settings.effort !== null) {
    return { control: "thinking", field: null };
  }
  if ((name === "tools" && settings.tools !== null) || (name === "skills" && settings.skills !== null)) {
    return { control: "tools", field: null };
  }
  const asksDocuments = name === "collections" || (name === "" && code === "not_found");
  return asksDocuments && settings.collections !== null ? { control: "documents", field: null } : null;
}
