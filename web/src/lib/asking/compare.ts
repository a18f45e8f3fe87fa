/**
 * One question to several models or strategies: what each is asked with, and which answers a tab shows side by side.
 * Pure but for what the tab keeps.
 */
import type { RunWishes } from "../api";
import { conflicts, wishes, type Conflict, type Known, type Settings } from "./settings";

/** What one of the answers is made by; null: as usual. */
export interface Way {
  readonly model: string | null;
  readonly strategy: string | null;
}

export const MAX_COMPARED = 3; // the server makes no more at once

function settingsOf(settings: Settings, { model, strategy }: Way): Settings {
  return { ...settings, model, strategy, options: strategy === settings.strategy ? settings.options : {} };
}

/** All that is set but for the way, which is named also where it is the usual one: the chat may keep another. */
export function runWishes(settings: Settings, way: Way): RunWishes {
  return { ...wishes(settingsOf(settings, way)), ...way };
}

/** Why the server would refuse a way; undefined where it would not. */
export const refusedWay = (settings: Settings, way: Way, known: Known): Conflict | undefined =>
  conflicts(settingsOf(settings, way), known)[0];

/** Two ways to begin with: the one that is set, and the next model or else the next strategy that goes with it. */
export function firstWays(settings: Settings, models: readonly string[], strategies: readonly string[], known: Known): Way[] {
  const { model, strategy } = settings;
  const others: Way[] = [
    ...models.map((each, i) => ({ model: i === 0 ? null : each, strategy })),
    ...[null, ...strategies].map((each) => ({ model, strategy: each })),
  ];
  const next = others.find(
    (way) => (way.model !== model || way.strategy !== strategy) && refusedWay(settings, way, known) === undefined,
  );
  return [{ model, strategy }, next ?? { model, strategy }];
}

const KEY = "ponder.compared";

/** Ids of the answers that this tab shows side by side in a chat, none where one was chosen; null: nothing is kept. */
export function comparedIn(chatId: string): readonly string[] | null {
  try {
    const kept: unknown = JSON.parse(sessionStorage.getItem(KEY) ?? "null");
    const ids: unknown = typeof kept === "object" && kept !== null ? Reflect.get(kept, chatId) : null;
    return Array.isArray(ids) && ids.every((id) => typeof id === "string") ? ids : null;
  } catch {
    return null;
  }
}

export function keepCompared(chatId: string, ids: readonly string[]): void {
  try {
    sessionStorage.setItem(KEY, JSON.stringify({ [chatId]: ids }));
  } catch {
    // Storage may be forbidden; they stand side by side until the page is left.
  }
}
